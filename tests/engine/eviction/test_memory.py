"""Memory of evictions beside the pool: set aside if all requests evict, else what is left decides how many may."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.errors import ModelError
from diptych.specs import WorkerSpec
from engine.eviction.memory import count_evicting, decision_bytes, eviction_bytes, remembered_bytes
from engine.model.checkpoint import Checkpoint
from engine.model.memory_plan import USABLE_SHARE
from worker.resolve_model import engine_limits, resolve_model

TINY = str(Path(__file__).parents[3] / "models" / "tiny")
# Queries of 64 tokens in 6 layers of 8 heads, and a map of 4 heads: of a sequence of 2,048 tokens.
REMEMBERED = 6 * 64 * 8 * 32 * 4 + 8 * 6 * 4 * 2048


def test_sizes_of_the_embedded_model() -> None:
    layout = Checkpoint.resolve(TINY).layout()
    assert remembered_bytes(layout, 8, 2048) == REMEMBERED
    rows = 33 * 64 * 6 * 4
    assert decision_bytes(layout, 2048) == rows * (2 * 32 * 4 + 24)
    assert eviction_bytes(layout, 8, 2048, 0) == 0
    assert eviction_bytes(layout, 8, 2048, 3) == 3 * REMEMBERED + decision_bytes(layout, 2048)
    for spare, most, count in (
        (0, 9, 0),
        (-5, 9, 0),
        (3 * REMEMBERED, 9, 3),
        (3 * REMEMBERED - 1, 9, 2),
        (1 << 40, 9, 9),
    ):
        beside = decision_bytes(layout, 2048) if spare > 0 else 0
        assert count_evicting(layout, 8, 2048, spare + beside, most) == count


def test_it_is_set_aside_where_all_requests_evict() -> None:
    files = Checkpoint.resolve(TINY)
    plain, keeps = (files.memory(max_model_len=None, kv_bytes=64 << 20, evicting_seqs=n) for n in (0, 64))
    more = eviction_bytes(files.layout(), 8, 2048, 64)
    assert (plain.eviction_bytes, keeps.eviction_bytes) == (0, more)
    assert keeps.fixed_bytes == plain.fixed_bytes + more and keeps.total_bytes == plain.total_bytes + more
    enough = int((keeps.fixed_bytes + keeps.kv_bytes) / USABLE_SHARE) + 1
    sized: dict[str, Any] = {"max_model_len": None, "kv_bytes": keeps.kv_bytes}
    assert files.memory(**sized, available_bytes=enough, evicting_seqs=64).kv_bytes == keeps.kv_bytes
    assert files.memory(**sized, available_bytes=enough - 1024).kv_bytes == keeps.kv_bytes
    with pytest.raises(ModelError, match="does not fit") as caught:
        files.memory(**sized, available_bytes=enough - 1024, evicting_seqs=64)
    assert "evictions 61.54 MiB" in caught.value.why and len(caught.value.lines()) <= 6


def test_what_is_left_beside_the_pool_says_how_many_may_evict() -> None:
    spec = WorkerSpec(
        worker="w", role="decode", gateway="", keys_dir="", model=TINY, kv_bytes=64 << 20, max_num_seqs=32
    )  # fmt: skip
    found = resolve_model(spec)
    layout, kv = found.layout, found.plan.kv_bytes
    assert engine_limits(spec, found).max_evicting == 32
    for spare, count in ((eviction_bytes(layout, 8, 2048, 5), 5), (decision_bytes(layout, 2048), 0)):
        tight = replace(found, plan=replace(found.plan, max_kv_bytes=kv + spare))
        assert engine_limits(spec, tight).max_evicting == count


def test_a_worker_that_evicts_by_default_evicts_all_its_sequences() -> None:
    spec = WorkerSpec(
        worker="w", role="decode", gateway="", keys_dir="", model=TINY, kv_bytes=64 << 20, max_num_seqs=32,
        kv_keep=0.95,
    )  # fmt: skip
    found = resolve_model(spec)
    assert found.plan.eviction_bytes == eviction_bytes(found.layout, 8, 2048, 32)
    assert engine_limits(spec, found).max_evicting == 32
