"""What is found among many pairs at once is what looking at each pair by itself finds."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import WorkerStats
from router.routing.credits import (
    MAX_CREDIT_TOKENS,
    MAX_CREDIT_TOKENS_UNDERSERVED,
    pairs_with_credit,
    prefill_room_tokens,
)
from router.routing.load_ledger import LoadLedger, WorkerLoad
from router.routing.pairs import Pair, PairList
from router.routing.policy import (
    RankedPair,
    RoutingNeed,
    RoutingView,
    choose_pair,
    find_pairs,
    transfer_s,
    worker_waits,
)
from router.routing.prefix_index import PrefixIndex
from tests.unit.router.fleet_views import fleet_of

SEEDS = st.integers(0, 1 << 32)
SLABS = 64


def random_view(draw: random.Random) -> RoutingView:
    """A fleet of up to five workers of each role, with some of the links, and whatever load and prefixes."""
    sources = [f"prefill-{number}" for number in range(draw.randint(1, 5))]
    targets = [f"decode-{number}" for number in range(draw.randint(1, 5))]
    links = {
        (source, target): draw.choice([0.01, 10.0, 10.0])
        for source in sources
        for target in targets
        if draw.random() < 0.8
    }
    fleet, ledger, index = fleet_of(*sources, *targets, links=links), LoadLedger(), PrefixIndex()
    for number, name in enumerate([*sources, *targets]):
        steps = draw.choice([0, 1, 50])
        fleet.workers[name].stats = WorkerStats(
            steps=steps, step_seconds=0.02 * steps * draw.random(), step_tokens=100 * steps
        )
        for request in range(draw.randint(0, 3)):
            load = WorkerLoad(
                draw.choice([0, 300]),
                1,
                draw.choice([0, 300, 2000, SLABS * CHUNK_TOKENS]),
                draw.choice([0, MAX_CREDIT_TOKENS // 2, MAX_CREDIT_TOKENS]),
            )
            ledger.book_shares(f"{number}/{request}", {name: load}, draw.choice([0, 1]))
        index.record_sent(name, CHUNKS[: draw.randint(0, len(CHUNKS))], SLABS)
    local = draw.random() < 0.5
    return RoutingView(fleet, ledger, True, index, allow_local_prefill=local, auto_local_prefill=local)


CHUNKS = PrefixIndex().name_chunks(list(range(30 * CHUNK_TOKENS)), "")


def random_need(draw: random.Random) -> RoutingNeed:
    prompt = draw.randint(1, 32 * CHUNK_TOKENS)
    return RoutingNeed(
        prompt,
        prompt + draw.choice([10, 2000]),
        chunks=CHUNKS[: prompt // CHUNK_TOKENS],
        priority=draw.choice([0, 1]),
        underserved=draw.random() < 0.5,
    )


def pairs_of(need: RoutingNeed, view: RoutingView) -> PairList:
    found = find_pairs(need, view)
    return found.with_local if view.auto_local_prefill else found


@given(SEEDS)
def test_the_best_pair_is_the_least_of_all(seed: int) -> None:
    draw = random.Random(seed)
    view, need = random_view(draw), random_need(draw)
    pairs = pairs_of(need, view)
    prefill_s, decode_s = worker_waits(need, view, pairs)
    ranked = [
        RankedPair(
            prefill_s[source or target]
            + (transfer_s(source, target, need, view) if source else 0.0)
            + decode_s[target],
            source or "",
            target,
        )
        for source, target in pairs
    ]
    shuffled = draw.sample(pairs, len(pairs))
    assert choose_pair(need, view, pairs) == choose_pair(need, view, shuffled) == min(ranked, default=None)


def has_credit(pair: Pair, need: RoutingNeed, view: RoutingView) -> bool:
    """The rule for one pair, step by step."""
    (source, target), capacity = pair, SLABS * CHUNK_TOKENS
    first = source or target
    most = MAX_CREDIT_TOKENS_UNDERSERVED if need.underserved else MAX_CREDIT_TOKENS
    if view.ledger.load_of(first).credit_tokens >= most:
        return False
    prompt_tokens = prefill_room_tokens(need)
    if source is not None:
        load = view.ledger.load_of(source)
        if load.running and load.room_tokens + prompt_tokens > capacity:
            return False
    load = view.ledger.load_up_to(target, need.priority)
    room_tokens = need.room_tokens if source is not None else max(need.room_tokens, prompt_tokens)
    return not load.running or load.room_tokens + room_tokens - view.shared_tokens(target, need) <= capacity


@given(SEEDS)
def test_credit_is_that_of_each_pair(seed: int) -> None:
    draw = random.Random(seed)
    view, need = random_view(draw), random_need(draw)
    pairs = pairs_of(need, view)
    assert pairs_with_credit(pairs, need, view) == [pair for pair in pairs if has_credit(pair, need, view)]


@given(SEEDS)
def test_pairs_know_their_workers(seed: int) -> None:
    draw = random.Random(seed)
    names = [f"w{number}" for number in range(6)]
    pairs = PairList((draw.choice([None, *names]), draw.choice(names)) for _ in range(draw.randint(0, 12)))
    lost = set(draw.sample(names, draw.randint(0, 3)))
    assert pairs.workers == {name for pair in pairs for name in pair if name is not None}
    assert pairs.without(lost) == [pair for pair in pairs if not lost & {*pair}]
    assert pairs.without(set()) is pairs
