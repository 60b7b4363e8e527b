"""The cores of a machine in virtual time, and the gateway's processor on one of them."""

from __future__ import annotations

import pytest

from planner.sim.exact.cores import GatewayProcessor, SimCores


def test_a_worker_is_beside_others_but_not_beside_itself() -> None:
    cores = SimCores(2, {"a": (0.0, 1.0), "b": (0.5, 2.0)})
    assert not cores.busy(0.2, "a") and cores.busy(0.2, "b")
    assert cores.busy(0.5, "a") and not cores.busy(2.0, "a"), (
        "a step has begun when it begins, and not when it ends"
    )


def test_what_shares_the_cores_with_more_than_they_are_takes_longer() -> None:
    cores = SimCores(2, {"a": (0.0, 1.0), "b": (0.5, 2.0), "c": (0.5, 0.8)})
    assert [cores.stretch(at_s) for at_s in (-1.0, 0.2, 0.9, 0.6)] == [1.0, 1.0, 1.5, 2.0]


def test_a_processor_does_one_thing_after_the_other() -> None:
    """What comes to an idle one is done when it would be at rest; what comes at once after it takes its work longer."""
    processor = GatewayProcessor(SimCores(1))
    assert processor.done_s(1.0, 0.5) == 1.0
    assert processor.done_s(1.2, 0.5) == 1.5
    assert processor.done_s(1.3, 0.5) == 2.0
    assert processor.done_s(1.4, 0.0) == 2.0, "no work, but it waits"
    assert processor.done_s(9.0, 0.5) == 9.0


def test_its_work_takes_longer_beside_steps() -> None:
    processor = GatewayProcessor(SimCores(1, {"a": (0.0, 5.0)}))
    assert processor.done_s(1.0, 0.5) == 1.0
    assert processor.done_s(1.1, 0.5) == pytest.approx(2.0)
