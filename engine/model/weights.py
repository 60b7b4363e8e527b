"""Tensors read straight from safetensors files, cast once to the compute dtype.

Files are read, not mapped: pages of a mapped file would count as memory of the process beside the tensors made from
them, and the peak while loading would be twice what is announced. The format: 8 bytes with the length of a JSON header
(little-endian), the header (name -> dtype, shape, range of bytes), the bytes (https://github.com/huggingface/safetensors).
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
from engine.model.memory import frugal

READABLE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ALL = slice(None)
PIECE_BYTES = 8 << 20  # read and cast at a time


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: an open file, the first byte, and what it holds."""

    file: int
    start: int
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it


class Weights:
    """The tensors of a checkpoint, by name. A context manager: the files are open inside it.

    Raises:
        ModelError: a file cannot be read as safetensors.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files  # tensor name -> file
        self._stack = ExitStack()
        self._entries: dict[str, Entry] = {}

    def __enter__(self) -> Weights:
        with ExitStack() as opened:
            opened.enter_context(frugal())  # what is cast and packed leaves pieces behind
            for path in sorted(set(self._files.values())):
                try:
                    with safe_open(path, framework="pt"):
                        pass  # the header is sound, and its ranges are within the file
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    opened.callback(os.close, file)
                    self._entries |= _header(file)
                except (SafetensorError, OSError, ValueError, KeyError) as error:
                    raise ModelError(f"the weights file {path} cannot be read", str(error)[:200]) from error
            self._stack = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def take(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """One tensor as contiguous float32, which must have this shape in the file, or a part of it.

        Only what is asked for is kept: `rows` of the first dimension, `columns` of the second.

        Raises:
            ModelError: it is missing, of another shape, or of a dtype that is not fp32, fp16 or bf16.
        """
        return self._gather([(name, shape[0], rows)], shape[1:], columns)

    def stack(self, names: list[tuple[str, int, slice]], *rest: int) -> torch.Tensor:
        """Several tensors (name, first dimension, which part of that), one below the other. Raises as `take` does."""
        return self._gather(names, rest, ALL)

    def _gather(
        self, names: list[tuple[str, int, slice]], rest: tuple[int, ...], columns: slice
    ) -> torch.Tensor:
        entries = [self._entry(name, (first, *rest)) for name, first, _ in names]
        ranges = [range(first)[rows] for _, first, rows in names]
        shape = [len(range(size)[columns]) for size in rest]
        out = torch.empty(sum(map(len, ranges)), *shape)
        place = 0
        for entry, rows in zip(entries, ranges, strict=True):
            _read(entry, rows, columns, out[place : place + len(rows)])
            place += len(rows)
        return out

    def _entry(self, name: str, shape: tuple[int, ...]) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(
                f"the checkpoint has no tensor {name}", f"it holds {len(self._files)} tensors in all"
            )
        if entry.dtype not in READABLE:
            raise ModelError(
                f"the tensor {name} is {entry.dtype}", f"readable are {', '.join(READABLE)} (safetensors)"
            )
        if entry.shape != shape:
            raise ModelError(
                f"the tensor {name} has the shape {list(entry.shape)}",
                f"config.json asks for {list(shape)}",
                "check that config.json belongs to these weights",
            )
        return entry


def dtype_of(path: Path, name: str) -> str | None:
    """What safetensors calls the dtype of a tensor; None if the file has no such tensor, or cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return str(file.get_slice(name).get_dtype())
    except (SafetensorError, OSError):
        return None


def _header(file: int) -> dict[str, Entry]:
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    told = json.loads(os.pread(file, length, 8))
    return {
        name: Entry(file, 8 + length + one["data_offsets"][0], tuple(one["shape"]), one["dtype"])
        for name, one in told.items()
        if name != "__metadata__"
    }


def _read(entry: Entry, rows: range, columns: slice, out: torch.Tensor) -> None:
    """Rows of a tensor, and of these the columns, into `out`, piece by piece."""
    dtype = READABLE[entry.dtype]
    width = torch.Size(entry.shape[1:]).numel()
    step = max(1, PIECE_BYTES // (width * dtype.itemsize))
    for begin in range(0, len(rows), step):
        some = rows[begin : begin + step]
        piece = torch.empty(len(some), *entry.shape[1:], dtype=dtype)
        view = piece.view(torch.uint8).numpy().data.cast("B")
        start = entry.start + some.start * width * dtype.itemsize
        if os.preadv(entry.file, [view], start) != view.nbytes:
            raise OSError("the weights file has become shorter")
        part = piece if piece.dim() == 1 else piece[:, columns]
        out[begin : begin + len(some)].copy_(part)
