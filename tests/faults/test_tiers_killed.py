"""Processes that share a store are killed anywhere: nothing wrong is read, the bound holds, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

from tests.faults.killed_storers import kill_storers

KILLS = 24


def test_processes_that_are_killed_while_they_store(tmp_path: Path) -> None:
    kill_storers(tmp_path / "kv", KILLS)
