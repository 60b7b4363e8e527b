"""Hand-offs in the exact simulator: what the decode worker does with room, deadlines and what it calls back."""

from __future__ import annotations

from math import inf
from typing import Any

from diptych.messages import Admit, Failed, Pulled
from diptych.request import SamplingParams
from engine.sequence import EngineLimits
from planner.costs.step import StepCost
from planner.sim.exact.engine import PipelineStages, SimEngine, SimSequence
from planner.sim.exact.event_queue import EventQueue
from planner.sim.exact.links import SimLinks
from planner.sim.exact.worker import SimOrder, SimWorker
from planner.types import DECODE, LinkSpec

COST = StepCost((5e-3, 5e-5, 2e-9), ((4e-3, 1e-7, 5e-5),))


class WorkerBench:
    """One decode worker that is asked what to do; `said` is what its gateway would hear."""

    def __init__(self) -> None:
        self.agenda, self.said = EventQueue(), list[Any]()
        self.agenda.now_s = 0.0
        engine = SimEngine(EngineLimits(8, 4096), PipelineStages(COST, 1, 0.0), caching=False, skips=True)
        wires = SimLinks(self.agenda, LinkSpec(1e6))
        self.worker = SimWorker("decode-0", DECODE, [engine], self.agenda, wires, {"": 64}, self._hear)

    def _hear(self, _worker: str, what: Any, _at_s: float) -> None:
        self.said.append(what)

    def admit(self, name: str, ticket: bytes, within_s: float = inf) -> None:
        """A request of 300 tokens that generates 50."""
        order = Admit(name, 0, [], [], SamplingParams(50, 0), ticket, remaining_s=within_s)
        lists: Any = {"prompt": range(300), "output": range(1 if ticket else 0)}
        deadline_s = self.agenda.now_s + within_s
        task = SimSequence(
            name, 0, sampling=order.sampling, deadline_s=deadline_s, max_output=50, size=300, **lists
        )
        self.worker.receive(SimOrder(order, lambda: task))

    def said_of(self, kind: type[Any]) -> list[str]:
        return [what.request for what in self.said if isinstance(what, kind)]


def test_an_idle_worker_uses_room_at_once_that_was_given_back() -> None:
    """No step's end and no message lets it look again: the one that waits departs when the other one has stopped."""
    bench = WorkerBench()
    bench.admit("early", b"")
    bench.agenda.run()
    bench.admit("ready", b"prefill-0")
    bench.agenda.run()
    assert bench.said_of(Pulled) == ["ready"]
    assert list(bench.worker.fetchers[0].admission.waiting) == ["early#0"]


def test_a_decode_worker_gives_up_what_is_too_late() -> None:
    """As `decode_worker.worker.DecodeWorker` does, without waiting for its gateway to say so."""
    bench = WorkerBench()
    bench.admit("first", b"prefill-0")
    bench.admit("late", b"prefill-0", within_s=0.05)
    bench.admit("last", b"prefill-0")
    bench.agenda.run()
    assert [(what.request, what.code) for what in bench.said if isinstance(what, Failed)] == [
        ("late", "deadline_exceeded")
    ]
    assert bench.said_of(Pulled) == ["first", "last"]
