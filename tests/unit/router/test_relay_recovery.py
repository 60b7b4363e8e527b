"""Workers that are away: who waits for them, who goes another way, and who is suspected."""

from __future__ import annotations

import pytest

from diptych.messages import Abort, Drain, Generate, Linked, Output, Prefill, Step
from diptych.request import RequestStage
from router.effects import (
    AttemptBegan,
    ChosenPair,
    ClientGone,
    ClockTick,
    FailRequest,
    FinishRequest,
    PrefilledLocally,
    RequestArrived,
    RequestQuarantined,
    WorkerCommand,
)
from router.requests.attempts import MAX_LOSSES
from router.requests.grace import WorkerGrace
from router.requests.quarantine import CLEAR_TOKENS, MAX_EXCUSED_KILLS
from router.routing.policy import NO_LINK, NO_PREFILL
from router.workers.kv_classes import AnswerVersion
from tests.unit.router.fake_deployment import (
    PAIR,
    RECOVERY_S,
    FakeDeployment,
    bring_to_decode,
    bring_to_transfer,
    is_at_rest,
    linked_deployment,
    make_request,
    messages_to,
)
from tests.unit.router.passing_time import wait

KEY = ("r", 0)


def locally(*workers: str) -> FakeDeployment:
    return linked_deployment(*(workers or PAIR), local_prefill="fallback")


def die(world: FakeDeployment, *names: str) -> None:
    for name in names:
        world.workers[name].alive = False
        world.lost(name)


# ---- waiting


def test_a_new_request_waits_for_workers_that_were_there_lately() -> None:
    world = linked_deployment(*PAIR)
    die(world, "prefill-0")
    world.arrive("r")
    assert world.waiting == {"r"}
    world.join("prefill-0")
    assert [type(message) for message in messages_to(world.flush("decode-0"), "prefill-0")] == [Prefill]
    die(world, "prefill-0")
    wait(world, RECOVERY_S + 0.5)
    world.arrive("late")
    end = world.terminal["late"]
    assert isinstance(end, FailRequest) and (
        end.failure.status,
        end.failure.code,
        end.failure.client_may_retry,
    ) == (503, "no_workers", True)
    assert end.failure.retry_after_s and not world.waiting


def test_a_gateway_that_has_never_had_a_way_says_so_at_once() -> None:
    world = FakeDeployment(*PAIR, linked=False)
    world.arrive("r")
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and end.failure.code == "no_workers" and is_at_rest(world)


def test_hope_is_by_version() -> None:
    recovery = WorkerGrace(5.0, FakeDeployment().relay.capabilities)
    assert not recovery.was_served(None, 0.0)
    f, g, coded = AnswerVersion("f", "raw"), AnswerVersion("g", "raw"), AnswerVersion("f", "tq4.s0")
    recovery.note_served({f}, 0.0)
    recovery.note_served({g}, 3.0)
    assert recovery.was_served(f, 5.0) and not recovery.was_served(f, 5.1)
    assert not recovery.was_served(coded, 5.0), "another class of the same model"
    assert (
        recovery.was_served(g, 8.0) and recovery.was_served(None, 8.0) and not recovery.was_served(None, 8.1)
    )


def test_a_stream_that_waits_may_end_by_its_client_or_its_deadline() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r", deadline_s=2.0)
    world.arrive("gone")
    die(world, "decode-0")
    world.do(ClientGone("gone"))
    world.now_s = 2.0
    world.do(ClockTick())
    end = world.terminal["r"]
    assert isinstance(end, FailRequest) and end.failure.code == "deadline_exceeded" and is_at_rest(world)


# ---- decode workers that read


def test_without_a_prefill_worker_a_decode_worker_reads_and_says_so() -> None:
    world = locally()
    die(world, "prefill-0")
    effects = world.arrive("r")
    assert [type(message) for message in messages_to(effects, "decode-0")] == [Generate]
    assert (
        PrefilledLocally("r", NO_PREFILL) in effects
        and AttemptBegan("r", 0, ChosenPair(None, "decode-0"), False) in effects
    )
    assert world.relay.find_pairs() == [(None, "decode-0")]
    world.decode("decode-0", KEY, finish="stop")
    world.flush("decode-0")
    assert world.terminal["r"] == FinishRequest("r", "stop") and is_at_rest(world)


def test_a_stream_goes_on_where_there_is_no_prefill_worker() -> None:
    world = locally("prefill-0", "decode-0", "decode-1")
    bring_to_decode(world)
    die(world, "prefill-0")
    assert world.relay.live["r"].request.epoch == 0, "it needs none"
    world.workers["decode-0"].alive = False
    again = messages_to(world.lost("decode-0"), "decode-1")[0]
    assert isinstance(again, Generate) and (again.epoch, again.output) == (1, [0])
    world.decode("decode-1", ("r", 1), finish="stop")
    world.flush("decode-1")
    assert world.tokens["r"] == [0, 1] and is_at_rest(world)


def test_prompts_go_to_prefill_workers_as_soon_as_there_is_one() -> None:
    world = locally()
    die(world, "prefill-0")
    world.arrive("a")
    world.join("prefill-0")
    assert messages_to(world.arrive("b"), "decode-0") == [], "it is being linked"
    world.flush("decode-0")
    assert ("b", 0) in world.workers["prefill-0"].held and world.relay.find_pairs() == [PAIR]


def test_a_link_that_cannot_be_made_is_a_reason_too_one_that_is_being_made_is_none() -> None:
    world = FakeDeployment(*PAIR, linked=False, local_prefill="fallback")
    assert world.relay.find_pairs() == []
    life = world.workers["prefill-0"].hello.incarnation
    world.say("decode-0", Linked("prefill-0", life, "", 0.0, 0.0, "no transport reaches it"))
    assert PrefilledLocally("r", NO_LINK) in world.arrive("r")


def test_a_draining_prefill_worker_is_no_reader() -> None:
    world = locally()
    world.do(WorkerCommand("prefill-0", Drain()))
    assert PrefilledLocally("r", NO_PREFILL) in world.arrive("r")


def test_where_it_is_not_allowed_nobody_reads_locally() -> None:
    world = linked_deployment(*PAIR)
    die(world, "prefill-0")
    assert messages_to(world.arrive("r"), "decode-0") == [] and world.relay.find_pairs() == []


def test_a_canary_goes_the_local_way() -> None:
    world = locally()
    die(world, "prefill-0")
    effects = world.canary("c", None, "decode-0")
    assert [type(message) for message in messages_to(effects, "decode-0")] == [Generate]
    assert not any(isinstance(effect, PrefilledLocally) for effect in effects)


# ---- suspects


def crash(world: FakeDeployment, name: str, ended: str) -> None:
    """A worker dies and is back at once, linked."""
    world.workers[name].alive = False
    world.lost(name)
    world.join(name, ended)
    for decode in [name for name in world.workers if name.startswith("decode")]:
        world.flush(decode)


def test_a_request_that_crashes_two_workers_is_refused_from_then_on() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    world.arrive("poison", prompt=13)
    for name in ("prefill-0", "prefill-1"):
        assert world.relay.live["poison"].source == name
        world.workers[name].alive = False
        world.lost(name)
        world.join(name, "crashed")
        world.flush("decode-0")
    end = world.terminal["poison"]
    assert isinstance(end, FailRequest) and (
        end.failure.status,
        end.failure.code,
        end.failure.client_may_retry,
    ) == (
        500,
        "request_quarantined",
        False,
    )
    effects = world.arrive("again", prompt=13)
    assert RequestQuarantined("again") in effects and isinstance(world.terminal["again"], FailRequest)
    world.arrive("innocent", prompt=14)
    assert "innocent" in world.relay.live
    world.do(ClientGone("innocent"))
    assert is_at_rest(world)


def test_workers_killed_from_outside_are_nobody_s_fault() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    for _ in range(4):
        crash(world, "prefill-0", "killed")
    assert "r" in world.relay.live and len(world.relay.quarantine) == 0


def test_a_request_that_gets_workers_killed_again_and_again_is_refused_at_last() -> None:
    """Nothing tells what kills them: perhaps a program that does so for memory."""
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    world.arrive("greedy", prompt=13)
    kills = 0
    while "greedy" in world.relay.live:
        source = world.relay.live["greedy"].source
        assert source is not None
        crash(world, source, "killed")
        kills += 1
    end = world.terminal["greedy"]
    assert (
        isinstance(end, FailRequest)
        and end.failure.code == "request_quarantined"
        and kills == MAX_EXCUSED_KILLS + 2 < MAX_LOSSES
    )
    world.arrive("innocent", prompt=14)
    assert "innocent" in world.relay.live and "greedy" not in world.relay.live


def test_suspects_run_one_at_a_time_and_innocents_are_not_harmed() -> None:
    world = linked_deployment(*PAIR)
    for name in ("a", "b", "c"):
        world.arrive(name)
    die(world, "prefill-0")
    world.join("prefill-0", "crashed")
    world.flush("decode-0")
    assert world.waiting == {"b", "c"} and ("a", 1) in world.workers["prefill-0"].held
    world.arrive("fresh")
    assert ("fresh", 0) in world.workers["prefill-0"].held, "who is not suspected passes them by"
    world.first("prefill-0", ("a", 1))
    world.flush("prefill-0")
    world.pull("decode-0", ("a", 1))
    world.decode("decode-0", ("a", 1), count=CLEAR_TOKENS)
    world.flush("decode-0")
    assert world.waiting == {"c"}, "a is cleared, b is served"
    for name in world.relay.live.copy():
        world.do(ClientGone(name))
    assert is_at_rest(world)


def test_one_that_dies_alone_again_is_held_until_there_is_word_or_patience_ends() -> None:
    world = linked_deployment("prefill-0", "prefill-1", "decode-0")
    world.arrive("r")
    for name in ("prefill-0", "prefill-1"):
        die(world, name)
    world.join("prefill-1", "")
    world.flush("decode-0")
    assert world.waiting == {"r"} and world.relay.find_pairs()
    wait(world, RECOVERY_S + 0.5)
    assert world.relay.live["r"].request.stage is RequestStage.QUEUED, "no word came"


def test_a_relink_is_no_death() -> None:
    world = linked_deployment(*PAIR)
    bring_to_transfer(world)
    world.relink("decode-0")
    assert len(world.relay.quarantine) == 0


def test_canaries_are_no_suspects() -> None:
    world = linked_deployment(*PAIR)
    world.canary("c", *PAIR)
    die(world, "prefill-0")
    assert isinstance(world.terminal["c"], FailRequest) and len(world.relay.quarantine) == 0


@pytest.mark.parametrize("output", [[], [5]])
def test_delivered_tokens_are_reported_to_the_quarantine(output: list[int]) -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    asked = make_request("r", max_tokens=50)
    asked.output = list(output)
    world.do(RequestArrived(asked))
    die(world, "prefill-0")
    world.join("prefill-0", "crashed")
    for name in ("decode-0", "decode-1"):
        world.flush(name)
    assert world.relay.quarantine.is_suspected("r")
    world.say("prefill-0", Step([Output("r", 1, [1])]))
    assert world.relay.quarantine.is_suspected("r"), "one token more is not enough"
    effects = world.do(ClientGone("r"))
    assert Abort("r", 1) in messages_to(effects, "prefill-0") and not world.relay.quarantine.is_suspected("r")
