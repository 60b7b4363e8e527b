"""What benchmarks of a whole deployment share: starting one, and streams whose events are only stamped, never parsed.

A client that parsed every event would compete with what it measures on a machine of two cores, so
`StampedStream` looks for the beginnings of events in the bytes it is given and notes the time; the text is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx

from services.host.ports import claim_port
from services.host.supervision.process_guard import tied_command

# No newline can be within an event, so none of its text looks like these.
EVENT, FAILURE, DONE = b"\ndata: {", b'\ndata: {"error"', b"\ndata: [DONE]"
OK = b"HTTP/1.1 200"
LAST_CHUNK = b"0\r\n\r\n"  # of a response: its end where a server sends no [DONE]
START_S, STOP_S, ANSWER_S = 300.0, 60.0, 300.0


@dataclass(frozen=True, slots=True)
class ReachedDeployment:
    """A deployment with a gateway on this machine."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises httpx.HTTPError."""
        reply = httpx.post(self.url + path, json=body, timeout=ANSWER_S).raise_for_status().json()
        assert isinstance(reply, dict)
        return reply

    def get(self, path: str) -> dict[str, Any]:
        """Raises httpx.HTTPError."""
        body = httpx.get(self.url + path, timeout=ANSWER_S).raise_for_status().json()
        assert isinstance(body, dict)
        return body

    def metrics(self) -> str:
        """All metrics, as text. Raises httpx.HTTPError."""
        return httpx.get(f"{self.url}/metrics", timeout=ANSWER_S).raise_for_status().text

    def metric(self, name: str) -> float:
        """Sum of all samples of a metric. Raises httpx.HTTPError."""
        samples = [line for line in self.metrics().splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def rest(self) -> None:
        """Wait until nothing is open and no slab is used. Raises TimeoutError."""
        deadline_s = time.monotonic() + STOP_S
        while time.monotonic() < deadline_s:
            state = self.get("/status")
            if not state["open_requests"] and not any(one["stats"]["slabs_used"] for one in state["workers"]):
                return
            time.sleep(0.05)
        raise TimeoutError(f"the deployment does not come to rest: {state}")


@dataclass(frozen=True, slots=True)
class ServedDeployment(ReachedDeployment):
    """A running `diptych serve`."""

    process: subprocess.Popen[str]

    def wait_ready(self) -> None:
        """Raises RuntimeError if it ended, or was not ready in time."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                errors = self.process.stderr.read() if self.process.stderr else ""
                raise RuntimeError(
                    f"diptych serve ended with {self.process.returncode}: {errors.strip()[-600:]}"
                )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=10).status_code == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"not ready after {START_S:.0f} s")


def pool_flags(colocated: int) -> tuple[str, ...]:
    """Flags for so many workers that do both, or, with 0, for one of each kind."""
    return ("--colocated", str(colocated)) if colocated else ("--prefill", "1", "--decode", "1")


@contextlib.contextmanager
def serving_deployment(*arguments: str, checkout: Path | None = None) -> Iterator[ServedDeployment]:
    """`diptych serve ARGUMENTS` on a free port of this machine; it may not be ready yet. Stopped at the end.

    With `checkout` it runs the code in that folder, by this interpreter.
    """
    port = claim_port("127.0.0.1", 0)
    command = [sys.executable, "-m", "services.cli.main", "serve", "--port", str(port), *arguments]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DIPTYCH_", "UCX_"))}
    if checkout is not None:
        environ["PYTHONPATH"] = str(checkout)
    process = subprocess.Popen(
        tied_command(command),
        cwd=checkout,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    )
    try:
        yield ServedDeployment(port, process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@dataclass(slots=True, eq=False)
class StampedStream(asyncio.Protocol):
    """One streamed completion. `stamps_s` has the arrival of each event, on the monotonic clock."""

    body: bytes
    stamps_s: list[float] = field(default_factory=list)
    error: str = ""
    transport: asyncio.Transport | None = None
    _answered: bool = False
    _wanted: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def open(
        cls, port: int, path: str = "/v1/completions", key: str = "", **body: Any
    ) -> StampedStream:
        """Connect to this machine and send, with an API key if there is one; `body` is what `path` takes."""
        content = json.dumps(body | {"stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {key}\r\n" if key else ""
        loop = asyncio.get_running_loop()
        request = head.encode() + f"content-length: {len(content)}\r\n\r\n".encode() + content
        _, stream = await loop.create_connection(lambda: cls(request), "127.0.0.1", port)
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not an instance of it
        self.transport.write(self.body)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        failed = (not self._answered and not data.startswith(OK)) or FAILURE in data
        self._answered = True
        self.stamps_s += [now_s] * data.count(EVENT)
        if failed:
            self.error = data.decode(errors="replace")
        if failed or DONE in data or data.endswith(LAST_CHUNK):
            self._over.set()
            self._news.set()
        if len(self.stamps_s) >= self._wanted:
            self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._over.is_set() and not self.error:
            self.error = "the connection ended before the answer did"
        for event in (self._over, self._news, self.closed):
            event.set()

    async def until(self, events: int) -> None:
        """Wait until there were so many events in all. Raises RuntimeError if it ends before."""
        self._wanted = events
        self._news.clear()
        if len(self.stamps_s) < events and not self._over.is_set():
            async with asyncio.timeout(ANSWER_S):
                await self._news.wait()
        if self.error or len(self.stamps_s) < events:
            raise RuntimeError(f"a stream ended after {len(self.stamps_s)} events: {self.error[-400:]}")

    async def done(self) -> None:
        """Wait for its end. Raises RuntimeError if it fails."""
        async with asyncio.timeout(ANSWER_S):
            await self._over.wait()
        if self.error:
            raise RuntimeError(f"a stream failed: {self.error[-400:]}")

    async def leave(self) -> None:
        """Hang up, whether it has ended or not; returns when the socket is closed."""
        if self.transport is not None:
            self.transport.abort()
            await self.closed.wait()
