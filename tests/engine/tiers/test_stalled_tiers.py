"""A tier that stands still or cannot be written costs prefixes alone: no memory is held for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.prefix_restores import PrefixRestore
from tests.engine.tiers.tiered_engine import TieredEngine, prompt_of
from tests.support.waiting import wait_for
from worker.tiers.worker_tiers import COUNT_S


def stored_engine(folder: Path, num_slabs: int = 24) -> TieredEngine:
    """An engine that has nothing in its pool and in host memory, and a prompt's prefix on its disk."""
    first = TieredEngine("raw", folder, disk=True)
    first.answer(prompt_of(1))
    first.settle()
    first.close()
    return TieredEngine("raw", folder, num_slabs, disk=True)


def test_prompts_and_steps_go_on_while_a_disk_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate, begun = stored_engine(tmp_path, num_slabs=6), threading.Event(), threading.Event()
    assert engine.tiers is not None
    disk = engine.tiers._tiers["disk"]
    read = disk.store.read

    def stalled_read(address: bytes, views: Sequence[memoryview]) -> None:
        begun.set()
        assert gate.wait(60)
        read(address, views)

    monkeypatch.setattr(disk.store, "read", stalled_read)
    # With three of six slabs the restore leaves too few for the prompt itself.
    cold = TieredEngine("raw", None)
    assert engine.answer(prompt_of(1))[0] == cold.answer(prompt_of(1))[0]
    assert begun.is_set() and not gate.is_set(), "the answer did not wait for the disk"
    assert engine.kv.used == 0 and not engine.engine.restores.is_busy
    held = bytes(engine.pool.memory)
    gate.set()
    wait_for(lambda: disk.thread._busy_since_s is None and not disk.thread._urgent, 10)
    assert bytes(engine.pool.memory) == held, "what came too late was written nowhere"
    engine.close()


def test_good_chunks_count_though_their_use_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stored_engine(tmp_path)
    assert engine.tiers is not None and engine.kv.tree is not None
    # Nothing is stored, which would fail as well.
    engine.kv.tree.on_released = None

    def fail(addresses: Sequence[bytes]) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(engine.tiers._tiers["disk"].store, "touch", fail)
    assert engine.answer(prompt_of(1))[2] == 256
    disk = engine.tiers._tiers["disk"]
    wait_for(lambda: disk.thread._busy_since_s is None, 10)
    stats = engine.engine.stats.tiers["disk"]
    assert (stats.restored_chunks, stats.failures, stats.paused) == (4, 0, False)
    engine.close()


def test_what_a_tier_has_is_known_before_anything_is_stored(tmp_path: Path) -> None:
    engine = stored_engine(tmp_path)
    wait_for(lambda: engine.engine.stats.tiers["disk"].chunks == 4, 10)
    assert engine.engine.stats.tiers["disk"].used_bytes > 4 * engine.layout.chunk_bytes
    engine.close()


def test_a_paused_tier_is_counted_when_it_is_looked_into(tmp_path: Path) -> None:
    engine = stored_engine(tmp_path)
    assert engine.tiers is not None
    disk = engine.tiers._tiers["disk"]
    wait_for(lambda: engine.engine.stats.tiers["disk"].chunks == 4, 10)
    disk._count, disk._counted_s = (0, 0), time.monotonic() - 2 * COUNT_S
    disk.thread.note_failure(OSError("the disk is full"))
    engine.answer(prompt_of(2))
    wait_for(lambda: engine.engine.stats.tiers["disk"].chunks == 4, 10)
    assert engine.engine.stats.tiers["disk"].paused
    engine.close()


def test_a_look_up_that_was_answered_is_the_engine_s(tmp_path: Path) -> None:
    engine = stored_engine(tmp_path)
    tiers = engine.tiers
    assert tiers is not None
    keys = engine.request(prompt_of(1)).update_keys()[:4]
    restore = PrefixRestore(1, engine.layout.kv_class, list(keys), 0, 0.0, 1.0, math.inf)
    found = list[list[str]]()

    def wake() -> None:
        found.append(restore.tiers)
        restore.tiers, restore.known = [], 4

    tiers.notify(wake)
    tiers.look_up(restore)
    wait_for(lambda: bool(found), 10)
    wait_for(lambda: all(one.thread._busy_since_s is None for one in tiers._tiers.values()), 10)
    assert found == [["disk"] * 4]
    assert not any(one.failures or one.paused for one in tiers.stats.values())
    engine.close()
