"""The loop over pools with a codec: hit or miss, in pieces, handed over, dropped or parked, the tokens are the same.

Everything is compared with a request that is prefilled at once and decoded alone. Pages travel as the bytes they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diptych.chunks import CHUNK_TOKENS
from engine.scheduling.new_token_ratio import NewTokenRatio
from tests.engine.coded_engine import ALL, LENGTHS, MODEL_LEN, SAME, Answers, CodedEngine, answers, check_same
from tests.unit.engine.fakes import FixedRate

CODECS = ("nuq4-1%", "tq4", "int8")


@pytest.fixture(scope="module", params=CODECS)
def alone(request: pytest.FixtureRequest) -> Iterator[tuple[str, Answers]]:
    """The codec, and every request by itself, prompts whole."""
    worker = CodedEngine(request.param, max_num_batched_tokens=MODEL_LEN, chunked_prefill=False)
    found: Answers = {}
    for number in ALL:
        found |= answers(worker.run(range(number, number + 1)))
    assert worker.holdings.used == 0
    yield request.param, found


def test_codes_are_not_lossless(alone: tuple[str, Answers]) -> None:
    """What the others compare is lossy: the log-probabilities are not those of raw KV."""
    raw, (_, coded) = CodedEngine("raw"), alone
    scores = answers(raw.run(ALL))["r7"][1]
    assert scores != pytest.approx(coded["r7"][1], abs=SAME)


def test_in_pieces_beside_others_and_from_the_cache(alone: tuple[str, Answers]) -> None:
    codec, expected = alone
    worker = CodedEngine(codec)
    check_same(answers(worker.run(ALL)), expected)
    steps = worker.engine.stats.step_tokens
    check_same(answers(worker.run(ALL)), expected)
    cached = sum((length - 1) // CHUNK_TOKENS * CHUNK_TOKENS for length in LENGTHS)
    assert worker.engine.stats.prefix_hits == cached and worker.engine.stats.step_tokens == 2 * steps - cached
    assert worker.holdings.used == 0
    worker.holdings.check_books()


@pytest.mark.parametrize("defer", [False, True], ids=["", "the decode worker draws the first token"])
def test_prefilled_here_and_decoded_there(alone: tuple[str, Answers], defer: bool) -> None:
    """The pages' bytes are all that moves."""
    codec, expected = alone
    prefill, decode = CodedEngine(codec), CodedEngine(codec)
    emitted = prefill.run(ALL, hold=True, defer=defer)
    for held in prefill.held:
        seq = decode.request(int(held.id[1:]), tuple(held.output))
        seq.computed = held.computed - defer
        seq.slabs = decode.holdings.allocate(seq.key, -(-seq.total // CHUNK_TOKENS))
        for source, target in zip(held.slabs, seq.slabs, strict=False):
            decode.pool.slab_bytes(target)[:] = prefill.pool.slab_bytes(source)
        decode.engine.adopt(seq, 0.0)
        prefill.holdings.release(held.key)
    check_same(answers(emitted + decode.run()), expected)
    assert prefill.holdings.used == decode.holdings.used == 0


def test_an_answer_that_goes_on_elsewhere(alone: tuple[str, Answers]) -> None:
    """Its worker died: the prompt and the tokens so far are prefilled by another one."""
    codec, expected = alone
    worker, done = CodedEngine(codec), 3
    for number in ALL:
        worker.engine.add(worker.request(number, tuple(expected[f"r{number}"][0][:done])), 0.0)
    found = answers(worker.run())
    rest = {name: (tokens[done:], scores[done:]) for name, (tokens, scores) in expected.items()}
    check_same(found, rest)


@pytest.mark.parametrize("parks", [True, False], ids=["park", "recompute"])
def test_preempted_requests_go_on_where_they_were(alone: tuple[str, Answers], parks: bool) -> None:
    codec, expected = alone
    worker = CodedEngine(codec, num_slabs=6, swap=40)
    worker.engine.scheduler.ratio = NewTokenRatio(0.0, 0.0, 0.0, 0.0)  # admits whatever fits now
    worker.engine.copy_rate = FixedRate(1e15 if parks else 1e-15)
    check_same(answers(worker.run(ALL)), expected)
    ways = worker.engine.stats.preemptions
    assert ways.get("park" if parks else "recompute", 0) >= 1 and len(ways) == 1
    assert worker.holdings.used == 0 and len(worker.engine.host or ()) == 0
