"""KV that is moved while it is computed: what the relay tells whom, and what comes of it when somebody is lost."""

from __future__ import annotations

import pytest

from diptych.eviction_spec import KeepSpec
from diptych.messages import (
    Abort,
    Admit,
    Failed,
    Fetch,
    Offer,
    Output,
    Prefill,
    Release,
    Staged,
    Staging,
    Step,
)
from diptych.request import RequestStage
from router.effects import (
    AttemptBegan,
    ClientGone,
    FailRequest,
    FinishRequest,
    KvMoved,
    RequestArrived,
    StopFound,
)
from router.routing.handoff_cost import COST_DECAY, INITIAL_COST_S, HandoffCost
from tests.unit.router.fake_deployment import (
    PAIR,
    FakeDeployment,
    is_at_rest,
    linked_deployment,
    make_request,
    messages_to,
)

SLOW = 0.1  # GB/s: the chunk of a short prompt takes ten times as long as the talk of a hand-off
KEY = ("r", 0)


def staged(*workers: str) -> FakeDeployment:
    """A request whose first chunks are being computed, and pulled."""
    world = linked_deployment(*(workers or PAIR), gb_per_s=SLOW)
    world.arrive("r")
    world.stage("prefill-0", KEY)
    world.flush("prefill-0")
    return world


def test_kv_of_which_something_is_dropped_is_not_pulled_while_it_is_computed() -> None:
    world = linked_deployment(*PAIR, gb_per_s=SLOW)
    request = make_request("r")
    request.keep = KeepSpec(0.95, 64)
    effects = world.do(RequestArrived(request))
    [prefill] = messages_to(effects, "prefill-0")
    assert isinstance(prefill, Prefill) and (prefill.stage, prefill.keep) == (False, request.keep)
    world.first("prefill-0", KEY)
    [admit] = messages_to(world.flush("prefill-0"), "decode-0")
    assert isinstance(admit, Admit) and (admit.ticket, admit.keep) == (b"ticket", request.keep)


def stage_of(world: FakeDeployment) -> RequestStage:
    return world.relay.live["r"].request.stage


def test_the_decode_worker_hears_of_it_with_the_first_hint_and_gets_the_ticket_later() -> None:
    world = linked_deployment(*PAIR, gb_per_s=SLOW)
    effects = world.arrive("r")
    prefill = messages_to(effects, "prefill-0")[0]
    assert isinstance(prefill, Prefill) and prefill.stage
    assert [effect.staged for effect in effects if isinstance(effect, AttemptBegan)] == [True]
    world.stage("prefill-0", KEY)
    admit, hint = messages_to(world.flush("prefill-0"), "decode-0")
    assert isinstance(admit, Admit) and (admit.ticket, admit.output) == (b"", [])
    assert hint == Staging("r", 0, b"hint") and stage_of(world) is RequestStage.QUEUED
    world.stage("prefill-0", KEY)
    assert messages_to(world.flush("prefill-0"), "decode-0") == [Staging("r", 0, b"hint")]
    world.first("prefill-0", KEY)
    fetch = messages_to(world.flush("prefill-0"), "decode-0")[0]
    assert isinstance(fetch, Fetch) and (fetch.ticket, fetch.output) == (b"ticket", [0])
    assert stage_of(world) is RequestStage.TRANSFERRING
    world.pull("decode-0", KEY)
    effects = world.flush("decode-0")
    assert messages_to(effects, "prefill-0") == [Release("r", 0)]
    moved = next(effect for effect in effects if isinstance(effect, KvMoved))
    assert (moved.hidden_s, moved.exposed_s) == (0.25, 0.5)
    world.decode("decode-0", KEY, finish="stop")
    world.flush("decode-0")
    assert world.tokens["r"] == [0, 1] and is_at_rest(world)


def test_no_early_admission_after_the_first_token() -> None:
    """The Admit would have the token that only its ticket brings."""
    world = linked_deployment(*PAIR, gb_per_s=SLOW)
    world.arrive("r")
    world.first("prefill-0", KEY, offer=False)
    world.stage("prefill-0", KEY)
    assert messages_to(world.flush("prefill-0"), "decode-0") == []
    world.say("prefill-0", Offer("r", 0, b"ticket", 1, 1))
    assert ("r", 0) in world.workers["decode-0"].held and not world.workers["decode-0"].early


def test_hints_may_be_lost() -> None:
    world = linked_deployment(*PAIR, gb_per_s=SLOW)
    world.arrive("r")
    world.first("prefill-0", KEY)
    admit = messages_to(world.flush("prefill-0"), "decode-0")[0]
    assert isinstance(admit, Admit) and admit.ticket == b"ticket", (
        "in one piece, as if nothing had been announced"
    )


@pytest.mark.parametrize("why", ["fast", "off", "short", "canary", "colocated"])
def test_what_is_not_worth_it_goes_in_one_piece(why: str) -> None:
    world = linked_deployment(*PAIR, gb_per_s=1000.0 if why == "fast" else SLOW, split=why != "colocated")
    world.relay.attempts.pipelined = why != "off"
    max_tokens = 1 if why == "short" else 8
    effects = world.canary("r", *PAIR) if why == "canary" else world.arrive("r", max_tokens=max_tokens)
    assert [effect.staged for effect in effects if isinstance(effect, AttemptBegan)] == [False]


def test_what_a_hop_costs_is_measured() -> None:
    hop = HandoffCost()
    assert hop.seconds == INITIAL_COST_S
    hop.record_handoff(0.5, {"reserve": 0.1, "transfer": 0.2, "verify": 0.1, "hidden": 9.0})
    assert hop.seconds == pytest.approx(COST_DECAY * INITIAL_COST_S + (1 - COST_DECAY) * 0.1)
    before = hop.seconds
    hop.record_handoff(0.5, {"transfer": 0.4, "verify": 0.2})
    assert hop.seconds == pytest.approx(COST_DECAY * before), "never negative"


def test_the_relay_measures_from_offer_to_pulled() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    world.first("prefill-0", KEY)
    world.flush("prefill-0")
    world.now_s += 0.01
    world.pull("decode-0", KEY)
    world.flush("decode-0")
    assert world.relay.attempts.handoff_cost.seconds == pytest.approx(
        COST_DECAY * INITIAL_COST_S + (1 - COST_DECAY) * 0.01
    )


def test_a_decode_worker_lost_while_its_prompt_is_read_is_replaced_without_reading_again() -> None:
    world = staged("prefill-0", "decode-0", "decode-1")
    world.workers["decode-0"].alive = False
    effects = world.lost("decode-0")
    assert messages_to(effects, "prefill-0") == [] and messages_to(effects, "decode-1") == []
    world.stage("prefill-0", KEY)
    admit, hint = messages_to(world.flush("prefill-0"), "decode-1")
    assert isinstance(admit, Admit) and (admit.epoch, admit.ticket) == (0, b"") and isinstance(hint, Staging)
    world.first("prefill-0", KEY)
    assert [type(message) for message in messages_to(world.flush("prefill-0"), "decode-1")] == [Fetch]


@pytest.mark.parametrize("code", ["overloaded", "transfer_failed", "draining"])
def test_a_decode_worker_that_fails_before_the_ticket_is_replaced_for_it(code: str) -> None:
    world = staged("prefill-0", "decode-0", "decode-1")
    world.fail("decode-0", KEY, code)
    world.flush("decode-0")
    world.first("prefill-0", KEY)
    admit = messages_to(world.flush("prefill-0"), "decode-1")[0]
    assert isinstance(admit, Admit) and (admit.epoch, admit.ticket) == (0, b"ticket")


def test_without_another_decode_worker_it_is_read_again_when_there_is_one() -> None:
    world = staged()
    world.workers["decode-0"].alive = False
    effects = world.lost("decode-0")
    assert messages_to(effects, "prefill-0") == [Abort("r", 0)] and world.waiting == {"r"}
    world.join("decode-0", ended="killed")
    assert [type(message) for message in messages_to(world.flush("decode-0"), "prefill-0")] == [Prefill]


def test_a_prefill_worker_lost_takes_what_was_pulled_with_it() -> None:
    world = staged("prefill-0", "prefill-1", "decode-0")
    world.workers["prefill-0"].alive = False
    effects = world.lost("prefill-0")
    assert Abort("r", 0) in messages_to(effects, "decode-0")
    assert [type(message) for message in messages_to(effects, "prefill-1")] == [Prefill]


def test_tokens_of_a_decode_worker_without_the_ticket_are_never_delivered() -> None:
    world = staged()
    world.say("decode-0", Step([Output(*KEY, [99])]))
    end = world.terminal["r"]
    assert (
        isinstance(end, FailRequest)
        and end.failure.code == "internal_error"
        and world.tokens["r"] == []
        and is_at_rest(world)
    )


@pytest.mark.parametrize("how", ["client", "stop", "finish"])
def test_both_sides_let_go_at_any_end(how: str) -> None:
    world = staged()
    if how == "finish":
        world.first("prefill-0", KEY, finish="stop")
        assert messages_to(world.flush("prefill-0"), "decode-0") == [Abort("r", 0)]
        assert world.terminal["r"] == FinishRequest("r", "stop")
    else:
        world.do(ClientGone("r") if how == "client" else StopFound("r"))
    assert is_at_rest(world)


def test_hints_of_whom_nobody_asked_are_late() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    assert world.say("prefill-0", Staged("r", 0, b"hint")) == []
    world.first("prefill-0", KEY)
    world.flush("prefill-0")
    assert world.say("prefill-0", Staged("r", 0, b"hint")) == []
    assert world.say("decode-0", Staged("r", 0, b"hint")) == []
    assert world.relay.late_messages == {"Staged": 3}


def test_an_offer_without_a_ticket_is_refused() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    world.first("prefill-0", KEY, offer=False)
    world.flush("prefill-0")
    world.say("prefill-0", Offer("r", 0, b"", 1, 1))
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and end.failure.code == "internal_error" and is_at_rest(world)


def test_a_stalled_pair_is_left_for_another_reader() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    world.arrive("r")
    world.first("prefill-0", KEY)
    world.flush("prefill-0")
    world.say("decode-0", Failed(*KEY, "transfer_failed", "no bytes came"))
    assert world.relay.live["r"].source == "prefill-1"
