"""Bulk work in `diptych simulate`: beside requests, and on workers of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.offload.policy import default_policy, parse_policy
from planner.costs.model import dims_on_cpu, find_model
from planner.costs.profile import analytic_profile
from planner.costs.profile_file import save_profile
from planner.types import BulkRates, LayerTime
from services.host.model_probe import resolve_embedded
from tests.unit.cli.typed_command import run_typed

Run = Callable[..., tuple[int, str, str]]
TINY = resolve_embedded("tiny")
REQUESTS = ("--workload", "humaneval", "--rate", "4", "--requests", "12", "--seeds", "1")
BESIDE = ("--model", "opt-13b", "--placement", "1P + 1D", *REQUESTS, "--bulk", "200:50")
RATES = BulkRates(1, 7.9e5, LayerTime(1.5e-4, 1.5e-5, 1.5e-4, 2e-5), 2e10, 2e10, 2e-5, 9e9, 8e8, 8e8)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *words: run_typed(monkeypatch, capsys, "simulate", *words)


@pytest.fixture
def alone(tmp_path: Path) -> tuple[str, ...]:
    """The words for two bulk workers, with a measured profile."""
    file = tmp_path / "p.json"
    save_profile(replace(analytic_profile(dims_on_cpu(find_model(TINY)), "cpu"), bulk=RATES), file)
    return (
        "--model",
        TINY,
        "--placement",
        "2B",
        "--bulk",
        "300:50",
        "--profile",
        str(file),
        "--bulk-memory",
        "64MiB",
    )


def test_it_says_how_much_bulk_work_is_done_beside_requests(run: Run) -> None:
    slos = ("--slo-ttft-ms", "500", "--slo-tpot-ms", "100")
    code, out, _ = run(*BESIDE, "--json", *slos)
    assert code == 0
    found = json.loads(out)
    bulk = found["bulk"]
    assert found["requests"] == 12 and 0 <= found["attainment"] <= 1
    assert bulk["line"] == {"prompt": 200, "output": 50} and bulk["slice_ms"] == 20
    assert bulk["beside_answers"] and bulk["workers"] == 1 and 0 < bulk["busy_share"] <= 1
    assert bulk["tokens_per_s"] > 0 and bulk["prompt_tokens_per_s"] > bulk["tokens_per_s"]
    code, out, _ = run(*BESIDE, "--bulk-slice-ms", "5")
    assert code == 0 and "bulk work: " in out and "units of 5 ms, only without answers" in out
    code, out, _ = run(*BESIDE[:-2], "--json")
    assert code == 0 and json.loads(out)["bulk"] is None


def test_bulk_workers_do_what_the_programme_predicts(run: Run, alone: tuple[str, ...]) -> None:
    code, out, _ = run(*alone, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["tokens_per_s"] == pytest.approx(2 * found["tokens_per_s_per_worker"])
    assert found["lines_per_hour"] == pytest.approx(found["tokens_per_s"] / 50 * 3600)
    policy = parse_policy(found["policy"], default_policy(350))
    assert (policy.prompt_tokens, policy.output_tokens) == (300, 50)
    assert found["memory_bytes"] <= 64 << 20 and found["waits_for"] in ("disk", "compute")
    code, out, _ = run(*alone)
    assert code == 0 and "2 × bulk: " in out and "lines of 300:50 tokens an hour" in out


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ((*BESIDE[:-1], "200"), ("--bulk 200 cannot be read",)),
        ((*BESIDE, "--bulk-slice-ms", "0"), ("--bulk-slice-ms cannot be used", "greater than 0 (got 0)")),
        ((*BESIDE, "--bulk-slice-ms", "nan"), ("--bulk-slice-ms cannot be used",)),
        ((*BESIDE[:-2], "--bulk-slice-ms", "5"), ("--bulk-slice-ms has no effect here", "add --bulk")),
        ((*BESIDE, "--bulk-memory", "1GiB"), ("--bulk-memory has no effect here", "1B")),
        ((*BESIDE[:-1], "9000:50"), ("too long for an instance", "--bulk PROMPT:OUTPUT")),
        (("--model", "opt-13b", "--placement", "1C PP2", *BESIDE[4:]), ("not simulated on pipelines",)),
    ],
)
def test_what_cannot_be_simulated_beside_requests_is_refused(
    run: Run, words: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    code, _, err = run(*words)
    assert code == 2 and len(err.splitlines()) <= 6
    assert all(text in err for text in texts), err


def test_bulk_workers_that_cannot_be_predicted_are_refused(
    run: Run, alone: tuple[str, ...], tmp_path: Path
) -> None:
    bare = tmp_path / "bare.json"
    save_profile(analytic_profile(dims_on_cpu(find_model(TINY)), "cpu"), bare)
    for words, texts in (
        ((*alone, "--rate", "4"), ("--rate has no effect here", "serve no requests")),
        ((*alone[:-2],), ("--bulk-memory is missing",)),
        ((*alone[:2], "--placement", "2B + 1C", *alone[4:]), ("serve batches alone",)),
        ((*alone[:2], "--placement", "0B", *alone[4:]), ("serve batches alone",)),
        ((*alone[:7], str(bare), *alone[8:]), ("does not say what bulk work costs", "diptych profile")),
        ((*alone[:-1], "12MiB"), ("too little memory", "use --bulk-memory ")),
        ((*alone[:5], "90000:50", *alone[6:]), ("has no room for 90,050 tokens",)),
    ):
        code, _, err = run(*words)
        assert code == 2 and len(err.splitlines()) <= 6, err
        assert all(text in err for text in texts), err
