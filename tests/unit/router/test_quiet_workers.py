"""Nothing new is given to a worker that has sent nothing for a while, long before it counts as lost."""

from __future__ import annotations

import pytest

from diptych.messages import SILENCE_S, Heartbeat, WorkerStats
from router.effects import ChosenPair, ClientGone, ClockTick
from router.workers.liveness import QUIET_AFTER_S
from tests.unit.router.fake_deployment import FakeDeployment

TICK_S = 0.1


def passes(world: FakeDeployment, seconds: float, *silent: str) -> None:
    """Time passes, in which all workers beat but the `silent` ones."""
    for _ in range(round(seconds / TICK_S)):
        world.now_s += TICK_S
        for name, worker in world.workers.items():
            if name not in silent:
                world.say(name, Heartbeat(name, worker.hello.incarnation, WorkerStats()))
            world.flush(name)
        world.do(ClockTick())


def chosen(world: FakeDeployment, name: str) -> ChosenPair | None:
    world.arrive(name)
    return world.relay.live[name].pair


@pytest.mark.parametrize("silent", ["prefill-0", "decode-0"])
def test_others_get_the_work_of_a_quiet_worker(silent: str) -> None:
    world = FakeDeployment("prefill-0", "prefill-1", "decode-0", "decode-1")
    passes(world, 1.0)
    before = chosen(world, "a")
    assert before is not None and before.prefill == "prefill-0" and before.decode == "decode-0"
    world.do(ClientGone("a"))
    passes(world, QUIET_AFTER_S + 0.5, silent)
    for number in range(3):
        choice = chosen(world, f"b{number}")
        assert choice is not None and silent not in (choice.prefill, choice.decode)
    passes(world, 0.2)
    assert world.relay.fleet.quiet == frozenset()


def test_a_request_with_only_a_quiet_worker_waits_until_that_sends_something() -> None:
    world = FakeDeployment("prefill-0", "decode-0")
    passes(world, QUIET_AFTER_S + 0.5, "decode-0")
    assert chosen(world, "a") is None and "a" in world.waiting
    passes(world, 0.2)
    assert world.relay.live["a"].pair == ChosenPair("prefill-0", "decode-0")


def test_what_a_prefill_worker_reads_goes_to_a_decode_worker_that_speaks() -> None:
    world = FakeDeployment("prefill-0", "decode-0", "decode-1")
    passes(world, 1.0)
    assert chosen(world, "a") == ChosenPair("prefill-0", "decode-0")
    passes(world, QUIET_AFTER_S + 0.5, "decode-0")
    world.first("prefill-0", ("a", 0))
    world.flush("prefill-0")
    assert world.relay.live["a"].target == "decode-1"


def test_a_gateway_that_stood_still_takes_nobody_for_quiet() -> None:
    world = FakeDeployment("prefill-0", "decode-0")
    passes(world, 1.0)
    world.now_s += (QUIET_AFTER_S + SILENCE_S / 2) / 2
    world.do(ClockTick())
    assert chosen(world, "a") == ChosenPair("prefill-0", "decode-0")
