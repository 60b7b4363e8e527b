"""Kills processes that share a store, and checks what is left."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from kvcache.tiers.chunk_store import ChunkStore
from tests.unit.kvcache.tiers.stored_chunks import (
    address_of,
    bytes_in,
    content_of,
    open_store,
    read_number,
    room_for,
)

ROOM, PROCESSES = 60, 3


def start(folder: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.faults.tier_storer", str(folder), str(ROOM), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def stored_right(store: ChunkStore) -> int:
    """How many chunks the store has; all of them are right.

    A process that was killed may have removed a file, and not yet its row: reading there forgets the row.
    """
    addresses = [address_of(n) for n in range(2 * ROOM)]
    found, right = store.find(addresses), 0
    for number, address in enumerate(addresses):
        if address in found:
            with suppress(KeyError):
                assert read_number(store, number) == content_of(number)
                right += 1
    assert right == len(store.find(addresses))
    return right


def kill_storers(folder: Path, kills: int) -> tuple[int, float]:
    """Kill so many processes while they store and read. Returns the reads that gave a chunk, and the most bytes over
    the bound's.
    """
    rng = random.Random(7)
    watcher = open_store(folder, ROOM)
    running = [start(folder, seed) for seed in range(PROCESSES)]
    lines: list[str] = []
    peak = 0
    for number in range(kills):
        victim = running.pop(0)
        assert victim.stdout is not None and victim.stdout.readline() == "open\n"
        deadline = time.monotonic() + rng.uniform(0.02, 0.2)
        while time.monotonic() < deadline:
            peak = max(peak, bytes_in(folder))
        victim.kill()
        lines += victim.communicate()[0].splitlines()[:-1]
        running.append(start(folder, PROCESSES + number))
    for victim in running:
        victim.kill()
        lines += victim.communicate()[0].splitlines()[1:-1]
    counts = [[int(word) for word in line.split()] for line in lines]
    num_right = sum(right for right, _, _ in counts)
    assert num_right > 100
    assert sum(wrong for _, wrong, _ in counts) == 0 and max(corrupt for *_, corrupt in counts) == 0
    assert peak <= room_for(ROOM)
    watcher.reclaim_dead()
    assert not list((folder / "partial").iterdir()) and len(list((folder / "owners").iterdir())) == 1
    right = stored_right(watcher)
    chunks, num_bytes = watcher.count()
    assert chunks == right == len(list((folder / "chunks").iterdir())) > ROOM // 2
    assert num_bytes == chunks * (room_for(1) - room_for(0))
    watcher.close()
    return num_right, peak / room_for(ROOM)
