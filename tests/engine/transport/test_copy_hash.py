"""Copying and hashing in one pass: the hash is the library's, the copy is whole, and each byte is read once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvtransfer.copy_hash import MAX_SHORT_BYTES, STRIPE_BYTES, Bytes, CopyHasher, Numbers

BLOCK_BYTES = 16 * STRIPE_BYTES
EDGE_BYTES = 128


def rows_of(*pieces: tuple[int, int, int]) -> Numbers:
    """Moves within one rank: (byte there, byte here, how many)."""
    return np.array([(0, far, 0, own, size) for far, own, size in pieces], np.int64).reshape(-1, 5)


def place_of(data: Bytes, stride: int = 0) -> Numbers:
    return np.array([(data.ctypes.data, stride)], np.int64)


def copy(hasher: CopyHasher, target: Bytes, source: Bytes, *pieces: tuple[int, int, int]) -> None:
    num_bytes = sum(size for _, _, size in pieces)
    hasher.copy_slab(rows_of(*pieces), num_bytes, place_of(source), 0, place_of(target), 0)


@pytest.mark.parametrize(
    "length", [*range(2 * MAX_SHORT_BYTES), *range(BLOCK_BYTES - 70, BLOCK_BYTES + 70), 5000]
)
def test_every_length_has_the_hash_of_the_library(length: int) -> None:
    data = random.Random(length).randbytes(length)
    hasher = CopyHasher()
    hasher.update(data)
    assert hasher.digest() == xxhash.xxh3_128_digest(data) == hasher.digest()


@pytest.mark.parametrize("seed", range(300))
def test_any_split_into_copies_and_updates_has_the_same_hash_and_an_exact_copy(seed: int) -> None:
    draw = random.Random(seed)
    length = draw.choice([draw.randrange(1, 600), draw.randrange(600, 9000), 64 * draw.randrange(1, 400)])
    source = np.frombuffer(draw.randbytes(length), np.uint8)
    shift = draw.choice([0, draw.randrange(STRIPE_BYTES)])
    room = np.full(length + 3 * EDGE_BYTES, 7, np.uint8)
    begin = -room.ctypes.data % STRIPE_BYTES + EDGE_BYTES // 2 + shift
    target, hasher, at = room[begin:], CopyHasher(), 0
    while at < length:
        sizes = [draw.choice([1, 63, 64, 65, 192, BLOCK_BYTES, draw.randrange(1, 3000)]) for _ in range(3)]
        pieces: list[tuple[int, int, int]] = []
        for size in sizes:
            taken = min(size, length - at)
            pieces += [(at, at, taken)] if taken else []
            at += taken
        if draw.random() < 0.3:
            for far, own, size in pieces:
                hasher.update(source[far : far + size].tobytes())
                target[own : own + size] = source[far : far + size]
        else:
            copy(hasher, target, source, *pieces)
        so_far = source[:at].tobytes()
        assert hasher.digest() == xxhash.xxh3_128_digest(so_far)
    assert target[:length].tobytes() == source.tobytes()
    assert (room[:begin] == 7).all() and (target[length:] == 7).all(), "something else was written"


def test_slabs_of_several_ranks_are_found_by_their_places() -> None:
    draw = np.random.default_rng(0)
    sources = [draw.integers(0, 256, 5 * size, np.uint8) for size in (1024, 512)]
    target = np.zeros((4, 1536), np.uint8)
    rows = np.array([(0, 0, 0, 0, 512), (1, 0, 0, 512, 512), (0, 512, 0, 1024, 512)], np.int64)
    places = np.concatenate([place_of(sources[0], 1024), place_of(sources[1], 512)])
    hasher = CopyHasher()
    hasher.copy_slab(rows, 1536, places, 3, place_of(target, 1536), 2)
    first, second = sources[0][3 * 1024 :][:1024], sources[1][3 * 512 :][:512]
    whole = np.concatenate([first[:512], second, first[512:]])
    assert (target[2] == whole).all() and not target[[0, 1, 3]].any()
    assert hasher.digest() == xxhash.xxh3_128_digest(whole.tobytes())


def test_loading_loads_what_copies_and_digests_run(tmp_path: Path) -> None:
    code = """
import numpy as np
from kvtransfer import copy_hash
from diptych.kernels.cache import is_stored
kernels = copy_hash._run_moves, copy_hash._end_hash
copy_hash.load_kernels()
assert all(map(is_stored, kernels))
room, hasher = np.zeros((2, 512), np.uint8), copy_hash.CopyHasher()
places = [np.array([(row.ctypes.data, 512)], np.int64) for row in room]
hasher.copy_slab(np.array([(0, 0, 0, 0, 512)], np.int64), 512, places[0], 0, places[1], 0)
hasher.digest()
assert [len(kernel.signatures) for kernel in kernels] == [1, 1]
"""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=120)


@pytest.mark.parametrize("shift", [0, 1])
def test_what_is_hashed_is_the_copy_while_others_write_to_the_source(shift: int) -> None:
    size, over = 1 << 16, threading.Event()
    source, room = np.zeros(size, np.uint8), np.zeros(size + 2 * STRIPE_BYTES, np.uint8)
    target = room[-room.ctypes.data % STRIPE_BYTES + shift :][:size]

    def write() -> None:
        value = 0
        while not over.is_set():
            value = (value + 1) % 251
            source[:] = value

    writer = threading.Thread(target=write)
    writer.start()
    torn = 0
    try:
        for _ in range(2000):
            hasher = CopyHasher()
            copy(hasher, target, source, (0, 0, 100), (100, 100, size - 200), (size - 100, size - 100, 100))
            assert hasher.digest() == xxhash.xxh3_128_digest(target.tobytes())
            torn += len(np.unique(target)) > 1
    finally:
        over.set()
        writer.join()
    assert torn, "nothing was written meanwhile"
