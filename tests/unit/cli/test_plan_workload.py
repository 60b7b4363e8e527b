"""What `diptych plan` plans for, as its flags say it: workloads, kinds of a trace, promises."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.costs.model import find_model
from planner.types import Job
from planner.workload.traces import write_trace
from planner.workload.workload import Workload, WorkloadMix
from services.cli.main import app
from services.cli.plan.options import DEFAULT_WORKLOAD, PlanOptions
from services.cli.plan.workload import PlanWorkload, read_workload

SHAPE = find_model("OPT-13B")
KINDS = ("priority 5", "", "", "priority 1")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Forty requests in turn: of priority 5, two without a name, of priority 1."""
    path = tmp_path / "requests.jsonl"
    write_trace(path, [Job(float(at), 40 + at, 5 + at % 3, KINDS[at % 4]) for at in range(40)])
    return str(path)


def asked(kind: Sequence[str] = (), **given: Any) -> PlanWorkload:
    return read_workload(PlanOptions(model="OPT-13B", kind=tuple(kind), **given), SHAPE)


def test_a_trace_without_kinds_asked_for_is_one_kind_and_says_so(trace: str) -> None:
    found = asked(workload=trace, slo_ttft_ms=250.0)
    assert isinstance(found.source, Workload) and found.source.kind == ""
    assert {job.kind for job in found.source.sample(50, 1.0, 1)} == {""}
    (note,) = found.notes
    assert "unnamed (20), priority 5 (10), priority 1 (10)" in note
    assert asked(slo_ttft_ms=250.0).notes == ()


def test_kinds_of_a_trace_have_their_own_promises(trace: str) -> None:
    found = asked(workload=trace, kind=["priority 5=250:100"], slo_ttft_ms=2000.0)
    assert isinstance(found.source, WorkloadMix) and found.name == trace and found.notes == ()
    assert found.slos == {"priority 5": Slo(0.25, 0.1, 0.9), "": Slo(2.0, attainment=0.9)}
    assert found.source.shares == {"priority 5": 0.25, "": 0.75}


def test_a_request_log_is_parted_by_its_priorities(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    more = {"event": "arrive", "canary": False, "prompt_tokens": 5, "max_tokens": 9}
    rows = [{"t": at, "request": str(at), "priority": 5 if at < 2 else 0, **more} for at in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = asked(workload=str(path), kind=["priority 5=250:100"], slo_ttft_ms=2000.0)
    assert isinstance(found.source, WorkloadMix) and found.source.shares == {"priority 5": 0.25, "": 0.75}


def test_kinds_may_bring_their_own_workloads(trace: str) -> None:
    found = asked(kind=["chat=sharegpt:3:250:100", f"batch={trace}:1:5000:1000"], fit=True)
    assert isinstance(found.source, WorkloadMix) and found.name == "chat, batch"
    assert found.source.shares == {"chat": 0.75, "batch": 0.25}
    assert not found.source.workloads["batch"].jobs, "drawn from what fits it"


def test_a_kinds_own_trace_of_several_kinds_says_so_too(trace: str) -> None:
    (note,) = asked(kind=["chat=sharegpt:3:250:100", f"batch={trace}:1:5000:1000"]).notes
    assert note.startswith("batch: all are taken as one kind, of unnamed (20), priority 5 (10)")


@pytest.fixture
def lengthy(tmp_path: Path) -> str:
    """Two hundred short requests, and as many that no context of 2,048 tokens takes."""
    path = tmp_path / "lengthy.jsonl"
    jobs = [Job(float(at), (100, 5000)[at % 2], 50, ("chat", "long")[at % 2]) for at in range(400)]
    write_trace(path, jobs)
    return str(path)


def test_what_is_longer_than_the_context_needs_no_promise(lengthy: str) -> None:
    found = asked(workload=lengthy, kind=["chat=400:60"])
    assert isinstance(found.source, WorkloadMix) and found.source.shares == {"chat": 1.0}
    (note,) = found.notes
    assert "200 of its 400 requests are longer than the context of OPT-13B, 2,048 tokens" in note


@pytest.mark.parametrize(
    ("given", "whose", "flag"),
    [
        ({"kind": ["chat=400:60", "long=4000:60"]}, "of kind 'long'", "--kind long"),
        ({"kind": ["chat=400:60"], "slo_ttft_ms": 4000.0}, "without a --kind of its own", "--slo-ttft-ms"),
    ],
)
def test_a_kind_that_is_all_longer_than_the_context_is_refused_with_the_context(
    lengthy: str, given: dict[str, Any], whose: str, flag: str
) -> None:
    with pytest.raises(ConfigError, match=f"no request {whose} fits a context of 2,048 tokens") as caught:
        asked(workload=lengthy, **given)
    assert (
        "longer context" in caught.value.fix and flag in caught.value.fix and len(caught.value.lines()) <= 6
    )


def test_the_default_workload_is_distinguished_from_a_typed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    typed: list[str | None] = []

    def noted(options: PlanOptions) -> int:
        typed.append(options.workload)
        return 0

    monkeypatch.setattr("services.cli.plan.command.run_plan", noted)
    for more in ([], ["--workload", DEFAULT_WORKLOAD]):
        assert CliRunner().invoke(app, ["plan", "--model", "OPT-13B", *more]).exit_code == 0
    assert typed == [None, DEFAULT_WORKLOAD]
    assert asked(slo_ttft_ms=250.0).name == DEFAULT_WORKLOAD


def test_a_fit_is_drawn_from(trace: str) -> None:
    found = asked(workload=trace, slo_ttft_ms=250.0, fit=True)
    assert isinstance(found.source, Workload) and not found.source.jobs
    parted = asked(workload=trace, kind=["priority 5=250:100"], slo_ttft_ms=2000.0, fit=True).source
    assert isinstance(parted, WorkloadMix) and not any(one.jobs for one in parted.workloads.values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": ["priority 9=250:100"]}, "no requests of kind 'priority 9'"),
        ({"kind": ["priority 5=250:100"]}, "30 requests of the trace have no SLO"),
        ({"kind": ["priority 5=250:100", "priority 5=1:1"]}, "named twice"),
        ({"kind": ["priority 5=250:100", "chat=sharegpt:1:250:100"]}, "in two ways"),
        ({"kind": ["chat=sharegpt:1:250:100"]}, "--workload has no effect"),
        ({"workload": "sharegpt", "kind": ["chat=humaneval:1:250:100"]}, "--workload has no effect"),
        ({"kind": ["priority 5=250"]}, "cannot be read"),
        ({"kind": ["priority 5=sharegpt:250:100"]}, "cannot be read"),
        ({"kind": ["priority 5=250:0"]}, "cannot be read"),
        ({}, "no SLO is given"),
        ({"slo_ttft_ms": -5.0}, r"--slo-ttft-ms must be greater than 0 and finite \(got -5\)"),
        ({"slo_tpot_ms": math.inf}, "--slo-tpot-ms must be greater than 0 and finite"),
        ({"kind": ["priority 5=250:100"], "attainment": 90.0}, "--attainment must be a share"),
        ({"workload": "sharegpt", "kind": ["chat=250:100"]}, "no requests of kind 'chat'"),
        ({"workload": "sharegpt", "slo_ttft_ms": 1.0, "fit": True}, "nothing can be fitted to sharegpt"),
    ],
)
def test_what_cannot_be_is_refused(trace: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        asked(**{"workload": trace, **given})
    assert caught.value.fix and len(caught.value.lines()) <= 6
