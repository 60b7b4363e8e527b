"""Reads tensors from safetensors files and casts them once to the compute dtype, on the host or straight to a device.

Files are read, not mapped: the pages of a mapped file would count as memory of the process, beside the tensors made
from them, and the peak during loading would be twice the announced memory. The file format is described in
`engine.model.safetensors_header`.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from diptych.errors import ModelError
from engine.model.memory_plan import return_freed_memory
from engine.model.safetensors_header import full_tensor_name

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WHOLE_RANGE = slice(None)
# Number of bytes that are read and cast at a time.
PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class OpenTensor:
    """The location of a tensor: an open file, its first byte, and its shape and type."""

    file: int
    start: int
    shape: tuple[int, ...]
    # The type in safetensors' notation.
    dtype: str


class WeightReader:
    """The tensors of a checkpoint, by name. A context manager, within which the files are open.

    Raises:
        ModelError: a file cannot be read as safetensors.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        # The file of each tensor, by tensor name.
        self._files = files
        self._stack = ExitStack()
        self._entries: dict[str, OpenTensor] = {}

    def __enter__(self) -> WeightReader:
        with ExitStack() as opened:
            # Casting and packing leaves much freed memory behind.
            opened.enter_context(return_freed_memory())
            for path in sorted(set(self._files.values())):
                try:
                    with safe_open(path, framework="pt"):
                        # Opening the file checks its header, and that its ranges lie within the file.
                        pass
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    opened.callback(os.close, file)
                    self._entries |= _read_header(file)
                except (SafetensorError, OSError, ValueError, KeyError) as error:
                    raise ModelError(f"the weights file {path} cannot be read", str(error)[:200]) from error
            self._stack = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read_tensor(
        self, name: str, *shape: int, rows: slice = WHOLE_RANGE, columns: slice = WHOLE_RANGE
    ) -> torch.Tensor:
        """One tensor, or a part of it, as contiguous float32. `shape` is the expected shape in the file.

        Only `rows` of the first dimension and `columns` of the second are kept.

        Raises:
            ModelError: the tensor is missing, has another shape, or its dtype is not fp32, fp16 or bf16.
        """
        return self._gather_rows([(name, shape[0], rows)], shape[1:], columns)

    def read_stacked(self, names: list[tuple[str, int, slice]], *rest: int) -> torch.Tensor:
        """Several tensors stacked along the first dimension, as (name, its size, rows to keep).

        Raises as `read_tensor`.
        """
        return self._gather_rows(names, rest, WHOLE_RANGE)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, on any device and of any floating type, with the tensor `name`, which must have its shape.

        It is read piece by piece; for a GPU into page-locked memory, which a copy to it reads at full speed. Raises as
        `read_tensor`.
        """
        _read_rows(self._find_tensor(name, tuple(out.shape)), range(len(out)), WHOLE_RANGE, out)

    def _gather_rows(
        self, names: list[tuple[str, int, slice]], rest: tuple[int, ...], columns: slice
    ) -> torch.Tensor:
        """Allocate the result of `read_tensor` or `read_stacked`, and fill it tensor by tensor."""
        entries = [self._find_tensor(name, (first, *rest)) for name, first, _ in names]
        ranges = [range(first)[rows] for _, first, rows in names]
        shape = [len(range(size)[columns]) for size in rest]
        out = torch.empty(sum(map(len, ranges)), *shape)
        place = 0
        for tensor, rows in zip(entries, ranges, strict=True):
            _read_rows(tensor, rows, columns, out[place : place + len(rows)])
            place += len(rows)
        return out

    def _find_tensor(self, name: str, shape: tuple[int, ...]) -> OpenTensor:
        """The entry of a tensor, after checking its dtype and shape. Raises ModelError."""
        tensor = self._entries.get(name)
        if tensor is None:
            raise ModelError(
                f"the checkpoint has no tensor {name}", f"it holds {len(self._files)} tensors in all"
            )
        if tensor.dtype not in TORCH_DTYPES:
            raise ModelError(
                f"the tensor {name} is {tensor.dtype}",
                f"readable are {', '.join(TORCH_DTYPES)} (safetensors)",
            )
        if tensor.shape != shape:
            raise ModelError(
                f"the tensor {name} has the shape {list(tensor.shape)}",
                f"config.json asks for {list(shape)}",
                "check that config.json belongs to these weights",
            )
        return tensor


def _read_header(file: int) -> dict[str, OpenTensor]:
    """The entries of all tensors in an open safetensors file."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    header = json.loads(os.pread(file, length, 8))
    return {
        full_tensor_name(name): OpenTensor(
            file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _read_rows(tensor: OpenTensor, rows: range, columns: slice, out: torch.Tensor) -> None:
    """Copy rows of a tensor, only these columns, into `out`, piece by piece."""
    dtype = TORCH_DTYPES[tensor.dtype]
    width = torch.Size(tensor.shape[1:]).numel()
    step = max(1, PIECE_BYTES // (width * dtype.itemsize))
    for begin in range(0, len(rows), step):
        some = rows[begin : begin + step]
        piece = torch.empty(len(some), *tensor.shape[1:], dtype=dtype, pin_memory=out.is_cuda)
        view = piece.view(torch.uint8).numpy().data.cast("B")
        start = tensor.start + some.start * width * dtype.itemsize
        if os.preadv(tensor.file, [view], start) != view.nbytes:
            raise OSError("the weights file has become shorter")
        part = piece if piece.dim() == 1 else piece[:, columns]
        out[begin : begin + len(some)].copy_(part)
