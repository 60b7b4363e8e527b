"""Which pair a request goes to."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from diptych.messages import Beat, Linked, Stats
from router.effects import Choice
from router.fleet import Fleet
from router.policy import IDLE, Ledger, Load, Need, View, choose, rebind
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
