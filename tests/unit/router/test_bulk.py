"""Bulk work in the gateway: online requests never wait for it, and it is counted nowhere among them."""

from __future__ import annotations

import pytest

from diptych.messages import Generate
from diptych.request import BULK_PRIORITY, Request, RequestStage, SamplingParams, Tenancy
from router.effects import (
    AttemptBegan,
    ClockTick,
    FailRequest,
    PrefilledLocally,
    RelayEffect,
    RequestArrived,
    RequestQueued,
    StageDurations,
)
from router.requests.admission import AdmissionLimits
from router.requests.quarantine import MAX_EXCUSED_KILLS
from router.requests.queue import RequestQueue
from router.requests.request_state import RequestState
from router.routing.answer_lengths import INITIAL_ANSWER_TOKENS
from router.routing.load_ledger import LoadLedger, WorkerLoad
from tests.unit.router.fake_deployment import PAIR, FakeDeployment, is_at_rest, linked_deployment, messages_to


def bulk_request(
    name: str, prompt: int = 10, max_tokens: int = 8, deadline_s: float = 1e9, tenant: str = "t"
) -> Request:
    origin = Tenancy(tenant, "scope", BULK_PRIORITY)
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return Request(name, list(range(prompt)), sampling, deadline_s, tenancy=origin)


def submit(
    world: FakeDeployment, name: str, prompt: int = 10, max_tokens: int = 8, deadline_s: float = 1e9
) -> list[RelayEffect]:
    return world.do(RequestArrived(bulk_request(name, prompt, max_tokens, deadline_s)))


def begun(effects: list[RelayEffect]) -> list[str]:
    return [effect.request for effect in effects if isinstance(effect, AttemptBegan)]


def test_only_bulk_is_bulk() -> None:
    assert Tenancy(priority=BULK_PRIORITY).bulk and not Tenancy(priority=10).bulk and not Tenancy().bulk


def test_a_bulk_request_runs_on_one_worker_and_is_counted_nowhere() -> None:
    world = linked_deployment(*PAIR)
    relay, effects = world.relay, submit(world, "b")
    assert begun(effects) == ["b"] and not any(isinstance(one, PrefilledLocally) for one in effects)
    state = relay.live["b"]
    assert state.pair is not None and state.pair.prefill is None and state.holders == {"decode-0"}
    assert [type(order) for order in messages_to(effects, "decode-0")] == [Generate]
    assert not len(relay.admission.tenants) and not relay.admission.num_unprefilled
    assert relay.count_stages() == {} and relay.count_stages(bulk=True) == {"queued": 1}
    world.decode("decode-0", ("b", 0))
    world.decode("decode-0", ("b", 0), finish="length", count=7)
    world.flush("decode-0")
    assert world.seen[StageDurations] == 0 and is_at_rest(world)
    answers = relay.pairs.answers, relay.pairs.bulk_answers
    assert [one.expected_tokens(1000) for one in answers] == [
        INITIAL_ANSWER_TOKENS,
        round(0.95 * INITIAL_ANSWER_TOKENS + 0.05 * 8),
    ]


def test_online_requests_see_workers_as_if_there_were_no_bulk_work() -> None:
    world = linked_deployment(*PAIR, slabs=8)
    submit(world, "b", prompt=400, max_tokens=100)
    assert world.relay.live["b"].request.stage is RequestStage.QUEUED
    assert begun(submit(world, "c", prompt=400, max_tokens=100)) == [], "bulk work waits for bulk work"
    assert begun(world.arrive("online", prompt=300, max_tokens=100)) == ["online"]
    later = world.arrive("next", prompt=300, max_tokens=100)
    assert [type(one) for one in later] == [RequestQueued], "online requests wait for each other"


def test_bulk_work_waits_behind_every_priority() -> None:
    world = linked_deployment(*PAIR, slabs=8)
    world.arrive("running", prompt=300, max_tokens=100)
    assert not submit(world, "b", prompt=300, max_tokens=100), "a waiting one is not reported, not counted"
    world.arrive("x" * 10, prompt=300, max_tokens=100)  # of priority 10
    assert [state.request.id for state in world.relay.queue.in_order()] == ["x" * 10, "b"]


def test_the_ledger_keeps_bulk_work_apart() -> None:
    ledger, load = LoadLedger(), WorkerLoad(10, 1, 64, 10)
    ledger.book_shares("online", {"w": load}, 3)
    ledger.book_shares("bulk", {"w": load, "v": load}, BULK_PRIORITY)
    both = load.combined_with(load)
    assert (ledger.load_of("w"), ledger.load_of("w", with_bulk=True)) == (load, both)
    assert (ledger.load_of("v"), ledger.load_of("v", with_bulk=True)) == (WorkerLoad(), load)
    assert (ledger.load_up_to("w", None), ledger.load_up_to("w", BULK_PRIORITY)) == (load, both)
    assert sorted(ledger.requests_at("w")) == ["bulk", "online"], "its loss concerns both"
    ledger.book_shares("bulk", {})
    assert ledger.load_of("w", with_bulk=True) == load and not ledger.requests_at("v")


def test_fair_by_tenant_then_the_nearest_deadline_first() -> None:
    queue = RequestQueue()
    wanted = {"a late": ("a", 9.0), "a soon": ("a", 3.0), "b later": ("b", 7.0), "b last": ("b", 8.0)}
    for number, (name, (tenant, deadline_s)) in enumerate(wanted.items()):
        request = bulk_request(name, deadline_s=deadline_s, tenant=tenant)
        queue.enqueue_request(RequestState(request, number, expected_tokens=8))
    order = []
    for _ in wanted:
        state = next(queue.in_order())
        order.append(state.request.id)
        queue.start_request(state)
    assert order == ["a soon", "b later", "b last", "a late"]
    assert not queue.is_underserved(state), "what tenants have in flight online is not touched by it"
    for name in wanted:
        queue.remove_request(name)
    assert not len(queue) and not queue._bulk_tokens and not queue._tokens


def test_bulk_work_is_not_refused_by_admission() -> None:
    world = linked_deployment(*PAIR, slabs=8, limits=AdmissionLimits(max_requests=1))
    world.arrive("online", prompt=300, max_tokens=100)
    for name in ("b", "c"):
        submit(world, name, prompt=300, max_tokens=100)
    assert not world.terminal
    world.arrive("refused")
    assert isinstance(world.terminal["refused"], FailRequest), "and the bound of online requests is as before"


def test_bulk_work_waits_for_workers_until_its_deadline() -> None:
    world = FakeDeployment()
    submit(world, "b", deadline_s=5000.0)
    world.now_s = 4000.0
    world.do(ClockTick())
    assert "b" in world.relay.live
    world.now_s = 5001.0
    world.do(ClockTick())
    failed = world.terminal["b"]
    assert isinstance(failed, FailRequest) and failed.failure.code == "deadline_exceeded"


def test_bulk_work_goes_on_elsewhere_when_its_worker_is_lost() -> None:
    world = linked_deployment(*PAIR, "decode-1")
    submit(world, "b", prompt=100)
    choice = world.relay.live["b"].pair
    assert choice is not None
    world.decode(choice.decode, ("b", 0), count=2)
    world.flush(choice.decode)
    world.lost(choice.decode)
    again = world.relay.live["b"]
    assert again.request.epoch == 1 and again.pair is not None and again.pair.decode != choice.decode
    assert world.tokens["b"] == again.request.output == [0, 1]


def kill_decode(world: FakeDeployment, name: str, ended: str = "killed") -> None:
    """A decode worker dies and is back at once, linked."""
    world.workers[name].alive = False
    world.lost(name)
    world.join(name, ended)
    world.flush(name)


def test_a_line_that_waits_beside_others_is_not_blamed_for_kills() -> None:
    """It may have waited there for hours without being computed once."""
    world = linked_deployment("prefill-0", "decode-0")
    submit(world, "b")
    submit(world, "other")
    for _ in range(MAX_EXCUSED_KILLS + 3):
        kill_decode(world, "decode-0")
    assert {"b", "other"} <= world.relay.live.keys() and not world.terminal
    assert not world.relay.quarantine.num_quarantined


@pytest.mark.parametrize("ended", ["killed", "crashed"])
def test_a_line_that_kills_workers_is_found(ended: str) -> None:
    """Alone it is blamed for kills as well, and for crashes whoever is there beside."""
    world = linked_deployment("prefill-0", "decode-0")
    submit(world, "b")
    if ended == "crashed":
        submit(world, "other")
    for _ in range(MAX_EXCUSED_KILLS + 2):
        if "b" in world.relay.live:
            kill_decode(world, "decode-0", ended)
    end = world.terminal["b"]
    assert isinstance(end, FailRequest) and end.failure.code == "request_quarantined"
    assert "other" not in world.terminal


def test_an_online_suspect_does_not_wait_for_a_suspected_line() -> None:
    """A line may go without time for as long as online requests are computed."""
    world = linked_deployment("decode-0", "decode-1", split=False)
    submit(world, "b")
    (first,) = world.relay.live["b"].holders
    (other,) = {"decode-0", "decode-1"} - {first}
    world.workers[first].alive = False
    world.lost(first)
    assert world.relay.quarantine.is_suspected("b") and world.relay.live["b"].holders == {other}
    world.join(first)
    world.arrive("r")
    assert world.relay.live["r"].holders == {first}
    world.workers[first].alive = False
    world.lost(first)
    assert world.relay.quarantine.is_suspected("r") and world.relay.live["r"].holders == {other}


def test_a_suspected_line_waits_for_online_suspects() -> None:
    world = linked_deployment("decode-0", "decode-1", split=False)
    world.arrive("r")
    (first,) = world.relay.live["r"].holders
    submit(world, "b")
    submit(world, "c")
    line = next(name for name in ("b", "c") if world.relay.live[name].holders == {first})
    world.workers[first].alive = False
    world.lost(first)
    assert world.relay.quarantine.is_suspected("r") and world.relay.live["r"].holders
    assert world.relay.quarantine.is_suspected(line) and not world.relay.live[line].holders
