"""`--gateways 2`: two processes take HTTP for one relay. Streams of one survive the other; none survives the relay."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.metrics.prometheus import GatewayMetrics
from tests.support.fake_workers import HALF, Puppet
from tests.support.gateway_process import WAIT_S, Gateway, specification, start, until

STREAMS = 12


class HeldStream(threading.Thread):
    """A stream that stands still after some tokens. `end` is how it ended."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.events, self.end = url, 0, ""
        self.start()

    def run(self) -> None:
        body = {"model": "toy", "prompt": [HALF], "max_tokens": 10, "stream": True}
        last = ""
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=WAIT_S) as answer:
                for line in filter(None, answer.iter_lines()):
                    self.events += '"text"' in line
                    last = line if '"error"' in line else last
        except httpx.TransportError:
            last = "reset"
        self.end = last


@contextmanager
def running(folder: Path, **changes: Any) -> Iterator[Gateway]:
    """A gateway of two processes that may be killed; its log is the file `log`."""
    spec = specification(folder, gateways=2, data_dir=str(folder / "data"), **changes)
    process = start(spec, folder / "log")
    gateway = Gateway(spec, process)
    try:
        assert process.stdout is not None
        while b'"ready"' not in process.stdout.readline():
            assert process.poll() is None, (folder / "log").read_text()
        yield gateway
    finally:
        gateway.http.close()
        process.kill()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


def sample(gateway: Gateway, series: str) -> float:
    """One series of `/metrics`."""
    lines = gateway.http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{series} ")).rpartition(" ")[2])


def open_streams(gateway: Gateway) -> list[HeldStream]:
    """Streams that stand still, some at each process."""
    streams = list[HeldStream]()
    while len(streams) < STREAMS or not all(one["sequences"] for one in gateway.status()["gateways"]):
        streams.append(HeldStream(gateway.url))
        assert len(streams) < 200, "one process takes everything"
        until(lambda: streams[-1].events)
    return streams


@pytest.mark.timeout(240)
def test_two_processes_serve_as_one_and_what_is_lost_with_each(tmp_path: Path) -> None:
    with running(tmp_path) as gateway:
        prefill, decode = gateway.puppet("prefill"), gateway.puppet("decode")
        until(lambda: gateway.ready()["ready"])
        check_forwarded(gateway)
        streams = open_streams(gateway)
        check_front_killed(gateway, streams, decode)
        check_relay_killed(gateway, streams)
        prefill.kill()
        decode.kill()


def check_forwarded(gateway: Gateway) -> None:
    """What one owner answers: files with their bytes, bodies that are refused unread, errors."""
    content = b'{"custom_id":"1"}\n' * 20_000
    made = gateway.openai().files.create(file=("lines.jsonl", content), purpose="batch")
    assert gateway.http.get(f"/v1/files/{made.id}/content").content == content
    assert gateway.http.get("/nowhere").status_code == 404
    assert gateway.http.get("/v1/completions").status_code == 405
    refused = gateway.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert refused.json()["error"]["code"] == "model_not_found"
    errors = [one["request_id"] for one in gateway.status()["errors"]]
    assert refused.headers["x-request-id"] in errors
    assert gateway.http.head("/health").status_code == 200
    assert b" 403 " in said(gateway, b"GET /health HTTP/1.0\r\n\r\n"), "it names no host"
    # A body that the relay's process does not want is not waited for.
    unread = (
        b"POST /v1/nowhere HTTP/1.1\r\nhost: 127.0.0.1\r\nexpect: 100-continue\r\ncontent-length: 99\r\n\r\n"
    )
    assert b" 404 " in said(gateway, unread)


def said(gateway: Gateway, request: bytes) -> bytes:
    """What is answered to these bytes, at first."""
    with socket.create_connection(("127.0.0.1", gateway.spec.port), WAIT_S) as client:
        client.sendall(request)
        return client.recv(1024).partition(b"\r\n")[0]


def check_front_killed(gateway: Gateway, streams: list[HeldStream], decode: Puppet) -> None:
    """One process is killed: its streams break, no other, nothing is held for them, and it is started again."""
    fronts = gateway.status()["gateways"]
    assert sum(one["sequences"] for one in fronts) == gateway.status()["sequences"] == len(streams)
    offered = sample(gateway, "diptych:offered_requests_total")
    victim, other = fronts
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: sum(stream.end == "reset" for stream in streams) == victim["sequences"])
    until(lambda: len(decode.held) == other["sequences"])
    until(lambda: gateway.status()["gateways"][0]["restarts"] == 1)
    until(lambda: gateway.status()["gateways"][0]["state"] == "ready")
    assert sum(not stream.end for stream in streams) == other["sequences"]
    assert sample(gateway, "diptych:fronts_lost_total") == 1
    assert sample(gateway, "diptych:offered_requests_total") == offered
    assert gateway.http.post("/v1/completions", json={"model": "toy", "prompt": [1]}).status_code == 200


def check_relay_killed(gateway: Gateway, streams: list[HeldStream]) -> None:
    """The relay's process is killed: every stream ends with an error, and no process is left."""
    left = [stream for stream in streams if not stream.end]
    pids = [one["pid"] for one in gateway.status()["gateways"]]
    gateway.process.kill()
    for stream in left:
        stream.join(WAIT_S)
    assert all('"server_shutting_down"' in stream.end for stream in left), [stream.end for stream in left]
    until(lambda: not any(runs(pid) for pid in pids))


def runs(pid: int) -> bool:
    """Whether a process runs, or only waits to be reaped."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_the_metrics_of_fronts_are_there_from_the_start() -> None:
    assert b"diptych:fronts_lost_total 0.0" in GatewayMetrics().render_text()
