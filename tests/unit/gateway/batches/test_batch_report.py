"""What operators see of batches: figures, and nothing that a tenant wrote."""

from __future__ import annotations

import json

import msgspec

from services.cli.client.status import format_batches
from services.gateway.batches.batch_report import BatchCollector, report_batches
from services.gateway.batches.feeder import BatchFeeder
from services.gateway.batches.records import BatchRecord
from tests.unit.gateway.batches.idle_feeder import idle_feeder


def busy_feeder() -> BatchFeeder:
    feeder = idle_feeder()
    feeder.store.data_dir.path = "/data"  # type: ignore[assignment]
    feeder.store.by_status = {"in_progress": 1, "completed": 4}
    record = BatchRecord(
        id="batch_1",
        tenant="secret tenant",
        urgent=0,
        endpoint="/v1/completions",
        window="24h",
        status="in_progress",
        input_file="file-in",
        output_file="file-out",
        error_file="file-err",
        created_at=1,
        expires_at=2,
        output_expiry_s=3,
        total=9,
        completed=4,
        metadata='{"secret": "metadata"}',
    )
    feeder.batches.set_waiting(feeder.batches.add(record), 5)
    feeder.ended.update({"completed": 4})
    return feeder


def test_status_says_what_runs_and_hides_what_tenants_wrote() -> None:
    report = report_batches(busy_feeder())
    assert report["enabled"] and report["stopped"] == ""
    assert report["lines"] == {"waiting": 5, "running": 0, "completed": 4, "failed": 0}
    assert report["open"][0]["lines"] == {"total": 9, "running": 0, "completed": 4, "failed": 0}
    text = msgspec.json.encode(report)
    assert b"secret" not in text and json.loads(text) == report
    assert report_batches(None, "why") == {"enabled": False, "off": "why"}


def test_the_command_shows_what_requests_that_miss_their_slos_leave() -> None:
    feeder = busy_feeder()
    assert report_batches(feeder)["line_share"] == 1.0
    for _ in range(2):
        feeder.record_request(False)
    assert feeder.window.share == 1.0, "no line ran beside them"
    for _ in range(2):
        feeder.window.record_outcome(False)
    report = report_batches(feeder)
    assert report["line_share"] == 0.5
    assert format_batches(report)[1] == "  requests miss their SLOs: 50 % of the lines may run at once"
    found = {one.name: one.samples[0].value for one in BatchCollector(feeder).collect() if one.samples}
    assert (found["diptych:batch_line_share"], found["diptych:batch_lines_recalled"]) == (0.5, 0)


def test_the_command_shows_a_line_and_why_nothing_runs() -> None:
    feeder = busy_feeder()
    assert format_batches(report_batches(feeder)) == [
        "batches: 1 in progress; lines: 5 waiting, 0 running, 4 completed, 0 failed"
    ]
    feeder.store.trouble = "the disk is full"  # type: ignore[misc]
    assert format_batches(report_batches(feeder))[1] == "  no line is started: the disk is full"
    assert format_batches({"enabled": False}) == format_batches({}) == []
    assert format_batches({"enabled": False, "off": "why"}) == ["files and batches are off: why"]


def test_every_status_has_a_series_from_the_beginning() -> None:
    found = {family.name: family for family in BatchCollector(busy_feeder()).collect()}
    by_status = {one.labels["status"]: one.value for one in found["diptych:batches"].samples}
    assert by_status["in_progress"] == 1 and by_status["expired"] == 0 and len(by_status) == 8
    outcomes = {one.labels["outcome"]: one.value for one in found["diptych:batch_lines_ended"].samples}
    assert outcomes == {"completed": 4, "failed": 0}


def test_a_status_that_every_tenant_reads_names_no_batch() -> None:
    report = report_batches(busy_feeder(), named=False)
    assert report["open"] == [] and b"batch_1" not in msgspec.json.encode(report)
    assert report["by_status"]["in_progress"] == 1
