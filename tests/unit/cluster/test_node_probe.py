"""What is said of nodes that cannot take part."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from diptych.errors import ModelError, StartError
from services.cluster.node_probe import (
    NodeReport,
    check_models,
    check_versions,
    describe_node,
    describe_warnings,
    parse_report,
)

OWN = {"diptych": "1.0", "python": "3.11.7", "ray": "2.60.0"}
GOOD = NodeReport("10.0.0.1", OWN, 0, "31536000")


def test_nodes_with_other_versions_are_named() -> None:
    check_versions([GOOD, GOOD], OWN)
    other = replace(GOOD, address="10.0.0.2", versions=OWN | {"diptych": "not installed", "python": "3.12.0"})
    with pytest.raises(StartError) as caught:
        check_versions([GOOD, *[other] * 5], OWN)
    lines = caught.value.lines()
    assert len(lines) <= 6
    assert "10.0.0.2: diptych not installed, here 1.0; python 3.12.0, here 3.11.7" in lines[1]
    assert lines[3].endswith("and 2 more nodes") and lines[4].startswith("  fix: ")


def test_a_node_without_the_model_is_named_with_its_reason() -> None:
    check_models([GOOD], "org/model")
    lacking = replace(GOOD, model_error=("there is no model at /m", "it is neither", ""))
    with pytest.raises(ModelError) as caught:
        check_models([GOOD, lacking], "/m")
    assert caught.value.what == "the node 10.0.0.1 cannot serve the model /m"
    assert "there is no model at /m: it is neither" in caught.value.why and "same path" in caught.value.fix


def test_settings_of_nodes_that_harm_are_named() -> None:
    assert describe_warnings([GOOD], 3600.0) == []
    nice, short = describe_warnings([replace(GOOD, niceness=15, reconnect_s="")], 3600.0)
    assert "RAY_worker_niceness=0" in nice
    assert "RAY_gcs_rpc_server_reconnect_timeout_s" in short


@pytest.mark.parametrize(
    ("max_workers", "cpus", "node_cpus", "share"),
    [
        (4, 1.0, 2.0, 2),
        (4, 1.0, 64.0, 4),
        (4, 2.0, 4.0, 2),
        (3, 4.0, 2.0, 3),
        (0, 1.0, 4.0, 0),
        (9, 0.5, 4.0, 8),
        (9, 0.1, 0.3, 3),
    ],
)
def test_a_node_divides_its_memory_among_the_workers_that_it_may_get(
    monkeypatch: pytest.MonkeyPatch, max_workers: int, cpus: float, node_cpus: float, share: int
) -> None:
    asked: list[dict[str, Any]] = []

    class Ended:
        stdout = b'noise\n{"model": {"path": "/m", "kv_bytes": 4096}}\n'

    def run(command: list[str], *, input: bytes, **_: Any) -> Ended:
        assert command[1:] == ["-P", "-m", "services.host.model_probe_main"]
        asked.append(json.loads(input))
        return Ended()

    monkeypatch.setattr("subprocess.run", run)
    found = describe_node(
        '{"model": "tiny", "num_workers": 0}', max_workers, cpus, node_cpus, "n@10.0.0.1", 60.0
    )
    assert asked == [{"model": "tiny", "num_workers": share, "deployment": "n@10.0.0.1"}]
    report = parse_report("10.0.0.1", found)
    assert report.versions["python"] == platform.python_version() and report.model_error == ()
    assert report.kv_bytes == 4096


def test_a_node_that_downloads_for_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("subprocess.run", run)
    report = parse_report("10.0.0.1", describe_node("{}", 1, 1, 1.0, "n@10.0.0.1", 7.0))
    assert report.model_error[0] == "the model is not there after 7 s" and "download" in report.model_error[2]
    # Without a question nothing is looked for.
    assert parse_report("10.0.0.1", describe_node("", 1, 1, 1.0, "n@10.0.0.1", 7.0)).model_error == ()
