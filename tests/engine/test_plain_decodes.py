"""A step that only decodes is packed by a shorter path, which gives what the general one does."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import KeepSpec
from engine.batching import batch as module
from engine.batching.batch import ForwardBatch, pack_batch, split_results
from engine.batching.prefix_plan import PrefixPlan
from engine.step_work import KeptWork, StepWork


def make_works(rng: random.Random, count: int) -> list[StepWork]:
    """Decode rows with prefixes of a few shared slabs, and slabs of their own."""
    works = []
    for row in range(count):
        chunks = rng.randrange(1, 6)
        slabs = [
            rng.randrange(3) if rng.random() < 0.6 else 100 + 10 * row + place for place in range(chunks)
        ]
        start = (chunks - 1) * CHUNK_TOKENS + rng.randrange(CHUNK_TOKENS)
        works.append(StepWork([rng.randrange(500)], start, slabs, "last", 7))
    return works


def assert_equal_batches(short: ForwardBatch, general: ForwardBatch) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, PrefixPlan):
            return value.depths, value.runs.tolist(), value.shared.tolist()
        return (value.dtype, value.tolist()) if isinstance(value, np.ndarray | torch.Tensor) else value

    for field in fields(ForwardBatch):
        assert plain(getattr(short, field.name)) == plain(getattr(general, field.name)), field.name


@pytest.mark.parametrize("with_sinks", [False, True])
def test_both_paths_pack_the_same(monkeypatch: pytest.MonkeyPatch, with_sinks: bool) -> None:
    rng, reordered = random.Random(3), 0
    for _ in range(200):
        works = make_works(rng, rng.choice((1, 2, 3, 8, 17)))
        sinks = [rng.randrange(9) for _ in works] if with_sinks else []
        short = pack_batch(works, sinks)
        with monkeypatch.context() as patch:
            patch.setattr(StepWork, "is_plain_decode", False)
            assert_equal_batches(short, pack_batch(works, sinks))
        reordered += short.rows.tolist() != list(range(len(works)))
    assert reordered > 20


def test_only_steps_of_plain_decodes_are_packed_by_the_shorter_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> ForwardBatch:
        raise AssertionError("these are no plain decodes")

    monkeypatch.setattr(module, "_pack_plain_decodes", refuse)
    decode = StepWork([5], 3, [0], "last")
    evicted = KeptWork("a#1", 3, KeepSpec(0.5), evicted=True)
    for other in (
        StepWork([5, 6], 3, [0], "last"),
        StepWork([5], 3, [0], "none"),
        StepWork([5], 3, [0], "all"),
        StepWork([5], 3, [0], "last_hidden"),
        StepWork([5], 3, [0, 1], "last", kept=evicted),
    ):
        pack_batch([decode, other])
    with pytest.raises(AssertionError, match="no plain decodes"):
        pack_batch([decode, decode])


def test_results_of_last_tokens_are_rows_of_the_logits() -> None:
    results = torch.arange(12.0).reshape(4, 3)
    works = [StepWork([1] * count, 0, [0], "last") for count in (1, 5, 2)]
    rows = split_results(results, works, hidden=2)
    assert [row.tolist() for row in rows] == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]]
    assert rows[1].data_ptr() == results[1].data_ptr(), "views, so that the sampler need not copy them"
    mixed = [*works[:1], StepWork([1], 0, [0], "last_hidden"), *works[1:]]
    assert [row.shape[1] for row in split_results(results, mixed, hidden=2)] == [3, 2, 3, 3]
