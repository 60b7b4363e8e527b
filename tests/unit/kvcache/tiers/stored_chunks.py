"""Chunks to store, whose bytes follow from their number."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvcache.tiers.chunk_index import INDEX_BYTES, ROW_BYTES
from kvcache.tiers.chunk_store import ChunkStore, NewChunk, file_bytes

CHUNK_BYTES = 10_000


def address_of(number: int) -> bytes:
    return hashlib.sha256(f"chunk {number}".encode()).digest()


def content_of(number: int, num_bytes: int = CHUNK_BYTES) -> bytes:
    return hashlib.shake_128(f"content {number}".encode()).digest(num_bytes)


def new_chunk(number: int, depth: int = 0) -> NewChunk:
    content = memoryview(bytearray(content_of(number)))
    return NewChunk(address_of(number), depth, [content[:4096], content[4096:]])


def room_for(count: int) -> int:
    """The bound of a store with room for so many chunks."""
    return INDEX_BYTES + count * (file_bytes(CHUNK_BYTES) + ROW_BYTES)


def open_store(folder: Path, count: int = 100, deployment: str = "a", removes: bool = False) -> ChunkStore:
    return ChunkStore(folder, room_for(count), deployment, removes)


def read_number(store: ChunkStore, number: int) -> bytes:
    """What the store has of a chunk. Raises as `ChunkStore.read`."""
    view = memoryview(bytearray(CHUNK_BYTES))
    store.read(address_of(number), [view[:100], view[100:]])
    return bytes(view)


def bytes_in(folder: Path) -> int:
    """The blocks that all files in a folder take."""
    found = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.lstat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return found
