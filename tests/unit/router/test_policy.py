"""Which pair a request goes to."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import Heartbeat, WorkerStats
from router.effects import ChosenPair
from router.routing.answer_lengths import INITIAL_ANSWER_TOKENS, AnswerLengths
from router.routing.credits import pairs_with_credit
from router.routing.load_ledger import IDLE_LOAD, LoadLedger, WorkerLoad
from router.routing.policy import (
    RoutingNeed,
    RoutingView,
    choose_decode,
    find_pairs,
)
from router.routing.policy import choose_pair as best
from router.routing.prefix_index import PrefixIndex
from router.workers.fleet import Fleet
from tests.unit.router.fleet_views import fleet_of, view

NEED = RoutingNeed(prompt_tokens=100, room_tokens=200)


def choose(need: RoutingNeed, view: RoutingView, avoid: str | None = None) -> ChosenPair | None:
    """The best of all ways."""
    found = best(need, view, [way for way in find_pairs(need, view) if not avoid or avoid not in way])
    return None if found is None else found.pair


FOUR = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def test_ties_are_broken_by_name() -> None:
    assert choose(NEED, view(fleet_of(*reversed(FOUR)))) == ChosenPair("prefill-0", "decode-0")


def test_a_queue_is_avoided_on_either_side() -> None:
    busy = view(
        fleet_of(*FOUR), prefill_0=WorkerLoad(queued_tokens=50, running=1), decode_0=WorkerLoad(running=1)
    )
    assert choose(NEED, busy) == ChosenPair("prefill-1", "decode-1")


def test_only_linked_pairs_are_chosen() -> None:
    fleet = fleet_of(*FOUR, links={("prefill-0", "decode-1"): 10.0, ("prefill-1", "decode-0"): 10.0})
    heavy = view(fleet, decode_1=WorkerLoad(running=5), prefill_0=WorkerLoad(queued_tokens=10))
    assert choose(NEED, heavy) == ChosenPair("prefill-1", "decode-0")
    assert choose(NEED, view(fleet_of(*FOUR, links={}))) is None


def test_a_slow_link_is_worth_a_longer_queue() -> None:
    need = RoutingNeed(prompt_tokens=1900, room_tokens=2000)
    links = {("prefill-0", "decode-0"): 0.01, ("prefill-0", "decode-1"): 10.0}
    fleet = fleet_of("prefill-0", "decode-0", "decode-1", links=links)
    assert choose(need, view(fleet, decode_1=WorkerLoad(running=3))) == ChosenPair("prefill-0", "decode-1")


def test_room_counts() -> None:
    full = view(
        fleet_of(*FOUR), decode_0=WorkerLoad(running=1, room_tokens=64 * 64), decode_1=WorkerLoad(running=4)
    )
    assert choose(NEED, full) == ChosenPair("prefill-0", "decode-1")


def test_a_measured_speed_counts_within_reason() -> None:
    fleet = fleet_of("prefill-0", "prefill-1", "decode-0")
    for name, tokens in (("prefill-0", 1_000), ("prefill-1", 1_000_000)):
        fleet.on_message(
            name, Heartbeat(name, f"{name}/1", WorkerStats(step_tokens=tokens, step_seconds=1.0)), 0.0
        )
    assert choose(NEED, view(fleet)) == ChosenPair("prefill-1", "decode-0")
    queue = view(fleet, prefill_1=WorkerLoad(queued_tokens=900, running=1))
    assert choose(NEED, queue) == ChosenPair("prefill-0", "decode-0"), (
        "looking a thousand times faster is not trusted"
    )


def test_fingerprint_drain_and_avoid_exclude() -> None:
    fleet = fleet_of(*FOUR)
    assert choose(NEED, view(fleet), avoid="prefill-0") == ChosenPair("prefill-1", "decode-0")
    fleet.workers["decode-0"].draining = True
    assert choose(NEED, view(fleet)) == ChosenPair("prefill-0", "decode-1")
    other = msgspec.structs.replace(fleet.workers["prefill-0"].hello, fingerprint="g")
    fleet.workers["prefill-0"].hello = other
    assert choose(RoutingNeed(1, 2, "f"), view(fleet)) == ChosenPair("prefill-1", "decode-1")


def test_colocated_has_no_prefill_worker() -> None:
    fleet = fleet_of("decode-0", "decode-1")
    assert choose(NEED, view(fleet, split=False, decode_0=WorkerLoad(5, 1, 5))) == ChosenPair(
        None, "decode-1"
    )
    assert choose(NEED, view(fleet_of(), split=False)) is None


def test_steps_that_took_no_time_are_no_ground_for_a_choice() -> None:
    fleet = fleet_of("decode-0", "decode-1")
    for name in ("decode-0", "decode-1"):
        fleet.workers[name].stats = WorkerStats(steps=5, step_seconds=0.0, step_tokens=100)
    assert choose(NEED, view(fleet, split=False)) == ChosenPair(None, "decode-0")


def test_who_reads_most_beside_its_answers_is_not_taken_for_the_fastest() -> None:
    """Of two that are equally fast, the one that read more has fewer seconds per token, and longer steps."""
    fleet = fleet_of("decode-0", "decode-1")
    fleet.workers["decode-0"].stats = WorkerStats(steps=9756, step_seconds=209.6, step_tokens=66_473)
    fleet.workers["decode-1"].stats = WorkerStats(steps=6202, step_seconds=229.9, step_tokens=521_973)
    loads = {"decode_0": WorkerLoad(0, 5, 1000), "decode_1": WorkerLoad(0, 5, 1000)}
    assert choose(NEED, view(fleet, split=False, **loads)) == ChosenPair(None, "decode-0")


def test_rebinding_keeps_the_prefill_worker() -> None:
    fleet = fleet_of(*FOUR, links={("prefill-0", "decode-0"): 10.0, ("prefill-1", "decode-1"): 10.0})
    busy = view(fleet, decode_0=WorkerLoad(running=9))
    assert choose_decode("prefill-0", NEED, busy) == "decode-0"
    assert choose_decode("prefill-9", NEED, busy) is None


def test_even_load_ends_evenly() -> None:
    seen = view(fleet_of(*FOUR))
    for index in range(40):
        choice = choose(NEED, seen)
        assert choice is not None and choice.prefill is not None
        seen.ledger.book_shares(
            f"r{index}", {choice.prefill: WorkerLoad(100, 1, 0), choice.decode: WorkerLoad(0, 1, 200)}
        )
    assert [seen.ledger.load_of(name).running for name in FOUR] == [20] * 4


# ---- prefixes


def large(fleet: Fleet) -> Fleet:
    """The same workers with pools that are never full."""
    for member in fleet.workers.values():
        member.hello = msgspec.structs.replace(member.hello, num_slabs=1 << 20)
    return fleet


def asking(index: PrefixIndex, group: int, chunks: int = 16, own_tokens: int = 40) -> RoutingNeed:
    """A prompt that begins with the `chunks` chunks of its group."""
    tokens = chunks * CHUNK_TOKENS
    names = index.name_chunks([group * 1000 + i for i in range(tokens)], "s")
    return RoutingNeed(tokens + own_tokens, tokens + own_tokens + 100, None, names)


def with_prefix(need: RoutingNeed, index: PrefixIndex, *workers: str, **loads: WorkerLoad) -> RoutingView:
    base = view(large(fleet_of(*FOUR)), True, **loads)
    for worker in workers:
        index.record_sent(worker, need.chunks, 1 << 20)
    return RoutingView(base.fleet, base.ledger, True, index)


def test_a_prefix_is_sought_on_both_sides() -> None:
    index = PrefixIndex()
    need = asking(index, 1)
    assert choose(need, with_prefix(need, index, "prefill-1", "decode-1")) == ChosenPair(
        "prefill-1", "decode-1"
    )
    assert choose_decode("prefill-0", need, with_prefix(need, index, "decode-1")) == "decode-1"
    other = asking(index, 2)
    assert choose(other, with_prefix(need, index, "prefill-1", "decode-1")) == ChosenPair(
        "prefill-0", "decode-0"
    )


def test_a_prefix_is_left_when_its_reader_has_too_much_to_do() -> None:
    index = PrefixIndex()
    need = asking(index, 1)
    saved = 2 * 16 * CHUNK_TOKENS  # twice what is shared
    queues = {part: WorkerLoad(queued_tokens=saved + part, running=1) for part in (-1, 1)}
    near, far = (with_prefix(need, PrefixIndex(), prefill_1=queues[part]) for part in (-1, 1))
    for seen in (near, far):
        seen.index.record_sent("prefill-1", need.chunks, 1 << 20)
    assert choose(need, near) == ChosenPair("prefill-1", "decode-0")
    assert choose(need, far) == ChosenPair("prefill-0", "decode-0")


def test_a_prefix_is_left_when_its_writer_is_too_busy() -> None:
    index = PrefixIndex()
    need = asking(index, 1, own_tokens=1)
    for running, target in ((2, "decode-1"), (4, "decode-0")):
        seen = with_prefix(need, index, "decode-1", decode_1=WorkerLoad(running=running))
        assert choose_decode("prefill-0", need, seen) == target
    both = {"decode_0": WorkerLoad(running=40), "decode_1": WorkerLoad(running=51)}
    assert choose_decode("prefill-0", need, with_prefix(need, index, "decode-1", **both)) == "decode-1"
    both["decode_1"] = WorkerLoad(running=54)
    assert choose_decode("prefill-0", need, with_prefix(need, index, "decode-1", **both)) == "decode-0"


def test_a_short_common_beginning_is_a_weak_reason() -> None:
    index = PrefixIndex()
    need = asking(index, 1, chunks=1, own_tokens=1000)
    seen = with_prefix(need, index, "decode-1", decode_1=WorkerLoad(running=1))
    assert choose_decode("prefill-0", need, seen) == "decode-0"


def test_colocated_workers_are_chosen_by_their_prefix_too() -> None:
    index = PrefixIndex()
    need, fleet = asking(index, 1), large(fleet_of("decode-0", "decode-1"))
    index.record_sent("decode-1", need.chunks, 1 << 20)
    assert choose(need, RoutingView(fleet, LoadLedger(), False, index)) == ChosenPair(None, "decode-1")


def beating(*workers: str, step_s: dict[str, float]) -> Fleet:
    """Workers that do both, each with steps that took so long."""
    fleet = large(fleet_of(*workers))
    for worker in workers:
        stats = WorkerStats(steps=100, step_seconds=100 * step_s[worker], step_tokens=1000)
        fleet.on_message(worker, Heartbeat(worker, f"{worker}/1", stats), 0.0)
    return fleet


def test_a_prompt_is_read_where_nobody_writes_though_that_worker_was_slower() -> None:
    fleet = beating("decode-0", "decode-1", step_s={"decode-0": 0.010, "decode-1": 0.012})
    need = RoutingNeed(prompt_tokens=400, room_tokens=500)

    def chosen(first: WorkerLoad, second: WorkerLoad) -> str:
        found = choose(need, view(fleet, split=False, decode_0=first, decode_1=second))
        assert found is not None and found.prefill is None
        return found.decode

    assert chosen(IDLE_LOAD, IDLE_LOAD) == "decode-0", "the faster one"
    assert chosen(WorkerLoad(running=1), IDLE_LOAD) == "decode-1"
    assert chosen(WorkerLoad(running=1), WorkerLoad(running=1)) == "decode-0"
    assert chosen(WorkerLoad(running=1), WorkerLoad(queued_tokens=400)) == "decode-0", (
        "it would have to wait there"
    )
    slow = beating("decode-0", "decode-1", step_s={"decode-0": 0.010, "decode-1": 0.030})
    found = choose(need, view(slow, split=False, decode_0=WorkerLoad(running=1)))
    assert found == ChosenPair(None, "decode-0"), "so slow that reading there takes longer than both"


def test_a_prefix_outweighs_answers_that_wait_for_the_rest() -> None:
    index = PrefixIndex()
    need, fleet = asking(index, 1), large(fleet_of("decode-0", "decode-1"))
    index.record_sent("decode-1", need.chunks, 1 << 20)
    ledger = LoadLedger()
    for number in range(2):
        ledger.book_shares(f"r{number}", {"decode-1": WorkerLoad(running=1)})
    assert choose(need, RoutingView(fleet, ledger, False, index)) == ChosenPair(None, "decode-1")


def test_what_is_shared_needs_no_room() -> None:
    index = PrefixIndex()
    need = asking(index, 1)
    fleet = fleet_of(*FOUR)  # pools of 64 slabs
    seen = RoutingView(fleet, LoadLedger(), True, index)
    for name in ("decode-0", "decode-1"):
        seen.ledger.book_shares(f"on {name}", {name: WorkerLoad(0, 3, 60 * CHUNK_TOKENS)})
    index.record_sent("decode-1", need.chunks[:14], 64)
    assert choose_decode("prefill-0", need, seen) == "decode-1"


def play(seed: int, groups: int, arrivals: int = 120) -> tuple[RoutingView, set[tuple[int, str]]]:
    """Requests of some prefixes come and go, as the relay books them; no choice may break the bounds of the rule."""
    draw, index = random.Random(seed), PrefixIndex()
    seen = RoutingView(large(fleet_of(*FOUR)), LoadLedger(), True, index)
    places: set[tuple[int, str]] = set()
    for number in range(arrivals):
        group = draw.randrange(groups)
        need = asking(index, group)
        choice = choose(need, seen)
        assert choice is not None and choice.prefill is not None
        running = [seen.ledger.load_of(name).running for name in ("decode-0", "decode-1")]
        queued = [seen.ledger.load_of(name).queued_tokens for name in ("prefill-0", "prefill-1")]
        assert seen.ledger.load_of(choice.decode).running <= 1.25 * min(running) + 3
        assert seen.ledger.load_of(choice.prefill).queued_tokens <= min(queued) + 2 * need.prompt_tokens
        unprefilled = need.prompt_tokens - seen.shared_tokens(choice.prefill, need)
        for worker in (choice.prefill, choice.decode):
            index.record_sent(worker, need.chunks, 1 << 20)
        seen.ledger.book_shares(
            f"r{number}",
            {choice.prefill: WorkerLoad(unprefilled, 1, 0), choice.decode: WorkerLoad(0, 1, 200)},
        )
        places.add((group, choice.decode))
        if draw.random() < 0.4:
            seen.ledger.book_shares(f"r{draw.randrange(number + 1)}", {})
    return seen, places


@given(st.integers(0, 1 << 32), st.integers(1, 12))
def test_no_worker_becomes_a_hot_spot(seed: int, groups: int) -> None:
    play(seed, groups)


def test_one_prefix_for_all_is_decoded_everywhere() -> None:
    seen, _ = play(0, groups=1)
    running = [seen.ledger.load_of(name).running for name in ("decode-0", "decode-1")]
    assert min(running) > 0 and max(running) <= 1.25 * min(running) + 3


def test_prefixes_rarely_move() -> None:
    """Eight prefixes on two decode workers: by load alone nearly every request would be a coin's toss."""
    index, ledger = PrefixIndex(), LoadLedger()
    seen, moves, last = RoutingView(large(fleet_of(*FOUR)), ledger, True, index), 0, dict[int, str]()
    for number in range(160):
        need = asking(index, group := random.Random(number).randrange(8))
        target = choose_decode("prefill-0", need, seen)
        assert target is not None
        moves += last.get(group, target) != target
        last[group] = target
        index.record_sent(target, need.chunks, 1 << 20)
        ledger.book_shares(f"r{number}", {target: WorkerLoad(0, 1, 200)})
        ledger.book_shares(f"r{number - 24}", {})
    assert moves <= 160 / 4


def test_answers_are_expected_to_be_as_long_as_they_were() -> None:
    answers = AnswerLengths()
    assert answers.expected_tokens(10_000) == INITIAL_ANSWER_TOKENS and answers.expected_tokens(7) == 7
    for _ in range(200):
        answers.record_length(20)
    assert answers.expected_tokens(10_000) == 20
    answers.record_length(10_000)
    assert answers.expected_tokens(10_000) < 600, "one long answer says little"


@given(st.integers(0, 1 << 32))
def test_the_ledger_is_the_sum_of_its_entries(seed: int) -> None:
    draw, ledger, kept = random.Random(seed), LoadLedger(), dict[str, dict[str, WorkerLoad]]()
    for _ in range(30):
        request = f"r{draw.randrange(5)}"
        shares = {
            f"w{draw.randrange(3)}": WorkerLoad(draw.randrange(9), 1, draw.randrange(9))
            for _ in range(draw.randrange(3))
        }
        ledger.book_shares(request, shares)
        kept[request] = shares
        for worker in ("w0", "w1", "w2"):
            total = IDLE_LOAD
            for shares in kept.values():
                total = total.combined_with(shares.get(worker, IDLE_LOAD))
            assert ledger.load_of(worker) == total
            assert sorted(ledger.requests_at(worker)) == sorted(
                name for name, shares in kept.items() if worker in shares
            )
    assert len(ledger) == sum(bool(shares) for shares in kept.values())


def test_answers_of_a_worse_priority_leave_room_to_better_ones() -> None:
    fleet = fleet_of("prefill-0", "decode-0")
    capacity = fleet.workers["decode-0"].hello.num_slabs * CHUNK_TOKENS
    ledger = LoadLedger()
    ledger.book_shares("worse", {"decode-0": WorkerLoad(0, 1, capacity - 64)}, priority=1)
    ledger.book_shares("better", {"decode-0": WorkerLoad(0, 1, 64)}, priority=-1)
    state, way = RoutingView(fleet, ledger, True), ("prefill-0", "decode-0")
    assert not pairs_with_credit([way], RoutingNeed(100, 128, priority=1), state)
    assert pairs_with_credit([way], RoutingNeed(100, 128, priority=0), state) == [
        way
    ]  # the worse one is preempted there
    assert not pairs_with_credit(
        [way], RoutingNeed(100, capacity, priority=0), state
    )  # but not the better one
    ledger.book_shares("better", {})
    assert ledger.load_up_to("decode-0", 0) == IDLE_LOAD and ledger.load_of("decode-0").running == 1


def test_what_prompts_hold_until_they_are_fetched_is_not_taken_back() -> None:
    fleet, ledger = fleet_of("prefill-0", "decode-0"), LoadLedger()
    capacity = fleet.workers["prefill-0"].hello.num_slabs * CHUNK_TOKENS
    ledger.book_shares("worse", {"prefill-0": WorkerLoad(0, 1, capacity)}, priority=1)
    assert not pairs_with_credit(
        [("prefill-0", "decode-0")], RoutingNeed(100, 128, priority=0), RoutingView(fleet, ledger, True)
    )
