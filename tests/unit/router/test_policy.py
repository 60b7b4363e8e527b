"""Which pair a request goes to."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from diptych.messages import Beat, Linked, Stats
from router.effects import Choice
from router.fleet import Fleet
from router.policy import (
    FIRST_ANSWER_TOKENS,
    IDLE,
    Answers,
    Ledger,
    Load,
    Need,
    View,
    rebind,
    ways,
)
from router.policy import choose as best
from router.prefix_index import CHUNK_TOKENS, PrefixIndex
from tests.unit.router.world import hello

NEED = Need(prompt_tokens=100, room_tokens=200)


def fleet_of(*workers: str, links: dict[tuple[str, str], float] | None = None) -> Fleet:
    """Workers, and gb_per_s by (prefill, decode); all linked at 10 GB/s if no links are named."""
    fleet = Fleet()
    for worker in workers:
        fleet.hear(worker, hello(worker), 0.0)
    everywhere = {(p, d): 10.0 for p in workers for d in workers if p.startswith("p") and d.startswith("d")}
    for (source, target), gb_per_s in (everywhere if links is None else links).items():
        fleet.hear(target, Linked(source, f"{source}/1", "shm", gb_per_s, 5.0), 0.0)
    return fleet


def view(fleet: Fleet, split: bool = True, **loads: Load) -> View:
    ledger = Ledger()
    for name, load in loads.items():
        ledger.book(f"on {name}", {name.replace("_", "-"): load})
    return View(fleet, ledger, split)


def choose(need: Need, view: View, avoid: str | None = None) -> Choice | None:
    """The best of all ways."""
    return best(need, view, [way for way in ways(need, view) if not avoid or avoid not in way])


FOUR = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def test_ties_are_broken_by_name() -> None:
    assert choose(NEED, view(fleet_of(*reversed(FOUR)))) == Choice("prefill-0", "decode-0")


def test_a_queue_is_avoided_on_either_side() -> None:
    busy = view(fleet_of(*FOUR), prefill_0=Load(queued_tokens=50, running=1), decode_0=Load(running=1))
    assert choose(NEED, busy) == Choice("prefill-1", "decode-1")


def test_only_linked_pairs_are_chosen() -> None:
    fleet = fleet_of(*FOUR, links={("prefill-0", "decode-1"): 10.0, ("prefill-1", "decode-0"): 10.0})
    heavy = view(fleet, decode_1=Load(running=5), prefill_0=Load(queued_tokens=10))
    assert choose(NEED, heavy) == Choice("prefill-1", "decode-0")
    assert choose(NEED, view(fleet_of(*FOUR, links={}))) is None


def test_a_slow_link_is_worth_a_longer_queue() -> None:
    need = Need(prompt_tokens=1900, room_tokens=2000)
    links = {("prefill-0", "decode-0"): 0.01, ("prefill-0", "decode-1"): 10.0}
    fleet = fleet_of("prefill-0", "decode-0", "decode-1", links=links)
    assert choose(need, view(fleet, decode_1=Load(running=3))) == Choice("prefill-0", "decode-1")


def test_room_counts() -> None:
    full = view(fleet_of(*FOUR), decode_0=Load(running=1, room_tokens=64 * 64), decode_1=Load(running=4))
    assert choose(NEED, full) == Choice("prefill-0", "decode-1")


def test_a_measured_speed_counts_within_reason() -> None:
    fleet = fleet_of("prefill-0", "prefill-1", "decode-0")
    for name, tokens in (("prefill-0", 1_000), ("prefill-1", 1_000_000)):
        fleet.hear(name, Beat(name, f"{name}/1", Stats(step_tokens=tokens, step_seconds=1.0)), 0.0)
    assert choose(NEED, view(fleet)) == Choice("prefill-1", "decode-0")
    queue = view(fleet, prefill_1=Load(queued_tokens=900, running=1))
    assert choose(NEED, queue) == Choice("prefill-0", "decode-0"), (
        "looking a thousand times faster is not trusted"
    )


def test_fingerprint_drain_and_avoid_exclude() -> None:
    fleet = fleet_of(*FOUR)
    assert choose(NEED, view(fleet), avoid="prefill-0") == Choice("prefill-1", "decode-0")
    fleet.members["decode-0"].draining = True
    assert choose(NEED, view(fleet)) == Choice("prefill-0", "decode-1")
    other = msgspec.structs.replace(fleet.members["prefill-0"].hello, fingerprint="g")
    fleet.members["prefill-0"].hello = other
    assert choose(Need(1, 2, "f"), view(fleet)) == Choice("prefill-1", "decode-1")


def test_colocated_has_no_prefill_worker() -> None:
    fleet = fleet_of("decode-0", "decode-1")
    assert choose(NEED, view(fleet, split=False, decode_0=Load(5, 1, 5))) == Choice(None, "decode-1")
    assert choose(NEED, view(fleet_of(), split=False)) is None


def test_steps_that_took_no_time_are_no_ground_for_a_choice() -> None:
    fleet = fleet_of("decode-0", "decode-1")
    for name in ("decode-0", "decode-1"):
        fleet.members[name].stats = Stats(steps=5, step_seconds=0.0, step_tokens=100)
    assert choose(NEED, view(fleet, split=False)) == Choice(None, "decode-0")


def test_who_reads_most_beside_its_answers_is_not_taken_for_the_fastest() -> None:
    """Of two that are equally fast, the one that read more has fewer seconds per token, and longer steps."""
    fleet = fleet_of("decode-0", "decode-1")
    fleet.members["decode-0"].stats = Stats(steps=9756, step_seconds=209.6, step_tokens=66_473)
    fleet.members["decode-1"].stats = Stats(steps=6202, step_seconds=229.9, step_tokens=521_973)
    loads = {"decode_0": Load(0, 5, 1000), "decode_1": Load(0, 5, 1000)}
    assert choose(NEED, view(fleet, split=False, **loads)) == Choice(None, "decode-0")


def test_rebinding_keeps_the_prefill_worker() -> None:
    fleet = fleet_of(*FOUR, links={("prefill-0", "decode-0"): 10.0, ("prefill-1", "decode-1"): 10.0})
    busy = view(fleet, decode_0=Load(running=9))
    assert rebind("prefill-0", NEED, busy) == "decode-0"
    assert rebind("prefill-9", NEED, busy) is None


def test_even_load_ends_evenly() -> None:
    seen = view(fleet_of(*FOUR))
    for index in range(40):
        choice = choose(NEED, seen)
        assert choice is not None and choice.prefill is not None
        seen.ledger.book(f"r{index}", {choice.prefill: Load(100, 1, 0), choice.decode: Load(0, 1, 200)})
    assert [seen.ledger.load(name).running for name in FOUR] == [20] * 4


# ---- prefixes


def large(fleet: Fleet) -> Fleet:
    """The same workers with pools that are never full."""
    for member in fleet.members.values():
        member.hello = msgspec.structs.replace(member.hello, num_slabs=1 << 20)
    return fleet


def asking(index: PrefixIndex, group: int, chunks: int = 16, own_tokens: int = 40) -> Need:
    """A prompt that begins with the `chunks` chunks of its group."""
    tokens = chunks * CHUNK_TOKENS
    names = index.cut([group * 1000 + i for i in range(tokens)], "s")
    return Need(tokens + own_tokens, tokens + own_tokens + 100, None, names)


def with_prefix(need: Need, index: PrefixIndex, *workers: str, **loads: Load) -> View:
    base = view(large(fleet_of(*FOUR)), True, **loads)
    for worker in workers:
        index.sent(worker, need.chunks, 1 << 20)
    return View(base.fleet, base.ledger, True, index)


def test_a_prefix_is_sought_on_both_sides() -> None:
    index = PrefixIndex()
    need = asking(index, 1)
    assert choose(need, with_prefix(need, index, "prefill-1", "decode-1")) == Choice("prefill-1", "decode-1")
    assert rebind("prefill-0", need, with_prefix(need, index, "decode-1")) == "decode-1"
    other = asking(index, 2)
    assert choose(other, with_prefix(need, index, "prefill-1", "decode-1")) == Choice("prefill-0", "decode-0")


def test_a_prefix_is_left_when_its_reader_has_too_much_to_do() -> None:
    index = PrefixIndex()
    need = asking(index, 1)
    saved = 2 * 16 * CHUNK_TOKENS  # twice what is shared
    queues = {part: Load(queued_tokens=saved + part, running=1) for part in (-1, 1)}
    near, far = (with_prefix(need, PrefixIndex(), prefill_1=queues[part]) for part in (-1, 1))
    for seen in (near, far):
        seen.index.sent("prefill-1", need.chunks, 1 << 20)
    assert choose(need, near) == Choice("prefill-1", "decode-0")
    assert choose(need, far) == Choice("prefill-0", "decode-0")


def test_a_prefix_is_left_when_its_writer_is_too_busy() -> None:
    index = PrefixIndex()
    need = asking(index, 1, own_tokens=1)
    for running, target in ((2, "decode-1"), (4, "decode-0")):
        seen = with_prefix(need, index, "decode-1", decode_1=Load(running=running))
        assert rebind("prefill-0", need, seen) == target
    both = {"decode_0": Load(running=40), "decode_1": Load(running=51)}
    assert rebind("prefill-0", need, with_prefix(need, index, "decode-1", **both)) == "decode-1"
    both["decode_1"] = Load(running=54)
    assert rebind("prefill-0", need, with_prefix(need, index, "decode-1", **both)) == "decode-0"


def test_a_short_common_beginning_is_a_weak_reason() -> None:
    index = PrefixIndex()
    need = asking(index, 1, chunks=1, own_tokens=1000)
    seen = with_prefix(need, index, "decode-1", decode_1=Load(running=1))
    assert rebind("prefill-0", need, seen) == "decode-0"


def test_colocated_workers_are_chosen_by_their_prefix_too() -> None:
    index = PrefixIndex()
    need, fleet = asking(index, 1), large(fleet_of("decode-0", "decode-1"))
    index.sent("decode-1", need.chunks, 1 << 20)
    assert choose(need, View(fleet, Ledger(), False, index)) == Choice(None, "decode-1")


def beating(*workers: str, step_s: dict[str, float]) -> Fleet:
    """Workers that do both, each with steps that took so long."""
    fleet = large(fleet_of(*workers))
    for worker in workers:
        stats = Stats(steps=100, step_seconds=100 * step_s[worker], step_tokens=1000)
        fleet.hear(worker, Beat(worker, f"{worker}/1", stats), 0.0)
    return fleet


def test_a_prompt_is_read_where_nobody_writes_though_that_worker_was_slower() -> None:
    fleet = beating("decode-0", "decode-1", step_s={"decode-0": 0.010, "decode-1": 0.012})
    need = Need(prompt_tokens=400, room_tokens=500)

    def chosen(first: Load, second: Load) -> str:
        found = choose(need, view(fleet, split=False, decode_0=first, decode_1=second))
        assert found is not None and found.prefill is None
        return found.decode

    assert chosen(IDLE, IDLE) == "decode-0", "the faster one"
    assert chosen(Load(running=1), IDLE) == "decode-1"
    assert chosen(Load(running=1), Load(running=1)) == "decode-0"
    assert chosen(Load(running=1), Load(queued_tokens=400)) == "decode-0", "it would have to wait there"
    slow = beating("decode-0", "decode-1", step_s={"decode-0": 0.010, "decode-1": 0.030})
    found = choose(need, view(slow, split=False, decode_0=Load(running=1)))
    assert found == Choice(None, "decode-0"), "so slow that reading there takes longer than both"


def test_a_prefix_outweighs_answers_that_wait_for_the_rest() -> None:
    index = PrefixIndex()
    need, fleet = asking(index, 1), large(fleet_of("decode-0", "decode-1"))
    index.sent("decode-1", need.chunks, 1 << 20)
    ledger = Ledger()
    for number in range(2):
        ledger.book(f"r{number}", {"decode-1": Load(running=1)})
    assert choose(need, View(fleet, ledger, False, index)) == Choice(None, "decode-1")


def test_what_is_shared_needs_no_room() -> None:
    index = PrefixIndex()
    need = asking(index, 1)
    fleet = fleet_of(*FOUR)  # pools of 64 slabs
    seen = View(fleet, Ledger(), True, index)
    for name in ("decode-0", "decode-1"):
        seen.ledger.book(f"on {name}", {name: Load(0, 3, 60 * CHUNK_TOKENS)})
    index.sent("decode-1", need.chunks[:14], 64)
    assert rebind("prefill-0", need, seen) == "decode-1"


def play(seed: int, groups: int, arrivals: int = 120) -> tuple[View, set[tuple[int, str]]]:
    """Requests of some prefixes come and go, as the relay books them; no choice may break the bounds of the rule."""
    draw, index = random.Random(seed), PrefixIndex()
    seen = View(large(fleet_of(*FOUR)), Ledger(), True, index)
    places: set[tuple[int, str]] = set()
    for number in range(arrivals):
        group = draw.randrange(groups)
        need = asking(index, group)
        choice = choose(need, seen)
        assert choice is not None and choice.prefill is not None
        running = [seen.ledger.load(name).running for name in ("decode-0", "decode-1")]
        queued = [seen.ledger.load(name).queued_tokens for name in ("prefill-0", "prefill-1")]
        assert seen.ledger.load(choice.decode).running <= 1.25 * min(running) + 3
        assert seen.ledger.load(choice.prefill).queued_tokens <= min(queued) + 2 * need.prompt_tokens
        unread = need.prompt_tokens - seen.shared(choice.prefill, need)
        for worker in (choice.prefill, choice.decode):
            index.sent(worker, need.chunks, 1 << 20)
        seen.ledger.book(f"r{number}", {choice.prefill: Load(unread, 1, 0), choice.decode: Load(0, 1, 200)})
        places.add((group, choice.decode))
        if draw.random() < 0.4:
            seen.ledger.book(f"r{draw.randrange(number + 1)}", {})
    return seen, places


@given(st.integers(0, 1 << 32), st.integers(1, 12))
def test_no_worker_becomes_a_hot_spot(seed: int, groups: int) -> None:
    play(seed, groups)


def test_one_prefix_for_all_is_decoded_everywhere() -> None:
    seen, _ = play(0, groups=1)
    running = [seen.ledger.load(name).running for name in ("decode-0", "decode-1")]
    assert min(running) > 0 and max(running) <= 1.25 * min(running) + 3


def test_prefixes_rarely_move() -> None:
    """Eight prefixes on two decode workers: by load alone nearly every request would be a coin's toss."""
    index, ledger = PrefixIndex(), Ledger()
    seen, moves, last = View(large(fleet_of(*FOUR)), ledger, True, index), 0, dict[int, str]()
    for number in range(160):
        need = asking(index, group := random.Random(number).randrange(8))
        target = rebind("prefill-0", need, seen)
        assert target is not None
        moves += last.get(group, target) != target
        last[group] = target
        index.sent(target, need.chunks, 1 << 20)
        ledger.book(f"r{number}", {target: Load(0, 1, 200)})
        ledger.book(f"r{number - 24}", {})
    assert moves <= 160 / 4


def test_answers_are_expected_to_be_as_long_as_they_were() -> None:
    answers = Answers()
    assert answers.expect(10_000) == FIRST_ANSWER_TOKENS and answers.expect(7) == 7
    for _ in range(200):
        answers.ended(20)
    assert answers.expect(10_000) == 20
    answers.ended(10_000)
    assert answers.expect(10_000) < 600, "one long answer says little"


@given(st.integers(0, 1 << 32))
def test_the_ledger_is_the_sum_of_its_entries(seed: int) -> None:
    draw, ledger, kept = random.Random(seed), Ledger(), dict[str, dict[str, Load]]()
    for _ in range(30):
        request = f"r{draw.randrange(5)}"
        shares = {
            f"w{draw.randrange(3)}": Load(draw.randrange(9), 1, draw.randrange(9))
            for _ in range(draw.randrange(3))
        }
        ledger.book(request, shares)
        kept[request] = shares
        for worker in ("w0", "w1", "w2"):
            total = IDLE
            for shares in kept.values():
                total = total.plus(shares.get(worker, IDLE))
            assert ledger.load(worker) == total
            assert sorted(ledger.requests(worker)) == sorted(
                name for name, shares in kept.items() if worker in shares
            )
    assert len(ledger) == sum(bool(shares) for shares in kept.values())
