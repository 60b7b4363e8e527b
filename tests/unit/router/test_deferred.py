"""First tokens that are left to the decode worker, and answers that no other worker can continue."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diptych.messages import Admit, Drain, Logprob, Offer, Output, Prefill, Pulled, Step, SwitchRole
from diptych.request import CONTINUED, RequestStage
from router.effects import (
    AttemptRetried,
    DeliverTokens,
    FailRequest,
    FinishRequest,
    RelayEffect,
    RequestArrived,
    StageDurations,
    StopFound,
    WorkerCommand,
)
from router.requests.admission import AdmissionLimits
from tests.unit.router.fake_deployment import (
    PAIR,
    FakeDeployment,
    bring_to_decode,
    bring_to_transfer,
    is_at_rest,
    linked_deployment,
    make_request,
    messages_to,
)

NOTHING: tuple[str, ...] = ()
SPARE = ("prefill-0", "decode-0", "decode-1")


def limited_deployment(*workers: str, **options: Any) -> FakeDeployment:
    return linked_deployment(*workers, traits=NOTHING, **options)


def only(effects: list[RelayEffect], kind: type[Any]) -> Any:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def ended(world: FakeDeployment, name: str = "r") -> tuple[int, str, float | None]:
    end = world.terminal[name]
    assert isinstance(end, FailRequest)
    return end.failure.status, end.failure.code, end.failure.retry_after_s


def decode_worker(world: FakeDeployment, name: str = "r") -> str:
    pair = world.relay.live[name].pair
    assert pair is not None
    return pair.decode


def kill(world: FakeDeployment, name: str) -> list[RelayEffect]:
    world.workers[name].alive = False
    return world.lost(name)


def bring_to_first_token(world: FakeDeployment) -> tuple[str, int]:
    """A request whose decode worker has drawn its first token."""
    key = bring_to_decode(world)
    world.decode(decode_worker(world), key)
    world.flush(decode_worker(world))
    assert world.tokens["r"] == [0]
    return key


def test_the_decode_worker_draws_what_the_prefill_worker_leaves_to_it() -> None:
    world = limited_deployment(*PAIR)
    (order,) = messages_to(world.arrive("r", prompt=5), "prefill-0")
    assert isinstance(order, Prefill) and order.defer_first and not order.stage
    world.first("prefill-0", ("r", 0))
    effects = world.say("prefill-0", world.workers["prefill-0"].outbox.pop(0))
    assert not [effect for effect in effects if isinstance(effect, DeliverTokens | StageDurations)]
    assert world.relay.live["r"].request.stage is RequestStage.PREFILLED
    assert world.relay.admission.queued_tokens == 0, "the prompt is computed"
    (admit,) = messages_to(world.flush("prefill-0"), "decode-0")
    assert isinstance(admit, Admit) and admit.output == [] and admit.ticket == b"ticket"
    world.pull("decode-0", ("r", 0))
    world.flush("decode-0")
    assert world.tokens["r"] == []
    for finish in (None, "stop"):
        world.decode("decode-0", ("r", 0), finish)
    world.flush("decode-0")
    assert world.tokens["r"] == [0, 1] and world.terminal["r"] == FinishRequest("r", "stop")
    assert is_at_rest(world)


@pytest.mark.parametrize(
    ("workers", "asked"),
    [
        (PAIR, {"temperature": 0.0}),  # any worker continues it
        (PAIR, {"max_tokens": 1}),  # there is nothing to continue
        (("decode-0",), {}),  # one worker does both
    ],
)
def test_nothing_is_deferred_without_a_need(workers: tuple[str, ...], asked: dict[str, Any]) -> None:
    world = limited_deployment(*workers, split=len(workers) > 1)
    for order in messages_to(world.arrive("r", **asked), workers[0]):
        assert not getattr(order, "defer_first", False)
    assert world.num_deferred == 0


def test_workers_with_all_traits_draw_the_first_token_at_once() -> None:
    world = linked_deployment(*PAIR)
    (order,) = messages_to(world.arrive("r"), "prefill-0")
    assert isinstance(order, Prefill) and not order.defer_first


@pytest.mark.parametrize("lacking", PAIR)
def test_both_workers_of_a_pair_must_be_able(lacking: str) -> None:
    world = FakeDeployment()
    for name in PAIR:
        world.join(name, traits=NOTHING if name == lacking else None)
    world.flush("decode-0")
    (order,) = messages_to(world.arrive("r"), "prefill-0")
    assert isinstance(order, Prefill) and order.defer_first


def test_what_is_said_of_the_prompt_comes_with_the_first_token() -> None:
    world = limited_deployment(*PAIR)
    world.arrive("r")
    scores = [None, Logprob(1, -0.5, [])]
    world.say("prefill-0", Step([Output("r", 0, [], prompt_logprobs=scores, cached_tokens=64)]))
    world.say("prefill-0", Offer("r", 0, b"ticket", 10, 1))
    world.say("decode-0", Pulled("r", 0, "shm", 1, {}))
    output = only(world.say("decode-0", Step([Output("r", 0, [7])])), DeliverTokens).output
    assert (output.tokens, output.prompt_logprobs, output.cached_tokens) == ([7], scores, 64)
    output = only(world.say("decode-0", Step([Output("r", 0, [8])])), DeliverTokens).output
    assert (output.tokens, output.prompt_logprobs, output.cached_tokens) == ([8], None, 0)


def test_all_stages_are_reported_with_the_first_token_and_sum_to_its_time() -> None:
    world = limited_deployment(*SPARE)
    world.now_s = 10.0
    arrived = make_request("r")
    arrived.entered_s[RequestStage.ADMITTED] = 9.5
    world.do(RequestArrived(arrived))
    world.now_s = 12.0
    world.say("prefill-0", Step([Output("r", 0, [], seconds={"queue": 0.5, "prefill": 1.0})]))
    world.now_s = 12.25
    world.say("prefill-0", Offer("r", 0, b"ticket", 10, 1))
    world.now_s = 13.0
    target = decode_worker(world)
    assert not [one for one in world.say(target, Pulled("r", 0, "shm", 1, {"transfer": 0.5}))
                if isinstance(one, StageDurations)]  # fmt: skip
    world.now_s = 13.5
    seconds = only(world.say(target, Step([Output("r", 0, [0])])), StageDurations).seconds
    assert seconds == {
        "admission": 0.5, "retry": 0.0, "prefill_queue": 0.5, "prefill": 1.0, "deliver": 0.5,
        "decode_admission": 0.5, "transfer": 0.5, "first_decode": 0.5,
    }  # fmt: skip
    assert sum(seconds.values()) == pytest.approx(13.5 - 9.5)
    again = world.say(target, Step([Output("r", 0, [1])]))
    assert not [effect for effect in again if isinstance(effect, StageDurations)]


def test_time_that_a_lost_attempt_took_is_among_the_stages() -> None:
    world = limited_deployment(*PAIR)
    key = bring_to_transfer(world)
    world.now_s = 2.0
    world.fail("decode-0", key, "transfer_failed")
    world.flush("decode-0")
    key = ("r", 1)
    world.now_s = 3.0
    world.first("prefill-0", key)
    world.flush("prefill-0")
    world.pull("decode-0", key)
    world.now_s = 4.0
    world.flush("decode-0")
    world.decode("decode-0", key)
    seconds = only(world.flush("decode-0"), StageDurations).seconds
    assert seconds["retry"] == 2.0 and sum(seconds.values()) == pytest.approx(4.0)


@pytest.mark.parametrize("output", [Output("r", 0, [5]), Output("r", 0, [], finish="length")])
def test_a_prefill_worker_that_draws_the_token_all_the_same_is_at_fault(output: Output) -> None:
    world = limited_deployment(*PAIR)
    world.arrive("r")
    world.say("prefill-0", Step([output]))
    assert ended(world)[1] == "internal_error" and world.tokens["r"] == [] and is_at_rest(world)


def test_an_offer_needs_the_word_that_the_prompt_is_computed() -> None:
    world = limited_deployment(*PAIR)
    world.arrive("r")
    world.say("prefill-0", Offer("r", 0, b"ticket", 10, 1))
    assert ended(world)[1] == "internal_error" and is_at_rest(world)


# ---- workers are lost


@pytest.mark.parametrize("moment", ["queued", "prefilled", "transferring", "decoding"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_before_the_first_token_nothing_is_lost(moment: str, role: str) -> None:
    world = limited_deployment("prefill-0", "prefill-1", "decode-0", "decode-1")
    world.arrive("r")
    first = next(name for name in world.workers if world.workers[name].held)
    if moment == "prefilled":
        world.first(first, ("r", 0), offer=False)
    elif moment != "queued":
        world.first(first, ("r", 0))
    world.flush(first)
    if moment == "decoding":
        world.pull(decode_worker(world), ("r", 0))
        world.flush(decode_worker(world))
    world.lost(first if role == "prefill" else decode_worker(world))
    assert "r" not in world.terminal and world.tokens["r"] == []
    state = world.relay.live["r"]
    assert state.deferred and state.pair is not None
    if role == "decode" and moment != "decoding":
        assert state.request.epoch == 0, "the KV is there, and goes to the other decode worker"


def test_after_the_first_token_its_client_gets_one_error_and_may_come_again() -> None:
    world = limited_deployment(*SPARE)
    key = bring_to_first_token(world)
    effects = kill(world, decode_worker(world))
    assert ended(world) == (503, "not_continuable", 1.0)
    assert not [effect for effect in effects if isinstance(effect, AttemptRetried)]
    assert is_at_rest(world) and world.spoke["r"] == {key[1]}


def test_a_greedy_answer_goes_on_at_the_same_workers() -> None:
    world = limited_deployment(*SPARE)
    world.arrive("r", temperature=0.0)
    world.first("prefill-0", ("r", 0))
    world.flush("prefill-0")
    world.lost(decode_worker(world))
    world.pull(decode_worker(world), ("r", 0))
    world.flush(decode_worker(world))
    world.lost(decode_worker(world))
    assert "r" not in world.terminal and world.relay.live["r"].request.epoch == 1


@pytest.mark.parametrize("code", ["draining", "transfer_failed", "overloaded", "out_of_memory"])
def test_a_failure_that_another_attempt_would_avoid_ends_an_answer_that_has_begun(code: str) -> None:
    world = limited_deployment(*SPARE)
    key = bring_to_first_token(world)
    name = decode_worker(world)
    world.fail(name, key, code)
    world.flush(name)
    assert ended(world)[1:] == ("not_continuable", 1.0) and is_at_rest(world)


def test_a_failure_that_no_attempt_would_avoid_keeps_its_own_name() -> None:
    world = limited_deployment(*SPARE)
    key = bring_to_first_token(world)
    name = decode_worker(world)
    world.fail(name, key, "internal_error")
    world.flush(name)
    assert ended(world)[1] == "internal_error"


def test_an_answer_of_one_worker_that_does_both_stays_there() -> None:
    world = limited_deployment("decode-0", "decode-1", split=False)
    world.arrive("r")
    kill(world, decode_worker(world))
    assert "r" not in world.terminal, "no token was delivered"
    name = decode_worker(world)
    world.decode(name, ("r", 1))
    world.flush(name)
    kill(world, name)
    assert ended(world)[1] == "not_continuable" and is_at_rest(world)


def test_a_stop_string_after_the_first_token_ends_it_well() -> None:
    world = limited_deployment(*PAIR)
    bring_to_first_token(world)
    world.do(StopFound("r"))
    assert world.terminal["r"] == FinishRequest("r", "stop") and is_at_rest(world)


# ---- workers with different traits, of one fingerprint


def mixed_deployment() -> FakeDeployment:
    """One prefill worker and one decode worker with all traits; decode-1 has none."""
    world = FakeDeployment()
    for name in SPARE:
        world.join(name, traits=NOTHING if name == "decode-1" else None)
    for name in SPARE:
        world.flush(name)
    return world


def test_an_answer_goes_on_only_where_it_can() -> None:
    world = mixed_deployment()
    world.arrive("busy")  # so that decode-1 would be the better choice
    world.arrive("r")
    world.lost("decode-1")
    world.join("decode-1", traits=NOTHING)
    world.flush("decode-1")
    world.first("prefill-0", ("busy", 0))
    world.flush("prefill-0")
    assert ("busy", 0) in world.workers["decode-0"].held, (
        "its first token is drawn, so decode-1 cannot take it"
    )


def test_an_answer_for_which_no_worker_is_left_fails_at_once() -> None:
    """It need not wait for its worker, which is back already and can do less."""
    world = mixed_deployment()
    key = bring_to_decode(world)
    assert decode_worker(world) == "decode-0" and world.tokens["r"] == [0] and key == ("r", 0)
    world.join("decode-0", "killed", traits=NOTHING)
    assert ended(world)[1] == "not_continuable" and is_at_rest(world)


def test_an_answer_waits_for_a_worker_that_can_go_on_and_may_come_back() -> None:
    world = mixed_deployment()
    bring_to_decode(world)
    world.lost("decode-0")
    assert world.relay.live["r"].request.stage is RequestStage.ADMITTED
    world.join("decode-0")
    world.flush("decode-0")
    assert decode_worker(world) == "decode-0"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_named_tokens_go_only_to_workers_that_know_them(temperature: float) -> None:
    """During an upgrade: the newer prefill worker and decode worker get them, and without those nobody."""
    world = FakeDeployment()
    newer, older = ("prefill-1", "decode-1"), ("prefill-0", "decode-0")
    for name in (*older, *newer):
        world.join(name, traits=None if name in newer else CONTINUED)
    for name in (*older, *newer):
        world.flush(name)

    def arrive(name: str) -> None:
        request = make_request(name, temperature=temperature)
        request.sampling = msgspec.structs.replace(request.sampling, allowed_token_ids=(5, 6))
        world.do(RequestArrived(request))

    for name in ("first", "second", "third"):
        arrive(name)
        pair = world.relay.live[name].pair
        assert pair is not None and (pair.prefill, pair.decode) == newer
    world.arrive("plain", temperature=temperature)
    pair = world.relay.live["plain"].pair
    assert pair is not None and (pair.prefill, pair.decode) == older
    for name in newer:
        world.join(name, "killed", traits=CONTINUED)
    assert ended(world, "first")[:2] == (503, "no_workers")
    arrive("late")
    assert ended(world, "late")[:2] == (503, "no_workers")
    failure = world.terminal["late"]
    assert isinstance(failure, FailRequest) and "do not know: bans" in failure.failure.message


# ---- drains and changes of role


@pytest.mark.parametrize("order", [Drain(), SwitchRole("prefill")])
def test_an_order_waits_for_answers_that_cannot_go_on_elsewhere(order: Drain | SwitchRole) -> None:
    world = limited_deployment(*SPARE)
    key = bring_to_first_token(world)
    name = decode_worker(world)
    assert messages_to(world.do(WorkerCommand(name, order)), name) == []
    assert world.relay.fleet.workers[name].draining, "it gets no new requests"
    world.arrive("other")
    assert decode_worker(world, "other") != name
    world.decode(name, key)
    assert messages_to(world.flush(name), name) == []
    world.decode(name, key, "stop")
    assert messages_to(world.flush(name), name) == [order]
    assert world.terminal["r"] == FinishRequest("r", "stop")


def test_an_order_does_not_wait_for_answers_that_can_go_on_elsewhere() -> None:
    for world, temperature in ((linked_deployment(*SPARE), 1.0), (limited_deployment(*SPARE), 0.0)):
        world.arrive("r", temperature=temperature)
        world.first("prefill-0", ("r", 0))
        world.flush("prefill-0")
        name = decode_worker(world)
        assert messages_to(world.do(WorkerCommand(name, Drain())), name) == [Drain()]


def test_a_prefill_worker_gets_its_order_at_once() -> None:
    world = limited_deployment("prefill-0", "prefill-1", "decode-0")
    bring_to_first_token(world)
    assert messages_to(world.do(WorkerCommand("prefill-0", Drain())), "prefill-0") == [Drain()]


def test_load_and_leases_are_those_of_any_hand_off() -> None:
    """The ledger of a deferred request, stage by stage, is that of one that is not."""
    loads: list[list[object]] = []
    for traits in (NOTHING, ("seed",)):
        world = linked_deployment(*PAIR, traits=traits, limits=AdmissionLimits(max_requests=4))
        seen: list[object] = []

        def note(world: FakeDeployment = world, seen: list[object] = seen) -> None:
            ledger, admission = world.relay.ledger, world.relay.admission
            loads_now = [msgspec.to_builtins(str(ledger.load_of(name))) for name in PAIR]
            seen.append((*loads_now, admission.queued_tokens, admission.num_unprefilled))

        world.arrive("r", prompt=130)
        note()
        world.first("prefill-0", ("r", 0), offer=False)
        world.flush("prefill-0")
        note()
        world.say("prefill-0", Offer("r", 0, b"ticket", 130, 3))
        note()
        world.pull("decode-0", ("r", 0))
        world.flush("decode-0")
        note()
        loads.append(seen)
    assert loads[0] == loads[1]
