"""Chunks of a sequence that failed for an unknown reason come back from no tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiers.tiered_engine import TieredEngine, prompt_of
from tests.support.waiting import wait_for


@pytest.mark.parametrize("survives", [False, True])
def test_what_is_in_doubt_goes_from_all_tiers_and_is_not_stored_again(tmp_path: Path, survives: bool) -> None:
    engine = TieredEngine("raw", tmp_path, disk=True)
    tiers = engine.tiers
    assert tiers is not None
    engine.answer(prompt_of(1))
    wait_for(lambda: all(one.store.count()[0] == 4 for one in tiers._tiers.values()), 10)
    keys = engine.request(prompt_of(1)).update_keys()[:4]
    if survives:
        engine.kv.attach_prefix("other", keys)
    engine.kv.attach_prefix("failed", keys)
    engine.kv.release("failed", keep=False)
    wait_for(lambda: not any(one.store.find(keys) for one in tiers._tiers.values()), 10)
    engine.kv.release("other")
    engine.settle()
    assert not any(one.store.find(keys) for one in tiers._tiers.values())
    assert engine.answer(prompt_of(1))[2] == 0
    engine.settle()
    assert all(one.store.find(keys) == set(keys) for one in tiers._tiers.values()), "computed anew"
    engine.close()


def test_what_cannot_be_removed_now_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TieredEngine("raw", tmp_path)
    tiers = engine.tiers
    assert tiers is not None
    engine.answer(prompt_of(1))
    engine.settle()
    keys = engine.request(prompt_of(1)).update_keys()[:4]
    host = tiers._tiers["host"]
    with monkeypatch.context() as patch:
        # Somebody reads them.
        patch.setattr(host.store, "_drop_file", lambda address: False)
        tiers._on_forgotten(keys)
        assert engine.answer(prompt_of(1))[2] == 0
        assert host.store.find(keys) == set(keys)
        engine.settle()
    engine.answer(prompt_of(2))
    wait_for(lambda: not host.store.find(keys) and not host.doubtful, 10)
    engine.close()
