"""The arithmetic of benchmarks/against.py, and what it says of versions that cannot be compared."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import against
from benchmarks.accuracy.goodput_knee import Goodput
from benchmarks.against import NOW, OLDER, TIMES, RunFigures, build_report, read_options, read_run
from benchmarks.load.older_version import find_commit, group_options, list_flags, split_known
from diptych.errors import ConfigError, DiptychError, StartError
from planner.types import Job, JobResult
from services.bench.load_generator import LoadRun, RequestRecord


def make_figures(ttft: float, tpot: float, cpu_ms: float = 10.0, idle_share: float = 0.02) -> RunFigures:
    times = dict(zip(TIMES, (ttft, 2 * ttft, tpot, 2 * tpot), strict=True))
    return RunFigures(times, cpu_ms, idle_share, failed=1, client_share=0.3)


def test_figures_of_a_run_leave_out_its_warm_up_and_what_failed() -> None:
    run = LoadRun(12.0, 0, 5, 0.0, wall_s=10.0, cpu_s=2.0)
    for at_s, ttft_s, tpot_s, failed in (
        (0.0, 9.0, 9.0, ""), (5.0, 0.02, 0.004, ""), (6.0, 0.04, 0.006, ""), (7.0, math.inf, math.inf, "500"),
        (10.0, 0.06, 0.008, ""),
    ):  # fmt: skip
        result = JobResult(Job(at_s, 90, 40), ttft_s, tpot_s, at_s + 1.0, failed)
        run.records.append(RequestRecord(result, 40, 90, array("d"), 0.0))
    figures = read_run(run, cpu_s=5.0, idle_s=0.4)
    assert figures.times == pytest.approx({"ttft_p50": 40, "ttft_p90": 60, "tpot_p50": 6, "tpot_p90": 8})
    assert (figures.cpu_ms, figures.idle_share, figures.failed) == (1000.0, 0.04, 1)
    assert figures.client_share == 0.2


def test_ratios_are_of_the_same_round_and_idling_is_what_a_version_costs_the_other() -> None:
    runs = {
        NOW: [make_figures(20, 4, 9, 0.05), make_figures(40, 9, 9, 0.05), make_figures(30, 6, 9, 0.05)],
        OLDER: [make_figures(10, 8, 10, 0.01), make_figures(20, 9, 10, 0.01), make_figures(20, 8, 10, 0.01)],
    }
    report = build_report(runs, {})
    assert (report["ttft_ratio"], report["tpot_ratio"], report["cpu_ratio"]) == (2.0, 0.75, 0.9)
    assert report["tpot_ratios"] == [0.5, 1.0, 0.75] and report["tpot_p90_ratio"] == 0.75
    assert report[NOW]["idle_share"] == 0.01 and report[OLDER]["idle_share"] == 0.05
    assert report[NOW]["ttft_p50_ms"] == 30 and report["failed"] == 6 and report["client_cpu_share"] == 0.3
    assert "goodput_ratio" not in report


def test_goodput_is_compared_seed_by_seed() -> None:
    def found(rates: tuple[float, ...]) -> Goodput:
        return Goodput.of([{rate: [True] * 40, 2 * rate: [False] * 40} for rate in rates])

    report = build_report({}, {NOW: found((12.0, 12.0)), OLDER: found((10.0, 10.0))})
    assert report["goodput_ratio"] == pytest.approx(1.2, abs=0.001) and report["censored"] == 0
    low, high = report["goodput_interval"]
    assert low <= 1.2 <= high and "tpot_ratio" not in report
    assert report[NOW]["goodput"] > report[OLDER]["goodput"]


def test_an_older_version_is_not_given_what_it_does_not_know() -> None:
    given = group_options(["--prefill", "1", "--kv-keep=0.5", "--pools", "a", "b", "--quiet"])
    assert given == [("--prefill", "1"), ("--kv-keep=0.5",), ("--pools", "a", "b"), ("--quiet",)]
    known, left_out = split_known(given, frozenset({"--prefill", "--pools"}))
    assert known == ["--prefill", "1", "--pools", "a", "b"] and left_out == ["--kv-keep=0.5", "--quiet"]
    with pytest.raises(ConfigError, match="'1' is no option"):
        group_options(["1"])


HELP = "print('│ --prefill INTEGER   workers, as with --decode │')"


def make_checkout(folder: Path, source: str) -> Path:
    package = folder / "services" / "cli"
    package.mkdir(parents=True)
    for path in (package.parent, package):
        (path / "__init__.py").touch()
    (package / "main.py").write_text(source, encoding="utf-8")
    return folder


def test_flags_are_those_of_the_version_in_its_own_folder(tmp_path: Path) -> None:
    assert list_flags(make_checkout(tmp_path, HELP)) == {"--prefill", "--decode"}


def test_a_version_without_a_command_line_is_an_error_of_few_lines(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="serve --help-all") as raised:
        list_flags(make_checkout(tmp_path, "raise SystemExit('line\\n' * 40 + 'the last one')"))
    lines = raised.value.lines()
    assert len(lines) <= 6 and any("the last one" in line for line in lines) and "--rev" in lines[-1]


def test_an_unknown_revision_is_an_error_of_few_lines() -> None:
    for revision in ("no-such-revision", "--all", "HEAD:README.md", ""):
        with pytest.raises(ConfigError, match="no revision") as raised:
            find_commit(revision)
        assert len(raised.value.lines()) <= 6
    assert len(find_commit("HEAD")) == 40


def test_a_version_that_does_not_start_is_an_error_of_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def wait_ready(self) -> None:
            raise RuntimeError("diptych serve ended with 1: " + "\n".join(map(str, range(40))))

    @contextlib.contextmanager
    def serving(*flags: str, checkout: Path) -> Iterator[Failing]:
        yield Failing()

    monkeypatch.setattr(against, "serving_deployment", serving)
    with (
        pytest.raises(StartError, match="this version does not start") as raised,
        against.both_served(Path(), {NOW: (), OLDER: ()}),
    ):
        pass
    assert len(raised.value.lines()) <= 6


def test_an_error_ends_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["against", "--rev", "no-such-revision"])
    with pytest.raises(SystemExit) as raised:
        against.main()
    assert isinstance(raised.value.code, str) and raised.value.code.startswith("error: there is no revision")
    assert issubclass(ConfigError, DiptychError)


def test_the_short_form_runs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["against", "--rev", "HEAD", "--short"])
    short = read_options()
    assert (short.rounds, short.seconds, short.seeds) == (3, 6.0, 1)
