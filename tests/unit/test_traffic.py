"""What `diptych plan` plans for, as its flags say it: workloads, kinds of a trace, promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.errors import ConfigError
from planner.shape import known
from planner.terms import Job, Slo
from planner.traces import write_trace
from planner.workload import Mix, Workload
from services.cli.traffic import Traffic, traffic

SHAPE = known("OPT-13B")
KINDS = ("priority 5", "", "", "priority 1")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Forty requests in turn: of priority 5, two without a name, of priority 1."""
    path = tmp_path / "requests.jsonl"
    write_trace(path, [Job(float(at), 40 + at, 5 + at % 3, KINDS[at % 4]) for at in range(40)])
    return str(path)


def asked(**given: Any) -> Traffic:
    flags = {"workload": "sharegpt", "kind": None, "slo_ttft_ms": None, "slo_tpot_ms": None, "fit": False}
    return traffic({**flags, "attainment": 0.9, **given}, SHAPE)


def test_a_trace_without_kinds_asked_for_is_one_kind_and_says_so(trace: str) -> None:
    found = asked(workload=trace, slo_ttft_ms=250.0)
    assert isinstance(found.source, Workload) and found.source.kind == ""
    assert {job.kind for job in found.source.sample(50, 1.0, 1)} == {""}
    (note,) = found.notes
    assert "unnamed (20), priority 5 (10), priority 1 (10)" in note
    assert asked(slo_ttft_ms=250.0).notes == ()


def test_kinds_of_a_trace_have_their_own_promises(trace: str) -> None:
    found = asked(workload=trace, kind=["priority 5=250:100"], slo_ttft_ms=2000.0)
    assert isinstance(found.source, Mix) and found.name == trace and found.notes == ()
    assert found.slos == {"priority 5": Slo(0.25, 0.1, 0.9), "": Slo(2.0, attainment=0.9)}
    assert found.source.shares == {"priority 5": 0.25, "": 0.75}


def test_a_request_log_is_parted_by_its_priorities(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    more = {"event": "arrive", "canary": False, "prompt_tokens": 5, "max_tokens": 9}
    rows = [{"t": at, "request": str(at), "priority": 5 if at < 2 else 0, **more} for at in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = asked(workload=str(path), kind=["priority 5=250:100"], slo_ttft_ms=2000.0)
    assert isinstance(found.source, Mix) and found.source.shares == {"priority 5": 0.25, "": 0.75}


def test_kinds_may_bring_their_own_workloads(trace: str) -> None:
    found = asked(kind=["chat=sharegpt:3:250:100", f"batch={trace}:1:5000:1000"], fit=True)
    assert isinstance(found.source, Mix) and found.name == "chat, batch"
    assert found.source.shares == {"chat": 0.75, "batch": 0.25}
    assert not found.source.workloads["batch"].jobs, "drawn from what fits it"


def test_a_fit_is_drawn_from(trace: str) -> None:
    found = asked(workload=trace, slo_ttft_ms=250.0, fit=True)
    assert isinstance(found.source, Workload) and not found.source.jobs
    parted = asked(workload=trace, kind=["priority 5=250:100"], slo_ttft_ms=2000.0, fit=True).source
    assert isinstance(parted, Mix) and not any(one.jobs for one in parted.workloads.values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": ["priority 9=250:100"]}, "no requests of kind 'priority 9'"),
        ({"kind": ["priority 5=250:100"]}, "30 requests of the trace have no objective"),
        ({"kind": ["priority 5=250:100", "priority 5=1:1"]}, "named twice"),
        ({"kind": ["priority 5=250:100", "chat=sharegpt:1:250:100"]}, "in two ways"),
        ({"kind": ["chat=sharegpt:1:250:100"]}, "--workload has no effect"),
        ({"kind": ["priority 5=250"]}, "cannot be read"),
        ({"kind": ["priority 5=sharegpt:250:100"]}, "cannot be read"),
        ({"kind": ["priority 5=250:0"]}, "cannot be read"),
        ({}, "no objective is given"),
        ({"workload": "sharegpt", "kind": ["chat=250:100"]}, "no requests of kind 'chat'"),
        ({"workload": "sharegpt", "slo_ttft_ms": 1.0, "fit": True}, "nothing can be fitted to sharegpt"),
    ],
)
def test_what_cannot_be_is_told(trace: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as told:
        asked(**{"workload": trace, **given})
    assert told.value.fix and len(told.value.lines()) <= 6
