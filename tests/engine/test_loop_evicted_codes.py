"""The loop with heads that drop coded KV, on the embedded model: tokens are those of requests that ran alone.

As `tests/engine/test_loop_evicted.py`, for codes: kept rows move as the codes that they are.
"""

from __future__ import annotations

import itertools

import pytest

from diptych.eviction_spec import KEEP_ALL, decision_tokens
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.outputs import SequenceOutput
from engine.scheduling.new_token_ratio import NewTokenRatio
from tests.engine.cpu.eviction.evicted_runs import SETUP
from tests.engine.evicting_engine import (
    ALL,
    MODEL_LEN,
    NEW_TOKENS,
    REQUESTS,
    TEXT,
    TINY,
    Answers,
    EvictingEngine,
    answers,
)
from tests.support.engine_model import EngineModel
from tests.unit.engine.fakes import FixedRate

CODEC = "nuq3-1%"


def answers_alone(codec: str, numbers: range = ALL) -> Answers:
    """Each of these requests by itself, prompts whole."""
    worker = EvictingEngine(codec=codec, max_num_batched_tokens=MODEL_LEN, chunked_prefill=False)
    found: Answers = {}
    for number in numbers:
        worker.holdings.evict_cached()
        found |= answers(worker.run(range(number, number + 1)))
    assert worker.holdings.used == 0
    return found


@pytest.fixture(scope="module")
def alone() -> Answers:
    return answers_alone(CODEC)


def test_in_pieces_beside_others_and_from_the_cache(alone: Answers) -> None:
    worker = EvictingEngine(codec=CODEC)
    assert answers(worker.run(ALL)) == alone
    assert answers(worker.run(ALL)) == alone
    assert [seq.cached for seq in worker.seen[4:]] == [0, 64, 128, 256]
    whole = answers(EvictingEngine(codec=CODEC).run(ALL, keep=KEEP_ALL))
    assert whole.keys() == alone.keys() and whole != alone and worker.holdings.used == 0


def test_the_worker_of_benchmarks_decides_as_the_loop_does(alone: Answers) -> None:
    """`benchmarks.kv_agreement` compares deployments with it."""
    worker = EngineModel(TINY, *resolve_kv_codec(Checkpoint.resolve(str(TINY)), CODEC), SETUP)
    for number in (2, 3):
        start, length, keep = REQUESTS[number]
        prompt = TEXT[start : start + length]
        found = worker.answer_greedily(prompt, NEW_TOKENS, lambda ids: str(ids[0]), keep)
        assert found.tokens == [str(token) for token in alone[f"r{number}"]]


@pytest.mark.parametrize("codec", ["int4", "tq4", "bf16"])
def test_other_codecs(codec: str) -> None:
    few = range(1, 3)
    worker = EvictingEngine(codec=codec)
    assert answers(worker.run(few)) == answers_alone(codec, few)


def test_prefilled_here_and_decoded_there(alone: Answers) -> None:
    """The bag moves as slabs; an answer of 70 tokens, 6 of them behind a decision, is read again in part."""
    done = 70
    prefill, decode = EvictingEngine(codec=CODEC), EvictingEngine(codec=CODEC)
    for number in ALL:
        prefill.engine.add(prefill.request(number, tuple(alone[f"r{number}"][:done]), hold_kv=True), 0.0)
    emitted = prefill.run()
    for held in prefill.held:
        decided = decision_tokens(len(held.prompt), held.computed)
        seq = decode.request(
            int(held.id[1:]), tuple(held.output), computed=decided, kept_slabs=held.kept_slabs
        )
        seq.slabs = decode.holdings.allocate(seq.key, len(held.slabs))
        ring = held.keep.boundary_chunks
        for place, (source, target) in enumerate(zip(held.slabs, seq.slabs, strict=True)):
            if place != ring:
                decode.pool.slab_bytes(target)[:] = prefill.pool.slab_bytes(source)
        decode.engine.adopt(seq, 0.0)
        prefill.holdings.release(held.key)
    assert answers(emitted + decode.run()) == {name: tokens[done:] for name, tokens in alone.items()}
    assert prefill.holdings.used == decode.holdings.used == 0


@pytest.mark.parametrize("parks", [True, False], ids=["park", "recompute"])
def test_preempted_requests_go_on_where_they_were(alone: Answers, parks: bool) -> None:
    worker = EvictingEngine(codec=CODEC, swap=60)
    worker.engine.copy_rate = FixedRate(1e15 if parks else 1e-15)
    for number in ALL:
        worker.engine.add(worker.request(number), 0.0)
    emitted, engine = list[SequenceOutput](), worker.engine
    for step in itertools.count():
        emitted += worker.step()
        if not len(engine.scheduler):
            break
        if step in (40, 100):
            for key in list(engine.scheduler.running):
                engine._preempt_sequence(key, lambda: 0.0)
    assert answers(emitted) == alone
    assert engine.stats.preemptions == {"park" if parks else "recompute": 2 * len(REQUESTS)}


def test_a_small_pool_changes_no_token(alone: Answers) -> None:
    worker = EvictingEngine(codec=CODEC, num_slabs=10)
    worker.engine.scheduler.ratio = NewTokenRatio(0.0, 0.0, 0.0, 0.0)  # admits whatever fits now
    assert answers(worker.run(ALL)) == alone
    assert worker.holdings.used == 0


def test_slabs_go_back_to_the_pool() -> None:
    worker = EvictingEngine(codec=CODEC, max_num_batched_tokens=MODEL_LEN)
    worker.engine.add(seq := worker.request(3), 0.0)
    worker.step()
    assert worker.holdings.used == len(seq.slabs) == 1 + 1 + len(seq.bag_slabs)
    assert len(seq.slabs) <= worker.layout.num_chunks(331)
    # Bytes of codes, the table, outliers and the map are not more than the share of rows that are kept.
    kept = seq.eviction.kept_rows / seq.eviction.all_rows
    assert len(seq.bag_slabs) <= kept * 266 / 64 + 2
