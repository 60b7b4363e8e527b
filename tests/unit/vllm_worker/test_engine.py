"""What the engine adds to vLLM: aborts, deadlines, limits, rests, and what becomes of saved and loaded KV."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import pytest

from diptych.eviction_spec import KeepSpec
from diptych.messages import Failed, Output
from diptych.request import Grammar
from engine.sequence import Sequence, SequenceRefused
from engine.step_work import StepWork
from tests.unit.vllm_worker.fake_port import FACTS, FakePort, sequence
from vllm_worker.engine import FREE_STEPS, MAX_REST_S, VllmEngine
from vllm_worker.port import ComputedPart, LoadPlan, PortCounts, PortOutput, PortRefused, SavedKv


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def port() -> FakePort:
    return FakePort()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(port: FakePort, clock: Clock) -> VllmEngine:
    return VllmEngine(port, clock)


def outputs_of(
    engine: VllmEngine, port: FakePort, clock: Clock, *outputs: PortOutput
) -> list[Output | Failed]:
    port.script.append(list(outputs))
    return [one.message for one in engine.step(clock)]


def test_tokens_become_messages_with_stages(engine: VllmEngine, port: FakePort, clock: Clock) -> None:
    seq = sequence(priority=4, root=b"\x05\x06")
    engine.add(seq, 90.0)
    assert (port.requests[0].priority, port.requests[0].salt) == (4, "0506")
    first = PortOutput("r#1", [7], cached_tokens=64, started_s=94.0)
    assert outputs_of(engine, port, clock, first) == [
        Output("r", 1, [7], seconds={"queue": 4.0, "prefill": 6.0}, cached_tokens=64)
    ]
    assert outputs_of(engine, port, clock, PortOutput("r#1", [8], finish="stop")) == [
        Output("r", 1, [8], finish="stop")
    ]
    assert seq.output == [7, 8]
    assert not list(engine.sequences())


def test_without_an_address_prefixes_are_not_shared(engine: VllmEngine, port: FakePort) -> None:
    engine.add(sequence("a"), 0.0)
    engine.add(sequence("b"), 0.0)
    assert port.requests[0].salt != port.requests[1].salt != ""


def test_an_error_ends_only_its_request(engine: VllmEngine, port: FakePort, clock: Clock) -> None:
    engine.add(sequence("a"), 0.0)
    engine.add(sequence("b"), 0.0)
    messages = outputs_of(
        engine, port, clock, PortOutput("a#1", [], finish="error", error="it broke"), PortOutput("b#1", [5])
    )
    assert messages[0] == Failed("a", 1, "internal_error", "it broke")
    assert isinstance(messages[1], Output) and [seq.id for seq in engine.sequences()] == ["b"]


@pytest.mark.parametrize(
    ("sampling", "begun", "started_s", "code"),
    [
        ({}, False, None, "internal_error"),
        ({"grammar": Grammar("regex", "a")}, False, None, "invalid_grammar"),
        ({"grammar": Grammar("regex", "a")}, False, 99.0, "internal_error"),
        ({"grammar": Grammar("regex", "a")}, True, None, "internal_error"),
    ],
)
def test_only_a_grammar_that_never_started_does_not_compile(
    engine: VllmEngine, port: FakePort, clock: Clock, sampling: Any, begun: bool, started_s: Any, code: str
) -> None:
    engine.add(sequence(sampling=sampling), 0.0)
    if begun:
        outputs_of(engine, port, clock, PortOutput("r#1", [4]))
    (message,) = outputs_of(engine, port, clock, PortOutput("r#1", [], finish="error", started_s=started_s))
    assert isinstance(message, Failed) and message.code == code


def test_errors_of_a_step_with_a_failed_load_can_be_retried(
    engine: VllmEngine, port: FakePort, clock: Clock
) -> None:
    engine.adopt(sequence("a", output=[6]), LoadPlan((3, 5), 100), 90.0)
    engine.add(sequence("b"), 90.0)
    port.loaded_keys, port.failed_keys = ["a#1"], ["a#1"]
    ends = [PortOutput(key, [], finish="error", error="?") for key in ("a#1", "b#1")]
    messages = outputs_of(engine, port, clock, *ends)
    assert [one.code for one in messages if isinstance(one, Failed)] == ["transfer_failed"] * 2
    assert engine.take_loaded() == [("a#1", True)]


def test_refusals_keep_their_code(engine: VllmEngine, port: FakePort) -> None:
    port.refusal = PortRefused("invalid_grammar", "no", "because")
    with pytest.raises(SequenceRefused) as refused:
        engine.add(sequence(), 0.0)
    assert (refused.value.code, refused.value.why) == ("invalid_grammar", "because")
    assert not list(engine.sequences()) and engine.deadline_s is None


def test_limits_are_checked_before_vllm_is_asked(port: FakePort, clock: Clock) -> None:
    engine = VllmEngine(port, clock, max_waiting=2, max_waiting_tokens=250)
    for bad in (
        sequence(tokens=FACTS.max_model_len + 1),
        sequence(tokens=0),
        sequence(output=[1] * 8),
        sequence(keep=KeepSpec(0.5)),
    ):
        with pytest.raises(SequenceRefused) as refused:
            engine.add(bad, 0.0)
        assert refused.value.code == "internal_error"
    with pytest.raises(SequenceRefused) as refused:
        # The client may know better than to ask for it.
        engine.add(sequence(tokens=FACTS.max_model_len), 0.0)
    assert refused.value.code == "unsupported_parameter"
    engine.add(sequence("a"), 0.0)
    with pytest.raises(SequenceRefused) as refused:
        engine.add(sequence("b", tokens=200), 0.0)
    assert refused.value.code == "overloaded"
    engine.add(sequence("c"), 0.0)
    with pytest.raises(SequenceRefused) as refused:
        engine.add(sequence("d", tokens=1), 0.0)
    assert refused.value.code == "overloaded"
    # A sequence that has begun does not wait any more.
    port.script.append([PortOutput("a#1", [4])])
    engine.step(clock)
    engine.add(sequence("d", tokens=1), 0.0)
    with pytest.raises(ValueError, match="already"):
        engine.add(sequence("d", tokens=1), 0.0)


def test_deadlines_fail_and_abort(engine: VllmEngine, port: FakePort, clock: Clock) -> None:
    engine.add(sequence("late", deadline_s=101.0), 0.0)
    engine.add(sequence("gone", deadline_s=100.5), 0.0)
    engine.add(sequence("fine", deadline_s=200.0), 0.0)
    assert engine.deadline_s == 100.5
    engine.abort("gone", 1)
    assert engine.deadline_s == 101.0
    clock.now_s = 101.0
    messages = outputs_of(engine, port, clock, PortOutput("late#1", [9]), PortOutput("fine#1", [9]))
    assert [type(message) for message in messages] == [Failed, Output]
    assert isinstance(messages[0], Failed) and messages[0].code == "deadline_exceeded"
    assert port.aborted == ["gone#1", "late#1"]
    assert engine.deadline_s == 200.0


def test_aborts_take_older_attempts_and_no_newer(engine: VllmEngine, port: FakePort) -> None:
    for epoch in (1, 2, 3):
        engine.add(sequence("r", epoch), 0.0)
    engine.add(sequence("other"), 0.0)
    assert [seq.key for seq in engine.abort("r", 2)] == ["r#1", "r#2"] == port.aborted
    assert [seq.key for seq in engine.sequences()] == ["r#3", "other#1"]


def test_saved_kv_comes_with_its_sequence(engine: VllmEngine, port: FakePort, clock: Clock) -> None:
    seq = sequence(hold_kv=True)
    engine.add(seq, 0.0)
    assert port.requests[0].save and not port.requests[0].defer_first
    (message,) = outputs_of(engine, port, clock, PortOutput("r#1", [7], finish="saved"))
    assert isinstance(message, Output) and message.finish is None
    assert list(engine.sequences()) == [seq] and engine.take_saved() == []
    saved = SavedKv("r#1", (4, 2), 100)
    port.saved_kv.append(saved)
    engine.step(clock)
    assert list(engine.sequences()) == [seq], "it is here until it is taken"
    assert engine.take_saved() == [(seq, saved)]
    assert (seq.slabs, seq.computed) == ([4, 2], 100)
    assert not list(engine.sequences())


def test_saved_kv_of_an_aborted_attempt_has_no_sequence(
    engine: VllmEngine, port: FakePort, clock: Clock
) -> None:
    saved = [SavedKv("a#1", (1,), 100), SavedKv("b#1", (2,), 100)]
    for name in ("a", "b"):
        engine.add(sequence(name, hold_kv=True), 0.0)
        outputs_of(engine, port, clock, PortOutput(f"{name}#1", [7], finish="saved"))
    engine.abort("a", 1)
    port.saved_kv = saved[:]
    engine.step(clock)
    # The second one is aborted between its arrival and the role's look.
    assert [seq.key for seq in engine.abort("b", 1)] == ["b#1"]
    assert engine.take_saved() == [(None, saved[0]), (None, saved[1])]


@pytest.mark.parametrize(
    ("changes", "defer", "save"),
    [
        ({"sampling": {"max_tokens": 1}}, False, False),
        ({"sampling": {"max_tokens": 3}, "output": [1, 2]}, False, False),
        ({"sampling": {"max_tokens": 0, "prompt_logprobs": 0}}, False, False),
        ({"tokens": FACTS.max_model_len - 1}, False, False),
        ({"sampling": {"max_tokens": 2}}, False, True),
        ({"tokens": FACTS.max_model_len - 1}, True, True),
    ],
)
def test_only_what_goes_on_is_saved(
    engine: VllmEngine, port: FakePort, changes: dict[str, Any], defer: bool, save: bool
) -> None:
    engine.add(sequence(hold_kv=True, **changes), 0.0, defer)
    assert port.requests[0].save is save
    assert port.requests[0].defer_first is (save and defer)


def test_loads_are_reported_with_their_failures(engine: VllmEngine, port: FakePort, clock: Clock) -> None:
    plan = LoadPlan((3, 5), 100)
    for name in ("a", "b"):
        engine.adopt(sequence(name, output=[6]), plan, 90.0)
    assert port.requests[0].load == plan
    port.loaded_keys, port.failed_keys = ["a#1", "b#1"], ["b#1"]
    (message,) = outputs_of(engine, port, clock, PortOutput("a#1", [8], cached_tokens=64, started_s=92.0))
    assert engine.take_loaded() == [("a#1", False), ("b#1", True)]
    assert engine.take_loaded() == []
    # What came over is not reported as cached, and the stages are those of a decode worker.
    assert isinstance(message, Output) and message.cached_tokens == 0
    assert message.seconds == {"decode_queue": 2.0, "decode_first": 8.0}


@pytest.mark.parametrize(("tokens", "fits"), [(99, False), (100, True), (101, True), (102, False)])
def test_adopted_kv_must_fit_the_tokens(engine: VllmEngine, tokens: int, fits: bool) -> None:
    seq, plan = sequence(output=[6]), LoadPlan((3, 5), tokens)
    if fits:
        return engine.adopt(seq, plan, 0.0)
    with pytest.raises(SequenceRefused):
        engine.adopt(seq, plan, 0.0)
    assert not list(engine.sequences())


def test_a_waiting_engine_rests_longer_and_longer(engine: VllmEngine, port: FakePort, clock: Clock) -> None:
    engine.add(sequence(deadline_s=1e9), 0.0)
    port.is_waiting_only = True
    for _ in range(FREE_STEPS):
        engine.step(clock)
        assert engine.has_work, "a copy takes a step or two"
    rests = []
    for _ in range(12):
        engine.step(clock)
        assert not engine.has_work
        assert engine.deadline_s is not None
        rests.append(engine.deadline_s - clock.now_s)
        clock.now_s = engine.deadline_s
        assert engine.has_work
    assert rests == sorted(rests) and rests[0] < 0.005
    assert rests[-1] == pytest.approx(MAX_REST_S)


def test_news_end_a_rest(engine: VllmEngine, port: FakePort, clock: Clock) -> None:
    engine.add(sequence("a"), 0.0)
    port.is_waiting_only = True
    for _ in range(FREE_STEPS + 3):
        engine.step(clock)
    rests = [engine.has_work]
    port.is_waiting_only = False
    assert [*rests, engine.has_work] == [False, True], "what was waited for has come"
    port.is_waiting_only = True
    engine.add(sequence("b"), 0.0)
    assert engine.has_work
    for _ in range(FREE_STEPS + 3):
        engine.step(clock)
    rests = [engine.has_work]
    engine.abort("b", 1)
    assert [*rests, engine.has_work] == [False, True]


def test_an_idle_engine_takes_no_steps(engine: VllmEngine, port: FakePort, clock: Clock) -> None:
    assert not engine.has_work and engine.deadline_s is None
    assert engine.step(clock) == [] and port.steps == 0


def test_statistics(engine: VllmEngine, port: FakePort, clock: Clock) -> None:
    engine.add(sequence("a", tokens=70), 0.0)
    engine.adopt(sequence("b", output=[1]), LoadPlan((1, 2), 100), 0.0)
    port.counts = PortCounts(
        running=1,
        waiting=1,
        used_blocks=4,
        cached_blocks=3,
        step_tokens=70,
        prefix_queries=9,
        prefix_hits=8,
        preemptions=2,
    )
    stats = engine.stats
    assert (stats.waiting_tokens, stats.deferred) == (171, 1)
    engine.step(clock)
    port.counts = PortCounts(preemptions=2)
    engine.step(clock)
    engine.record_send_time(0.5)
    stats = engine.stats
    assert (stats.steps, stats.step_tokens, stats.step_parts["send"]) == (1, 70, 0.5)
    assert stats.preemptions == {"recompute": 2} and sum(stats.step_sizes) == 1
    assert stats.slabs_total == FACTS.num_blocks


class Recorder:
    """Keeps what an observer is told."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.steps: list[tuple[float, float, list[tuple[str, int, list[int]]], int]] = []

    def on_sequence_arrived(self, seq: Sequence, now_s: float) -> None:
        """Keep its key."""
        self.arrived.append(seq.key)

    def on_decisions(self, prompts: int, answers: int, seconds: float) -> None:
        """Never called."""
        raise AssertionError("vLLM drops no KV")

    def on_step_end(
        self,
        begun_s: float,
        ended_s: float,
        works: Many[tuple[Sequence, StepWork]],
        messages: Many[Output | Failed],
    ) -> None:
        """Keep what ran."""
        ran = [(seq.key, work.start, list(work.tokens)) for seq, work in works]
        self.steps.append((begun_s, ended_s, ran, len(messages)))


def test_an_observer_learns_what_steps_computed(port: FakePort, clock: Clock) -> None:
    recorder = Recorder()
    engine = VllmEngine(port, clock, observer=recorder)
    engine.add(sequence("a", tokens=5), 0.0)
    engine.adopt(sequence("b", output=[70]), LoadPlan((1, 2), 100), 0.0)
    assert recorder.arrived == ["a#1", "b#1"]
    port.parts = [ComputedPart("a#1", 2, 3), ComputedPart("b#1", 100, 1), ComputedPart("gone#1", 0, 4)]
    outputs_of(engine, port, clock, PortOutput("a#1", [9], finish="stop"), PortOutput("b#1", [8]))
    assert recorder.steps == [(100.0, 100.0, [("a#1", 2, [2, 3, 4]), ("b#1", 100, [70])], 2)]
