"""Finds the NVIDIA GPUs that processes started here would see, without loading torch.

NVML says what there is; the package `nvidia-ml-py`, of the extra `gpu`, is its binding. `CUDA_VISIBLE_DEVICES` counts.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diptych.errors import ConfigError
from diptych.extras import require_extra

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Ray counts in steps of 0.0001.
RAY_STEPS = 10_000
_CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*'([^']+)'", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its name, its memory in bytes, and its compute capability."""

    name: str
    total_bytes: int
    capability: tuple[int, int]


def find_gpus(environ: Mapping[str, str] = os.environ, own_torch: bool = True) -> list[Gpu]:
    """The GPUs that a process with this environment would see; at least one.

    `own_torch`: the torch of this environment is to compute on them; that of vLLM's is another one.

    Raises:
        ConfigError: the binding of NVML is not installed, there is no driver or no GPU, torch was built without CUDA,
            or `CUDA_VISIBLE_DEVICES` leaves no GPU.
    """
    # First, since most people who lack the extra lack this too.
    if own_torch:
        _check_torch()
    require_extra("gpu", "--device cuda", "; or use --device cpu")
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        why = f"NVIDIA's driver does not answer: {error}"
        raise _no_gpu(why, "install or load the driver (nvidia-smi shows it), or use --device cpu") from None
    try:
        gpus = _visible_gpus(nvml, environ)
    except nvml.NVMLError as error:
        raise _no_gpu(f"NVIDIA's driver says: {error}", "look at nvidia-smi, or use --device cpu") from None
    finally:
        nvml.nvmlShutdown()
    if not gpus and VISIBLE in environ:
        why = f"{VISIBLE}={environ[VISIBLE]} leaves none of this machine's GPUs"
        raise _no_gpu(why, f"set {VISIBLE} anew or not at all, or use --device cpu")
    if not gpus:
        raise _no_gpu("NVIDIA's driver knows none", "use --device cpu, or a machine with a GPU")
    return gpus


def _no_gpu(why: str, fix: str) -> ConfigError:
    return ConfigError("there is no device 'cuda' here", why, fix)


def _check_torch() -> None:
    """Raises ConfigError if torch was built without CUDA. Reads what torch says of itself, and does not load it."""
    folder = _torch_folder()
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
    except OSError:
        # A torch that says nothing is asked by the worker.
        return
    if not _CUDA_LINE.search(text):
        why = "torch was built without CUDA" if folder else "torch is not installed"
        raise _no_gpu(why, "install the torch that was built for this driver's CUDA, or use --device cpu")


def _torch_folder() -> Path | None:
    """Where torch is installed."""
    found = find_spec("torch")
    folders = list(found.submodule_search_locations or []) if found else []
    return Path(folders[0]) if folders else None


def _visible_gpus(nvml: Any, environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs in the order of `CUDA_VISIBLE_DEVICES`, or all. As in CUDA, its first wrong entry ends the list."""
    count = nvml.nvmlDeviceGetCount()
    entries = environ[VISIBLE].split(",") if VISIBLE in environ else map(str, range(count))
    gpus: list[Gpu] = []
    for entry in map(str.strip, entries):
        try:
            if entry.isdecimal() and int(entry) < count:
                handle = nvml.nvmlDeviceGetHandleByIndex(int(entry))
            elif entry.startswith(("GPU-", "MIG-")):
                handle = nvml.nvmlDeviceGetHandleByUUID(entry)
            else:
                break
        except nvml.NVMLError:
            break
        name = nvml.nvmlDeviceGetName(handle)
        gpus.append(
            Gpu(
                name if isinstance(name, str) else name.decode(),
                int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
            )
        )
    return gpus


def workers_per_gpu(num_workers: int, num_gpus: int) -> int:
    """How many workers share a GPU: as few as possible. All GPUs are shared alike, so that all workers are."""
    return max(1, -(-num_workers // num_gpus))


def gpu_amount(num_sharing: int) -> float:
    """The share of a GPU that each of `num_sharing` workers asks of Ray, rounded down to what Ray can count."""
    return RAY_STEPS // num_sharing / RAY_STEPS
