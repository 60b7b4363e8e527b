"""Reads the header of a safetensors file: the dtype, shape and byte range of every tensor, without reading a tensor.

The format: 8 bytes with the length of a JSON header (little-endian), the header (name -> dtype, shape, range of bytes),
the bytes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

# The header limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
# What the names of tensors begin with in a checkpoint without an output matrix, as embedding models are saved.
BARE_PARTS = ("embed_tokens.", "layers.", "norm.")


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor. `data_offsets` is its half-open byte range, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def full_tensor_name(name: str) -> str:
    """The name of a tensor as it is in a checkpoint of the whole model."""
    return f"model.{name}" if name.startswith(BARE_PARTS) else name


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file, by full name.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not in this format, or its size differs from its header.
    """
    with path.open("rb") as file:
        size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        parts = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    parts.pop(METADATA_KEY, None)
    tensors = {
        full_tensor_name(name): msgspec.json.decode(part, type=TensorEntry) for name, part in parts.items()
    }
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(f"it has {size} bytes, but its header describes {8 + length + end}")
    return tensors
