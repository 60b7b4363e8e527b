"""Failed attempts and lost workers: who gets another attempt, and what the client hears if there is none."""

from __future__ import annotations

import pytest

from diptych.messages import (
    Abort,
    Beat,
    Failed,
    Offer,
    Output,
    Prefill,
    Stats,
    Step,
)
from router.effects import (
    Choice,
    Fail,
    Finish,
    Retried,
    Tick,
)
from router.relay import Relay
from tests.unit.router.world import PAIR, World, at_decode, at_rest, at_transfer, hello, linked, sent


@pytest.mark.parametrize("code", ["transfer_failed", "kv_corrupt", "stale_ticket"])
def test_a_failed_hand_off_is_read_again_once(code: str) -> None:
    world = linked(*PAIR)
    key = at_transfer(world)
    world.fail("decode-0", key, code)
    effects = world.flush("decode-0")
    abort, again = sent(effects, "prefill-0")
    assert abort == Abort("r", 0)
    assert isinstance(again, Prefill) and (again.epoch, again.output) == (1, [0])
    assert effects[-1] == Retried("r", "kv_transfer_failed", 1)
    world.first("prefill-0", ("r", 1))
    world.flush("prefill-0")
    assert world.tokens["r"] == [0, 1]
    world.fail("decode-0", ("r", 1), code)
    world.flush("decode-0")
    end = world.terminal["r"]
    assert isinstance(end, Fail) and end.code == "kv_transfer_failed" and not end.retry and at_rest(world)


def test_an_overloaded_worker_is_avoided() -> None:
    world = linked("prefill-0", "prefill-1", "decode-0")
    world.arrive("r")
    world.fail("prefill-0", ("r", 0), "overloaded")
    assert [type(m) for m in sent(world.flush("prefill-0"), "prefill-1")] == [Prefill]
    world.fail("prefill-1", ("r", 1), "overloaded")
    world.flush("prefill-1")
    end = world.terminal["r"]
    assert isinstance(end, Fail) and (end.status, end.code, end.retry) == (503, "overloaded", True)


def test_a_draining_worker_is_chosen_no_more() -> None:
    world = linked("prefill-0", "prefill-1", "decode-0")
    world.arrive("a")
    world.fail("prefill-0", ("a", 0), "draining")
    world.flush("prefill-0")
    assert sent(world.arrive("b"), "prefill-1") and ("b", 0) in world.workers["prefill-1"].held


@pytest.mark.parametrize(
    ("code", "status"), [("internal_error", 500), ("invalid_grammar", 400), ("unheard_of", 500)]
)
def test_what_may_break_every_worker_is_not_tried_again(code: str, status: int) -> None:
    world = linked("prefill-0", "prefill-1", "decode-0")
    world.arrive("r")
    world.fail("prefill-0", ("r", 0), code)
    world.flush("prefill-0")
    end = world.terminal["r"]
    assert isinstance(end, Fail) and (end.status, end.retry) == (status, False) and at_rest(world)


def test_prefill_worker_lost_before_a_token_goes_to_another() -> None:
    world = linked("prefill-0", "prefill-1", "decode-0")
    world.arrive("r")
    world.workers["prefill-0"].alive = False
    effects = world.lost("prefill-0")
    assert sent(effects, "prefill-0") == []
    again = sent(effects, "prefill-1")[0]
    assert isinstance(again, Prefill) and (again.epoch, again.output) == (1, [])


def test_prefill_worker_lost_during_the_transfer_goes_to_another_with_its_tokens() -> None:
    world = linked("prefill-0", "prefill-1", "decode-0")
    at_transfer(world)
    world.workers["prefill-0"].alive = False
    effects = world.lost("prefill-0")
    assert Abort("r", 0) in sent(effects, "decode-0")
    again = sent(effects, "prefill-1")[0]
    assert isinstance(again, Prefill) and (again.epoch, again.output) == (1, [0])


def test_prefill_worker_lost_after_the_transfer_is_not_noticed() -> None:
    world = linked(*PAIR)
    key = at_decode(world)
    world.workers["prefill-0"].alive = False
    world.lost("prefill-0")
    assert "r" not in world.terminal
    world.decode("decode-0", key, finish="stop")
    world.flush("decode-0")
    assert world.terminal["r"] == Finish("r", "stop")


def test_the_only_decode_worker_lost_fails_everything_at_once() -> None:
    world = linked(*PAIR)
    world.arrive("fresh")
    at_transfer(world, "begun")
    at_decode(world, "streaming")
    world.workers["decode-0"].alive = False
    world.lost("decode-0")
    ends = {name: end for name, end in world.terminal.items() if isinstance(end, Fail)}
    assert {name: (end.code, end.retry) for name, end in ends.items()} == {
        "fresh": ("worker_lost", True),
        "begun": ("worker_lost", False),
        "streaming": ("worker_lost", False),
    }
    assert at_rest(world)


def test_a_planned_decode_worker_that_is_lost_is_replaced() -> None:
    world = linked("prefill-0", "decode-0", "decode-1")
    world.arrive("r")
    assert world.relay.live["r"].choice == Choice("prefill-0", "decode-0")
    world.workers["decode-0"].alive = False
    world.lost("decode-0")
    assert world.relay.live["r"].choice == Choice("prefill-0", "decode-1")
    assert world.relay.live["r"].request.epoch == 0, "nothing was lost, nothing begins again"


@pytest.mark.parametrize("how", ["restarts", "relinks"])
def test_a_hello_over_a_new_link_ends_what_the_old_one_carried(how: str) -> None:
    world = linked(*PAIR)
    at_decode(world)
    world.join("decode-0") if how == "restarts" else world.relink("decode-0")
    end = world.terminal["r"]
    assert isinstance(end, Fail) and end.code == "worker_lost" and at_rest(world)
    world.flush("decode-0")
    world.arrive("next")
    assert "next" in world.relay.live


def test_silence_is_loss() -> None:
    world = linked(*PAIR)
    at_decode(world)
    for _ in range(11):
        world.now_s += 0.25
        world.say("prefill-0", Beat("prefill-0", "prefill-0/1", Stats()))
        world.do(Tick())
    assert set(world.relay.fleet.members) == {"prefill-0"}
    end = world.terminal["r"]
    assert isinstance(end, Fail) and end.code == "worker_lost"


def test_a_retry_stays_with_the_fingerprint_it_began_with() -> None:
    relay = Relay()
    world = World()
    world.relay = relay
    world.join("prefill-0")
    world.join("decode-0")
    world.flush("decode-0")
    for name in ("prefill-1", "decode-1"):  # the other version of a rollout
        world.join(name)
        relay.fleet.hear(name, hello(name, 9, fingerprint="g"), 0.0)
    world.link("decode-1", "prefill-1")
    assert relay.fleet.pairs() == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
    world.arrive("r")
    world.workers["prefill-0"].alive = False
    world.lost("prefill-0")
    assert isinstance(world.terminal["r"], Fail)


def test_what_an_earlier_attempt_still_says_is_late() -> None:
    world = linked(*PAIR)
    key = at_transfer(world)
    world.fail("decode-0", key, "kv_corrupt")
    world.flush("decode-0")
    for message in (
        Step([Output("r", 0, [9])]),
        Offer("r", 0, b"", 1, 1),
        Failed("r", 0, "internal_error", ""),
    ):
        assert world.say("prefill-0", message) == []
    assert world.tokens["r"] == [0] and world.relay.live["r"].request.epoch == 1


def test_a_stream_is_not_begun_again_even_where_it_could_be() -> None:
    world = linked("prefill-0", "decode-0", "decode-1")
    at_decode(world)
    assert ("r", 0) in world.workers["decode-0"].held
    world.workers["decode-0"].alive = False
    world.lost("decode-0")
    assert isinstance(world.terminal["r"], Fail) and at_rest(world)
