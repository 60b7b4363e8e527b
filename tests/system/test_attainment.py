"""Attainment under many kinds of clients at once is what a count made outside of the gateway says, to the request."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.slo import Slo
from services.gateway.batches.line_window import LineWindowSink
from services.gateway.metrics.traffic_feed import ENDED, FAILED, REFUSED, TrafficFeed
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.tenancy import tenant_of_key
from services.gateway.preparation.preparation_job import PreparationJob
from tests.support.metric_values import values
from tests.support.model_folder import make_folder
from tests.support.waiting import wait_for
from tests.system.batches.batch_lines import chat_body, client_of, finished, input_file, start
from tests.system.scripted_gateway import Running, scripted

WAIT_S = 90.0
# A client that leaves early, or has a short deadline, gives up long before these, and a late one long after: so a busy
# machine does not change what counts.
SLO = Slo(ttft_s=5.0, tpot_s=1.5)
EARLY_S, LATE_S = 0.2, 8.0
OWN, GREEDY, CROWDED = "key-of-its-own-012345", "key-of-the-greedy-0123", "key-of-a-crowd-01234567"
MET, MISSED, NOT_COUNTED = "met", "missed", "not_counted"


@dataclass(frozen=True, slots=True)
class ClientKind:
    """Clients that do the same: each call of `run` offers `sequences`, which count as `outcome` for `reason`."""

    name: str
    run: Callable[[Running], None]
    outcome: str
    reason: str
    clients: int = 2
    sequences: int = 1


def post(running: Running, prompt: str, key: str = OWN, timeout_s: float = WAIT_S, **more: Any) -> int:
    """The status of the answer to a completion request, which is read to its end; 0 for a client that gave up."""
    headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
    body = {"model": "toy", "prompt": prompt, "max_tokens": 8, **more}
    try:
        answer = httpx.post(
            f"{running.api}/completions",
            json=body,
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
            verify=False,
        )
    except httpx.ReadTimeout:
        return 0
    return answer.status_code


def asks(status: int, prompt: str, **fields: Any) -> Callable[[Running], None]:
    """A client that asks so, and is answered with this status; 0 if it leaves."""

    def run(running: Running) -> None:
        assert post(running, prompt, **fields) == status, prompt

    return run


def read_nothing(running: Running) -> None:
    """A client that asks for a long stream, and does not read it."""
    host, port = running.url.removeprefix("http://").split(":")
    body = (
        b'{"model":"toy","prompt":"FLOOD","max_tokens":1000000,"ignore_eos":true,"stream":true,"logprobs":5}'
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT_S)
        connection.connect((host, int(port)))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s" % (OWN.encode(), len(body), body)
        )
        wait_for(lambda: "diptych:slow_readers_cut_total 2.0" in metrics_of(running), WAIT_S)


def metrics_of(running: Running) -> str:
    return running.service.metrics.render_text().decode()


def deadline(seconds: float) -> dict[str, str]:
    return {"x-request-timeout": str(seconds)}


KINDS = (
    ClientKind("good", asks(200, "hi"), MET, "answered", 4),
    ClientKind("good stream", asks(200, "SLOW", stream=True), MET, "answered", 4),
    ClientKind("good, three answers", asks(200, "hi", n=3), MET, "answered", 2, sequences=3),
    ClientKind("leaves early", asks(0, "HANG", timeout_s=EARLY_S), NOT_COUNTED, "left_early", 4),
    ClientKind("leaves late", asks(0, "HANG", timeout_s=LATE_S), MISSED, "left_late", 3),
    ClientKind(
        "leaves a stream that stands still",
        asks(0, "HANG-LATE", timeout_s=LATE_S, stream=True), MISSED, "left_late", 2,
    ),
    ClientKind("deadline of 1 ms", asks(504, "HANG", headers=deadline(1e-3)), NOT_COUNTED, "short_deadline", 4),
    ClientKind("short deadline", asks(504, "HANG", headers=deadline(EARLY_S)), NOT_COUNTED, "short_deadline", 2),
    ClientKind("patient deadline", asks(504, "HANG", headers=deadline(LATE_S)), MISSED, "deadline_exceeded"),
    ClientKind("asks too much", asks(400, "hi", max_tokens=1 << 22), NOT_COUNTED, "context_length_exceeded", 3),
    ClientKind("wrong field", asks(400, "hi", temperature=-1), NOT_COUNTED, "invalid_value"),
    ClientKind("too much memory", asks(503, "FAIL-WITH answer_memory_full"), NOT_COUNTED, "answer_memory_full"),
    ClientKind("refused: full", asks(429, "hi", key=CROWDED), MISSED, "too_many_requests", 3),
    ClientKind("refused: above its share", asks(429, "hi", key=GREEDY), NOT_COUNTED, "too_many_requests", 5),
    ClientKind("500 of a worker", asks(500, "CRASH"), MISSED, "internal_error", 3),
    ClientKind("500 of the preparation", asks(500, "PREPARATION-FAILS"), MISSED, "internal_error", 3),
    ClientKind("lost worker in a stream", asks(200, "FAIL-LATE", stream=True), MISSED, "worker_lost"),
    ClientKind("slow reader", read_nothing, NOT_COUNTED, "slow_reader", 2),
    ClientKind("quarantined", asks(500, "FAIL-WITH request_quarantined"), NOT_COUNTED, "request_quarantined"),
    ClientKind("wrong grammar", asks(400, "FAIL-WITH invalid_grammar"), NOT_COUNTED, "invalid_grammar"),
)  # fmt: skip


def refuse_by_key(num_requests: int, tenant: str) -> RequestFailure | None:
    """Who uses `GREEDY` has more than its share; for `CROWDED` the service is full."""
    reasons = {GREEDY: FailureReason.TENANT_REQUESTS_FULL, CROWDED: FailureReason.TOO_MANY_REQUESTS}
    found = {tenant_of_key(key.encode()): reason for key, reason in reasons.items()}.get(tenant)
    return None if found is None else RequestFailure(found, "later")


def run_batch(running: Running) -> None:
    """Lines that are answered, and one that fails."""
    with client_of(running, OWN) as client:
        texts = ["hi", "hi", "FAIL-WITH invalid_grammar ."]
        lines = [(str(number), chat_body(text)) for number, text in enumerate(texts)]
        counts = finished(client, start(client, input_file(lines)).id).request_counts
        assert counts is not None and (counts.completed, counts.failed) == (2, 1)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    limits, keys = RequestLimits(max_stream_bytes=20_000), (OWN, GREEDY, CROWDED)
    folder = make_folder(tmp_path / "toy", context=1 << 20)
    with scripted(folder, keys=keys, limits=limits, objectives=SLO, data_dir=tmp_path / "data") as found:
        prepare = found.service.preparers.prepare_body

        async def fail_some(job: PreparationJob) -> Any:
            if b"PREPARATION-FAILS" in job.body:
                raise RuntimeError("a preparer fails")
            return await prepare(job)

        monkeypatch.setattr(found.service.preparers, "prepare_body", fail_some)
        monkeypatch.setattr(found.script, "find_refusal", refuse_by_key)
        yield found


def test_attainment_is_what_a_count_outside_says(running: Running) -> None:
    traffic, window = TrafficFeed(), list[bool]()
    running.service.outcomes.add_sink(traffic)
    running.service.outcomes.add_sink(LineWindowSink(window.append))
    clients = [kind for kind in KINDS for _ in range(kind.clients)]
    with ThreadPoolExecutor(len(clients) + 1) as pool:
        running_clients = [pool.submit(kind.run, running) for kind in clients]
        pool.submit(run_batch, running).result()
        for one in running_clients:
            one.result()
    expected, by_reason = Counter[str](), Counter[tuple[str, str]]()
    for kind in clients:
        expected[kind.outcome] += kind.sequences
        by_reason[kind.outcome, kind.reason] += kind.sequences
    outside = expected[MET] / (expected[MET] + expected[MISSED])

    def counted() -> dict[str, float]:
        return {
            name: value
            for name, value in values(running.service.metrics).items()
            if name.startswith("diptych:slo_outcomes_total") and value
        }

    # The gateway notices a moment later that a client has left.
    wait_for(lambda: sum(counted().values()) >= expected.total(), 30.0, explain=counted)
    time.sleep(0.2)
    found = values(running.service.metrics)
    error = abs(found["diptych:slo_attainment{objective=all}"] - outside)
    print(f"\nattainment_error={error:g} attainment={outside:.4f} offered={expected.total()}")
    assert counted() == {
        f"diptych:slo_outcomes_total{{outcome={outcome},reason={reason}}}": count
        for (outcome, reason), count in by_reason.items()
    }
    assert error == 0
    assert found["diptych:offered_requests_total{}"] == expected.total()
    assert found["diptych:goodput_requests_total{}"] == expected[MET]
    # Every reader has the same numbers; lines of batches are in none of them.
    history = running.service.metrics.history.report(time.monotonic(), SLO.attainment)
    shown = history["objectives"]["all"]["whole"]
    assert (shown["requests"], sum(history["not_counted"])) == (
        expected[MET] + expected[MISSED],
        expected[NOT_COUNTED],
    )
    assert shown["attainment"] == pytest.approx(outside, abs=1e-6)
    ends = Counter((what, good) for _, what, _, _, good, _ in traffic.events_since("", 0).events)
    assert ends[ENDED, True] == expected[MET]
    assert ends[ENDED, False] + ends[FAILED, False] + ends[REFUSED, False] == expected[MISSED]
    refused = by_reason[MISSED, "too_many_requests"] + 3  # and those whose preparation failed
    assert (window.count(True), window.count(False)) == (expected[MET], expected[MISSED] - refused)
