"""Who waits in the gateway, for what, and in which order."""

from __future__ import annotations

import msgspec
import pytest

from diptych.messages import Generate, Output, Prefill, Step
from diptych.request import Origin, Stage
from router.credits import MAX_TURN_TOKENS, TURN_TOKENS, open_ways
from router.effects import Arrive, Began, Cancelled, Choice, ClientGone, Entered, Fail, Queued, Tick
from router.live import Live
from router.policy import Load, Need, View
from router.prefix_index import PrefixIndex
from router.queue import Queue
from tests.unit.router.test_policy import fleet_of
from tests.unit.router.world import PAIR, World, at_rest, linked, request, sent

SLABS = 8  # of each pool in these stories: 512 tokens


def full(*workers: str) -> World:
    """Pools so small that one prompt of 300 tokens, with its answer of 100, is all that fits."""
    world = linked(*(workers or PAIR), slabs=SLABS)
    world.arrive("first", prompt=300, max_tokens=100)
    return world


def started(world: World, name: str) -> bool:
    return world.relay.live[name].request.stage is not Stage.ADMITTED


def through(world: World, name: str, finish: str | None = "stop") -> None:
    """A request is read, moved and, if it is to `finish`, ends."""
    live = world.relay.live[name]
    key, choice = (name, live.request.epoch), live.choice
    assert choice is not None and choice.prefill is not None
    world.first(choice.prefill, key)
    world.flush(choice.prefill)
    world.pull(choice.decode, key)
    if finish:
        world.decode(choice.decode, key, finish)
    world.flush(choice.decode)


# ---- credits


def test_what_has_no_promise_waits_in_the_gateway_and_goes_when_there_is_room() -> None:
    world = full()
    effects = world.arrive("second", prompt=300, max_tokens=100)
    assert effects == [Queued("second")] and not started(world, "second")
    through(world, "first", finish=None)
    assert not started(world, "second"), "the prefill worker is idle, but no decode worker has room for it"
    world.decode("decode-0", ("first", 0), finish="stop")
    effects = world.flush("decode-0")
    assert [type(message) for message in sent(effects, "prefill-0")] == [Prefill]
    assert Began("second", 0, Choice(*PAIR), False) in effects and Entered("second", Stage.QUEUED) in effects
    through(world, "second")
    assert at_rest(world)


def test_prompts_that_wait_to_be_fetched_are_part_of_the_promise() -> None:
    world = linked("prefill-0", "decode-0", "decode-1", slabs=SLABS)
    for name in ("a", "b"):
        world.arrive(name, prompt=300, max_tokens=100)
    assert started(world, "a") and not started(world, "b"), "decode-1 has room, prefill-0 has not"
    world.first("prefill-0", ("a", 0))
    world.flush("prefill-0")
    assert not started(world, "b"), "it is read, but not yet fetched"
    world.pull("decode-0", ("a", 0))
    world.flush("decode-0")
    assert started(world, "b")


def test_nobody_overtakes_for_want_of_room() -> None:
    world = full()
    world.arrive("large", prompt=300, max_tokens=100)
    world.arrive("small", prompt=5, max_tokens=5)
    assert not started(world, "large") and not started(world, "small")
    through(world, "first")
    assert started(world, "large")


def test_one_that_is_too_large_for_all_promises_goes_alone() -> None:
    world = linked(*PAIR, slabs=2)
    world.arrive("huge", prompt=600, max_tokens=600)
    assert started(world, "huge"), "whether it fits is the workers' business to say"
    world.arrive("next", prompt=5, max_tokens=5)
    assert not started(world, "next")


def test_few_steps_of_prompts_wait_at_a_worker_the_rest_in_the_gateway() -> None:
    world = linked(*PAIR, slabs=1000)
    for index in range(8):
        asked = request(f"r{index}", 400)
        asked.prompt = [index] * 400  # nothing in common
        world.do(Arrive(asked))
    there = [name for name in world.arrived if started(world, name)]
    assert len(there) == 6 and 6 * 400 >= MAX_TURN_TOKENS > 5 * 400
    world.say("prefill-0", Step([Output("r0", 0, [0])]))
    assert started(world, "r6") and not started(world, "r7"), "one has been read"


def test_a_long_prompt_leaves_turns_to_short_ones() -> None:
    """Workers let those pass, so the gateway must not keep them."""
    world = linked(*PAIR, slabs=1000)
    world.arrive("long", prompt=10 * TURN_TOKENS)
    world.arrive("short", prompt=5)
    assert started(world, "short")


@pytest.mark.parametrize(
    ("at", "load", "yes"),
    [
        ("prefill-0", Load(running=1, room_tokens=4096 - 128), True),
        ("prefill-0", Load(running=1, room_tokens=4096 - 127), False),
        ("prefill-0", Load(running=1, turn_tokens=MAX_TURN_TOKENS - 1), True),
        ("prefill-0", Load(running=1, turn_tokens=MAX_TURN_TOKENS), False),
        ("decode-0", Load(running=1, room_tokens=4096 - 200), True),
        ("decode-0", Load(running=1, room_tokens=4096 - 199), False),
        ("decode-0", Load(running=0, room_tokens=9999), True),
    ],
)
def test_credits_to_the_token(at: str, load: Load, yes: bool) -> None:
    fleet = fleet_of(*PAIR)
    view = View(fleet, World().relay.ledger, True, PrefixIndex(0))
    view.ledger.book("other", {at: load})
    assert bool(open_ways([PAIR], Need(prompt_tokens=100, room_tokens=200), view)) is yes


def test_who_leaves_the_queue_was_never_sent_anywhere() -> None:
    world = full()
    world.arrive("second", prompt=300)
    effects = world.do(ClientGone("second"))
    assert effects == [Cancelled("second")]
    world.arrive("third", prompt=300, deadline_s=1.0)
    world.now_s = 1.0
    world.do(Tick())
    end = world.terminal["third"]
    assert isinstance(end, Fail) and end.code == "deadline_exceeded" and len(world.relay.queue) == 0


def test_a_colocated_worker_gives_credit_for_both() -> None:
    world = linked("decode-0", split=False, slabs=SLABS)
    assert sent(world.arrive("a", prompt=300, max_tokens=100), "decode-0")
    world.arrive("b", prompt=300, max_tokens=100)
    assert not started(world, "b")
    world.decode("decode-0", ("a", 0), finish="stop")
    assert [type(message) for message in sent(world.flush("decode-0"), "decode-0")] == [Generate]


# ---- order


def lives(*told: tuple[str, str, int, list[int]]) -> list[Live]:
    """By name, tenant, priority and what has been delivered."""
    made = []
    for number, (name, tenant, priority, output) in enumerate(told):
        asked = request(name, 10, 10)
        asked.origin, asked.output = Origin(tenant, "", priority), output
        made.append(Live(asked, number, expected_tokens=10))
    return made


def order(queue: Queue) -> list[str]:
    """Everybody is taken in turn."""
    names = []
    for live in queue.order():
        names.append(live.request.id)
        queue.take(live)
    return names


def test_order_is_priority_then_begun_then_the_tenant_with_least_in_flight_then_arrival() -> None:
    queue = Queue()
    waiting = lives(
        ("a1", "a", 0, []),
        ("a2", "a", 0, []),
        ("b1", "b", 0, []),
        ("b2", "b", 0, []),
        ("begun", "a", 0, [1]),
        ("urgent", "b", -1, []),
    )
    for live in waiting:
        queue.put(live)
    assert len(queue) == 6
    assert order(queue) == ["urgent", "begun", "a1", "b1", "a2", "b2"]
    assert len(queue) == 0


def test_tokens_in_flight_count_until_they_are_gone() -> None:
    queue = Queue()
    first, second, other = lives(("a1", "a", 0, []), ("a2", "a", 0, []), ("b1", "b", 0, []))
    queue.take(first)
    queue.put(second)
    queue.put(other)
    assert order(queue) == ["b1", "a2"]
    for live in (first, second, other):
        queue.remove(live.request.id)
        queue.remove(live.request.id)
    queue.put(second)
    queue.put(other)
    assert order(queue) == ["a2", "b1"]


def test_a_request_keeps_its_place_when_it_comes_again() -> None:
    queue = Queue()
    early, late = lives(("early", "a", 0, []), ("late", "a", 0, []))
    queue.take(early)
    queue.put(late)
    queue.put(early)
    assert order(queue) == ["early", "late"]


def test_who_is_passed_by_does_not_lose_its_place() -> None:
    queue = Queue()
    for live in lives(("a1", "a", 0, []), ("a2", "a", 0, []), ("b1", "b", 0, [])):
        queue.put(live)
    assert [live.request.id for live in queue.order()] == ["a1", "a2", "b1"]
    assert order(queue) == ["a1", "b1", "a2"]


def test_versions_do_not_wait_for_each_other() -> None:
    """A begun answer of one version that has no room does not keep the other version's workers from working."""
    world = linked(*PAIR, slabs=SLABS)
    for name in ("prefill-1", "decode-1"):
        world.join(name)
        hello = msgspec.structs.replace(world.workers[name].hello, fingerprint="g", link="new")
        world.say(name, hello)
    world.link("decode-1", "prefill-1")
    world.relay.fleet.members["prefill-1"].draining = True
    world.arrive("f1", prompt=300, max_tokens=100)
    through(world, "f1", finish=None)
    world.relay.fleet.members["prefill-1"].draining = False
    world.relay.fleet.members["prefill-0"].draining = True
    world.arrive("g1", prompt=10, max_tokens=10)
    assert world.relay.live["g1"].choice == Choice("prefill-1", "decode-1")
    world.fail("decode-0", ("f1", 0), "draining")
    world.flush("decode-0")
    assert not started(world, "f1")
    world.arrive("g2", prompt=10, max_tokens=10)
    assert started(world, "g2")
