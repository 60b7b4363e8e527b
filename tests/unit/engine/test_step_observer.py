"""An engine's observer hears of every sequence that comes, and of every step: what ran, and what it emits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from diptych.eviction_spec import KeepSpec
from diptych.messages import Failed, Output
from engine import sequence
from engine.step_work import StepWork
from tests.unit.engine import fakes
from tests.unit.engine.fakes import EngineBench, sampling


class RecordingObserver:
    def __init__(self) -> None:
        self.arrived: list[tuple[str, float]] = []
        self.ran: list[list[tuple[str, int, int]]] = []
        self.messages: list[Output | Failed] = []
        self.decided: list[tuple[tuple[int, int], float]] = []

    def on_sequence_arrived(self, seq: sequence.Sequence, now_s: float) -> None:
        self.arrived.append((seq.id, now_s))

    def on_decisions(self, prompts: int, answers: int, seconds: float) -> None:
        self.decided.append(((prompts, answers), seconds))

    def on_step_end(
        self,
        begun_s: float,
        ended_s: float,
        ran: Sequence[tuple[sequence.Sequence, StepWork]],
        messages: Sequence[Output | Failed],
    ) -> None:
        assert begun_s < ended_s
        self.ran.append([(seq.id, work.start, len(work.tokens)) for seq, work in ran])
        self.messages += messages


def test_every_arrival_and_every_step_is_observed() -> None:
    observer = RecordingObserver()
    bench = EngineBench(observer=observer)
    seen: list[Output | Failed] = []
    bench.engine.add(fakes.sequence("a", 10, sampling(2)), 5.0)
    bench.engine.add(fakes.sequence("late", 10, deadline_s=0.0), 6.0)
    while bench.engine.has_work:
        seen += [one.message for one in bench.engine.step(bench.clock)]
    seen += [one.message for one in bench.engine.step(bench.clock)]
    assert observer.arrived == [("a", 5.0), ("late", 6.0)]
    assert observer.ran == [[("a", 0, 10)], [("a", 10, 1)], []], "a step that runs nothing is one, too"
    assert observer.messages == seen and [type(one) for one in seen] == [Failed, Output, Output]


def test_a_sequence_that_goes_on_here_has_arrived_as_well() -> None:
    observer = RecordingObserver()
    bench = EngineBench(observer=observer)
    seq = fakes.sequence("a", 64, output=[1], computed=64)
    seq.slabs = bench.holdings.allocate(seq.key, 2)
    bench.engine.adopt(seq, 7.0)
    assert observer.arrived == [("a", 7.0)]


def test_decisions_are_observed_with_their_time() -> None:
    observer = RecordingObserver()
    bench = EngineBench(observer=observer, caching=False, max_num_batched_tokens=512)
    for name in ("a", "b"):
        bench.engine.add(fakes.sequence(name, 100, sampling(70), keep=KeepSpec(0.5)), 0.0)
    while bench.engine.has_work:
        bench.engine.step(bench.clock)
    assert [decided for decided, _ in observer.decided] == [
        (200, 0),
        (0, 328),
    ]
    spent = bench.engine.stats.step_parts["evict"]
    assert sum(seconds for _, seconds in observer.decided) == spent > 0


def test_a_sequence_that_is_preempted_by_its_decision_counts_with_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its decision was planned, and that took its time. And only answers say how long those of answers take."""
    observer = RecordingObserver()
    bench = EngineBench(observer=observer, caching=False, max_num_batched_tokens=512)
    bench.engine.add(seq := fakes.sequence("a", 100, sampling(70), keep=KeepSpec(0.5)), 0.0)
    bench.engine.step(bench.clock)
    assert bench.scheduler.step_time.decision_s(100) == 0, "a prompt's end says nothing of answers"
    room, refused = bench.engine.table.has_room_for_bag, iter([False])
    monkeypatch.setattr(
        bench.engine.table, "has_room_for_bag", lambda *asked: next(refused, True) and room(*asked)
    )
    while not sum(bench.engine.stats.preemptions.values()):
        bench.engine.step(bench.clock)
    assert seq.computed < 164 and observer.decided[-1][0] == (0, 164)
    seconds = observer.decided[-1][1]
    assert bench.scheduler.step_time.decision_s(164) == pytest.approx(seconds) and seconds > 0
