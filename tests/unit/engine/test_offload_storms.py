"""Storms over the engine of a block, on fakes: whatever comes, leaves and fails, each line has its own answer, once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from diptych.messages import Failed, Output
from diptych.request import Grammar
from engine.offload.block_admission import BlockAdmission
from engine.offload.engine import OffloadEngine
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import batch_chunks
from engine.offload.units import UnitResult, WorkFailure, WorkLogits, cut_works
from engine.sequence import Sequence as Line
from engine.step_work import StepWork
from tests.unit.engine.fakes import VOCAB, FakeRunner, FakeSampler, alone, place, sampling, sequence

LAYERS = 3
# Lines whose prompts end with this token are not finite, wherever they are.
BAD = VOCAB


class FakeOffloadRunner:
    """The hash model in a block: KV by batch, written in the last layer. A step that fails spoils what it changes."""

    def __init__(self, policy: BlockPolicy, draw: random.Random) -> None:
        self.policy, self.draw = policy, draw
        self.kv = [FakeRunner(batch_chunks(policy)) for _ in range(policy.batches)]
        self.disk_fails, self.open_steps = 0.0, 0

    def run_step(self, works: dict[int, list[StepWork]], last: bool) -> Generator[Sequence[UnitResult]]:
        """As `engine.offload.units.OffloadRunner.run_step`."""
        self.open_steps += 1
        assert self.open_steps == 1
        finished = False
        try:
            for mine in works.values():
                slabs = [slab for work in mine for slab in work.slabs]
                assert len(set(slabs)) == len(slabs) and len(mine) <= self.policy.rows
            for layer in range(LAYERS):
                for batch, mine in works.items():
                    for pieces in cut_works(mine, self.policy.step_tokens):
                        if self.draw.random() < self.disk_fails:
                            raise OSError("the disk failed")
                        found: list[UnitResult] = []
                        for piece in pieces:
                            if layer == 0 and BAD in piece.work.tokens:
                                found.append(WorkFailure(batch, piece.index, ValueError("not finite")))
                            if layer == LAYERS - 1:
                                rows = self.kv[batch].one(piece.work)
                                found += [
                                    WorkLogits(batch, piece.index, piece.row + i, [row])
                                    for i, row in enumerate(rows)
                                ]
                        yield found
            finished = True
        finally:
            self.open_steps -= 1
            if not finished:
                self._spoil(works)

    def _spoil(self, works: dict[int, list[StepWork]]) -> None:
        for batch, mine in works.items():
            for work in mine:
                for position in range(work.start, work.start + len(work.tokens)):
                    self.kv[batch].kv[place(work, position)] = [BAD]


def make_line(draw: random.Random, number: int) -> Line:
    """A line of some kind."""
    kind = draw.choice(
        ("plain", "plain", "open", "scored", "only scored", "stop", "grammar", "push", "bad", "resumed")
    )
    length, most = draw.choice((1, 5, 60, 64, 70, 130)), draw.choice((1, 3, 20, 70))
    asked: dict[str, Any] = {"max_tokens": 1000 if kind == "open" else most}
    if "scored" in kind:
        asked |= {"prompt_logprobs": 0, "max_tokens": 0 if kind == "only scored" else most}
    if kind == "stop":
        asked["stop_token_ids"] = tuple(range(0, VOCAB, 5))
    if kind in ("grammar", "push"):
        asked["grammar"] = Grammar("lark", "push" if kind == "push" else draw.choice(("1", "4", "bad")))
    line = sequence(f"{kind} {number}", [draw.randrange(VOCAB) for _ in range(length)], sampling(**asked))
    if kind == "bad":
        line.prompt[draw.randrange(length)] = BAD
    if kind == "resumed":
        line.output = alone(line)[: draw.randrange(most)]
    if draw.random() < 0.05:
        line.deadline_s = draw.randrange(4000)
    return line


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 400), marks=pytest.mark.slow)])
def test_each_line_has_its_own_answer_once(seeds: range) -> None:
    seen = Counter[str]()
    for seed in seeds:
        seen += run_storm(seed)
    assert all(
        seen[what] for what in ("gone", "preempted", "disk", "time", "not finite", "stop", "length")
    ), seen


def run_storm(seed: int) -> Counter[str]:
    """One storm, with all checks; returns how often what happened."""
    draw = random.Random(seed)
    policy = BlockPolicy(
        rows=draw.choice((1, 3, 4)), batches=draw.choice((1, 2, 3)), prompt_tokens=draw.choice((40, 150)),
        output_tokens=draw.choice((4, 40)), step_tokens=draw.choice((16, 100)),
    )  # fmt: skip
    runner, schedule = FakeOffloadRunner(policy, draw), BlockAdmission(policy, 300)
    engine = OffloadEngine(runner, schedule, FakeSampler(), VOCAB + 1, slice_s=3.0)
    now_s, lines, gone = 0.0, dict[str, Line](), set[str]()
    begun: dict[str, list[int]] = {}
    answers: dict[str, list[int]] = {}
    scores: dict[str, int] = {}
    ends: dict[str, str] = {}

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    def step() -> None:
        for one in engine.step(clock):
            message = one.message
            assert isinstance(message, Output | Failed)
            name = message.request
            assert name not in gone and name not in ends
            if isinstance(message, Failed):
                ends[name] = message.message
                continue
            answers[name] += message.tokens
            if message.prompt_logprobs is not None:
                scores[name] = scores.get(name, 0) + 1
                assert [one and one.token for one in message.prompt_logprobs] == [
                    None,
                    *lines[name].prompt[1:],
                ]
            if message.finish:
                ends[name] = message.finish
        schedule.check_books()

    for number in range(60):
        line = make_line(draw, number)
        if line.total < schedule.max_model_len:
            lines[line.id], begun[line.id], answers[line.id] = line, list(line.output), list(line.output)
            engine.add(line, now_s)
        runner.disk_fails = draw.choice((0.0, 0.0, 0.0, 0.02))
        for _ in range(draw.randrange(12)):
            step()
        if lines and draw.random() < 0.15:
            name = draw.choice(sorted(lines))
            if name not in ends:
                gone.add(name)
            engine.abort(name, 1)
    runner.disk_fails = 0.0
    for _ in range(100_000):
        if not engine.has_work:
            break
        step()
    assert not engine.has_work and not len(schedule) and schedule.used == 0 and runner.open_steps == 0
    assert ends.keys() | gone == lines.keys()
    seen = Counter({"gone": len(gone), "preempted": schedule.preemptions})
    for name, end in ends.items():
        line, kind = lines[name], name.rsplit(" ", 1)[0]
        line.output = begun[name]
        wanted = alone(line, schedule.max_model_len) if kind != "only scored" else []
        assert answers[name] == wanted[: len(answers[name])], name
        seen[next((word for word in ("disk", "time", "not finite") if word in end), end)] += 1
        if "disk" in end or "time" in end:
            continue
        assert (kind == "bad") == (end == "not finite"), (name, end)
        if kind in ("plain", "open", "resumed", "scored", "only scored"):
            assert end == "length" and answers[name] == wanted, name
        if "scored" in kind:
            assert scores[name] == 1
    return seen
