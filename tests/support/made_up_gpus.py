"""GPUs that are not there: an NVML with whatever a test says, and a torch that was built for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from services.host import gpus
from services.host.gpus import Gpu

GIB = 1 << 30


class MadeUpNvml(ModuleType):
    """The functions of NVML that Diptych calls. `error` is what its start ends with."""

    def __init__(self, gpus: Sequence[Gpu], error: str = "") -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.NVMLError = type("NVMLError", (Exception,), {})
        self._gpus, self._error = gpus, error
        self.opened = 0

    def nvmlInit(self) -> None:
        if self._error:
            raise self.NVMLError(self._error)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self._gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        if not uuid.startswith("GPU-") or not uuid[4:].isdecimal() or int(uuid[4:]) >= len(self._gpus):
            raise self.NVMLError("Not Found")
        return self._gpus[int(uuid[4:])]

    def nvmlDeviceGetName(self, handle: Gpu) -> str:
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu) -> Any:
        return SimpleNamespace(total=handle.total_bytes)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Gpu) -> tuple[int, int]:
        return handle.capability


def plug_in(
    patch: pytest.MonkeyPatch, folder: Path, *there: Gpu, error: str = "", cuda: str | None = "12.8"
) -> MadeUpNvml:
    """Let this machine have these GPUs, and a torch for `cuda`, of which a file is written to `folder`."""
    nvml = MadeUpNvml(there, error)
    patch.setitem(sys.modules, "pynvml", nvml)
    patch.delenv(gpus.VISIBLE, raising=False)
    (folder / "version.py").write_text(
        f"__version__ = '2'\ncuda: Optional[str] = {cuda!r}\n", encoding="utf-8"
    )
    patch.setattr(gpus, "_torch_folder", lambda: folder)
    return nvml


def made_gpu(name: str = "NVIDIA H200", gib: float = 141, capability: tuple[int, int] = (9, 0)) -> Gpu:
    """A GPU with so much memory."""
    return Gpu(name, int(gib * GIB), capability)
