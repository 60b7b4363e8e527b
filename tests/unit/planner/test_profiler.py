"""From logs of steps to costs: what is noted comes back, costs that made the steps are found, pauses are no steps."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from planner import profiler
from planner.cost import StepCost
from planner.hardware import device
from planner.profile import Overheads, load, save
from planner.profiler import Life, Move, Step, fit_costs, kind_of, link_of, overheads, parse
from planner.shape import known
from planner.terms import Batch, Split
from services.worker.steps import Recorded, StepLog
from tests.unit.engine.fakes import Bench, sampling, sequence

TRUTH = StepCost((2e-3, 1e-4, 2e-8), ((1e-3, 2e-7, 1.5e-4),), shared=0.6)


def some_steps(count: int, noise: float = 0.02, seed: int = 1) -> list[Step]:
    """Steps of all kinds, as `TRUTH` has them but for noise."""
    chance, steps, now_s = random.Random(seed), list[Step](), 100.0
    for number in range(count):
        tokens = chance.choice((16, 40, 100, 256, 512)) if number % 3 != 1 else 0
        rows = chance.choice((1, 2, 5, 12, 30)) if number % 3 != 0 else 0
        start = chance.choice((0, 64, 512)) if tokens else 0
        squares = float((start + tokens) ** 2 - start**2)
        batch = Batch(tokens, squares, rows, rows * chance.choice((50, 200, 900)))
        seconds = TRUTH.step_s(batch) * chance.uniform(1.0 - noise, 1.0 + noise)
        steps.append(Step(now_s, now_s + seconds, batch))
        now_s += seconds + 1e-4
    return steps


def test_the_cost_behind_the_steps_is_found() -> None:
    found = fit_costs(some_steps(3000))
    for step in some_steps(100, noise=0.0, seed=2):
        assert found.cost.step_s(step.batch) == pytest.approx(TRUTH.step_s(step.batch), rel=0.03)
    assert set(found.errors) == {"prefill", "decode", "mixed"}
    assert all(error.held_out < 0.03 for error in found.errors.values())
    assert found.counts == {"prefill": 1000, "decode": 1000, "mixed": 1000}
    assert found.told["decode_held_out_mean"] == found.errors["decode"].held_out


def test_lines_are_balanced_so_that_all_steps_together_take_as_long_as_they_did() -> None:
    steps = [step for step in some_steps(2000, noise=0.4) if kind_of(step.batch) != "mixed"]
    found = fit_costs(steps)
    for kind in ("prefill", "decode"):
        some = [step for step in steps if kind_of(step.batch) == kind]
        assert profiler.balance(found.cost, some) == pytest.approx(1.0, abs=0.01)
    assert (found.cost.shared, found.cost.cross) == (1.0, 0.0)


def test_too_few_steps_are_a_mistake_that_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot be fitted"):
        fit_costs(some_steps(6))


def test_what_an_engine_notes_can_be_read_back(tmp_path: Path) -> None:
    bench = Bench(num_slabs=20, max_num_batched_tokens=70)
    log = StepLog(str(tmp_path / "new"), "w-0")
    engine = Recorded.of(bench.engine, log)
    engine.suit("w-0", "prefill")
    for name, length in (("a", 100), ("b", 30)):
        engine.add(sequence(name, length, sampling(3)), bench.clock())
    while engine.has_work:
        engine.step(bench.clock)
    log.close()
    (path,) = (tmp_path / "new").iterdir()
    (life,) = parse(path.read_bytes().splitlines())
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
        log.write("role", 0.0, "w-0", "decode", 0)
        log.flush()
    log.close()
    assert [record.message.split(":")[0] for record in caplog.records] == ["the log of steps ends here"]


def test_only_the_last_line_may_be_cut_short() -> None:
    lines = [json.dumps(line).encode() for line in (["role", 0.0, "w", "decode", 0], ["come", 1.0, "a"])]
    assert parse([*lines, b'["first", 2.0, "a'])[0].come == {"a": 1.0}
    for wrong in (b"nothing", b'["step", 1.0]', b"{}"):
        with pytest.raises(ConfigError, match="row 2"):
            parse([lines[0], wrong, lines[1]])
    assert parse([]) == []
    assert parse([lines[0], b'["come", 1.0, "canary-1-0"]', b'["first", 2.0, "canary-1-0"]'])[0].come == {}


@pytest.mark.parametrize(("latency_s", "speed"), [(1e-3, 2e9), (0.0, 5e8)])
def test_a_links_latency_and_speed_are_found(latency_s: float, speed: float) -> None:
    moves = [Move(size, latency_s + size / speed) for size in (400_000, 800_000, 4_000_000)]
    found = link_of(moves)
    assert found.latency_s == pytest.approx(latency_s, abs=1e-9)
    assert found.bytes_per_s == pytest.approx(speed)


def test_a_link_nobody_used_and_one_that_gets_faster_with_size_are_no_nonsense() -> None:
    assert link_of([]).bytes_per_s == math.inf
    assert link_of([Move(100, 0.5)]).latency_s == 0.5
    assert link_of([Move(100, 0.5), Move(200, 0.4)]).latency_s == pytest.approx(0.45)
    assert link_of([Move(100, 0.01), Move(200, 0.4)]).latency_s == 0.0


def test_what_goes_by_beside_the_steps_is_divided() -> None:
    reader, writer = Life("p", "prefill", 128), Life("d", "decode", 0)
    for number in range(20):
        name, at_s = str(number), 10.0 * number
        reader.come[name], reader.first[name] = at_s + 0.010, at_s + 0.050
        writer.come[name], writer.first[name] = at_s + 0.058, at_s + 0.064
        begun_s = at_s + 1.0
        for row in range(5):
            writer.steps.append(Step(begun_s, begun_s + 0.004, Batch(0, 0.0, 3, 90 + 3 * row)))
            begun_s += 0.0045
    moves = [Move(1000 * n, 0.001 + n * 0.0005) for n in range(1, 4)]  # 2 ms on average
    beside = overheads([reader, writer], [reader, writer], 0.060, moves, 4096)
    assert beside.hop_s == pytest.approx(0.003)  # half of 8 ms, less those of the link
    assert beside.gateway_s == pytest.approx(0.060 - 0.040 - 2 * 0.003)
    assert beside.step_s == pytest.approx(0.0005)
    assert (beside.link.latency_s, beside.link.bytes_per_s) == pytest.approx((0.001, 2e6))


def test_without_hand_offs_a_message_takes_its_part_of_what_is_not_work() -> None:
    life = Life("c", "decode", 0, come={"a": 1.0}, first={"a": 1.03})
    beside = overheads([life], [life], 0.05, [], 4096)
    assert beside.gateway_s == pytest.approx(0.01) and beside.hop_s == pytest.approx(0.005)
    assert beside.step_s == 0.0


def test_a_profile_is_written_and_read_back(tmp_path: Path) -> None:
    costs = fit_costs(some_steps(900))
    made = profiler.profile(
        known("embedded"), device("cpu"), Split(), 43_648, costs, Overheads(1e-3, 2e-4, 3e-5), "measured"
    )
    save(made, tmp_path / "p.json")
    again = load(tmp_path / "p.json")
    assert again.cost(Split()) == costs.cost
    assert again.kv_tokens(Split()) == 43_648
    assert again.overheads == made.overheads
    assert again.fit_error == made.fit_error


def test_where_most_steps_do_both_all_are_fitted_together() -> None:
    mixed = [step for step in some_steps(6000) if kind_of(step.batch) == "mixed"]
    others = [step for step in some_steps(60, seed=3) if kind_of(step.batch) != "mixed"]
    found = fit_costs([*mixed, *others])
    assert set(found.errors) == {"all"} and found.errors["all"].held_out < 0.03
    for step in some_steps(100, noise=0.0, seed=2):
        assert found.cost.step_s(step.batch) == pytest.approx(TRUTH.step_s(step.batch), rel=0.05)
    with pytest.raises(ConfigError, match="the cost cannot be fitted"):
        fit_costs(mixed[:2])


def paced(worker: str, begun_s: float, batches: list[tuple[Batch, float]], pause_s: float = 0.0) -> Life:
    """One step after another, each so many times as long as `TRUTH` says."""
    life = Life(worker, "decode", 0)
    for batch, ratio in batches:
        life.steps.append(Step(begun_s, begun_s + ratio * TRUTH.step_s(batch), batch))
        begun_s = life.steps[-1].ended_s + pause_s
    return life


@pytest.mark.parametrize("most", [9, 8.2])  # rows of 8 are beside a busy worker in 89 %, 98 % of cases
def test_what_neighbours_do_is_not_taken_for_what_rows_cost(most: float) -> None:
    """Many rows are mostly written beside a busy worker, which makes all steps 1.5 times as long."""
    chance, life, other = random.Random(3), Life("decode-0", "decode", 0), Life("prefill-0", "prefill", 128)
    now_s = 0.0
    for _ in range(3000):
        rows = chance.choice((1, 2, 4, 8))
        batch = Batch(0, 0.0, rows, rows * chance.choice((50, 200, 900)))
        beside = chance.random() < rows / most
        seconds = TRUTH.step_s(batch) * (1.5 if beside else 1.0) * chance.uniform(0.9, 1.1)
        life.steps.append(Step(now_s, now_s + seconds, batch))
        if beside:
            tokens, start = chance.choice((16, 40, 100, 256)), chance.choice((0, 64, 512))
            reads = Batch(tokens, float((start + tokens) ** 2 - start**2))
            other.steps.append(Step(now_s, now_s + TRUTH.step_s(reads), reads))
        now_s += 0.1
    mixed = fit_costs(life.steps + other.steps).cost
    found = profiler.fit_apart([life, other], mixed)
    eight, one = Batch(0, 0.0, 8, 1600), Batch(0, 0.0, 1, 200)
    truth = TRUTH.step_s(eight) / TRUTH.step_s(one)
    assert mixed.step_s(eight) / mixed.step_s(one) > 1.1 * truth
    assert found.cost.step_s(eight) / found.cost.step_s(one) == pytest.approx(truth, rel=0.03)
    rhythm = profiler.rhythm(found.cost, life, [other])
    assert rhythm.beside[False] / rhythm.alone[False] == pytest.approx(1.5, rel=0.03)
    assert found.errors["decode"].held_out < 0.05


READS, WRITES = Batch(64, 4096.0), Batch(0, 0.0, 3, 300)


def test_a_workers_rhythm_is_how_its_steps_went_alone_and_beside_others() -> None:
    """First it is by itself; then another is always in a step, and takes some of the machine."""
    own = paced("decode-0", 0.0, [(READS, 1.0), (WRITES, 0.9)] * 20 + [(READS, 1.5), (WRITES, 1.2)] * 20)
    busy_s = own.steps[40].begun_s
    other = Life("decode-1", "decode", 0, [Step(busy_s, own.steps[-1].ended_s, WRITES)])
    found = profiler.rhythm(TRUTH, own, [other])
    assert found.alone == pytest.approx((0.9, 1.0))
    assert found.beside == pytest.approx((1.2, 1.5))
    assert all(tape == pytest.approx((1.0,) * 40) for tape in found.tapes)


def test_what_is_left_of_steps_keeps_its_order_and_does_not_change_the_mean() -> None:
    ratios = [1.0] * 10 + [3.0] * 10
    found = profiler.rhythm(TRUTH, paced("decode-0", 0.0, [(WRITES, ratio) for ratio in ratios]), [])
    assert found.alone == pytest.approx((2.0, 1.0)), "nobody read, here or elsewhere"
    assert found.tapes[0] == pytest.approx([ratio / 2.0 for ratio in ratios]) and found.tapes[1] == (1.0,)
    assert found.after(0.5).tapes[0] == found.tapes[0][10:] + found.tapes[0][:10]
    assert found.after(0.0) == found


def test_a_stair_in_the_cost_of_rows_is_in_the_rhythm() -> None:
    """From three rows on steps take 1.5 times what a line says; a size that was rare is drawn towards the line."""
    batches = [(Batch(0, 0.0, rows, 100 * rows), 1.5 if rows >= 3 else 1.0) for rows in (1, 2, 4) * 200]
    own = paced("decode-0", 0.0, [*batches, (Batch(0, 0.0, 6, 600), 1.5)])
    found = profiler.rhythm(TRUTH, own, [])
    one, two, three, four, five, six = (found.factor(Batch(0, 0.0, rows, 100), False) for rows in range(1, 7))
    assert four / one == pytest.approx(1.5, rel=0.1) and two / one == pytest.approx(1.0, rel=0.02)
    assert three == two and five == four, "like the next smaller size that there was"
    assert one < six < four, "there was one"
    assert found.factor(Batch(0, 0.0, 60, 100), False) == six
    steps = sum(TRUTH.step_s(batch) * found.factor(batch, False) for batch, _ in batches)
    assert steps == pytest.approx(sum(step.seconds for step in own.steps[:-1]), rel=0.02)


def test_what_is_before_a_step_is_told_by_its_rows() -> None:
    """Before two rows 2 ms, before one 1 ms; where another row alone follows, nobody knows since when it was there."""
    own, at_s = Life("decode-0", "decode", 0), 0.0
    for number in range(300):
        rows = 2 if number % 20 >= 10 else 1
        batch = Batch(0, 0.0, rows, 100 * rows + rows * number)
        own.steps.append(Step(at_s, at_s + 1e-3, batch))
        at_s += 1e-3 + (2e-3 if (number + 1) % 20 >= 10 else 1e-3)
    found = profiler.rhythm(TRUTH, own, [])
    assert found.gap_s(Batch(0, 0.0, 1, 5), 9.0) == pytest.approx(1e-3, rel=0.1)
    assert found.gap_s(Batch(0, 0.0, 7, 5), 9.0) == pytest.approx(2e-3, rel=0.1)
    assert found.gap_s(READS, 9.0) == 9.0, "of steps that write only"
    strangers = paced(
        "decode-0", 0.0, [(Batch(0, 0.0, 1, 100 + 7 * number), 1.0) for number in range(20)], 5e-3
    )
    assert profiler.rhythm(TRUTH, strangers, []).gaps_s == ()
    pauses = paced("decode-0", 0.0, [(Batch(0, 0.0, 2 + number % 2, 300), 1.0) for number in range(20)], 0.5)
    assert profiler.rhythm(TRUTH, pauses, []).gaps_s == (), "nobody knows what it did in half a second"


def test_sizes_leave_the_time_of_all_steps_as_it_was() -> None:
    """A rare size that takes three times as long as the line says is drawn towards it; the others make up for that."""
    batches = [(Batch(0, 0.0, 1, 100), 1.0)] * 160 + [(Batch(0, 0.0, 2, 200), 3.0)] * 16
    own = paced("decode-0", 0.0, batches)
    found = profiler.rhythm(TRUTH, own, [])
    told_s = sum(TRUTH.step_s(step.batch) * found.factor(step.batch, False) for step in own.steps)
    assert told_s == pytest.approx(sum(step.seconds for step in own.steps), rel=1e-6)


def test_a_rare_state_is_like_the_rest_and_a_kind_that_did_not_occur_is_as_elsewhere() -> None:
    own = paced("decode-0", 0.0, [(WRITES, 2.0)] * 20)
    other = Life("prefill-0", "prefill", 0)
    for at in (3, 9):  # two of its steps begin while the other is in one
        begun_s = own.steps[at].begun_s
        other.steps.append(Step(begun_s, begun_s + 1.7 * TRUTH.step_s(READS), READS))
    found = profiler.rhythm(TRUTH, own, [other])
    assert found.alone == found.beside == pytest.approx((2.0, 1.7))
    assert profiler.rhythm(TRUTH, Life("x", "decode", 0), []).alone == (1.0, 1.0)
