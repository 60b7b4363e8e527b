"""Who waits in the gateway, for what, and in which order."""

from __future__ import annotations

import msgspec
import pytest

from diptych.messages import Generate, Output, Prefill, Step
from diptych.request import RequestStage, Tenancy
from router.effects import (
    AttemptBegan,
    ChosenPair,
    ClientGone,
    ClockTick,
    FailRequest,
    RequestArrived,
    RequestCancelled,
    RequestQueued,
    StageEntered,
)
from router.requests.queue import RequestQueue
from router.requests.request_state import RequestState
from router.routing.credits import (
    CREDIT_TOKENS_PER_PROMPT,
    MAX_CREDIT_TOKENS,
    pairs_with_credit,
)
from router.routing.load_ledger import WorkerLoad
from router.routing.policy import RoutingNeed, RoutingView
from router.routing.prefix_index import PrefixIndex
from tests.unit.router.fake_deployment import (
    PAIR,
    FakeDeployment,
    is_at_rest,
    linked_deployment,
    make_request,
    messages_to,
)
from tests.unit.router.fleet_views import fleet_of

SLABS = 8  # of each pool in these stories: 512 tokens


def full(*workers: str) -> FakeDeployment:
    """Pools so small that one prompt of 300 tokens, with its answer of 100, is all that fits."""
    world = linked_deployment(*(workers or PAIR), slabs=SLABS)
    world.arrive("first", prompt=300, max_tokens=100)
    return world


def started(world: FakeDeployment, name: str) -> bool:
    return world.relay.live[name].request.stage is not RequestStage.ADMITTED


def through(world: FakeDeployment, name: str, finish: str | None = "stop") -> None:
    """A request is read, moved and, if it is to `finish`, ends."""
    state = world.relay.live[name]
    key, choice = (name, state.request.epoch), state.pair
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
    assert effects == [RequestQueued("second")] and not started(world, "second")
    through(world, "first", finish=None)
    assert not started(world, "second"), "the prefill worker is idle, but no decode worker has room for it"
    world.decode("decode-0", ("first", 0), finish="stop")
    effects = world.flush("decode-0")
    assert [type(message) for message in messages_to(effects, "prefill-0")] == [Prefill]
    assert (
        AttemptBegan("second", 0, ChosenPair(*PAIR), False) in effects
        and StageEntered("second", RequestStage.QUEUED) in effects
    )
    through(world, "second")
    assert is_at_rest(world)


def test_prompts_that_wait_to_be_fetched_are_part_of_the_promise() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1", slabs=SLABS)
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
    world = linked_deployment(*PAIR, slabs=2)
    world.arrive("huge", prompt=600, max_tokens=600)
    assert started(world, "huge"), "whether it fits is the workers' business to say"
    world.arrive("next", prompt=5, max_tokens=5)
    assert not started(world, "next")


def test_few_steps_of_prompts_wait_at_a_worker_the_rest_in_the_gateway() -> None:
    world = linked_deployment(*PAIR, slabs=1000)
    for index in range(8):
        asked = make_request(f"r{index}", 400)
        asked.prompt = [index] * 400  # nothing in common
        asked.tenancy = Tenancy("tenant", "scope", 0)
        world.do(RequestArrived(asked))
    there = [name for name in world.arrived if started(world, name)]
    assert len(there) == 6 and 6 * 400 >= MAX_CREDIT_TOKENS > 5 * 400
    world.say("prefill-0", Step([Output("r0", 0, [0])]))
    assert started(world, "r6") and not started(world, "r7"), "one has been read"


def test_a_tenant_below_its_share_does_not_wait_for_the_credit_of_another() -> None:
    world = linked_deployment(*PAIR, slabs=1000)

    def arrive(name: str, tenant: str, number: int) -> None:
        asked = make_request(name, 400)
        asked.prompt = [number] * 400  # nothing in common
        asked.tenancy = Tenancy(tenant, "scope", 0)
        world.do(RequestArrived(asked))

    for index in range(10):
        arrive(f"r{index}", "loud", index)
    arrive("quiet", "quiet", 10)
    assert started(world, "quiet") and not started(world, "r6")
    for index in range(10):
        arrive(f"q{index}", "quiet", 11 + index)
    assert [name for name in world.arrived if started(world, name)].count("q0") == 1
    assert not started(world, "q2"), "what is kept for such tenants is bounded, too"


def test_without_api_keys_there_are_no_shares() -> None:
    queue = RequestQueue()
    loud, other = (
        RequestState(make_request(name, 400), number) for number, name in enumerate(("loud", "other"))
    )
    for one in (loud, other):
        one.request.tenancy = Tenancy("", "scope", 0)
    queue.start_request(loud)
    assert not queue.is_underserved(other)
    other.request.tenancy = Tenancy("b", "scope", 0)
    assert queue.is_underserved(other)
    queue.start_request(other)
    assert not queue.is_underserved(other), "both have the same"


def test_a_long_prompt_leaves_credit_to_short_ones() -> None:
    """Workers let those pass, so the gateway must not keep them."""
    world = linked_deployment(*PAIR, slabs=1000)
    world.arrive("long", prompt=10 * CREDIT_TOKENS_PER_PROMPT)
    world.arrive("short", prompt=5)
    assert started(world, "short")


@pytest.mark.parametrize(
    ("at", "load", "yes"),
    [
        ("prefill-0", WorkerLoad(running=1, room_tokens=4096 - 128), True),
        ("prefill-0", WorkerLoad(running=1, room_tokens=4096 - 127), False),
        ("prefill-0", WorkerLoad(running=1, credit_tokens=MAX_CREDIT_TOKENS - 1), True),
        ("prefill-0", WorkerLoad(running=1, credit_tokens=MAX_CREDIT_TOKENS), False),
        ("decode-0", WorkerLoad(running=1, room_tokens=4096 - 200), True),
        ("decode-0", WorkerLoad(running=1, room_tokens=4096 - 199), False),
        ("decode-0", WorkerLoad(running=0, room_tokens=9999), True),
    ],
)
def test_credits_to_the_token(at: str, load: WorkerLoad, yes: bool) -> None:
    fleet = fleet_of(*PAIR)
    view = RoutingView(fleet, FakeDeployment().relay.ledger, True, PrefixIndex(0))
    view.ledger.book_shares("other", {at: load})
    assert bool(pairs_with_credit([PAIR], RoutingNeed(prompt_tokens=100, room_tokens=200), view)) is yes


def test_who_leaves_the_queue_was_never_sent_anywhere() -> None:
    world = full()
    world.arrive("second", prompt=300)
    effects = world.do(ClientGone("second"))
    assert effects == [RequestCancelled("second")]
    world.arrive("third", prompt=300, deadline_s=1.0)
    world.now_s = 1.0
    world.do(ClockTick())
    end = world.terminal["third"]
    assert (
        isinstance(end, FailRequest)
        and end.failure.code == "deadline_exceeded"
        and len(world.relay.queue) == 0
    )


def test_a_colocated_worker_gives_credit_for_both() -> None:
    world = linked_deployment("decode-0", split=False, slabs=SLABS)
    assert messages_to(world.arrive("a", prompt=300, max_tokens=100), "decode-0")
    world.arrive("b", prompt=300, max_tokens=100)
    assert not started(world, "b")
    world.decode("decode-0", ("a", 0), finish="stop")
    assert [type(message) for message in messages_to(world.flush("decode-0"), "decode-0")] == [Generate]


# ---- order


def make_states(*requests: tuple[str, str, int, list[int]]) -> list[RequestState]:
    """By name, tenant, priority and what has been delivered."""
    made = []
    for number, (name, tenant, priority, output) in enumerate(requests):
        asked = make_request(name, 10, 10)
        asked.tenancy, asked.output = Tenancy(tenant, "", priority), output
        made.append(RequestState(asked, number, expected_tokens=10))
    return made


def order(queue: RequestQueue) -> list[str]:
    """Everybody is taken in turn."""
    names = []
    for state in queue.in_order():
        names.append(state.request.id)
        queue.start_request(state)
    return names


def test_order_is_priority_then_begun_then_the_tenant_with_least_in_flight_then_arrival() -> None:
    queue = RequestQueue()
    waiting = make_states(
        ("a1", "a", 0, []),
        ("a2", "a", 0, []),
        ("b1", "b", 0, []),
        ("b2", "b", 0, []),
        ("begun", "a", 0, [1]),
        ("urgent", "b", -1, []),
    )
    for state in waiting:
        queue.enqueue_request(state)
    assert len(queue) == 6
    assert order(queue) == ["urgent", "begun", "a1", "b1", "a2", "b2"]
    assert len(queue) == 0


def test_tokens_in_flight_count_until_they_are_gone() -> None:
    queue = RequestQueue()
    first, second, other = make_states(("a1", "a", 0, []), ("a2", "a", 0, []), ("b1", "b", 0, []))
    queue.start_request(first)
    queue.enqueue_request(second)
    queue.enqueue_request(other)
    assert order(queue) == ["b1", "a2"]
    for state in (first, second, other):
        queue.remove_request(state.request.id)
        queue.remove_request(state.request.id)
    queue.enqueue_request(second)
    queue.enqueue_request(other)
    assert order(queue) == ["a2", "b1"]


def test_a_request_keeps_its_place_when_it_comes_again() -> None:
    queue = RequestQueue()
    early, late = make_states(("early", "a", 0, []), ("late", "a", 0, []))
    queue.start_request(early)
    queue.enqueue_request(late)
    queue.enqueue_request(early)
    assert order(queue) == ["early", "late"]


def test_who_is_passed_by_does_not_lose_its_place() -> None:
    queue = RequestQueue()
    for state in make_states(("a1", "a", 0, []), ("a2", "a", 0, []), ("b1", "b", 0, [])):
        queue.enqueue_request(state)
    assert [state.request.id for state in queue.in_order()] == ["a1", "a2", "b1"]
    assert order(queue) == ["a1", "b1", "a2"]


def test_versions_do_not_wait_for_each_other() -> None:
    """A begun answer of one version that has no room does not keep the other version's workers from working."""
    world = linked_deployment(*PAIR, slabs=SLABS)
    for name in ("prefill-1", "decode-1"):
        world.join(name)
        hello = msgspec.structs.replace(world.workers[name].hello, fingerprint="g", link="new")
        world.say(name, hello)
    world.link("decode-1", "prefill-1")
    fleet = world.relay.fleet
    fleet.start_draining("prefill-1", accepts_pending=False)
    world.arrive("f1", prompt=300, max_tokens=100)
    through(world, "f1", finish=None)
    fleet.workers["prefill-1"].draining = False
    fleet.start_draining("prefill-0", accepts_pending=False)
    world.arrive("g1", prompt=10, max_tokens=10)
    assert world.relay.live["g1"].pair == ChosenPair("prefill-1", "decode-1")
    world.fail("decode-0", ("f1", 0), "draining")
    world.flush("decode-0")
    assert not started(world, "f1")
    world.arrive("g2", prompt=10, max_tokens=10)
    assert started(world, "g2")


class CountedState(RequestState):
    """Counts how often it is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name in ("number", "request"):
            CountedState.looks += 1
        return super().__getattribute__(name)


def test_leaving_the_queue_does_not_look_at_everybody_in_it() -> None:
    queue, many = RequestQueue(), 2000
    waiting = []
    for number in range(many):
        asked = make_request(f"r{number}", 10, 10)
        asked.tenancy = Tenancy("a", "", 0)
        waiting.append(CountedState(asked, number, expected_tokens=10))
        queue.enqueue_request(waiting[-1])
    CountedState.looks = 0
    for state in waiting[::2]:
        queue.remove_request(state.request.id)
    assert CountedState.looks < 50 * many / 2
    assert order(queue) == [state.request.id for state in waiting[1::2]]
