"""Tensors read straight from safetensors files, cast once to the compute dtype."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from diptych.errors import ModelError

READABLE = (torch.float32, torch.float16, torch.bfloat16)


class Weights:
    """The tensors of a checkpoint, by name. A context manager: the files stay open (memory-mapped) inside it.

    Raises:
        ModelError: a file cannot be read as safetensors.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files  # tensor name -> file
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Weights:
        for path in sorted(set(self._files.values())):
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelError(f"the weights file {path} cannot be read", str(error)[:200]) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor as contiguous float32, which must have this shape.

        Raises:
            ModelError: it is missing, of another shape, or of a dtype that is not fp32, fp16 or bf16.
        """
        if name not in self._files:
            raise ModelError(
                f"the checkpoint has no tensor {name}", f"it holds {len(self._files)} tensors in all"
            )
        tensor: torch.Tensor = self._open[self._files[name]].get_tensor(name)
        if tensor.dtype not in READABLE:
            raise ModelError(
                f"the tensor {name} is {tensor.dtype}", "readable are float32, float16 and bfloat16"
            )
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"the tensor {name} has the shape {list(tensor.shape)}",
                f"config.json asks for {list(shape)}",
                "check that config.json belongs to these weights",
            )
        return tensor.to(torch.float32, copy=True).contiguous()  # a copy, so that nothing hangs on the file

    def stack(self, names: list[tuple[str, int]], *rest: int) -> torch.Tensor:
        """Several tensors (name, first dimension), one below the other."""
        return torch.cat([self.take(name, first, *rest) for name, first in names])
