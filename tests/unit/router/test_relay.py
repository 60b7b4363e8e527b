"""The relay, one story at a time. The random stories are in stories.py."""

from __future__ import annotations

import pytest

from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.messages import (
    Abort,
    Admit,
    Failed,
    Generate,
    Offer,
    Output,
    Prefill,
    Release,
    Renew,
    Step,
)
from diptych.request import RequestStage
from router.effects import (
    AttemptBegan,
    ChosenPair,
    ClientGone,
    ClockTick,
    DeliverTokens,
    FailRequest,
    FinishRequest,
    KvMoved,
    RequestArrived,
    RequestCancelled,
    SendMessage,
    StageDurations,
    StageEntered,
    StopFound,
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


def test_one_request_from_arrival_to_its_end() -> None:
    world = linked_deployment(*PAIR)
    effects = world.arrive("r", prompt=5)
    assert [type(m) for m in messages_to(effects, "prefill-0")] == [Prefill] and messages_to(
        effects, "decode-0"
    ) == []
    world.first("prefill-0", ("r", 0))
    effects = world.flush("prefill-0")
    admit = messages_to(effects, "decode-0")[0]
    assert isinstance(admit, Admit) and admit.output == [0] and admit.ticket == b"ticket"
    assert world.tokens["r"] == [0]  # before any transfer
    world.pull("decode-0", ("r", 0))
    effects = world.flush("decode-0")
    assert messages_to(effects, "prefill-0") == [Release("r", 0)]
    assert [effect for effect in effects if isinstance(effect, KvMoved)][0].num_bytes == 100
    world.decode("decode-0", ("r", 0))
    world.decode("decode-0", ("r", 0), finish="length")
    effects = world.flush("decode-0")
    assert world.terminal["r"] == FinishRequest("r", "length")
    assert world.tokens["r"] == [0, 1, 2]
    assert messages_to(effects, "decode-0") == [], "who said it is done needs no abort"
    assert is_at_rest(world)


def test_a_first_token_that_ends_the_answer_moves_nothing() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    world.first("prefill-0", ("r", 0), finish="stop")
    effects = world.flush("prefill-0")
    assert [type(effect) for effect in effects] == [
        StageDurations,
        StageEntered,
        DeliverTokens,
        FinishRequest,
    ]
    assert is_at_rest(world)


def test_colocated_workers_generate() -> None:
    world = linked_deployment("decode-0", "decode-1", split=False)
    assert [type(m) for m in messages_to(world.arrive("a"), "decode-0")] == [Generate]
    assert [type(m) for m in messages_to(world.arrive("b"), "decode-1")] == [Generate]
    world.decode("decode-0", ("a", 0))
    world.flush("decode-0")
    assert world.relay.live["a"].request.stage is RequestStage.DECODING
    world.decode("decode-0", ("a", 0), finish="stop")
    world.flush("decode-0")
    assert world.terminal["a"] == FinishRequest("a", "stop") and world.tokens["a"] == [0, 1]


def test_a_split_deployment_without_prefill_workers_refuses() -> None:
    world = linked_deployment("decode-0")
    world.arrive("r")
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and (
        end.failure.status,
        end.failure.code,
        end.failure.client_may_retry,
    ) == (503, "no_workers", True)
    assert end.failure.retry_after_s and "no prefill worker" in end.failure.message


def test_workers_that_are_not_linked_are_no_pair() -> None:
    world = FakeDeployment(*PAIR)  # Linked was never received
    world.arrive("r")
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and end.failure.message == "no two workers are linked"


@pytest.mark.parametrize("moment", ["queued", "transferring", "decoding"])
def test_a_client_that_leaves_frees_both_sides(moment: str) -> None:
    world = linked_deployment(*PAIR)
    if moment == "queued":
        world.arrive("r")
    elif moment == "transferring":
        bring_to_transfer(world)
    else:
        bring_to_decode(world)
    effects = world.do(ClientGone("r"))
    assert world.terminal["r"] == RequestCancelled("r")
    aborted = {
        effect.worker
        for effect in effects
        if isinstance(effect, SendMessage) and isinstance(effect.message, Abort)
    }
    assert aborted == {"queued": {"prefill-0"}, "transferring": set(PAIR), "decoding": {"decode-0"}}[moment]
    assert is_at_rest(world)
    assert world.do(ClientGone("r")) == []


def test_what_a_request_frees_is_given_to_none_of_its_own_sequences() -> None:
    """All of them are cancelled first: none begins only to be aborted."""
    world = linked_deployment(*PAIR)
    names = [f"r.{index}" for index in range(200)]
    for name in names:
        world.arrive(name)
    world.arrive("other")
    waiting = [name for name in names if world.relay.live[name].request.stage is RequestStage.ADMITTED]
    assert waiting, "the prefill worker has no room for all"
    effects = world.do(ClientGone(names[0], tuple(names[1:])))
    begun = {effect.request for effect in effects if isinstance(effect, AttemptBegan)}
    assert begun == {"other"}


def test_a_client_that_leaves_between_token_and_offer_frees_the_prefill_worker() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    world.first("prefill-0", ("r", 0))
    world.say("prefill-0", world.workers["prefill-0"].outbox.pop(0))
    world.do(ClientGone("r"))
    assert is_at_rest(world)
    assert world.flush("prefill-0") == [], "the Offer is late"
    assert world.relay.late_messages["Offer"] == 1


def test_a_stop_string_ends_well_and_frees() -> None:
    world = linked_deployment(*PAIR)
    bring_to_decode(world)
    world.do(StopFound("r"))
    assert world.terminal["r"] == FinishRequest("r", "stop") and is_at_rest(world)


def test_late_messages_are_dropped_and_counted() -> None:
    world = linked_deployment(*PAIR)
    bring_to_decode(world)
    world.do(ClientGone("r"))
    for message in (
        Step([Output("r", 0, [7])]),
        Failed("r", 0, "internal_error", ""),
        Offer("r", 0, b"", 1, 1),
    ):
        assert world.say("decode-0", message) == []
    assert world.relay.late_messages == {"Output": 1, "Failed": 1, "Offer": 1}
    assert world.say("stranger", Step([Output("r", 0, [7])])) == []


def test_the_decode_worker_is_chosen_when_the_kv_is_ready() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    world.arrive("a")  # planned for decode-0
    world.arrive("b")  # planned for decode-1
    world.do(ClientGone("b"))
    world.arrive("c")
    world.do(ClientGone("a"))
    assert world.relay.live["c"].pair == ChosenPair("prefill-0", "decode-1")
    world.first("prefill-0", ("c", 0))
    world.flush("prefill-0")
    assert ("c", 0) in world.workers["decode-0"].held, "decode-0 is idle by now"


def test_leases_are_renewed_while_kv_waits_and_not_after() -> None:
    world = linked_deployment(*PAIR)
    key = bring_to_transfer(world)
    world.do(ClockTick())
    world.now_s += 1.0
    assert messages_to(world.do(ClockTick()), "prefill-0") == [Renew([key])]
    world.now_s += 0.9
    assert messages_to(world.do(ClockTick()), "prefill-0") == []
    world.pull("decode-0", key)
    world.flush("decode-0")
    world.now_s += 0.9
    assert messages_to(world.do(ClockTick()), "prefill-0") == []


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r", deadline_s=1.0)
    world.now_s = 0.9
    world.do(ClockTick())
    assert "r" not in world.terminal
    world.now_s = 1.0
    world.do(ClockTick())
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and (
        end.failure.status,
        end.failure.code,
        end.failure.client_may_retry,
    ) == (
        504,
        "deadline_exceeded",
        False,
    )
    assert is_at_rest(world)
    world.arrive("late", deadline_s=1.0)
    assert isinstance(world.terminal["late"], FailRequest)


def test_tokens_before_the_kv_are_never_delivered() -> None:
    world = linked_deployment(*PAIR)
    key = bring_to_transfer(world)
    world.say("decode-0", Step([Output(*key, [99])]))
    end = world.terminal["r"]
    assert (
        isinstance(end, FailRequest)
        and end.failure.code == "internal_error"
        and world.tokens["r"] == [0]
        and is_at_rest(world)
    )


def test_a_canary_goes_through_its_pair_past_the_limits_and_unmeasured() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0", limits=AdmissionLimits(max_requests=0))
    effects = world.canary("c", "prefill-1", "decode-0")
    assert messages_to(effects, "prefill-1") and not messages_to(effects, "prefill-0")
    world.first("prefill-1", ("c", 0))
    world.flush("prefill-1")
    world.pull("decode-0", ("c", 0))
    world.decode("decode-0", ("c", 0), finish="length")
    effects = world.flush("decode-0")
    assert world.terminal["c"] == FinishRequest("c", "length")
    assert not any(isinstance(effect, StageDurations) for effect in effects)
    world.canary("gone", "prefill-7", "decode-0")
    assert isinstance(world.terminal["gone"], FailRequest)


def test_a_canary_is_not_tried_again() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    world.canary("c", "prefill-0", "decode-0")
    world.fail("prefill-0", ("c", 0), "overloaded")
    world.flush("prefill-0")
    assert isinstance(world.terminal["c"], FailRequest)


def test_the_waterfall_sums_to_the_whole() -> None:
    world = linked_deployment(*PAIR)
    world.now_s = 10.0
    arrived = make_request("r")
    arrived.entered_s[RequestStage.ADMITTED] = 9.5
    world.do(RequestArrived(arrived))
    world.now_s = 12.0
    effects = world.say("prefill-0", Step([Output("r", 0, [0], seconds={"queue": 0.5, "prefill": 1.0})]))
    first = next(effect for effect in effects if isinstance(effect, StageDurations)).seconds
    assert first == {"admission": 0.5, "retry": 0.0, "prefill_queue": 0.5, "prefill": 1.0, "deliver": 0.5}
    world.say("prefill-0", Offer("r", 0, b"ticket", 1, 1))
    world.now_s = 13.0
    world.pull("decode-0", ("r", 0))
    world.flush("decode-0")
    world.now_s = 13.5
    world.decode("decode-0", ("r", 0))
    second = next(effect for effect in world.flush("decode-0") if isinstance(effect, StageDurations)).seconds
    assert sum(second.values()) == pytest.approx(1.5) and second["first_decode"] == pytest.approx(0.5)
    world.decode("decode-0", ("r", 0))
    assert not any(isinstance(effect, StageDurations) for effect in world.flush("decode-0"))


def test_too_many_requests_are_refused_with_a_time() -> None:
    world = linked_deployment(*PAIR, limits=AdmissionLimits(max_requests=1))
    world.arrive("a")
    world.arrive("b")
    end = world.terminal["b"]
    assert isinstance(end, FailRequest) and (
        end.failure.status,
        end.failure.code,
        end.failure.client_may_retry,
    ) == (
        429,
        "too_many_requests",
        True,
    )
    assert end.failure.retry_after_s and end.failure.retry_after_s >= 1
    world.do(ClientGone("a"))
    world.arrive("c")
    assert "c" in world.relay.live


def test_a_name_is_used_once() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    with pytest.raises(ValueError, match="arrived before"):
        world.arrive("r")


def test_the_memory_of_ended_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.requests.attempts.MAX_REMEMBERED", 3)
    world = linked_deployment(*PAIR)
    for index in range(5):
        world.arrive(f"r{index}")
        world.do(ClientGone(f"r{index}"))
    assert list(world.relay.attempts.ended) == ["r2", "r3", "r4"]


def test_messages_of_workers_without_an_order_are_late() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    world.arrive("r")
    for worker in ("prefill-1", "decode-0"):
        assert world.say(worker, Step([Output("r", 0, [9])])) == []
        assert world.say(worker, Failed("r", 0, "internal_error", "")) == []
    assert world.relay.late_messages == {"Output": 2, "Failed": 2} and "r" in world.relay.live


def test_a_token_said_twice_is_delivered_once() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    token = Step([Output("r", 0, [0])])
    world.say("prefill-0", token)
    world.say("prefill-0", token)
    assert world.tokens["r"] == [0] and world.relay.late_messages == {"Output": 1}


def test_a_prompt_that_was_read_no_longer_waits() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r", prompt=10)
    assert world.relay.admission.queued_tokens == 10
    world.say("prefill-0", Step([Output("r", 0, [0])]))
    assert (world.relay.admission.queued_tokens, world.relay.admission.in_flight) == (0, 1)


def test_a_request_is_not_driven_away_by_its_own_plan() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    bring_to_transfer(world)
    assert ("r", 0) in world.workers["decode-0"].held


def test_no_work_begins_after_the_deadline_even_between_ticks() -> None:
    world = linked_deployment("prefill-0", "prefill-1", *PAIR[1:])
    world.arrive("a", deadline_s=1.0)
    world.arrive("b", deadline_s=1.0)
    world.first("prefill-0", ("a", 0))
    world.fail("prefill-1", ("b", 0), "overloaded")
    world.now_s = 1.0
    for worker in ("prefill-0", "prefill-1"):
        world.flush(worker)
    ends = [world.terminal[name] for name in ("a", "b")]
    assert [end.failure.code for end in ends if isinstance(end, FailRequest)] == [
        "deadline_exceeded"
    ] * 2 and is_at_rest(world)


# ---- prefixes, and what an answer is expected to take


def test_a_second_request_with_the_same_prompt_goes_where_the_first_went() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0", "decode-1")
    for name, expected in (("a", 640), ("b", 1)):  # 10 chunks; the last token is always computed
        world.arrive(name, prompt=640)
        choice = world.relay.live[name].pair
        assert choice is not None and choice.prefill == "prefill-0"
        load = world.relay.ledger.load_of("prefill-0")
        assert load.queued_tokens == expected + (640 if name == "b" else 0)
    world.arrive("c", prompt=10)  # nothing in common: by load
    assert messages_to(world.arrive("d", prompt=63), "prefill-1")


def test_kv_that_a_decode_worker_pulls_is_expected_there() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    for name in ("a", "b"):
        world.arrive(name, prompt=640)
        world.first("prefill-0", (name, 0))
        world.flush("prefill-0")
    targets = [world.relay.live[name].pair for name in ("a", "b")]
    assert [choice.decode for choice in targets if choice] == ["decode-0", "decode-0"]
    # Room for two answers of 11 chunks each, and for the 10 of the prompt once.
    assert world.relay.ledger.load_of("decode-0").room_tokens == (11 + 11 - 10) * 64


def test_a_request_that_may_drop_kv_shares_only_whole_chunks_at_its_decode_worker() -> None:
    world = linked_deployment(*PAIR)
    bring_to_decode(world)
    for name, keep, shared in (("a", KEEP_ALL, 0), ("b", KeepSpec(0.95, 128), 128), ("c", KEEP_ALL, 639)):
        request = make_request(name, 640, 256)
        request.keep = keep
        world.do(RequestArrived(request))
        assert world.relay.live[name].shared_tokens == shared
        world.first("prefill-0", (name, 0))
        world.flush("prefill-0")


def test_a_worker_that_was_lost_has_no_prefixes() -> None:
    world = linked_deployment(*PAIR)
    bring_to_decode(world)
    assert len(world.relay.index) == 0  # 10 tokens are no chunk
    world.arrive("a", prompt=640)
    assert world.relay.index.count_shared("prefill-0", world.relay.live["a"].chunks) == 10
    chunks = world.relay.live["a"].chunks
    world.lost("prefill-0")
    assert world.relay.index.count_shared("prefill-0", chunks) == 0


def test_an_answer_that_was_written_is_expected_where_it_was_written() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("a", prompt=128, max_tokens=200)
    request = world.relay.live["a"].request
    world.first("prefill-0", ("a", 0))
    world.flush("prefill-0")
    world.pull("decode-0", ("a", 0))
    world.decode("decode-0", ("a", 0), count=130, finish="stop")
    world.flush("decode-0")
    index = world.relay.index
    text = [*request.prompt, *request.output]
    assert len(text) == 128 + 131
    assert index.count_shared("decode-0", index.name_chunks(text, "scope")) == 4
    assert index.count_shared("prefill-0", index.name_chunks(text, "scope")) == 2


def test_room_is_what_answers_take_not_what_they_may_take() -> None:
    world = linked_deployment("decode-0", split=False)
    world.arrive("a", prompt=60, max_tokens=2000)
    booked = [world.relay.ledger.load_of("decode-0").room_tokens]
    for count in (250, 30, 60):
        world.decode("decode-0", ("a", 0), count=count)
        world.flush("decode-0")
        booked.append(world.relay.ledger.load_of("decode-0").room_tokens)
    # 256 tokens are expected of an answer at first; one that grows beyond takes a chunk more at a time.
    assert booked == [320, 320, 384, 448]
    world.decode("decode-0", ("a", 0), finish="stop")
    world.flush("decode-0")
    assert len(world.relay.ledger) == 0


def test_canaries_leave_no_trace_in_the_index() -> None:
    world = linked_deployment(*PAIR)
    world.canary("canary", *PAIR)
    world.first("prefill-0", ("canary", 0))
    world.flush("prefill-0")
    world.pull("decode-0", ("canary", 0))
    world.decode("decode-0", ("canary", 0), finish="length")
    world.flush("decode-0")
    assert is_at_rest(world) and len(world.relay.index) == 0
