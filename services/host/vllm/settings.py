"""The settings of workers whose engine is vLLM: what they need, and what means nothing to them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from diptych.config.load import LoadedConfig
from diptych.config.options import Config
from diptych.errors import ConfigError
from diptych.specs import EMULATED, VLLM
from vllm_worker.setup.engine_args import check_vllm_args

# Settings that mean nothing to Diptych's own engine.
VLLM_SETTINGS = ("vllm_python", "vllm_args")
# Settings of Diptych's own engine, which vLLM does not have in this form.
OWN_SETTINGS = (
    "kv_cache_codec", "kv_cache_calibration", "kv_quality_budget", "kv_keep", "swap_space", "bulk", "bulk_slice_ms",
    "bulk_policy", "bulk_profile", "bulk_memory_bytes", "bulk_disk_bytes", "pipelined_transfer", "prefill_yields",
    "kv_host_bytes", "kv_disk_bytes", "kv_disk_folder",
)  # fmt: skip


def check_own_engine(loaded: LoadedConfig) -> None:
    """Check that settings of vLLM are given to vLLM workers only.

    Raises:
        ConfigError: one is given, and the engine is Diptych's own.
    """
    if given := [name for name in VLLM_SETTINGS if name in loaded.origins]:
        raise ConfigError(
            f"{loaded.origins[given[0]]} has no effect",
            "it is for workers whose engine is vLLM, and these have Diptych's own",
            "add --engine vllm, or leave it out",
        )


def check_vllm_settings(loaded: LoadedConfig) -> None:
    """Check the settings of workers whose engine is vLLM. What only vLLM can say is asked later.

    Raises:
        ConfigError: there is no interpreter, or a setting asks for what such workers do not do.
    """
    config, origins = loaded.config, loaded.origins
    assert config.engine == VLLM
    if config.device == EMULATED:
        raise ConfigError(
            "vLLM has no emulated device", "--device emulated tests Diptych's own engine", "leave it out"
        )
    if given := [name for name in OWN_SETTINGS if name in origins]:
        raise ConfigError(
            f"{origins[given[0]]} has no effect on vLLM",
            "it is a setting of Diptych's own engine (docs/engines.md)",
            "leave it out, or leave out --engine vllm",
        )
    if "gpu_memory_utilization" in origins and config.device != "cuda":
        raise ConfigError(
            f"{origins['gpu_memory_utilization']} has no effect",
            "it is for workers on GPUs, and these compute on the CPU",
            "add --device cuda, or use --kv-cache-memory-bytes",
        )
    _check_splits(config)
    check_vllm_args(split_vllm_args(config))
    python = find_interpreter(config)
    if config.ray_address is None:
        _check_interpreter(python)


def find_interpreter(config: Config) -> Path:
    """The interpreter of `--vllm-python`, absolute; a link stays one, since it says which environment is meant.

    Raises:
        ConfigError: it is not given.
    """
    if config.vllm_python is None:
        raise ConfigError(
            "--engine vllm needs --vllm-python",
            "vLLM has an environment of its own: its packages and Diptych's exclude each other",
            "make vllm; then --vllm-python .vllm/bin/python",
        )
    return config.vllm_python.expanduser().absolute()


def split_vllm_args(config: Config) -> tuple[str, ...]:
    """The words of `--vllm-args`, as a shell would split them.

    Raises:
        ConfigError: a quotation mark is left open.
    """
    try:
        return tuple(shlex.split(config.vllm_args or ""))
    except ValueError as error:
        raise ConfigError(
            f"--vllm-args {config.vllm_args} cannot be split into words",
            str(error).lower(),
            "for example --vllm-args '--quantization fp8 --enforce-eager'",
        ) from None


def _check_splits(config: Config) -> None:
    """Raises ConfigError for splits of workers that vLLM workers cannot have."""
    for role in ("prefill", "decode"):
        if getattr(config, f"{role}_pp") > 1:
            raise ConfigError(
                f"--{role}-pp {getattr(config, f'{role}_pp')} splits vLLM by layers",
                "a hand-off has the parts of ranks that split heads, and all layers of each (docs/engines.md)",
                f"use --{role}-tp, and --{role}-pp 1",
            )
    if not config.colocated and config.role is None and config.prefill_tp != config.decode_tp:
        raise ConfigError(
            f"--prefill-tp {config.prefill_tp} and --decode-tp {config.decode_tp} differ",
            "a rank of vLLM loads what the same rank of the other pool has saved (docs/engines.md)",
            "give both pools the same",
        )


def _check_interpreter(python: Path) -> None:
    """Raises ConfigError if that is no program that can be run."""
    if not python.is_file() or not os.access(python, os.X_OK):
        raise ConfigError(
            f"there is no interpreter at {python}",
            "it is a folder" if python.is_dir() else "no such program can be run",
            "name the python of vLLM's environment, for example .vllm/bin/python",
        )
