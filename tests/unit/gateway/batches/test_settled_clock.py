"""Files and batches do not end because the wall clock jumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.storage.settled_clock import STAND_S, TOLERANCE_S, SettledClock
from services.gateway.batches.store import BatchStore
from tests.unit.gateway.batches.stored_batches import add_batch, add_file

DAY = 86400.0
NOW = 1_800_000_000.0


@pytest.mark.parametrize("jump", [31 * DAY, -31 * DAY])
def test_a_jump_counts_after_an_hour(jump: float) -> None:
    clock = SettledClock()
    assert clock.read(NOW, 0.0) == NOW
    assert clock.read(NOW + jump + 60, 60.0) == NOW + 60
    assert clock.read(NOW + jump + 60 + STAND_S - 1, 60 + STAND_S - 1) == NOW + 60 + STAND_S - 1
    assert clock.read(NOW + jump + 60 + STAND_S, 60 + STAND_S) == NOW + jump + 60 + STAND_S


def test_a_jump_that_is_taken_back_never_counts() -> None:
    clock = SettledClock()
    clock.read(NOW, 0.0)
    for minute in range(1, 300):
        jump = 31 * DAY if minute % 50 else 0.0
        assert clock.read(NOW + 60 * minute + jump, 60.0 * minute) == NOW + 60 * minute


def test_each_new_jump_must_stand_for_itself() -> None:
    clock = SettledClock()
    clock.read(NOW, 0.0)
    for minute in range(1, 300):
        jump = DAY * (1 + minute // 30)
        assert clock.read(NOW + 60 * minute + jump, 60.0 * minute) == NOW + 60 * minute


def test_slow_clocks_are_followed() -> None:
    clock = SettledClock()
    for minute in range(10_000):
        wall = NOW + 61.0 * minute
        assert clock.read(wall, 60.0 * minute) == wall


def test_a_restart_is_no_way_around() -> None:
    """A machine whose battery is empty boots in another year; or it was off for three days."""
    for jump in (31 * DAY, 3 * DAY, -20_000 * DAY):
        clock = SettledClock(NOW)
        assert clock.read(NOW + jump, 7.0) == NOW
        assert clock.read(NOW + jump + STAND_S, 7.0 + STAND_S) == NOW + jump + STAND_S
    assert SettledClock(NOW).read(NOW + TOLERANCE_S, 7.0) == NOW + TOLERANCE_S, "a restart takes minutes"


def test_what_is_made_meanwhile_ends_later_rather_than_earlier() -> None:
    ahead, behind = SettledClock(NOW), SettledClock(NOW)
    assert ahead.stamp(NOW + DAY, 0.0) == NOW + DAY
    assert behind.stamp(NOW - DAY, 0.0) == NOW


class TwoClocks:
    """A wall clock that can be set, and a monotonic one."""

    def __init__(self) -> None:
        self.wall, self.passed = NOW, 0.0

    def pass_time(self, seconds: float) -> None:
        self.wall, self.passed = self.wall + seconds, self.passed + seconds

    def open(self, path: Path) -> BatchStore:
        return BatchStore(DataDir(str(path)), lambda: self.wall, lambda: self.passed)


async def test_a_clock_that_jumps_removes_nothing_until_it_has_stood(tmp_path: Path) -> None:
    clocks = TwoClocks()
    store = clocks.open(tmp_path / "data")
    file = await add_file(store, expires_at=int(NOW + 30 * DAY))
    batch = await add_batch(store)
    await store.remove_unused()
    clocks.wall += 31 * DAY
    for minutes in (0, 1, 58):
        clocks.pass_time(60 * minutes)
        await store.remove_unused()
        assert store.content_path(file.id).exists() and (await store.find_file("", file.id)) == file
        assert store.settled_s < NOW + DAY < batch.expires_at + DAY
    # Nor does a restart.
    store.close()
    store = clocks.open(tmp_path / "data")
    await store.recover()
    await store.remove_unused()
    assert store.content_path(file.id).exists()
    clocks.pass_time(STAND_S)
    await store.remove_unused()
    assert not store.content_path(file.id).exists()
    store.close()


async def test_the_time_is_kept_though_the_process_is_killed(tmp_path: Path) -> None:
    clocks = TwoClocks()
    store = clocks.open(tmp_path / "data")
    await store.remove_unused()
    for _ in range(10):
        clocks.pass_time(300)
        await store.remove_unused()
    db = store._thread._db
    assert db.execute("SELECT settled_s FROM clocks").fetchone()[0] == NOW + 3000
    store.close()
