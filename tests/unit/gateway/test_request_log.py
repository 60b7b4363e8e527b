"""What becomes of requests is written down, and a file that fails harms nobody."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from diptych.errors import ConfigError
from diptych.eviction_report import KeptReport
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.request_ids import RequestIds
from diptych.messages import Output
from diptych.request import Request, RequestStage, SamplingParams
from router.effects import (
    AttemptBegan,
    AttemptRetried,
    ChosenPair,
    DeliverTokens,
    FailRequest,
    FinishRequest,
    KvMoved,
    PrefilledLocally,
    RelayEffect,
    RequestCancelled,
    RequestQuarantined,
    RequestQueued,
    StageDurations,
    StageEntered,
    WorkerDown,
    WorkerUp,
)
from services.gateway.metrics import request_log
from services.gateway.metrics.request_log import RequestLog, RequestLogFile

STORY: list[RelayEffect] = [
    WorkerUp("p", "prefill", "p/1"),
    RequestQueued("a"),
    PrefilledLocally("a", "no_link"),
    AttemptBegan("a", 0, ChosenPair(None, "d"), False),
    StageEntered("a", RequestStage.QUEUED),
    StageDurations("a", {"prefill": 1.0}),
    DeliverTokens("a", Output("a", 0, [5, 6])),
    AttemptRetried("a", "worker_lost", 0, 2),
    WorkerDown("d", "d/1", "test"),
    AttemptBegan("a", 1, ChosenPair("p", "e"), True, "int8.g64", keep=0.95),
    KvMoved("a", "p", "e", "shm", 64, 0.5, 0.4, 0.1),
    DeliverTokens("a", Output("a", 1, [7], kept=KeptReport(30, 40, {"special": 1}))),
    RequestQuarantined("a"),
    FailRequest("a", RequestFailure(FailureReason.REQUEST_QUARANTINED, "text that is not for this log")),
    FinishRequest("b", "stop"),
    RequestCancelled("c"),
]
EXPECTED: list[dict[str, Any]] = [
    {"event": "arrive", "request": "a", "prompt_tokens": 3, "max_tokens": 9, "priority": 0, "canary": False},
    {"event": "up", "worker": "p", "role": "prefill", "incarnation": "p/1", "pid": 7},
    {"event": "queued", "request": "a", "epoch": 0},
    {"event": "local", "request": "a", "reason": "no_link"},
    {"event": "begin", "request": "a", "epoch": 0, "prefill": None, "decode": "d", "stage": False},
    {"event": "stage", "request": "a", "stage": "queued"},
    {"event": "tokens", "request": "a", "epoch": 0, "count": 2, "total": 2, "worker": "d"},
    {"event": "retried", "request": "a", "epoch": 0, "code": "worker_lost", "delivered": 2},
    {"event": "down", "worker": "d", "incarnation": "d/1", "reason": "test"},
    {"event": "begin", "request": "a", "epoch": 1, "prefill": "p", "decode": "e", "stage": True}
    | {"kv_class": "int8.g64", "keep": 0.95},
    {"event": "moved", "request": "a", "epoch": 1, "source": "p", "target": "e", "num_bytes": 64}
    | {"seconds": 0.5, "hidden_s": 0.4, "exposed_s": 0.1},
    {"event": "tokens", "request": "a", "epoch": 1, "count": 1, "total": 3, "worker": "d"}
    | {"kept_rows": 30, "all_rows": 40},
    {"event": "quarantined", "request": "a"},
    {"event": "end", "request": "a", "epoch": 1, "outcome": "failed", "code": "request_quarantined"}
    | {"status": 500, "output_tokens": 3},
    {"event": "end", "request": "b", "outcome": "done", "reason": "stop", "status": 200, "output_tokens": 0},
    {"event": "end", "request": "c", "outcome": "cancelled", "output_tokens": 0},
    {"event": "late", "kind": "Offer", "count": 2},
]


def request(name: str) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=9, seed=0), 10.0)


def test_every_event_has_its_line_and_nothing_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = RequestLogFile(str(path))
    moments = iter(range(100))
    log = RequestLog(file, lambda: float(next(moments)))
    log.log_arrival(request("a"), RequestIds("req_1", "mine", "a"), canary=False)
    for effect in STORY:
        log.on_effect(effect, "d", 7)
    log.log_late_messages("Offer", 2)
    file.close()
    file.close()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["t"] for line in lines] == [float(i + 1) for i in range(len(lines))]
    for line, expected in zip(lines, EXPECTED, strict=True):
        assert line == line | expected
        of_a = {"request_id": "req_1", "client_request_id": "mine"} if line.get("request") == "a" else {}
        assert {name: line[name] for name in ("request_id", "client_request_id") if name in line} == of_a
    assert file.outcomes == {"written": len(EXPECTED), "dropped": 0, "failed": 0}
    assert "not for this log" not in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o077 == 0


def test_prompts_that_begin_alike_have_the_same_numbers_within_one_log_only(tmp_path: Path) -> None:
    written = []
    for name in ("one", "two"):
        file = RequestLogFile(str(tmp_path / name))
        log = RequestLog(file)
        for request_id, chunks in (("a", (b"x", b"y")), ("b", (b"x", b"z"))):
            log.log_arrival(request(request_id), RequestIds(), canary=False)
            log.on_effect(AttemptBegan(request_id, 1, ChosenPair("p", "d"), False), None, None, chunks)
            log.on_effect(AttemptBegan(request_id, 2, ChosenPair("p", "d"), False), None, None, chunks)
        file.close()
        lines = [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        written.append([line["chunks"] for line in lines if "chunks" in line])
    (first, second), (other, _) = written
    assert len(written[0]) == 2 and first[0] == second[0] and first[1] != second[1]
    assert not set(first) & set(other)


def test_a_log_that_cannot_be_opened_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="request log"):
        RequestLogFile(str(tmp_path / "nowhere" / "log"))


def test_after_an_error_nothing_more_is_written_and_nothing_is_raised(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    file = RequestLogFile(str(tmp_path / "pipe"))
    os.close(reader)  # from now on every write fails
    file.write(b"one\n")
    file.close()
    assert file.outcomes["failed"] == 1
    file.write(b"two\n")
    assert file.outcomes["dropped"] == 1


def test_what_a_slow_disk_does_not_take_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MAX_WAITING_BYTES", 10)
    file = RequestLogFile(str(tmp_path / "log"))
    file.write(b"a line that is too long\n")
    file.write(b"short\n")
    file.close()
    assert file.outcomes == {"written": 1, "dropped": 1, "failed": 0}
