"""Files of a store that are not what their names say."""

from __future__ import annotations

import os
import random

import pytest

from diptych.errors import CorruptChunk
from kvcache.tiers.chunk_store import ChunkStore
from tests.unit.kvcache.tiers.stored_chunks import address_of, content_of, new_chunk, read_number

INJURIES = ("flip", "header", "cut", "longer", "swap", "rename", "empty", "link", "fifo", "folder")


def check_injury(store: ChunkStore, injury: str, start: int, rng: random.Random) -> None:
    """Store two chunks, injure them, and check that the store finds it, reads nothing wrong and stores them again."""
    store.store([new_chunk(start), new_chunk(start + 1)])
    one, other = (store.claim.path_of(address_of(start + i)) for i in (0, 1))
    content = bytearray(one.read_bytes())
    match injury:
        case "flip":
            content[rng.randrange(128, len(content))] ^= 1 << rng.randrange(8)
            one.write_bytes(content)
        case "header":
            content[rng.randrange(128)] ^= 1 << rng.randrange(8)
            one.write_bytes(content)
        case "cut" | "empty":
            os.truncate(one, 0 if injury == "empty" else rng.randrange(len(content)))
        case "longer":
            one.write_bytes(content + b"x")
        case "swap":
            kept = other.read_bytes()
            other.write_bytes(content)
            one.write_bytes(kept)
        case "rename":
            os.rename(other, one)
        case "link":
            one.rename(one.with_suffix(".moved"))
            one.symlink_to(one.with_suffix(".moved"))
        case "fifo":
            one.unlink()
            os.mkfifo(one)
        case "folder":
            one.unlink()
            one.mkdir()
            (one / "file").touch()
    with pytest.raises(CorruptChunk):
        read_number(store, start)
    with pytest.raises(KeyError):
        read_number(store, start)
    if injury in ("swap", "rename"):
        with pytest.raises((CorruptChunk, KeyError)):
            read_number(store, start + 1)
    assert store.store([new_chunk(start)]) == [address_of(start)]
    assert read_number(store, start) == content_of(start)
