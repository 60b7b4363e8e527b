"""What eviction keeps and costs: measured, written to a profile, read again, and refused where it is not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from diptych.errors import ConfigError
from diptych.eviction_spec import FASTGEN, KeepSpec
from planner.costs.class_fit import class_batch, fit_decisions
from planner.costs.kv.eviction import DecidingCost, find_keep, keep_notes
from planner.costs.profile_file import load_profile, save_profile
from planner.costs.profiler import MeasuredStep, fit_kv_keep, parse_step_log
from planner.types import KvClassWork, KvKeep, StepBatch
from services.worker.step_log import StepLog, StepRecorder
from tests.unit.engine.fakes import EngineBench, sampling, sequence
from tests.unit.planner.costs.class_batches import COST, WORK, batches
from tests.unit.planner.small_problems import profile

KEEP = KvKeep(0.95, 0.4, 2e-6, 1e-6, KvClassWork(context=0.5))


def test_a_profile_keeps_what_was_measured(tmp_path: Path) -> None:
    made = replace(profile(), kv_keep=(KEEP, replace(KEEP, threshold=0.8)))
    save_profile(made, tmp_path / "p.json")
    read = load_profile(tmp_path / "p.json")
    assert read.kv_keep == made.kv_keep
    assert find_keep(read, 0.95) == KEEP and find_keep(read, 1.0) is None and find_keep(None, 1.0) is None
    text = (tmp_path / "p.json").read_text()
    for wrong in ('"threshold": 1.0', '"threshold": 0.0', '"threshold": 2'):
        (tmp_path / "bad.json").write_text(text.replace('"threshold": 0.95', wrong))
        with pytest.raises(ConfigError, match="not valid"):
            load_profile(tmp_path / "bad.json")


def test_what_is_not_known_is_refused_with_the_command_that_measures_it() -> None:
    known = replace(profile(), kv_keep=(KEEP,))
    for measured, why in (
        (None, "no profile is given"),
        (known, "the profile knows 0.95"),
        (profile(), "no threshold"),
    ):
        with pytest.raises(ConfigError) as caught:
            find_keep(measured, 0.9, flag="--replan-profile")
        text = "\n".join(caught.value.lines())
        assert len(caught.value.lines()) <= 6 and why in text
        assert "diptych profile --kv-keep 0.9" in text and "--replan-profile profile.json" in text
    with pytest.raises(ConfigError, match="KV of one class"):
        find_keep(known, 0.95, "raw:0.5,tq4")
    for wrong in (0.0, 1.5, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="is not possible"):
            find_keep(known, wrong)
    assert "40%" in keep_notes(KEEP)[0] and keep_notes(None) == ()


def test_the_time_of_decisions_is_found() -> None:
    draw = Random(1)
    samples = [
        (2e-6 * prompts + 5e-7 * answers, prompts, answers)
        for prompts, answers in ((draw.choice([0, 100, 900]), draw.choice([0, 300, 2000])) for _ in range(50))
    ]
    assert fit_decisions(samples) == pytest.approx((2e-6, 5e-7))
    assert fit_decisions([(1e-3, 500, 0)]) == pytest.approx((2e-6, 0.0)), "no answer was so long"
    assert fit_decisions([]) == (0.0, 0.0)


def test_costs_are_measured_apart_from_decisions() -> None:
    steps, now_s, kept = [], 0.0, KvClassWork(context=WORK.context)
    for number, batch in enumerate(batches(Random(3), 600)):
        decided = (500, 0) if number % 3 == 0 else (0, 700) if number % 3 == 1 else (0, 0)
        decide_s = 3e-6 * decided[0] + 1e-6 * decided[1]
        ended_s = now_s + COST.step_s(class_batch(batch, kept)) + decide_s
        steps.append(MeasuredStep(now_s, ended_s, batch, decide_s, decided))
        now_s = ended_s
    keep, error = fit_kv_keep(steps, COST, 0.95, 0.4, FASTGEN)
    assert (keep.threshold, keep.share, keep.rule) == (0.95, 0.4, FASTGEN)
    assert (keep.prompt_s, keep.answer_s) == pytest.approx((3e-6, 1e-6))
    assert keep.work.context == pytest.approx(WORK.context, rel=0.05) and error.mean < 0.02
    assert (keep.work.token, keep.work.square) == (1.0, 1.0), "prompts attend in full"


def test_what_an_engine_decides_is_in_its_log(tmp_path: Path) -> None:
    log = StepLog(str(tmp_path), "w-0")
    recorder = StepRecorder(log)
    bench = EngineBench(observer=recorder, caching=False, max_num_batched_tokens=512)
    recorder.log_role("w-0", "decode", 0)
    for name in ("a", "b"):
        bench.engine.add(sequence(name, 100, sampling(70), keep=KeepSpec(0.5)), 0.0)
    while bench.engine.has_work:
        bench.engine.step(bench.clock)
    log.close()
    (path,) = tmp_path.iterdir()
    (life,) = parse_step_log(path.read_bytes().splitlines())
    decided = [step.decided for step in life.steps if any(step.decided)]
    assert decided == [(200, 0), (0, 328)]
    spent = bench.engine.stats.step_parts["evict"]
    assert sum(step.decide_s for step in life.steps) == pytest.approx(spent)
    assert all(0 <= step.seconds <= step.ended_s - step.begun_s for step in life.steps)
    assert [step.decide_s for step in life.between(-1.0, 1e9).steps] == [step.decide_s for step in life.steps]


def test_a_cost_with_decisions_counts_tokens_as_there_are() -> None:
    """The batch has tokens as they cost: half the context that there is."""
    cost = DecidingCost(COST, KEEP)
    batch = StepBatch(100.0, 100.0**2, 4, 500.0)
    extra_s = 100 * 2e-6 + 1000 * 1e-6 / 64
    assert cost.step_s(batch) == pytest.approx(COST.step_s(batch) + extra_s)
    assert cost.stage_s(batch) == pytest.approx(COST.stage_s(batch) + extra_s)
