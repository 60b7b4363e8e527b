"""One loader: defaults < YAML file < environment < command line, and where each value came from.

Every mistake is a `ConfigError` that names the source, the value, and what would be right.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from diptych.config import Config
from diptych.errors import ConfigError
from diptych.settings import ENV_PREFIX, Setting, settings

CONFIG_ENV = ENV_PREFIX + "CONFIG"
URL_ENV = ENV_PREFIX + "URL"  # read by `diptych chat` and `diptych status`


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration and the origin of every value that is not a default, by name."""

    config: Config
    origins: dict[str, str]

    def origin(self, name: str) -> str:
        """Where the value of this setting came from, for messages."""
        return self.origins.get(name, "the default")


def load(
    command: str, given: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None
) -> Loaded:
    """Merge all sources for one command. `given` holds what the command line said, by setting name; None is unset.

    Raises:
        ConfigError: unknown name, wrong type, out of range, or choices that contradict each other.
    """
    known = {one.name: one for one in settings(Config)}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    file = file or (Path(environ[CONFIG_ENV]).expanduser() if environ.get(CONFIG_ENV) else None)
    for name, value, origin in [
        *(_from_file(file, known) if file else []),
        *_from_environment(environ, known),
        *((name, value, known[name].flag) for name, value in given.items() if value not in (None, (), [])),
    ]:
        values[name] = _parse(known[name], value, origin)
        origins[name] = origin
    loaded = Loaded(Config(**values), origins)
    _check(loaded, command)
    return loaded


def _from_file(file: Path, known: Mapping[str, Setting]) -> Iterable[tuple[str, Any, str]]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the configuration file {file} cannot be read", error.strerror or str(error)
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML", " ".join(str(error).split())) from None
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{file} is not a list of settings", fix="write one 'name: value' per line")
    for key, value in (tree or {}).items():
        name = str(key).replace("-", "_")  # vLLM's files write the flag's dashes
        if name not in known:
            raise ConfigError(
                f"unknown key {str(key)!r} in {file}", _meant(name, known), "see docs/configuration.md"
            )
        if value is not None:
            yield name, value, f"{key} in {file}"


def _from_environment(
    environ: Mapping[str, str], known: Mapping[str, Setting]
) -> Iterable[tuple[str, Any, str]]:
    by_env = {one.env: one for one in known.values()}
    for name, value in sorted(environ.items()):
        if name in by_env:
            if value != "":
                yield by_env[name].name, value, name
        elif name.startswith(ENV_PREFIX) and name not in (CONFIG_ENV, URL_ENV):
            # Only near misses: orchestrators set names of their own (DIPTYCH_SERVICE_HOST for a service "diptych").
            meant = _meant(name, by_env, cutoff=0.85)
            if meant:
                raise ConfigError(f"unknown environment name {name}", meant, f"rename it, or `unset {name}`")


def _meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else ""


def _parse(setting: Setting, value: Any, origin: str) -> Any:
    try:
        return setting.kind.parse(value)
    except ValueError as error:
        shown = "this value" if setting.kind.metavar == "KEY" else repr(value)
        raise ConfigError(
            f"{origin}: {shown} {error}", f"{setting.name}: {setting.help}", _form(setting)
        ) from None


def _form(setting: Setting) -> str:
    switch = f"{setting.flag} or --no-{setting.flag[2:]}"
    form = switch if setting.kind.switch else f"{setting.flag} {setting.kind.metavar}"
    return form + (f"   (default: {setting.shown})" if setting.shown else "")


def _check(loaded: Loaded, command: str) -> None:
    config = loaded.config
    _check_pools(loaded)
    if not config.local_only and not (config.api_key or config.api_key_file or config.insecure):
        raise ConfigError(
            f"{config.host} can be reached from other machines, and no API key is set",
            f"host from {loaded.origin('host')}; without a key anyone who reaches the port may use the model",
            "--api-key KEY or --api-key-file FILE; or --insecure to serve everyone",
        )
    if command in ("worker", "gateway"):
        for name in ("role", "channel", "keys_dir") if command == "worker" else ("channel", "keys_dir"):
            if getattr(config, name) is None:
                raise ConfigError(
                    f"`diptych {command}` needs --{name.replace('_', '-')}", _why_apart(command)
                )


def _check_pools(loaded: Loaded) -> None:
    config, origins = loaded.config, loaded.origins
    both = [name for name in ("prefill", "decode") if name in origins]
    if config.colocated and both:
        raise ConfigError(
            "a deployment is either colocated or has two pools",
            f"colocated is {config.colocated} ({origins['colocated']}), {both[0]} is set too ({origins[both[0]]})",
            f"leave out {origins['colocated']} or {origins[both[0]]}",
        )
    split = [name for name in ("prefill_tp", "prefill_pp") if name in origins]
    if config.colocated and split:
        raise ConfigError(
            "a colocated deployment has no prefill workers to split",
            f"colocated is {config.colocated} ({origins['colocated']}), {split[0]} is set ({origins[split[0]]})",
            "--decode-tp and --decode-pp split colocated workers",
        )
    if not config.colocated and min(config.pools) < 1:
        empty = "prefill" if config.prefill < 1 else "decode"
        raise ConfigError(
            f"the {empty} pool has no workers",
            f"from {loaded.origin(empty)}",
            f"--{empty} 1, or --colocated 1",
        )


def _why_apart(command: str) -> str:
    return (
        f"a {command} started alone must be told where its deployment is; `diptych serve` does that by itself"
    )


def keys(loaded: Loaded) -> tuple[str, ...]:
    """All API keys, those of `api_key_file` included; empty when none is asked for.

    Raises:
        ConfigError: the file is missing, unreadable or holds no key.
    """
    file = loaded.config.api_key_file
    if file is None:
        return loaded.config.api_key
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"the API key file {file} cannot be read", f"{reason} (from {loaded.origin('api_key_file')})",
            f"make it:  openssl rand -hex 24 > {file}",
        ) from None  # fmt: skip
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not found:
        raise ConfigError(f"the API key file {file} holds no key", "one key per line; '#' begins a comment")
    return tuple(dict.fromkeys([*loaded.config.api_key, *found]))


def dump(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults, as one would write them in YAML."""
    plain = Config()
    changed = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {name: value for name, value in changed.items() if value != getattr(plain, name)}
