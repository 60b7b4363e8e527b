"""Failed attempts and lost workers: who gets another attempt, and what the client hears if there is none."""

from __future__ import annotations

import pytest

from diptych.messages import (
    SILENCE_S,
    Abort,
    Admit,
    Drain,
    Failed,
    Offer,
    Output,
    Prefill,
    Step,
    SwitchRole,
)
from diptych.request import RequestStage
from router.effects import (
    AttemptRetried,
    ChosenPair,
    ClientGone,
    FailRequest,
    FinishRequest,
    WorkerCommand,
    WorkerLost,
)
from router.requests.attempts import MAX_LOSSES
from tests.unit.router.fake_deployment import (
    PAIR,
    RECOVERY_S,
    bring_to_decode,
    bring_to_transfer,
    is_at_rest,
    linked_deployment,
    make_hello,
    messages_to,
)
from tests.unit.router.passing_time import wait


@pytest.mark.parametrize("code", ["transfer_failed", "kv_corrupt", "stale_ticket"])
def test_a_failed_hand_off_is_read_again_twice(code: str) -> None:
    world = linked_deployment(*PAIR)
    key = bring_to_transfer(world)
    world.fail("decode-0", key, code)
    effects = world.flush("decode-0")
    abort, again = messages_to(effects, "prefill-0")
    assert abort == Abort("r", 0)
    assert isinstance(again, Prefill) and (again.epoch, again.output) == (1, [0])
    assert AttemptRetried("r", "kv_transfer_failed", 1, 1) in effects
    assert [one.why for one in effects if isinstance(one, AttemptRetried)] == [f"{code} at decode-0"]
    for epoch in (1, 2):
        assert "r" in world.relay.live
        world.first("prefill-0", ("r", epoch))
        world.flush("prefill-0")
        assert world.tokens["r"] == list(range(epoch + 1))
        world.fail("decode-0", ("r", epoch), code)
        world.flush("decode-0")
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and end.failure.code == "kv_transfer_failed" and is_at_rest(world)


def test_a_third_attempt_meets_nobody_who_failed_an_earlier_one() -> None:
    world = linked_deployment(*(f"{role}-{number}" for role in ("prefill", "decode") for number in range(3)))
    world.arrive("r")
    met: list[str] = []
    for epoch in range(3):
        key = ("r", epoch)
        (reader,) = (name for name, worker in world.workers.items() if key in worker.held)
        world.first(reader, key)
        world.flush(reader)
        (writer,) = (name for name, worker in world.workers.items() if key in worker.held and name != reader)
        world.fail(writer, key, "transfer_failed")
        world.flush(writer)
        met += [reader, writer]
    assert len(set(met)) == 6


def test_an_overloaded_worker_is_avoided() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    world.arrive("r")
    world.fail("prefill-0", ("r", 0), "overloaded")
    assert [type(m) for m in messages_to(world.flush("prefill-0"), "prefill-1")] == [Prefill]
    world.fail("prefill-1", ("r", 1), "overloaded")
    assert [type(m) for m in messages_to(world.flush("prefill-1"), "prefill-0")] == [Prefill], (
        "the other is free by now"
    )
    world.fail("prefill-0", ("r", 2), "overloaded")
    world.flush("prefill-0")
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and (
        end.failure.status,
        end.failure.code,
        end.failure.client_may_retry,
    ) == (503, "overloaded", True)


def test_an_overloaded_worker_that_is_the_only_one_is_not_asked_again() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    world.fail("prefill-0", ("r", 0), "overloaded")
    world.flush("prefill-0")
    end = world.terminal["r"]
    assert (
        isinstance(end, FailRequest)
        and (end.failure.status, end.failure.code) == (503, "overloaded")
        and end.failure.retry_after_s == 1.0
    )


def test_a_draining_worker_is_chosen_no_more() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    world.arrive("a")
    world.fail("prefill-0", ("a", 0), "draining")
    world.flush("prefill-0")
    assert messages_to(world.arrive("b"), "prefill-1") and ("b", 0) in world.workers["prefill-1"].held


@pytest.mark.parametrize(
    ("code", "status"),
    [("internal_error", 500), ("invalid_grammar", 400), ("no_token_left", 400), ("unheard_of", 500)],
)
def test_what_may_break_every_worker_is_not_tried_again(code: str, status: int) -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    world.arrive("r")
    world.fail("prefill-0", ("r", 0), code)
    world.flush("prefill-0")
    end = world.terminal["r"]
    assert (
        isinstance(end, FailRequest)
        and (end.failure.status, end.failure.client_may_retry) == (status, False)
        and is_at_rest(world)
    )


def test_prefill_worker_lost_before_a_token_goes_to_another() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    world.arrive("r")
    world.workers["prefill-0"].alive = False
    effects = world.lost("prefill-0")
    assert messages_to(effects, "prefill-0") == []
    again = messages_to(effects, "prefill-1")[0]
    assert isinstance(again, Prefill) and (again.epoch, again.output) == (1, [])


def test_prefill_worker_lost_during_the_transfer_goes_to_another_with_its_tokens() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    bring_to_transfer(world)
    world.workers["prefill-0"].alive = False
    effects = world.lost("prefill-0")
    assert Abort("r", 0) in messages_to(effects, "decode-0")
    again = messages_to(effects, "prefill-1")[0]
    assert isinstance(again, Prefill) and (again.epoch, again.output) == (1, [0])


def test_prefill_worker_lost_after_the_transfer_is_not_noticed() -> None:
    world = linked_deployment(*PAIR)
    key = bring_to_decode(world)
    world.workers["prefill-0"].alive = False
    world.lost("prefill-0")
    assert "r" not in world.terminal
    world.decode("decode-0", key, finish="stop")
    world.flush("decode-0")
    assert world.terminal["r"] == FinishRequest("r", "stop")


def test_without_the_only_decode_worker_everything_waits_and_then_fails_with_a_time() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("fresh")
    bring_to_transfer(world, "begun")
    bring_to_decode(world, "streaming")
    world.workers["decode-0"].alive = False
    world.lost("decode-0")
    assert world.waiting == {"fresh", "begun", "streaming"} and not world.workers["prefill-0"].held
    wait(world, RECOVERY_S - 0.5)
    assert not world.terminal
    wait(world, 1.0)
    ends = {name: end for name, end in world.terminal.items() if isinstance(end, FailRequest)}
    assert {
        name: (end.failure.status, end.failure.code, end.failure.client_may_retry)
        for name, end in ends.items()
    } == dict.fromkeys(("fresh", "begun", "streaming"), (503, "worker_lost", True))
    assert all(end.failure.retry_after_s for end in ends.values()) and is_at_rest(world)


def test_a_planned_decode_worker_that_is_lost_is_replaced() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    world.arrive("r")
    assert world.relay.live["r"].pair == ChosenPair("prefill-0", "decode-0")
    world.workers["decode-0"].alive = False
    world.lost("decode-0")
    assert world.relay.live["r"].pair == ChosenPair("prefill-0", "decode-1")
    assert world.relay.live["r"].request.epoch == 0, "nothing was lost, nothing begins again"


@pytest.mark.parametrize("how", ["restarts", "relinks"])
def test_a_hello_over_a_new_link_ends_what_the_old_one_carried(how: str) -> None:
    world = linked_deployment(*PAIR)
    bring_to_decode(world)
    world.join("decode-0") if how == "restarts" else world.relink("decode-0")
    assert world.waiting == {"r"} and not world.workers["decode-0"].held
    effects = world.flush("decode-0")  # it is linked again, and the request goes on
    again = messages_to(effects, "prefill-0")[0]
    assert isinstance(again, Prefill) and (again.epoch, again.output) == (1, [0])
    world.first("prefill-0", ("r", 1))
    world.flush("prefill-0")
    world.pull("decode-0", ("r", 1))
    world.decode("decode-0", ("r", 1), finish="stop")
    world.flush("decode-0")
    assert (
        world.tokens["r"] == [0, 1, 2]
        and world.terminal["r"] == FinishRequest("r", "stop")
        and is_at_rest(world)
    )


def test_silence_is_loss() -> None:
    world = linked_deployment(*PAIR)
    bring_to_decode(world)
    wait(world, SILENCE_S + 0.5, silent="decode-0")
    assert set(world.relay.fleet.workers) == {"prefill-0"} and world.waiting == {"r"}


def test_an_answer_stays_with_the_fingerprint_it_began_with() -> None:
    world = linked_deployment(*PAIR)
    for name in ("prefill-1", "decode-1"):  # the other version of a rollout
        world.join(name)
        world.relay.fleet.remove_worker(name, "")
        world.relay.fleet.on_message(name, make_hello(name, 9, fingerprint="g"), 0.0)
    world.link("decode-1", "prefill-1")
    assert world.relay.fleet.linked_pairs() == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
    bring_to_transfer(world, "begun")
    world.arrive("fresh")
    world.workers["prefill-0"].alive = False
    world.lost("prefill-0")
    assert world.waiting == {"begun"}
    assert ("fresh", world.relay.live["fresh"].request.epoch) in world.workers["prefill-1"].held
    wait(world, RECOVERY_S + 0.5)
    assert isinstance(world.terminal["begun"], FailRequest) and "fresh" not in world.terminal


def test_what_an_earlier_attempt_still_says_is_late() -> None:
    world = linked_deployment(*PAIR)
    key = bring_to_transfer(world)
    world.fail("decode-0", key, "kv_corrupt")
    world.flush("decode-0")
    for message in (
        Step([Output("r", 0, [9])]),
        Offer("r", 0, b"", 1, 1),
        Failed("r", 0, "internal_error", ""),
    ):
        assert world.say("prefill-0", message) == []
    assert world.tokens["r"] == [0] and world.relay.live["r"].request.epoch == 1


# ---- an answer goes on elsewhere


def test_a_stream_goes_on_at_another_decode_worker() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    key = bring_to_decode(world)
    world.decode("decode-0", key, count=3)
    world.flush("decode-0")
    world.workers["decode-0"].alive = False
    effects = world.lost("decode-0")
    assert AttemptRetried("r", "worker_lost", 1, 4) in effects
    again = messages_to(effects, "prefill-0")[0]
    assert isinstance(again, Prefill) and (again.epoch, again.output) == (1, [0, 1, 2, 3])
    world.first("prefill-0", ("r", 1))
    world.flush("prefill-0")
    world.pull("decode-1", ("r", 1))
    world.decode("decode-1", ("r", 1), finish="length")
    world.flush("decode-1")
    assert world.tokens["r"] == [0, 1, 2, 3, 4, 5] and world.terminal["r"] == FinishRequest("r", "length")
    assert is_at_rest(world)


def test_a_request_outlives_eight_losses_and_no_more() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    for losses in range(MAX_LOSSES + 1):
        assert "r" in world.relay.live, losses
        world.join("prefill-0", ended="alive")  # it was cut off: so often killed, it would be a suspect
        world.flush("decode-0")
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and end.failure.code == "worker_lost" and is_at_rest(world)


def test_a_ticket_outlives_the_decode_worker_that_was_to_use_it() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    key = bring_to_transfer(world)
    world.workers["decode-0"].alive = False
    effects = world.lost("decode-0")
    admit = messages_to(effects, "decode-1")[0]
    assert isinstance(admit, Admit) and (admit.epoch, admit.ticket) == (0, b"ticket")
    assert messages_to(effects, "prefill-0") == [], "nothing is read again"
    world.pull("decode-1", key)
    world.flush("decode-1")
    assert (
        world.relay.live["r"].request.stage is RequestStage.DECODING and not world.workers["prefill-0"].held
    )


def test_a_worker_hears_of_an_attempt_once() -> None:
    """It takes a second order of the same epoch for an old message."""
    world = linked_deployment(*PAIR)
    bring_to_transfer(world)
    world.relink("decode-0")
    again = messages_to(world.flush("decode-0"), "prefill-0")
    assert [type(message) for message in again] == [Prefill] and world.relay.live["r"].request.epoch == 1


def test_a_decode_worker_that_has_to_end_hands_its_streams_on() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    key = bring_to_decode(world)
    world.do(WorkerCommand("decode-0", Drain()))
    assert "r" in world.relay.live and world.relay.fleet.workers["decode-0"].draining
    world.fail("decode-0", key, "draining")
    again = messages_to(world.flush("decode-0"), "prefill-0")[0]
    assert isinstance(again, Prefill) and again.output == [0]
    assert world.relay.live["r"].pair == ChosenPair("prefill-0", "decode-1")


def test_a_draining_worker_gets_nothing_new() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    assert messages_to(world.do(WorkerCommand("prefill-0", Drain())), "prefill-0") == [Drain()]
    assert messages_to(world.arrive("r"), "prefill-1")
    assert world.do(WorkerCommand("stranger", Drain())) == []


def test_a_worker_changes_pools() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    world.do(WorkerCommand("decode-1", SwitchRole("prefill")))
    assert world.workers["decode-1"].next_role == "prefill"
    world.switch_role("decode-1", "prefill")
    world.flush("decode-0")
    assert world.relay.find_pairs() == [("decode-1", "decode-0"), ("prefill-0", "decode-0")]
    for name in ("a", "b"):
        world.arrive(name)
    assert {world.relay.live[name].source for name in ("a", "b")} == {"decode-1", "prefill-0"}


def test_corrupt_kv_of_a_pair_is_reported_to_the_fleet() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    for name in ("a", "b", "c"):
        world.arrive(name)
        source = world.relay.live[name].source
        assert source is not None
        world.first(source, (name, 0))
        world.flush(source)
        world.fail("decode-0", (name, 0), "kv_corrupt")
        world.flush("decode-0")
        assert world.relay.live[name].source != source, "the other reads it again"
        world.do(ClientGone(name))
    assert world.relay.fleet.workers["decode-0"].links.keys() == {"prefill-1"}


def test_late_answers_of_a_stream_that_went_on_elsewhere_are_dropped() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    key = bring_to_decode(world)
    world.do(WorkerLost("decode-0", "decode-0/1", "silent"))
    world.say("decode-0", Step([Output(*key, [7])]))
    assert world.tokens["r"] == [0] and world.relay.late_messages["Step"] == 1
