"""The file of one stored chunk: a header, then the bytes of the chunk in the order of its pages.

    magic 8 │ address 32 │ payload bytes 8 │ xxh3-128 of the payload 16 │ xxh3-64 of all before 8 │ zeros up to 128

A file whose payload was flipped, cut, or exchanged for that of another chunk does not match its header, and one that
has another chunk's name holds another address. The address names model, scope, codec and tokens
(`kvcache.prefix_tree`), so that a file which matches is the chunk that was asked for.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import xxhash

from diptych.errors import CorruptChunk

HEADER_BYTES = 128
# It changes with this format, so that files of another one are no chunks.
MAGIC = b"dipkv\0\0\1"
_FIELDS = struct.Struct("<8s32sQ16s")
# Most buffers of one call of the kernel (IOV_MAX).
MAX_BUFFERS = 1024


def build_header(address: bytes, num_bytes: int, payload: bytes) -> bytes:
    """The header of the chunk at `address`, whose `num_bytes` have the hash `payload`."""
    fields = _FIELDS.pack(MAGIC, address, num_bytes, payload)
    return (fields + xxhash.xxh3_64_digest(fields)).ljust(HEADER_BYTES, b"\0")


def read_header(header: bytes, address: bytes) -> tuple[int, bytes]:
    """The payload's length and hash in the header of the chunk at `address`.

    Raises:
        CorruptChunk: it is no header, or that of another chunk.
    """
    fields = header[: _FIELDS.size]
    if len(header) != HEADER_BYTES or header != (fields + xxhash.xxh3_64_digest(fields)).ljust(
        HEADER_BYTES, b"\0"
    ):
        raise CorruptChunk("a stored chunk has no valid header", address.hex())
    magic, found, num_bytes, payload = _FIELDS.unpack(fields)
    if magic != MAGIC or found != address:
        raise CorruptChunk("a stored chunk has the name of another one", address.hex())
    return num_bytes, payload


def hash_views(views: Sequence[memoryview]) -> bytes:
    """The xxh3-128 of the bytes of `views`, one after the other."""
    if len(views) == 1:
        return xxhash.xxh3_128_digest(views[0])
    payload = xxhash.xxh3_128()
    for view in views:
        payload.update(view)
    return payload.digest()


def write_views(fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Write the bytes of `views` to a file, from `offset` on. Raises OSError."""
    left = list(views)
    while left:
        done = os.pwritev(fd, left[:MAX_BUFFERS], offset)
        if done <= 0:
            raise OSError("the file takes no more bytes")
        offset += done
        left = _drop_bytes(left, done)


def read_views(fd: int, views: Sequence[memoryview], offset: int) -> bool:
    """Fill `views` with the bytes of a file from `offset` on. Returns whether it has that many. Raises OSError."""
    left = list(views)
    while left:
        done = os.preadv(fd, left[:MAX_BUFFERS], offset)
        if done <= 0:
            return False
        offset += done
        left = _drop_bytes(left, done)
    return True


def _drop_bytes(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` behind their first `count` bytes."""
    for place, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[place + 1 :]]
        count -= view.nbytes
    return []


def read_chunk(fd: int, address: bytes, views: Sequence[memoryview]) -> None:
    """Fill `views` with the chunk at `address` from its open file, and check them. Raises OSError.

    Raises:
        CorruptChunk: it is not that chunk, has another size, or its bytes have changed. `views` then hold anything.
    """
    num_bytes, payload = read_header(os.pread(fd, HEADER_BYTES, 0), address)
    if num_bytes != sum(view.nbytes for view in views) or os.fstat(fd).st_size != HEADER_BYTES + num_bytes:
        raise CorruptChunk("a stored chunk has another size", address.hex())
    if not read_views(fd, views, HEADER_BYTES) or hash_views(views) != payload:
        raise CorruptChunk("a stored chunk has changed", address.hex())
