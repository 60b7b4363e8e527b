"""The dashboards: every metric exists, the committed files are what is written, and the command's errors are short."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.main import main
from services.dashboard.panels import metric_names, select_job
from services.dashboard.rules import OBJECTIVES, alerts, recording_rules, rule_file
from services.dashboard.runbook import render_runbook
from services.dashboard.write import list_dashboards, render_files
from services.host.exit_codes import USAGE
from tests.unit.gateway.exported_metrics import exported

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/dashboards.md"


def queries() -> dict[str, str]:
    """Every query of the dashboards, by row, panel and legend."""
    return {
        f"{row.title}: {panel.title}: {query.legend}": query.expr
        for board in list_dashboards()
        for row in board.rows
        for panel in row.panels
        for query in panel.queries
    }


def known_names() -> set[str]:
    """Every name that a query may ask for: the gateway's, with those of its histograms, and the recorded ones."""
    names = {rule["record"] for rule in recording_rules()} | {"up"}
    for name, (kind, *_) in exported().items():
        names |= {f"{name}{end}" for end in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return names


def test_every_query_asks_for_metrics_that_exist() -> None:
    known, found = known_names(), queries()
    asked = found | {one.name: one.expr for one in alerts(0.9)}
    asked |= {rule["record"]: rule["expr"] for rule in recording_rules()}
    unknown = {what: names - known for what, expr in asked.items() if (names := metric_names(expr)) - known}
    assert unknown == {} and len(found) > 90


def test_a_name_that_is_not_exposed_is_seen() -> None:
    asked = 'sum(rate(vllm:num_preemptions{job="a"}[5m])) / on () sum(diptych:slo_burn:rate5m) and up == 1'
    assert metric_names(asked) == {"vllm:num_preemptions", "diptych:slo_burn:rate5m", "up"}
    assert metric_names(asked) - known_names() == {"vllm:num_preemptions"}


def test_a_query_is_limited_to_one_job_metric_by_metric() -> None:
    expr = 'sum by (role) (diptych:worker_up) / rate(diptych:x_total{part="a"}[$__rate_interval])'
    assert select_job(expr) == (
        'sum by (role) (diptych:worker_up{job="$job"})'
        ' / rate(diptych:x_total{job="$job", part="a"}[$__rate_interval])'
    )
    for written in queries().values():
        assert select_job(written).count("job=") == len(list(metric_names(written))) or "/" in written


def test_the_rows_of_the_issue_are_there_and_names_are_unique() -> None:
    rows = [row for board in list_dashboards() for row in board.rows]
    slugs = [row.slug for row in rows]
    assert slugs == [
        "slo", "clients", "time", "admission", "handoff", "pools", "faults", "planner", "gateway",
    ]  # fmt: skip
    titles = [panel.title for row in rows for panel in row.panels]
    assert len(set(titles)) == len(titles)


def test_committed_files_are_what_is_written() -> None:
    folder = ROOT / "deploy/grafana"
    written = render_files()
    assert {path.name for path in folder.iterdir()} == written.keys()
    for name, text in written.items():
        assert (folder / name).read_text(encoding="utf-8") == text, "run `make docs`"


def test_a_dashboard_is_whole() -> None:
    for name, text in render_files().items():
        if not name.endswith(".json"):
            continue
        board = json.loads(text)
        assert board["uid"] == name.removesuffix(".json")
        assert {one["name"] for one in board["templating"]["list"]} == {"datasource", "job"}
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        assert all(panel["targets"] and panel["description"] for panel in panels)
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in panels:
            assert all('job="$job"' in one["expr"] or "vector(" in one["expr"] for one in panel["targets"])


def test_every_alert_has_a_section_that_says_what_to_do() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == render_runbook(text), "make docs writes it"
    for one in alerts(0.9):
        assert one.severity in ("page", "ticket") and one.action.endswith((".", ";", "FILE"))
        section = text.partition(f"### {one.name}\n")[2].partition("\n#")[0]
        assert one.action in section and one.severity in section, "the alert's runbook annotation leads there"
        assert "{{" not in section


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["diptych", "dashboards", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int | None)
    return ended.value.code or 0


def test_the_command_writes_a_deployment_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "deployment.yaml"
    settings.write_text("host: 0.0.0.0\nslo_ttft_ms: 500\nslo_target: 0.99\n")
    out = tmp_path / "made" / "here"
    assert run(monkeypatch, "--out", str(out), "--config", str(settings)) == 0
    assert {path.name for path in out.iterdir()} == render_files().keys()
    rules: dict[str, Any] = yaml.safe_load((out / "diptych-rules.yml").read_text())
    assert rules == rule_file(0.99, ("ttft", "all")) != rule_file(0.9, OBJECTIVES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slo-target", "1", "--slo-ttft-ms", "500"], "must be between 0 and 1"),
        (["--slo-target", "0.99"], "no SLO is given"),
        (["--slo-ttft-ms", "soon"], "is not a duration"),
    ],
)
def test_bad_settings_are_one_short_answer(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "--out", str(tmp_path / "out"), *arguments) == USAGE
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) <= 6 and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_one_short_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(monkeypatch, "--out", str(tmp_path / "file" / "out")) == USAGE
    shown = capsys.readouterr().err
    assert "cannot be written" in shown and "fix: " in shown and len(shown.splitlines()) <= 6
