"""The table of all settings under all their names: `diptych serve --help-all`, and docs/configuration.md.

`python -m services.cli.serve.settings_reference` prints the document; a test asserts that the file in docs is
what this prints.
"""

from __future__ import annotations

from diptych.config.fields import SettingSpec, list_settings
from diptych.config.options import Config

INTRODUCTION = """\
# Configuration

<!-- Made by `make docs`; edit diptych/config/options.py instead. -->

    diptych serve --help-all

Every setting has one home, a field of `Config` in `diptych/config/options.py`, and three names: a flag, a YAML key and
an environment name. Later sources win:

    defaults  <  YAML file (--config FILE or DIPTYCH_CONFIG)  <  environment  <  command line

```yaml
# deployment.yaml:  diptych serve --config deployment.yaml
model: Qwen/Qwen2.5-0.5B-Instruct
prefill: 1
decode: 2
kv_cache_memory_bytes: 2GiB
slo_ttft_ms: 500
slo_tpot_ms: 50
```

An unknown YAML key is an error that names the key you may have meant; so is an environment name that is nearly one of
ours. YAML keys may be written with dashes, as in vLLM's files. Flags are spelled as in vLLM wherever the meaning is the
same.

An editor completes and checks the file with [configuration.schema.json](configuration.schema.json), which
`diptych serve --config-schema` prints. For an editor with the YAML language server (VS Code's YAML extension has it),
name the schema in the file's first line:

```yaml
# yaml-language-server: $schema=configuration.schema.json
```

- Counts: `2k` is 2,000 and `2K` is 2,048. Sizes: `512MiB`, `1.5GB`, or bytes.
- Durations: `30s`, `500ms`, `2m`, `1h`; without unit, seconds (milliseconds where the name ends in `_ms`).
- Lists: the flag several times, a YAML list, or values with commas between.
- Switches: `--name` and `--no-name`; `true` or `false` in YAML and in the environment.

Exit status: 0 ended as asked; 1 could not start, or failed; 2 a wrong flag, key or value; 130 interrupted before it was
ready, or a second time while it stopped.
"""


def render_document() -> str:
    """docs/configuration.md."""
    parts = [INTRODUCTION]
    everything = list_settings(Config)
    for group in dict.fromkeys(setting.group for setting in everything):
        parts.append(
            f"\n## {group}\n\n| flag | YAML | environment | default | meaning |\n|---|---|---|---|---|"
        )
        parts += [_setting_row(one) for one in everything if one.group == group]
    return "\n".join(parts) + "\n"


def _setting_row(setting: SettingSpec) -> str:
    flag = (
        f"`{setting.flag}`, `--no-{setting.flag[2:]}`"
        if setting.kind.switch
        else f"`{setting.flag} {_escape_metavar(setting.kind.metavar)}`"
    )
    commands = "" if "serve" in setting.commands else f" ({', '.join(setting.commands)})"
    return (
        f"| {flag} | `{setting.name}` | `{setting.env}` | {setting.shown or '-'} | {setting.help}{commands} |"
    )


def _escape_metavar(metavar: str) -> str:
    return metavar.replace("|", "\\|")


def settings_table(command: str) -> str:
    """All settings of one command as plain text for a terminal."""
    rows = [("flag and values", "YAML key", "environment name", "default")]
    rows += [
        (
            f"{setting.flag}, --no-..." if setting.kind.switch else f"{setting.flag} {setting.kind.metavar}",
            setting.name,
            setting.env,
            setting.shown,
        )
        for setting in list_settings(Config, command)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows)


if __name__ == "__main__":
    print(render_document(), end="")
