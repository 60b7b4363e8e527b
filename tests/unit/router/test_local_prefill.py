"""A decode worker reads a prompt itself when that is predicted to be better for it and for those who write there."""

from __future__ import annotations

import dataclasses

import pytest

from diptych.messages import Generate, Output, Prefill, Step, WorkerStats
from router.effects import ChosenPair, PrefilledLocally
from router.routing.load_ledger import WorkerLoad
from router.routing.policy import (
    SOONER,
    RoutingNeed,
    RoutingView,
    choose_pair,
    find_pairs,
)
from router.workers.fleet import Fleet
from tests.unit.router.fake_deployment import PAIR, FakeDeployment, linked_deployment, messages_to
from tests.unit.router.fleet_views import fleet_of, view

LONG = RoutingNeed(prompt_tokens=1000, room_tokens=1100)
TOKEN_S, STEP_S = 1e-4, 0.01


def measured() -> Fleet:
    """A pair that has been measured: 0.1 ms for a token that is read, 10 ms for a step of answers."""
    fleet = fleet_of(*PAIR)
    reads = WorkerStats(steps=100, step_seconds=1.0, step_tokens=10_000)
    writes = WorkerStats(steps=1000, step_seconds=1000 * STEP_S, step_tokens=4000)
    for name, stats in (("prefill-0", reads), ("decode-0", writes)):
        fleet.workers[name].stats = stats
    return fleet


def picked(looked: RoutingView, tpot_s: float | None = None, auto: bool = True) -> ChosenPair | None:
    looked = dataclasses.replace(looked, auto_local_prefill=auto, tpot_s=tpot_s)
    found = find_pairs(LONG, looked)
    best = choose_pair(LONG, looked, found.with_local)
    return None if best is None else best.pair


def busy(queued: int, running: int) -> RoutingView:
    """So many tokens wait at the prefill worker, and so many answers are written."""
    return view(
        measured(),
        prefill_0=WorkerLoad(queued_tokens=queued, running=1),
        decode_0=WorkerLoad(running=running),
    )


def test_an_idle_decode_worker_spares_the_hand_off() -> None:
    assert picked(view(measured())) == ChosenPair(None, "decode-0")


@pytest.mark.parametrize("running", [1, 3, 10])
def test_those_who_write_outweigh_a_short_queue_and_not_a_long_one(running: int) -> None:
    assert picked(busy(LONG.prompt_tokens * running - 100, running)) == ChosenPair("prefill-0", "decode-0")
    assert picked(busy(LONG.prompt_tokens * running + 100, running)) == ChosenPair(None, "decode-0")


def test_a_bound_on_steps_leaves_only_a_part_of_them_for_reading() -> None:
    waits = busy(5 * LONG.prompt_tokens, 3)
    assert picked(waits) == ChosenPair(None, "decode-0")
    assert picked(waits, tpot_s=10 * STEP_S) == ChosenPair(None, "decode-0")  # nine tenths are left
    assert picked(waits, tpot_s=2 * STEP_S) == ChosenPair("prefill-0", "decode-0")  # half of them


@pytest.mark.parametrize("tpot_s", [STEP_S, STEP_S / 2])
def test_nobody_reads_where_answers_keep_their_pace_only_just(tpot_s: float) -> None:
    assert picked(busy(10**7, 1), tpot_s) == ChosenPair("prefill-0", "decode-0")
    assert picked(view(measured()), tpot_s) == ChosenPair(None, "decode-0")  # nobody writes


def world_of() -> FakeDeployment:
    world = linked_deployment(*PAIR, local_prefill="auto")
    for name in PAIR:
        member = world.relay.fleet.workers[name]
        member.stats = measured().workers[name].stats
    return world


def test_the_relay_goes_both_ways_and_says_why() -> None:
    world = world_of()
    first = world.arrive("first")
    assert [type(message) for message in messages_to(first, "decode-0")] == [Generate]
    assert PrefilledLocally("first", SOONER) in first
    world.say("decode-0", Step([Output("first", 0, [1])]))
    second = world.arrive("second")  # the first one writes there
    assert [type(message) for message in messages_to(second, "prefill-0")] == [Prefill]
    assert not any(isinstance(effect, PrefilledLocally) for effect in second)


def test_an_answer_that_began_locally_ends_like_any_other() -> None:
    world = world_of()
    world.arrive("r")
    world.say("decode-0", Step([Output("r", 0, [1], finish="stop")]))
    assert not world.relay.live and not len(world.relay.ledger)
