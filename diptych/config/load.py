"""Merges the sources of settings: defaults < YAML file < environment < command line, and where each value came from.

Every mistake is a `ConfigError` that names the source, the value, and what would be right.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diptych.config.fields import CONFIG_ENV, SettingSpec, list_settings
from diptych.config.options import Config
from diptych.config.sources import CommandLineSource, EnvironmentSource, FileSource, SettingsSource
from diptych.config.values import check_key, show_value
from diptych.errors import ConfigError
from diptych.keys.key_file import read_key_file
from diptych.keys.named_key import digest_key
from diptych.keys.private_file import read_private_file


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration and the origin of every value that is not a default, by name."""

    config: Config
    origins: dict[str, str]

    def origin_of(self, name: str) -> str:
        """Where the value of this setting came from, for messages."""
        return self.origins.get(name, "the default")


def load_config(
    command: str, given: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None
) -> LoadedConfig:
    """Merge all sources for one command. `given` holds what the command line said, by setting name; None is unset.

    Raises:
        ConfigError: unknown name, wrong type, out of range, or choices that contradict each other.
    """
    file = file or (Path(os.path.expanduser(environ[CONFIG_ENV])) if environ.get(CONFIG_ENV) else None)
    # Later sources take precedence over earlier ones.
    sources = (
        *((FileSource(Config, file),) if file else ()),
        EnvironmentSource(Config, environ),
        CommandLineSource(Config, given),
    )
    origins: dict[str, str] = {}
    for source in sources:
        _check_values(source)
        origins |= source.origins
    # pydantic-settings gives the first source precedence, so the order is reversed.
    built: dict[str, Any] = {"_build_sources": (tuple(reversed(sources)), {})}
    loaded = LoadedConfig(Config(**built), origins)
    _check_config(loaded, command)
    return loaded


def _check_values(source: SettingsSource) -> None:
    """Raises ConfigError for the first wrong value of a source, even if another source overrides that value."""
    values = source()
    try:
        Config(**values)
    except ValidationError as error:
        reasons = {problem["loc"][0]: problem for problem in error.errors(include_url=False)}
        name = next(name for name in source.origins if name in reasons)
        setting = next(one for one in list_settings(Config) if one.name == name)
        reason = reasons[name].get("ctx", {}).get("error") or reasons[name]["msg"]
        shown = "this value" if setting.kind.metavar == "KEY" else show_value(values[name])
        raise ConfigError(
            f"{source.origins[name]}: {shown} {reason}",
            f"{setting.name}: {setting.help}",
            _describe_usage(setting),
        ) from None


def _describe_usage(setting: SettingSpec) -> str:
    switch = f"{setting.flag} or --no-{setting.flag[2:]}"
    form = switch if setting.kind.switch else f"{setting.flag} {setting.kind.metavar}"
    return form + (f"   (default: {setting.shown})" if setting.shown else "")


def _check_config(loaded: LoadedConfig, command: str) -> None:
    config = loaded.config
    _check_pools(loaded)
    if (
        command != "dashboards"
        and not config.local_only
        and not (
            config.api_key or config.api_key_file or config.priority_keys or config.keys or config.insecure
        )
    ):
        raise ConfigError(
            f"{config.host} can be reached from other machines, and no API key is set",
            f"host from {loaded.origin_of('host')}; without a key anyone who reaches the port may use the model",
            "--api-key KEY, --api-key-file FILE or --keys FILE; or --insecure to serve everyone",
        )
    _check_tiers(loaded)
    if "trace_sample" in loaded.origins and config.otlp_traces_endpoint is None:
        raise ConfigError(
            f"{loaded.origin_of('trace_sample')} has no effect",
            "it is the share of requests that are traced, and no traces are sent",
            "add --otlp-traces-endpoint URL, or leave it out",
        )
    if command == "gateway":
        check_slo_target(loaded)
    if command in ("worker", "gateway"):
        for name in ("role", "channel", "keys_dir") if command == "worker" else ("channel", "keys_dir"):
            if getattr(config, name) is None:
                raise ConfigError(
                    f"`diptych {command}` needs --{name.replace('_', '-')}", _explain_missing(command)
                )


def _check_tiers(loaded: LoadedConfig) -> None:
    """Check what is stored of KV below the pools. Raises ConfigError."""
    config = loaded.config
    given = [name for name in ("kv_host_bytes", "kv_disk_bytes", "kv_disk_folder") if name in loaded.origins]
    if given and not config.enable_prefix_caching:
        raise ConfigError(
            f"{loaded.origin_of(given[0])} does not go with --no-enable-prefix-caching",
            "KV that left the pools is read back as cached prefixes",
            "leave out one of the two",
        )
    if given and config.kv_host_bytes is None:
        raise ConfigError(
            f"{loaded.origin_of(given[0])} needs --kv-host-bytes",
            "KV goes from the pools to the memory of its host, and from there to disk",
            "add --kv-host-bytes SIZE, for example 1GiB",
        )
    if (config.kv_disk_bytes is None) != (config.kv_disk_folder is None):
        have, lacks = ("bytes", "folder DIR") if config.kv_disk_bytes else ("folder", "bytes SIZE")
        raise ConfigError(
            f"{loaded.origin_of(f'kv_disk_{have}')} needs --kv-disk-{lacks.split()[0]}",
            "KV on disk has a folder and a bound",
            f"add --kv-disk-{lacks}, or leave out both",
        )


def check_slo_target(loaded: LoadedConfig) -> None:
    """Raises ConfigError if a target is given and no SLO is. Call it after a plan, which has SLOs, is applied."""
    config = loaded.config
    if config.slo_target is not None and config.slo_ttft_ms is None and config.slo_tpot_ms is None:
        raise ConfigError(
            f"{loaded.origin_of('slo_target')} has no effect",
            "it is the share of requests that shall meet the SLOs, and no SLO is given",
            "add --slo-ttft-ms MS or --slo-tpot-ms MS, or leave it out",
        )


def _check_pools(loaded: LoadedConfig) -> None:
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
    if config.colocated and "decode_overdraft" in origins:
        raise ConfigError(
            f"{loaded.origin_of('decode_overdraft')} has no effect",
            "a colocated worker has the room of a prompt before it computes it",
            "leave it out, or start --prefill 1 --decode 1",
        )
    if config.bulk:
        return _check_bulk(loaded)
    if given := [name for name in BULK_SETTINGS if name in origins]:
        raise ConfigError(
            f"{loaded.origin_of(given[0])} has no effect",
            "it is for workers that serve batches alone, and there are none",
            "add --bulk 1 --prefill 0 --decode 0, or leave it out",
        )
    if not config.colocated and config.prefill < 1:
        raise ConfigError(
            "the prefill pool has no workers",
            f"from {loaded.origin_of('prefill')}",
            "--prefill 1, or --colocated 1",
        )
    if config.pools[1] < 1:
        _check_pooling(loaded)


# Settings that a deployment without decode workers has no use for.
NOT_FOR_POOLING = (
    "decode_tp", "decode_pp", "decode_resources", "plan", "replan", "replan_mode", "slo_tpot_ms", "kv_lease_s",
    "pipelined_transfer", "local_prefill", "decode_overdraft", "kv_keep", "tool_call_parser", "reasoning_parser",
    "generation_config",
)  # fmt: skip


def _check_pooling(loaded: LoadedConfig) -> None:
    """Check a deployment that only pools prompts. Raises ConfigError."""
    given = [name for name in NOT_FOR_POOLING if name in loaded.origins]
    if loaded.config.engine == "vllm":
        given.append("engine")
    if given:
        raise ConfigError(
            f"{loaded.origin_of(given[0])} does not go with --decode 0",
            "a deployment without decode workers serves /v1/embeddings, /rerank and /score alone, with our own engine",
            "leave it out, or add --decode 1",
        )


# Settings of bulk workers, and those that they have no use for.
BULK_SETTINGS = ("bulk_policy", "bulk_profile", "bulk_memory_bytes", "bulk_disk_bytes")
NOT_FOR_BULK = (
    "colocated", "prefill_tp", "prefill_pp", "decode_tp", "decode_pp", "plan", "replan",
    "kv_cache_codec", "kv_cache_memory_bytes", "kv_keep", "swap_space", "step_log", "slo_ttft_ms", "slo_tpot_ms",
    "kv_host_bytes", "kv_disk_bytes", "kv_disk_folder",
    "kv_quality_budget", "max_num_seqs", "max_num_batched_tokens", "dtype", "transports", "enable_prefix_caching",
    "enable_chunked_prefill", "kv_lease_s", "pipelined_transfer", "local_prefill", "decode_overdraft", "replan_mode",
)  # fmt: skip


def _check_bulk(loaded: LoadedConfig) -> None:
    """Check a deployment that serves batches alone. Raises ConfigError."""
    config, origins = loaded.config, loaded.origins
    if config.prefill or config.decode:
        raise ConfigError(
            "bulk workers serve batches alone",
            f"bulk is {config.bulk}, and there are {config.prefill} prefill and {config.decode} decode workers",
            "add --prefill 0 --decode 0; other deployments serve batches beside requests without --bulk",
        )
    if given := [name for name in NOT_FOR_BULK if name in origins]:
        raise ConfigError(
            f"{loaded.origin_of(given[0])} has no effect on bulk workers",
            "they compute blocks, whose size and kinds --bulk-policy says",
            "leave it out",
        )
    if config.data_dir == "none":
        raise ConfigError(
            "bulk workers need a data directory",
            "they serve batches, and files and batches lie there",
            "for example --data-dir /var/lib/diptych",
        )


def _explain_missing(command: str) -> str:
    return f"a {command} started alone must know where its deployment is; `diptych serve` does that by itself"


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The API keys that a gateway accepts."""

    # All accepted keys. If there are none, no key is asked for.
    every: tuple[str, ...] = ()
    # The keys among `every` whose requests may ask for a priority below 0.
    urgent: tuple[str, ...] = ()


def collect_api_keys(loaded: LoadedConfig) -> ApiKeys:
    """All API keys, those of `api_key_file` and `priority_keys` included. The file of `keys` is only checked.

    Call it once: each file is read, and one that is a pipe can be read once only.

    Raises:
        ConfigError: a file is missing, unreadable, another user's, open to others, or holds no keys.
    """
    named, urgent = _read_key_file(loaded, "api_key_file"), _read_key_file(loaded, "priority_keys")
    every = tuple(dict.fromkeys([*loaded.config.api_key, *named, *urgent]))
    if loaded.config.keys is not None:
        read_key_file(loaded.config.keys, loaded.origin_of("keys"), frozenset(map(digest_key, every)))
        # Their text is not kept, so the deployment has a key for its own questions.
        every = every or (secrets.token_hex(24),)
    return ApiKeys(every, urgent)


# What the key opens, by the setting that holds it. The setting NAME_file names a file with the key instead.
OPERATOR_KEYS = {"metrics_key": "/metrics", "admin_key": "the admin routes"}


def with_operator_keys(loaded: LoadedConfig) -> LoadedConfig:
    """The same settings, with the keys of `metrics_key_file` and `admin_key_file` as `metrics_key` and `admin_key`.

    Raises:
        ConfigError: two keys are given where there is one, or a file cannot be used.
    """
    found: dict[str, str] = {}
    for name, opened in OPERATOR_KEYS.items():
        keys = _read_key_file(loaded, f"{name}_file")
        if not keys:
            continue
        if len(keys) > 1 or getattr(loaded.config, name) is not None:
            raise ConfigError(
                f"two keys are given for {opened}",
                f"{name}_file from {loaded.origin_of(f'{name}_file')}, {name} from {loaded.origin_of(name)}; "
                f"the file has {len(keys)} of them",
                "leave one key",
            )
        found[name] = keys[0]
    return LoadedConfig(loaded.config.model_copy(update=found), loaded.origins) if found else loaded


def _read_key_file(loaded: LoadedConfig, name: str) -> tuple[str, ...]:
    """The keys in the file that a setting names; none if it names no file."""
    file: Path | None = getattr(loaded.config, name)
    if file is None:
        return ()
    make = f"make it:  (umask 077; openssl rand -hex 24 > {file})"
    lines = read_private_file(file, loaded.origin_of(name), make).splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found.append(check_key(line))
        except ValueError as error:
            raise ConfigError(
                f"line {number} of the key file {file} {error}", "one key per line; '#' begins a comment"
            ) from None
    if not found:
        raise ConfigError(f"the key file {file} holds no key", "one key per line; '#' begins a comment")
    return tuple(found)
