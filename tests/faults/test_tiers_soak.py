"""What tiers below the pools promise, at length. With `-s` the figures are seen."""

from __future__ import annotations

import random
import time
from itertools import product
from pathlib import Path

import pytest

from kvcache.prefix_tree import chunk_keys, root_key
from kvcache.tiers.chunk_store import NewChunk
from tests.faults.killed_storers import ROOM, kill_storers, start
from tests.unit.kvcache.tiers.injured_chunks import INJURIES, check_injury
from tests.unit.kvcache.tiers.stored_chunks import address_of, bytes_in, open_store, room_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SECONDS, WORKERS, INJURED, KILLED = 60, 4, 10_000, 100


def test_four_workers_stay_within_the_bound(tmp_path: Path) -> None:
    folder, peak = tmp_path / "kv", 0
    watcher = open_store(folder, ROOM)
    running = [start(folder, seed) for seed in range(WORKERS)]
    ends_s = time.monotonic() + SECONDS
    while time.monotonic() < ends_s:
        peak = max(peak, bytes_in(folder))
    for worker in running:
        assert worker.poll() is None
        worker.kill()
        lines = worker.communicate()[0].splitlines()[1:-1]
        assert lines and not any(int(line.split()[1]) for line in lines)
    assert watcher.count()[0] > ROOM // 2
    watcher.close()
    print(f"peak={peak / room_for(ROOM):.3f}")
    assert peak <= room_for(ROOM)


def test_ten_thousand_files_are_injured(tmp_path: Path) -> None:
    store, rng = open_store(tmp_path / "kv"), random.Random(3)
    for number in range(INJURED):
        check_injury(store, INJURIES[number % len(INJURIES)], 2 * (number % 40), rng)
    print(f"injured={INJURED} found={store.num_corrupt} wrong=0")
    assert store.num_corrupt >= INJURED
    store.close()


def test_a_hundred_processes_are_killed_and_what_they_stored_stays(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    num_right, peak = kill_storers(folder, KILLED)
    addresses = [address_of(number) for number in range(2 * ROOM)]
    stored = len(list((folder / "chunks").iterdir()))
    again = open_store(folder, ROOM)
    kept = len(again.find(addresses)) / stored
    again.close()
    print(f"killed={KILLED} reads={num_right} wrong=0 peak={peak:.3f} kept={kept:.3f}")
    assert kept >= 0.9


def test_nobody_finds_what_others_stored(tmp_path: Path) -> None:
    """Ten thousand look-ups by others: another tenant, salt, model, class or part of the KV, or text."""
    tokens = list(range(64 * 4))
    roots = [
        root_key(*fields)
        for fields in product(
            ("m", "m2", "m\0"), ("", "t", "t\0s", "tm", "ts"), ("", "fp8", "t"), ("", "zap 0.5")
        )
    ]
    assert len(set(roots)) == len(roots) == 90
    keys = [chunk_keys(tokens, root) for root in roots]
    store = open_store(tmp_path / "kv", 4 * len(roots))
    content = memoryview(bytearray(10_000))
    probes = foreign = 0
    for owner, mine in enumerate(keys):
        assert store.store([NewChunk(key, depth, [content]) for depth, key in enumerate(mine)]) == mine
        for later in keys[owner + 1 :]:
            probes, foreign = probes + len(later), foreign + len(store.find(later))
    print(f"probes={probes} foreign_hits={foreign}")
    assert probes >= 10_000 and foreign == 0
    store.close()
