"""A kept saturation is found by workers of the same kind only, and never believed when it is old or damaged."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from worker import build_cpu
from worker.saturation_store import MAX_AGE_S, SaturationStore


def test_the_same_kind_of_worker_finds_what_was_kept(tmp_path: Path) -> None:
    assert SaturationStore(tmp_path, "model", 1, 512).read_tokens() is None
    SaturationStore(tmp_path, "model", 1, 512).write_tokens(256)
    assert SaturationStore(tmp_path, "model", 1, 512).read_tokens() == 256
    SaturationStore(tmp_path, "model", 1, 512).write_tokens(128)
    assert SaturationStore(tmp_path, "model", 1, 512).read_tokens() == 128
    for others in (("other", 1, 512), ("model", 2, 512), ("model", 1, 256)):
        assert SaturationStore(tmp_path, *others).read_tokens() is None


@pytest.mark.parametrize("age_s", [MAX_AGE_S + 60, -3600])
def test_what_is_old_or_from_the_future_is_measured_again(tmp_path: Path, age_s: float) -> None:
    SaturationStore(tmp_path, "model").write_tokens(256)
    (file,) = (tmp_path / "saturation").iterdir()
    os.utime(file, (time.time() - age_s,) * 2)
    assert SaturationStore(tmp_path, "model").read_tokens() is None


@pytest.mark.parametrize("content", ["", "{", '{"tokens": "many"}', '{"tokens": -1}', "[256]"])
def test_damage_costs_a_measurement(tmp_path: Path, content: str) -> None:
    store = SaturationStore(tmp_path, "model")
    store.write_tokens(256)
    (file,) = (tmp_path / "saturation").iterdir()
    file.write_text(content)
    assert store.read_tokens() is None
    store.write_tokens(64)
    assert store.read_tokens() == 64


def test_nothing_is_kept_without_a_folder_that_can_be_written(tmp_path: Path) -> None:
    nowhere = SaturationStore(None, "model")
    nowhere.write_tokens(256)
    assert nowhere.read_tokens() is None
    (tmp_path / "file").write_text("")
    blocked = SaturationStore(tmp_path / "file", "model")
    blocked.write_tokens(256)
    assert not (tmp_path / "file").read_text()


def test_the_machine_and_its_cores_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build_cpu._machine_identity()
    assert build_cpu._machine_identity() == before
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(99)))
    assert build_cpu._machine_identity() != before
