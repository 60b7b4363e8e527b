"""From logs of steps to costs: what is noted comes back, costs that made the steps are found, pauses are no steps."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from planner.costs import profiler
from planner.costs.model import find_model
from planner.costs.profile import Overheads
from planner.costs.profile_file import load_profile, save_profile
from planner.costs.profiler import (
    MeasuredStep,
    MeasuredTransfer,
    WorkerTrace,
    fit_costs,
    fit_link,
    measure_overheads,
    parse_step_log,
    step_kind,
)
from planner.costs.step import StepCost
from planner.hardware import find_device
from planner.types import Parallelism, StepBatch
from services.worker.step_log import StepLog, StepRecorder
from tests.unit.engine.fakes import EngineBench, sampling, sequence

TRUTH = StepCost((2e-3, 1e-4, 2e-8), ((1e-3, 2e-7, 1.5e-4),), shared=0.6)


def some_steps(count: int, noise: float = 0.02, seed: int = 1) -> list[MeasuredStep]:
    """Steps of all kinds, as `TRUTH` has them but for noise."""
    chance, steps, now_s = random.Random(seed), list[MeasuredStep](), 100.0
    for number in range(count):
        tokens = chance.choice((16, 40, 100, 256, 512)) if number % 3 != 1 else 0
        rows = chance.choice((1, 2, 5, 12, 30)) if number % 3 != 0 else 0
        start = chance.choice((0, 64, 512)) if tokens else 0
        squares = float((start + tokens) ** 2 - start**2)
        batch = StepBatch(tokens, squares, rows, rows * chance.choice((50, 200, 900)))
        seconds = TRUTH.step_s(batch) * chance.uniform(1.0 - noise, 1.0 + noise)
        steps.append(MeasuredStep(now_s, now_s + seconds, batch))
        now_s += seconds + 1e-4
    return steps


def test_the_cost_behind_the_steps_is_found() -> None:
    found = fit_costs(some_steps(3000))
    for step in some_steps(100, noise=0.0, seed=2):
        assert found.cost.step_s(step.batch) == pytest.approx(TRUTH.step_s(step.batch), rel=0.03)
    assert set(found.errors) == {"prefill", "decode", "mixed"}
    assert all(error.held_out < 0.03 for error in found.errors.values())
    assert found.counts == {"prefill": 1000, "decode": 1000, "mixed": 1000}
    assert found.relative_errors["decode_held_out_mean"] == found.errors["decode"].held_out


def test_lines_are_balanced_so_that_all_steps_together_take_as_long_as_they_did() -> None:
    steps = [step for step in some_steps(2000, noise=0.4) if step_kind(step.batch) != "mixed"]
    found = fit_costs(steps)
    for kind in ("prefill", "decode"):
        some = [step for step in steps if step_kind(step.batch) == kind]
        assert profiler.measured_ratio(found.cost, some) == pytest.approx(1.0, abs=0.01)
    assert (found.cost.shared, found.cost.cross) == (1.0, 0.0)


def test_too_few_steps_are_a_mistake_that_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot be fitted"):
        fit_costs(some_steps(6))


def test_what_an_engine_notes_can_be_read_back(tmp_path: Path) -> None:
    log = StepLog(str(tmp_path / "new"), "w-0")
    recorder = StepRecorder(log)
    bench = EngineBench(num_slabs=20, max_num_batched_tokens=70, observer=recorder)
    engine = bench.engine
    recorder.log_role("w-0", "prefill", bench.scheduler.limits.saturation_tokens)
    for name, length in (("a", 100), ("b", 30)):
        engine.add(sequence(name, length, sampling(3)), bench.clock())
    while engine.has_work:
        engine.step(bench.clock)
    log.close()
    (path,) = (tmp_path / "new").iterdir()
    (life,) = parse_step_log(path.read_bytes().splitlines())
    assert (life.worker, life.role, life.saturation_tokens) == ("w-0", "prefill", 0)
    batches = [step.batch for step in life.steps]
    assert sum(batch.tokens for batch in batches) == 130
    assert sum(batch.squares for batch in batches) == 100**2 + 30**2
    assert sum(batch.rows for batch in batches) == 4  # the first token of each is the prompt's
    assert sum(batch.context for batch in batches) == 100 + 101 + 30 + 31
    assert set(life.come) == set(life.first) == {"a", "b"}
    assert all(step.seconds >= 0.0 for step in life.steps)
    assert len(life.between(-1.0, math.inf).steps) == len(life.steps) and not life.between(-1.0, -0.5).come


def test_a_log_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="log of steps"):
        StepLog(str(tmp_path / "file"), "w-0")


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / f"w-0.{os.getpid()}.steps").symlink_to("/dev/full")
    log = StepLog(str(tmp_path), "w-0")
    for _ in range(3):
        log.write_line("role", 0.0, "w-0", "decode", 0)
        log.flush()
    log.close()
    assert [record.message.split(":")[0] for record in caplog.records] == ["the log of steps ends here"]


def test_only_the_last_line_may_be_cut_short() -> None:
    lines = [json.dumps(line).encode() for line in (["role", 0.0, "w", "decode", 0], ["come", 1.0, "a"])]
    assert parse_step_log([*lines, b'["first", 2.0, "a'])[0].come == {"a": 1.0}
    for wrong in (b"nothing", b'["step", 1.0]', b"{}"):
        with pytest.raises(ConfigError, match="row 2"):
            parse_step_log([lines[0], wrong, lines[1]])
    assert parse_step_log([]) == []
    assert (
        parse_step_log([lines[0], b'["come", 1.0, "canary-1-0"]', b'["first", 2.0, "canary-1-0"]'])[0].come
        == {}
    )


@pytest.mark.parametrize(("latency_s", "speed"), [(1e-3, 2e9), (0.0, 5e8)])
def test_a_links_latency_and_speed_are_found(latency_s: float, speed: float) -> None:
    moves = [MeasuredTransfer(size, latency_s + size / speed) for size in (400_000, 800_000, 4_000_000)]
    found = fit_link(moves)
    assert found.latency_s == pytest.approx(latency_s, abs=1e-9)
    assert found.bytes_per_s == pytest.approx(speed)


def test_a_link_nobody_used_and_one_that_gets_faster_with_size_are_no_nonsense() -> None:
    assert fit_link([]).bytes_per_s == math.inf
    assert fit_link([MeasuredTransfer(100, 0.5)]).latency_s == 0.5
    assert fit_link([MeasuredTransfer(100, 0.5), MeasuredTransfer(200, 0.4)]).latency_s == pytest.approx(0.45)
    assert fit_link([MeasuredTransfer(100, 0.01), MeasuredTransfer(200, 0.4)]).latency_s == 0.0


def test_what_goes_by_beside_the_steps_is_divided() -> None:
    reader, writer = WorkerTrace("p", "prefill", 128), WorkerTrace("d", "decode", 0)
    for number in range(20):
        name, at_s = str(number), 10.0 * number
        reader.come[name], reader.first[name] = at_s + 0.010, at_s + 0.050
        writer.come[name], writer.first[name] = at_s + 0.058, at_s + 0.064
        begun_s = at_s + 1.0
        for row in range(5):
            writer.steps.append(MeasuredStep(begun_s, begun_s + 0.004, StepBatch(0, 0.0, 3, 90 + 3 * row)))
            begun_s += 0.0045
    moves = [MeasuredTransfer(1000 * n, 0.001 + n * 0.0005) for n in range(1, 4)]  # 2 ms on average
    beside = measure_overheads([reader, writer], [reader, writer], 0.060, moves)
    assert beside.hop_s == pytest.approx(0.003)  # half of 8 ms, less those of the link
    assert beside.gateway_s == pytest.approx(0.060 - 0.040 - 2 * 0.003)
    assert beside.step_s == pytest.approx(0.0005)
    assert (beside.link.latency_s, beside.link.bytes_per_s) == pytest.approx((0.001, 2e6))


def test_without_hand_offs_a_message_takes_its_part_of_what_is_not_work() -> None:
    life = WorkerTrace("c", "decode", 0, come={"a": 1.0}, first={"a": 1.03})
    beside = measure_overheads([life], [life], 0.05, [])
    assert beside.gateway_s == pytest.approx(0.01) and beside.hop_s == pytest.approx(0.005)
    assert beside.step_s == 0.0


def test_a_profile_is_written_and_read_back(tmp_path: Path) -> None:
    costs = fit_costs(some_steps(900))
    made = profiler.build_profile(
        find_model("embedded"),
        find_device("cpu"),
        Parallelism(),
        43_648,
        costs,
        Overheads(1e-3, 2e-4, 3e-5),
        "measured",
    )
    save_profile(made, tmp_path / "p.json")
    again = load_profile(tmp_path / "p.json")
    assert again.cost(Parallelism()) == costs.cost
    assert again.kv_tokens(Parallelism()) == 43_648
    assert again.overheads == made.overheads
    assert again.fit_error == made.fit_error


def test_where_most_steps_do_both_all_are_fitted_together() -> None:
    mixed = [step for step in some_steps(6000) if step_kind(step.batch) == "mixed"]
    others = [step for step in some_steps(60, seed=3) if step_kind(step.batch) != "mixed"]
    found = fit_costs([*mixed, *others])
    assert set(found.errors) == {"all"} and found.errors["all"].held_out < 0.03
    for step in some_steps(100, noise=0.0, seed=2):
        assert found.cost.step_s(step.batch) == pytest.approx(TRUTH.step_s(step.batch), rel=0.05)
    with pytest.raises(ConfigError, match="the cost cannot be fitted"):
        fit_costs(mixed[:2])
