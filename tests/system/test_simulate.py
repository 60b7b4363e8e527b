"""`diptych simulate` as it is typed: the paper's simulator by files, deployments in figures, and refusals."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.config.options import Config
from planner.costs.model import dims_on_cpu, find_model
from planner.costs.profile_file import PROFILE_FOLDER, built_in_profile, save_profile
from planner.hardware import NodeSpec, find_device
from planner.sim.exact.deployment import SimDeployment
from planner.sim.exact.simulate import ExactSimulation
from planner.types import Job, JobResult, LinkSpec, Parallelism
from planner.workload.traces import write_trace
from services.cli.main import main
from services.cli.simulate import report
from tests.unit.planner.paper_data import distserve

FITS = {
    "toy/opt": {},
    "facebook/opt-13b": {
        "1": {
            "prefill": [20.0, 0.1, 1e-6],
            "decoding_smallbs": [20.0, 6e-4, 0.04],
            "decoding_largebs": [8.0, 6e-4, 0.16],
            "decoding_large_small_bs_threshold": 95,
        }
    },
}
CASES = ("d66_sharegpt_pp2_r4", "v66_longbench_r1")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a profile and a trace."""
    (tmp_path / "fits.json").write_text(json.dumps(FITS))
    (tmp_path / "in.csv").write_text("arrival_s,prompt_len,output_len\n0.0,100,3\n0.5,200,1\n")
    return tmp_path


def typed(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Runs the command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["diptych", "simulate", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def compat(folder: Path, *more: object) -> list[object]:
    return [
        "--compat", "simdistserve", "--profile", folder / "fits.json", "--model", "facebook/opt-13b",
        "--trace", folder / "in.csv", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_golden_traces_come_out_as_files(name: str, tmp_path: Path) -> None:
    golden = distserve(f"golden/{name}.csv")
    with distserve("golden/cases.csv").open(newline="") as file:
        case = next(row for row in csv.DictReader(file) if row["case"] == name)
    out = tmp_path / "out.csv"
    words = [
        "--compat", "simdistserve", "--backend", case["backend"], "--model", case["model"],
        "--profile", str(distserve(f"profile_data/profiler-a100-80g.{case['backend']}.json")),
        "--tp-prefill", case["tp_prefill"], "--pp-prefill", case["pp_prefill"],
        "--tp-decode", case["tp_decode"], "--pp-decode", case["pp_decode"],
        "--trace", str(golden), "--out", str(out),
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "services.cli.main", "simulate", *words], check=True, timeout=60)
    with out.open(newline="") as made, golden.open(newline="") as file:
        found, wanted = list(csv.DictReader(made)), list(csv.DictReader(file))
    assert found[0].keys() == wanted[0].keys()
    for one, other in zip(found, wanted, strict=True):
        assert all(abs(float(one[key]) - float(other[key])) <= 0.01 for key in other)


def test_without_out_the_rows_are_printed(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, *compat(files)) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    read_ms = 20.0 + 0.1 * 100 + 1e-6 * 100**2 + 1.0 + 2.0 + 1e-4 * 100
    assert float(rows[0]["ttft_ms"]) == pytest.approx(read_ms, abs=1e-4)
    assert [row["output_len"] for row in rows] == ["3", "1"]


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("arrival_s,prompt_len,output_len\n0.0,100,3\n0.5,many,1\n", "row 3"),
        ("arrival_s,prompt_len,output_len\n0.0,100\n", "row 2"),
        ("arrival_s,prompt_len,output_len\n-1.0,100,3\n", "row 2"),
        ("arrival_s,prompt_len,output_len\n0.0,100,0\n", "row 2"),
        ("arrival_s,prompt_len\n0.0,100\n", "layout"),
        ("arrival_s,prompt_len,output_len\n0.0,60000,3\n", "can never run"),
        ("", "empty"),
    ],
)
def test_a_broken_trace_is_refused_in_six_lines(
    trace: str, message: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "in.csv").write_text(trace)
    assert typed(monkeypatch, *compat(files)) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.splitlines()) <= 6
    assert not shown.out


REAL = ["--model", "facebook/opt-13b"]
CHAT = ["--placement", "1P + 1D", "--workload", "sharegpt"]
BOTH = ["--placement", "1C", "--workload", "sharegpt"]
KINDS = ["--placement", "1C", "--kind", "chat=sharegpt:3:2500:200", "--kind", "code=humaneval:1:1:200"]
BUILT_IN = str(PROFILE_FOLDER / "opt-13b.a100-80g.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compat", "vllm", *REAL], "is not known"),
        ([*REAL, "--tp-decode", "2"], "--tp-decode has no effect"),
        (["--compat", "simdistserve", *REAL, "--rate", "2"], "--rate has no effect"),
        (["--compat", "simdistserve", *REAL, "--json"], "--json has no effect"),
        (
            ["--compat", "simdistserve", *REAL, "--no-enable-chunked-prefill"],
            "enable-chunked-prefill has no effect",
        ),
        (["--compat", "simdistserve", *REAL, "--max-num-seqs", "9"], "--max-num-seqs has no effect"),
        (["--compat", "simdistserve", *REAL], "--trace is missing"),
        (["--compat", "simdistserve", *REAL, "--tp-decode", "0"], "at least 1"),
        ([*REAL, "--workload", "sharegpt", "--rate", "1"], "--placement is missing"),
        ([*REAL, *CHAT], "--rate is missing"),
        ([*REAL, *CHAT, "--rate", "0"], "a rate of"),
        ([*REAL, *CHAT, "--rate", "1e-300"], "a rate of"),
        ([*REAL, *CHAT, "--rate", "1", "--cv", "1e-200"], "cannot be drawn"),
        ([*REAL, *CHAT, "--rate", "1", "--enable-prefix-caching"], "enable-prefix-caching has no effect"),
        ([*REAL, *CHAT, "--rate", "1", "--kv-host-bytes", "1GiB"], "--kv-host-bytes has no effect"),
        ([*REAL, *CHAT, "--rate", "1", "--kv-host-bytes", "much"], "--kv-host-bytes much cannot be read"),
        ([*REAL, *CHAT, "--rate", "1", "--kv-host-bytes", "1MiB"], "--kv-host-bytes 1,048,576 is too small"),
        ([*REAL, *CHAT, "--rate", "1", "--kv-disk-bytes", "1GiB"], "--kv-disk-bytes needs --kv-host-bytes"),
        ([*REAL, *CHAT, "--rate", "1", "--kv-disk-rate", "1GB/s"], "--kv-disk-rate needs --kv-disk-bytes"),
        (
            [*REAL, *CHAT, "--rate", "1", "--kv-host-bytes", "1GiB", "--kv-host-rate", "fast"],
            "--kv-host-rate fast cannot be read",
        ),
        (
            [*REAL, *CHAT, "--rate", "1", "--kv-host-bytes", "1GiB", "--no-enable-prefix-caching"],
            "--kv-host-bytes does not go with --no-enable-prefix-caching",
        ),
        ([*REAL, *CHAT, "--rate", "1", "--max-num-seqs", "600"], "too small for 600 requests"),
        ([*REAL, *CHAT, "--rate", "1", "--local-prefill", "often"], "--local-prefill often"),
        ([*REAL, *CHAT, "--rate", "1", "--link", "fast"], "--link fast cannot be read"),
        ([*REAL, *BOTH, "--rate", "1", "--link", "25Gbps"], "--link has no effect"),
        ([*REAL, *BOTH, "--rate", "1", "--local-prefill", "never"], "--local-prefill has no effect"),
        ([*REAL, *CHAT, "--rate", "1", "--tpot-budget-ms", "9"], "no instance prefills while it decodes"),
        ([*REAL, *CHAT, "--rate", "1", "--tpot-budget-ms", "0"], "--tpot-budget-ms must be greater than 0"),
        (
            [*REAL, *BOTH, "--rate", "1", "--tpot-budget-ms", "9", "--no-enable-chunked-prefill"],
            "--tpot-budget-ms has no effect",
        ),
        ([*REAL, *CHAT, "--rate", "1", "--device", "H100", "--profile", BUILT_IN], "--profile has no effect"),
        ([*REAL, "--placement", "1C TP2TP4", "--rate", "1"], "a size twice"),
        ([*REAL, "--placement", "999999999C", "--rate", "1"], "at most 100,000 devices"),
        ([*REAL, "--placement", "1P"], "--trace or --workload"),
        ([*REAL, "--placement", "2 servers", "--rate", "1"], "not understood"),
        ([*REAL, "--placement", "1P TP0 + 1D"], "a size of 0"),
        ([*REAL, "--placement", "1P TP7 + 1D"], "cannot be spread"),
        ([*REAL, "--placement", "1P", "--workload", "sharegpt", "--rate", "1"], "cannot serve requests"),
        ([*REAL, *CHAT, "--rate", "1", "--device", "Abacus"], "Abacus"),
        ([*REAL, *CHAT, "--rate", "1", "--slo-ttft-ms", "-3"], "--slo-ttft-ms must be greater than 0"),
        (
            [*REAL, *CHAT, "--rate", "1", "--slo-tpot-ms", "inf"],
            "--slo-tpot-ms must be greater than 0 and finite",
        ),
        (["--model", "opt-175b", *CHAT, "--rate", "1"], "does not fit"),
        (["--model", "no-such-model", *CHAT, "--rate", "1"], "not known"),
        ([*REAL, *CHAT, "--rate", "4", "--requests", "5", "--warmup", "5"], "no request is left"),
        ([*REAL, *CHAT, "--rate", "1", "--kind", "chat=fast"], "--kind chat=fast cannot be read"),
        ([*REAL, *CHAT, "--rate", "1", "--kind", "chat=250:100"], "it is a formula, which has no kinds"),
        ([*REAL, *CHAT, "--rate", "1", "--kind", "a=humaneval:1:9:9"], "--workload has no effect"),
        ([*REAL, *KINDS, "--rate", "1", "--slo-ttft-ms", "9"], "--slo-ttft-ms has no effect"),
        ([*REAL, *KINDS, "--rate", "1", "--kind", "b=9:9"], "given in two ways"),
        ([*REAL, *KINDS, "--rate", "1", "--kind", "code=sharegpt:1:9:9"], "named twice"),
        ([*REAL, *KINDS], "--rate is missing"),
        ([*REAL, "--placement", "1C", "--kind", "b=9:9"], "--workload FILE --rate 4"),
        ([*REAL, *CHAT[:2], "--rate", "1", "--kind", "\udce9=humaneval:1:9:9"], "cannot be read"),
        (
            [
                *REAL,
                *CHAT[:2],
                "--rate",
                "1",
                "--kind",
                "a=humaneval:1e308:9:9",
                "--kind",
                "b=humaneval:1e308:9:9",
            ],
            "cannot be mixed",
        ),
        ([*REAL, *KINDS, "--trace", "in.csv"], "--trace has no effect"),
        (["--compat", "simdistserve", *REAL, "--kind", "b=9:9"], "--kind has no effect"),
    ],
)
def test_flags_that_cannot_be_used_are_refused_in_six_lines(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, *words) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) <= 6


def test_a_deployment_is_reported_in_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *REAL, "--placement", "1P TP2 + 1D tp1", "--workload", "humaneval", "--rate", "3", "--requests", "150",
        "--seeds", "2", "--slo-ttft-ms", "250", "--slo-tpot-ms", "100", "--out", tmp_path / "out.csv",
    ]  # fmt: skip
    assert typed(monkeypatch, *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["devices"], report["requests"], report["failed"]) == (3, 300, {})
    assert report["attainment"] > 0.95
    assert report["good_rps_per_device"] == pytest.approx(1.0, rel=0.2)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 151
    assert typed(monkeypatch, *words) == 0
    assert "joint attainment" in capsys.readouterr().out


def test_a_trace_is_replayed_at_its_own_rate_or_another(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*REAL, "--placement", "1C", "--trace", files / "in.csv", "--json"]
    assert typed(monkeypatch, *words, "--no-enable-chunked-prefill") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2
    (files / "one.csv").write_text("arrival_s,prompt_len,output_len\n0.0,100,3\n")
    assert typed(monkeypatch, *REAL, "--placement", "1C", "--trace", files / "one.csv", "--json") == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["good_rps_per_device"] is None
    assert typed(monkeypatch, *words, "--seeds", "4") == 2
    assert "--seeds has no effect" in capsys.readouterr().err


def test_each_kind_is_checked_by_its_own_slo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading takes more than the millisecond that code is promised, whatever the load."""
    words = [*REAL, *KINDS, "--rate", "1", "--requests", "400", "--seeds", "1"]
    report = figures(monkeypatch, capsys, *words)
    chat, code = report["kinds"]["chat"], report["kinds"]["code"]
    assert chat["requests"] + code["requests"] == report["requests"] == 400 and 60 < code["requests"] < 140
    assert code["attainment"] == 0.0 and chat["attainment"] > 0.9
    assert report["attainment"] == pytest.approx(chat["requests"] * chat["attainment"] / 400)
    assert report["slo_ms"] is None and chat["slo_ms"] == {"ttft": 2500.0, "tpot": 200.0}
    assert code["ms"]["ttft"]["p50"] > 1.0 and code["ms"]["ttft"] != chat["ms"]["ttft"]
    assert typed(monkeypatch, *words, "--out", tmp_path / "out.csv") == 0
    shown = capsys.readouterr().out
    assert f"code: {code['requests']} requests, 0.0%" in shown and "chat: " in shown
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(row["kind"] == "code" for row in rows) == code["requests"]


def test_kinds_of_a_trace_are_replayed_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "kinds.jsonl"
    jobs = [Job(2.0 * at, (100, 800, 3000)[at % 3], 4, ("chat", "batch", "long")[at % 3]) for at in range(30)]
    write_trace(trace, jobs)
    chat, rest = ["--kind", "chat=500:500"], ["--slo-ttft-ms", "1"]
    words = [*REAL, "--placement", "1C", *chat]
    replayed = figures(monkeypatch, capsys, *words, *rest, "--trace", trace)
    assert {kind: (one["requests"], one["attainment"]) for kind, one in replayed["kinds"].items()} == {
        "": (10, 0.0),
        "chat": (10, 1.0),
    }
    assert replayed["left_out"]["longer"] == 10
    assert typed(monkeypatch, *words, *rest, "--trace", trace) == 0
    assert "all others: 10 requests, 0.0%" in capsys.readouterr().out
    drawn = figures(
        monkeypatch, capsys, *words, *rest, "--workload", trace, "--rate", "0.5", "--requests", "60"
    )
    assert set(drawn["kinds"]) == {"", "chat"}
    assert [drawn["kinds"][kind]["attainment"] for kind in ("", "chat")] == [0.0, 1.0]
    assert drawn["requests"] == 180 and drawn["kinds"]["chat"]["requests"] == pytest.approx(90, abs=30)
    for more in (["--trace", trace], ["--workload", trace, "--rate", "1"]):
        assert typed(monkeypatch, *words, *more) == 2
        assert "10 requests of the trace have no SLO" in capsys.readouterr().err
    every = figures(monkeypatch, capsys, *words, "--kind", "batch=1:1", "--trace", trace)
    assert (every["kinds"]["batch"]["attainment"], every["attainment"]) == (0.0, 0.5)


def test_steps_are_kept_within_the_least_of_the_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    tight, loose = ["--kind", "code=humaneval:1:900:40"], ["--kind", "chat=sharegpt:1:2500:70"]
    for kinds in (tight + loose, loose + tight):
        (both,) = simulated(monkeypatch, *REAL, "--placement", "1C", *kinds).instances
        assert both.tpot_s == 0.04


def test_prefixes_and_lengths_are_those_of_the_kinds_that_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 1,100 requests the last ones alone name prefixes: nobody would see that in the first thousand."""
    trace = tmp_path / "late.jsonl"
    rows = [Job(float(at), 128, 4, "chat") for at in range(1050)]
    rows += [Job(float(at), 128, 4, "agent", (1, 2), 64) for at in range(1050, 1100)]
    write_trace(trace, rows)
    words = [*REAL, "--placement", "1C", "--workload", trace, "--slo-ttft-ms", "900", "--kind"]
    assert simulated(monkeypatch, *words, "agent=900:90").prefix_caching
    long = [Job(float(at), 9000, 4, "agent", (1, 2), 64) for at in range(50)]
    write_trace(trace, long + [Job(50.0 + at, 128, 4, "chat") for at in range(1050)])
    assert not simulated(monkeypatch, *words[:-1]).prefix_caching, "those are left out"
    capsys.readouterr()
    brought = [*REAL, "--placement", "1C", "--rate", "1", "--kind", "code=humaneval:1:900:90"]
    few = ["--requests", "40", "--seeds", "1", "--kind", f"[/log]={trace}:1:900:90"]
    report = figures(monkeypatch, capsys, *brought, *few)
    assert "left_out" not in report and "left_out" not in report["kinds"]["code"]
    assert report["kinds"]["[/log]"]["left_out"]["longer"] == 50
    assert typed(monkeypatch, *brought, *few) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "[/log]: 50 of its 1,100 requests are longer" in shown


def test_prefixes_that_left_the_pools_are_read_back_where_that_is_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the same 60 prefixes of 1,536 tokens, more than the pools have room for."""
    trace = tmp_path / "twice.jsonl"
    write_trace(trace, [Job(float(at), 1600, 2, "", (at % 60,), 1536) for at in range(120)])
    words = [*REAL, "--placement", "1P + 1D", "--trace", trace]
    tiers = ["--kv-host-bytes", "20GiB", "--kv-disk-bytes", "1TiB", "--kv-host-rate", "50GB/s"]
    fast = ["--kv-disk-rate", "20GB/s"]
    cold, slow, warm = (figures(monkeypatch, capsys, *words, *more) for more in ((), tiers, [*tiers, *fast]))
    assert cold["tiers"] == {} and slow["tiers"].keys() == {"host", "disk"}
    # By the first guess of a disk's rate, prefixes are computed sooner. Memory has lost them before they come again.
    assert slow["tiers"]["disk"]["restored_chunks"] == 0 < slow["tiers"]["disk"]["stored_chunks"]
    assert warm["tiers"]["disk"]["restored_chunks"] == 60 * 24
    assert warm["ms"]["ttft"]["p50"] < 0.5 * cold["ms"]["ttft"]["p50"] == 0.5 * slow["ms"]["ttft"]["p50"]
    assert typed(monkeypatch, *words, *tiers, *fast) == 0
    assert "read back at 20 GB/s" in capsys.readouterr().out


def test_a_kind_that_none_came_of_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*REAL, "--placement", "1C", "--rate", "1", "--requests", "20", "--seeds", "1"]
    words += ["--kind", "often=humaneval:1:900:90", "--kind", "rare=humaneval:1e-9:900:90"]
    report = figures(monkeypatch, capsys, *words)
    rare = report["kinds"]["rare"]
    assert (rare["requests"], rare["attainment"], rare["interval"]) == (0, None, None)
    assert typed(monkeypatch, *words) == 0
    assert "rare: none came that counts" in capsys.readouterr().out


def test_kinds_that_are_taken_as_one_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "two.jsonl"
    write_trace(trace, [Job(float(at), 128, 1, ("a", "b")[at % 2]) for at in range(10)])
    for more in (["--trace", trace], ["--workload", trace, "--rate", "1", "--requests", "10"]):
        words = [*REAL, "--placement", "1C", *more]
        (note,) = figures(monkeypatch, capsys, *words)["notes"]
        assert "all are taken as one kind, of a (5), b (5)" in note
        assert typed(monkeypatch, *words) == 0
        shown = capsys.readouterr().out
        assert "taken as one kind" in " ".join(shown.split()) and "never" not in shown, (
            "one token has no TPOT"
        )


def test_requests_that_the_model_cannot_take_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "long.csv"
    trace.write_text("arrival_s,prompt_len,output_len\n0,100,20\n1,3000,20\n2,200,2000\n3,300,30\n")
    words = ["--model", "OPT-13B", "--placement", "1C", "--slo-ttft-ms", "400", "--trace", trace]
    assert typed(monkeypatch, *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 2
    assert report["left_out"] == {"longer": 2, "out_of": 4, "drawn": False, "context_tokens": 2048}
    assert typed(monkeypatch, *words) == 0
    assert "left out: 2 of its 4 requests are longer" in capsys.readouterr().out
    trace.write_text("arrival_s,prompt_len,output_len\n1,3000,20\n")
    assert typed(monkeypatch, *words) == 2
    assert "no request fits" in capsys.readouterr().err


def test_a_result_that_could_not_be_written_is_refused_before_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "OPT-13B", "--placement", "1C", "--workload", "sharegpt", "--rate", "1"]
    for out in ("/proc/out.csv", tmp_path, tmp_path / "none" / "out.csv"):
        assert typed(monkeypatch, *words, "--out", out) == 2
        captured = capsys.readouterr()
        assert "cannot be written" in captured.err and not captured.out
        assert 2 <= len(captured.err.strip().splitlines()) <= 6
    assert list(tmp_path.iterdir()) == []


def figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> dict[str, Any]:
    """What --json tells."""
    assert typed(monkeypatch, *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def test_kv_takes_the_time_of_its_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OPT-66B, whose 100 tokens of KV are 0.24 GB; no built-in profile has a measured link."""
    words = [
        "--model",
        "OPT-66B",
        "--workload",
        "humaneval",
        "--rate",
        "0.05",
        "--requests",
        "12",
        "--seeds",
        "1",
    ]
    pair = [*words, "--placement", "1P TP4 + 1D TP4"]
    inside = figures(monkeypatch, capsys, *pair)
    apart = figures(monkeypatch, capsys, *words, "--placement", "2P TP4 + 2D TP4")
    fast, slow = (figures(monkeypatch, capsys, *pair, "--link", link) for link in ("25Gbps", "1Gbps"))
    assert inside["link"]["gb_per_s"] == 4 * 300 and apart["link"]["gb_per_s"] == 3.125
    assert fast["link"] == apart["link"] and slow["link"]["gb_per_s"] == 0.125
    tpots_ms = [report["ms"]["tpot"]["p50"] for report in (inside, fast, slow)]
    assert tpots_ms == sorted(tpots_ms) and tpots_ms[2] > 1.1 * tpots_ms[1] > 1.1 * tpots_ms[0]
    ends_ms = [report["ms"]["e2e"]["p50"] for report in (fast, slow)]
    assert ends_ms[1] > ends_ms[0] + 500
    assert figures(monkeypatch, capsys, *words, "--placement", "1C TP4")["link"] is None


def simulated(monkeypatch: pytest.MonkeyPatch, *words: object) -> SimDeployment:
    """What is simulated with these flags."""
    found: list[SimDeployment] = []

    def note(what: SimDeployment, ended: Callable[[JobResult], None]) -> ExactSimulation:
        found.append(what)
        return ExactSimulation(what, ended)

    monkeypatch.setattr(report, "ExactSimulation", note)
    assert typed(monkeypatch, *words, "--requests", "5", "--seeds", "1", "--rate", "1") == 0
    return found[0]


def test_settings_and_their_defaults_are_those_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, objectives = Config(), ["--slo-tpot-ms", "80"]
    pair = simulated(monkeypatch, *REAL, *CHAT, *objectives)
    for one in pair.instances:
        assert (one.max_num_seqs, one.max_num_batched_tokens) == (
            usual.max_num_seqs,
            usual.max_num_batched_tokens,
        )
        assert one.chunked_prefill and one.tpot_s is None, "nobody reads beside answers"
    assert pair.local_prefill == usual.local_prefill and not pair.prefix_caching, "no prompt names a prefix"
    near = ["--local-prefill", "auto", "--max-num-seqs", "8", "--max-num-batched-tokens", "300"]
    auto = simulated(monkeypatch, *REAL, *CHAT, *objectives, *near)
    reads, writes = auto.instances
    assert (writes.max_num_seqs, writes.max_num_batched_tokens, writes.tpot_s) == (8, 300, 0.08)
    assert auto.local_prefill == "auto" and reads.tpot_s is None
    (both,) = simulated(monkeypatch, *REAL, *BOTH, *objectives).instances
    assert both.tpot_s == 0.08
    (own,) = simulated(monkeypatch, *REAL, *BOTH, *objectives, "--tpot-budget-ms", "50").instances
    assert own.tpot_s == 0.05
    (unbounded,) = simulated(monkeypatch, *REAL, *BOTH, *objectives, "--tpot-budget-ms", "inf").instances
    assert unbounded.tpot_s is None


def test_prefixes_that_a_trace_names_are_cached_unless_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"timestamp": 1000 * at, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}
        for at in range(3)
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*REAL, "--placement", "1P + 1D", "--workload", tmp_path / "t.jsonl"]
    assert simulated(monkeypatch, *words).prefix_caching
    assert not simulated(monkeypatch, *words, "--no-enable-prefix-caching").prefix_caching


def test_a_device_of_ones_own_is_in_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(
        find_device("H100"), name="X9", node=NodeSpec(2, LinkSpec(1e11, 1e-5), LinkSpec(1e10, 3e-5))
    )
    save_profile(replace(built_in_profile("OPT-13B", "A100-80G"), device=mine), tmp_path / "x9.json")
    words = [*REAL, "--workload", "sharegpt", "--profile", tmp_path / "x9.json"]
    for more in ["--placement", "1P + 1D"], ["--placement", "1P + 1D", "--device", "x9"]:
        found = simulated(monkeypatch, *words, *more)
        assert {pool.device for pool in found.placement.pools} == {"X9"} and found.link == LinkSpec(
            1e11, 1e-5
        )
    mixed = simulated(monkeypatch, *words, "--placement", "1P @A100 + 2D @X9")
    assert [pool.device for pool in mixed.placement.pools] == ["A100-80G", "X9"]
    assert mixed.link.bytes_per_s == 3.125e9, "the slower of the links between nodes"


def test_a_context_and_a_width_are_those_of_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = replace(dims_on_cpu(find_model("tiny")), max_len=700)
    save_profile(replace(built_in_profile(served, "cpu"), rooms={Parallelism(): 40_000}), tmp_path / "p.json")
    words = ["--model", "tiny", "--workload", "humaneval", "--placement", "1P + 1D"]
    found = simulated(monkeypatch, *words, "--profile", tmp_path / "p.json")
    assert (found.max_model_len, found.token_bytes) == (700, 6144)
    sheet = simulated(monkeypatch, *words, "--device", "cpu")
    assert (sheet.max_model_len, sheet.token_bytes) == (2048, 6144), "on the CPU all is of 32 bits"


TWO = ["--model", "embedded", "--device", "cpu", "--kv-cache-codec", "raw:0.25,nuq4-1%"]


def test_classes_of_kv_have_room_requests_and_moved_bytes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes by hand: 32 and 4.5 bits of 2 x 6 x 4 x 32 numbers; and a trace keeps its classes."""
    drawn = ["--placement", "1P + 1D", "--workload", "humaneval", "--rate", "5", "--requests", "300"]
    report = figures(monkeypatch, capsys, *TWO, *drawn, "--seeds", "1", "--kv-mix", "raw=0.5,nuq4-1%=0.5")
    raw, coded = report["kv_classes"]["raw"], report["kv_classes"]["nuq4-1%"]
    assert (raw["chunk_bytes"], coded["chunk_bytes"]) == (64 * 6144, 64 * 864)
    for pool, slabs in raw["slabs"].items():
        assert coded["slabs"][pool] / slabs == pytest.approx(3 * 6144 / 864, rel=1e-3)
    assert raw["requests"] + coded["requests"] == 300 and raw["requests"] == pytest.approx(150, abs=40)
    moved = raw["moved_bytes"] / raw["requests"], coded["moved_bytes"] / coded["requests"]
    assert moved[0] / moved[1] == pytest.approx(6144 / 864, rel=0.25)
    assert any(
        "25% of the bytes for KV, 6,144 bytes per token, 50% of the requests" in x for x in report["notes"]
    )
    trace = tmp_path / "log.jsonl"
    named = ("", "raw", "nuq4-1%.g128@0123456789abcdef")
    write_trace(trace, [Job(float(at), 100, 4, kv_class=named[at % 3]) for at in range(30)])
    replayed = [*TWO, "--placement", "1P + 1D", "--trace", trace]
    report = figures(monkeypatch, capsys, *replayed)["kv_classes"]
    assert (report["raw"]["requests"], report["nuq4-1%"]["requests"]) == (20, 10)
    assert report["nuq4-1%"]["moved_bytes"] == 10 * 2 * 64 * 864
    assert typed(monkeypatch, *replayed, "--kv-mix", "nuq4-1%=1") == 0
    assert "nuq4-1%: slabs of an instance" in " ".join(capsys.readouterr().out.split())
    one = figures(monkeypatch, capsys, *replayed[:-2], "--trace", trace, "--kv-cache-codec", "tq4")
    assert one["kv_classes"] == {} and "here all KV is tq4" in one["notes"][0]
    assert typed(monkeypatch, *replayed, "--kv-cache-codec", "raw:0.5,int8") == 2
    refused = capsys.readouterr().err
    assert "the trace names the KV class nuq4-1%" in refused and len(refused.strip().splitlines()) <= 6
