"""The loop with heads that drop KV, on the embedded model: slabs go back to the pool, and tokens are those of requests
that ran alone, whether they hit the cache or not, in pieces, preempted, parked or handed over.
"""

from __future__ import annotations

import itertools

import pytest

from diptych.eviction_spec import KEEP_ALL, decision_tokens
from engine.outputs import SequenceOutput
from engine.scheduling.new_token_ratio import NewTokenRatio
from tests.engine.evicting_engine import ALL, MODEL_LEN, REQUESTS, Answers, EvictingEngine, answers
from tests.unit.engine.fakes import FixedRate


@pytest.fixture(scope="module")
def alone() -> Answers:
    """Every request by itself, prompts whole."""
    worker = EvictingEngine(max_num_batched_tokens=MODEL_LEN, chunked_prefill=False)
    found: Answers = {}
    for number in ALL:
        worker.holdings.evict_cached()
        found |= answers(worker.run(range(number, number + 1)))
    assert worker.holdings.used == 0
    return found


def test_eviction_is_not_lossless(alone: Answers) -> None:
    """What the others compare differs from answers that keep everything."""
    whole = answers(EvictingEngine().run(ALL, keep=KEEP_ALL))
    assert whole.keys() == alone.keys() and whole != alone


def test_in_pieces_beside_others_and_from_the_cache(alone: Answers) -> None:
    worker = EvictingEngine()
    assert answers(worker.run(ALL)) == alone
    again = answers(worker.run(ALL))
    assert again == alone and [seq.cached for seq in worker.seen[4:]] == [0, 64, 128, 256]
    assert worker.holdings.used == 0


def test_an_answer_that_goes_on_elsewhere(alone: Answers) -> None:
    """The prompt and the delivered tokens are read by another worker, in blocks that end at decision points."""
    worker = EvictingEngine()
    for number, done in zip(ALL, (1, 63, 64, 100), strict=True):
        worker.engine.add(worker.request(number, tuple(alone[f"r{number}"][:done])), 0.0)
    found = answers(worker.run())
    assert found == {name: alone[name][done:] for name, done in zip(alone, (1, 63, 64, 100), strict=True)}


@pytest.mark.parametrize("done", [0, 70])
def test_prefilled_here_and_decoded_there(alone: Answers, done: int) -> None:
    """Whole chunks before the boundary and the bag move; tokens since the last decision are read again."""
    prefill, decode = EvictingEngine(), EvictingEngine()
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
    """Each is preempted in the middle of blocks, before and after its first decision in the answer."""
    worker = EvictingEngine(swap=60)
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
    assert worker.holdings.used == 0 and len(engine.host or ()) == 0


def test_a_small_pool_changes_no_token(alone: Answers) -> None:
    """Slabs for a bag, or for a prompt, are missing: others give up theirs."""
    worker = EvictingEngine(num_slabs=11)
    worker.engine.scheduler.ratio = NewTokenRatio(0.0, 0.0, 0.0, 0.0)  # admits whatever fits now
    assert answers(worker.run(ALL)) == alone
    assert worker.engine.stats.preemptions and worker.holdings.used == 0


def test_slabs_go_back_to_the_pool() -> None:
    """After its prompt, a sequence holds whole chunks, one ring, and a bag that is smaller than what it replaces."""
    worker = EvictingEngine(max_num_batched_tokens=MODEL_LEN)
    worker.engine.add(seq := worker.request(3), 0.0)
    worker.step()
    held = worker.holdings.used
    assert held == len(seq.slabs) == 1 + 1 + len(seq.bag_slabs) and held <= worker.layout.num_chunks(331)
    worker.engine.abort(seq.id, 1)
    assert worker.holdings.used == 0
