"""`diptych bench` against our own gateway, as a process of its own; tokens come from a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folder import make_folder
from tests.system.scripted_gateway import Running, scripted

CONTEXT = 512
PATIENCE_S = 120
SHORT = ("--shrink", "16", "--duration", "1.5")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with scripted(make_folder(tmp_path_factory.mktemp("toy"), CONTEXT), keys=("client",)) as running:
        yield running


def bench(url: str, *arguments: str, key: str | None = "client") -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    keyed = ("--api-key", key) if key else ()
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", "bench", "--url", url, *keyed, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environ | {"COLUMNS": "200"},
    )


# Whoever starts tests in the background leaves SIGINT ignored, and Python then leaves it so.
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import services.cli.main
services.cli.main.main()
"""


def read_report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_figures_are_those_of_the_rows(gateway: Running, tmp_path: Path) -> None:
    rows_file, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    slo = ("--slo-ttft-ms", "60000", "--slo-tpot-ms", "0.5")
    flags = (
        "--rates",
        "10,20",
        "--seeds",
        "2",
        *slo,
        "--save",
        str(rows_file),
        "--plot",
        str(plot),
        "--json",
    )
    report = read_report(bench(gateway.url, *SHORT, *flags))
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert len(rows) == 2 * (15 + 30) and report["lengths_forced"] and report["prompts_counted"]
    for point in report["points"]:
        counted = [row for row in rows if row["rate"] == point["rate"] and row["counted"]]
        kept = [
            row for row in counted if not row["failed"] and row["ttft_s"] <= 60 and row["tpot_s"] <= 0.0005
        ]
        assert point["requests"] == len(counted) and point["seeds"] == [0, 1]
        assert point["attainment"] == round(len(kept) / len(counted), 6)
        assert point["short_answers"] == 0 and not point["errors"]
    assert all(row["output_tokens"] == row["output"] for row in rows)
    assert all(abs(row["prompt_tokens"] - row["prompt"]) <= 8 for row in rows), "words of several tokens"
    assert plot.read_bytes().startswith(b"\x89PNG") and report["plot"] == [
        str(plot),
        str(plot.with_suffix(".json")),
    ]


def test_a_search_of_a_chat_tells_its_rate_and_what_it_rests_on(gateway: Running) -> None:
    flags = ("--search", "--rate", "8", "--max-rate", "16", "--width", "4", "--slo-ttft-ms", "60000")
    report = read_report(bench(gateway.url, *SHORT, *flags, "--endpoint", "chat", "--json"))
    assert report["goodput"]["rate"] == 16.0 and report["goodput"]["requests"] == 24
    assert report["route"] == "/v1/chat/completions"
    assert [point["rate"] for point in report["points"]] == [8.0, 16.0]


def test_a_trace_is_replayed_and_errors_are_counted_by_kind(gateway: Running, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lengths = [(20, 5), (30, 1), (40, 600), (20, 5)]  # the third is longer than the server takes
    rows = (f"{number / 5},{prompt},{output}" for number, (prompt, output) in enumerate(lengths))
    trace.write_text("\n".join(["arrival_s,prompt_len,output_len", *rows]) + "\n")
    flags = ("--workload", str(trace), "--arrivals", "replay", "--warmup", "0", "--context", "1000", "--json")
    (point,) = read_report(bench(gateway.url, *flags))["points"]
    assert point["errors"] == {"400 context_length_exceeded": 1}
    assert (point["requests"], point["answered"]) == (4, 3)
    report = read_report(bench(gateway.url, *flags[:-3], "--json"))
    whole = report["points"][0]
    assert (whole["answered"], whole["errors"]) == (4, {}), "cut to what the server says it takes"
    assert report["cut"] == "1 of its 4 requests are longer than 512 tokens, and are cut to that"
    assert report["trace_requests"] == whole["run_requests"] == 4


def test_a_replay_that_is_cut_says_so(gateway: Running, tmp_path: Path) -> None:
    trace = tmp_path / "hour.jsonl"
    rows = ({"at_s": 40.0 * number, "prompt": 20, "output": 5, "kind": "batch"} for number in range(90))
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = ("--workload", str(trace), "--arrivals", "replay", "--warmup", "0", "--rate", "45")
    done = bench(gateway.url, *flags, "--duration", "1.01")
    assert done.returncode == 0, done.stderr
    assert "of the trace's 90 requests a run sent the first 46, as --duration" in done.stdout


def test_lengths_may_be_drawn_from_what_fits_a_trace(gateway: Running, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = (f"{number},{40 + number},{5 + number % 3}" for number in range(20))
    trace.write_text("\n".join(["arrival_s,prompt_len,output_len", *rows]))
    flags = ("--workload", str(trace), "--fit", "--num-requests", "20", "--rate", "20", "--json")
    report = read_report(bench(gateway.url, *flags))
    assert report["asked"]["fit"] and report["points"][0]["requests"] <= 20


def test_what_could_not_be_written_is_refused_at_once(gateway: Running) -> None:
    for flag, path in (("--save", "/proc/rows.jsonl"), ("--plot", "/proc/curve.png")):
        done = bench(gateway.url, *SHORT, "--rate", "5", flag, path)
        assert done.returncode == 2 and "cannot be written" in done.stderr and "/s seed 0" not in done.stderr
        assert 2 <= len(done.stderr.strip().splitlines()) <= 6


def test_the_report_for_readers(gateway: Running) -> None:
    done = bench(gateway.url, *SHORT, "--rate", "5", "--slo-ttft-ms", "60000")
    assert done.returncode == 0
    assert "100.0%" in done.stdout and "TTFT" in done.stdout and "the client used" in done.stdout
    assert "5/s seed 0" in done.stderr


def test_interrupted_it_reports_the_runs_that_have_ended(gateway: Running) -> None:
    flags = (
        "--url",
        gateway.url,
        "--api-key",
        "client",
        *SHORT[:2],
        "--rates",
        "10,0.5",
        "--num-requests",
        "20",
    )
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "bench", *flags, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stderr is not None
        assert "10/s seed 0" in child.stderr.readline(), "one run has ended, and the next takes 40 s"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130, err
    (point,) = json.loads(out)["points"]
    assert point["rate"] == 10.0 and point["answered"] == point["requests"] > 10 and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "key", "status", "what"),
    [
        ((), None, 1, "401 invalid_api_key"),
        (("--model", "nobody"), "client", 1, "404 model_not_found"),
        (("--workload", "nowhere.csv"), "client", 2, "nowhere.csv"),
        (("--search",), "client", 2, "nothing to search for"),
        (("--url", "http://127.0.0.1:1"), "client", 1, "no server answers"),
    ],
)
def test_mistakes_take_six_lines(
    gateway: Running, arguments: tuple[str, ...], key: str | None, status: int, what: str
) -> None:
    done = bench(gateway.url, *arguments, key=key)
    assert done.returncode == status and not done.stdout
    assert what in done.stderr and len(done.stderr.splitlines()) <= 6 and "Traceback" not in done.stderr
