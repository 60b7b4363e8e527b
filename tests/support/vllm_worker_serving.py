"""A worker's loop and roles over vLLM, whose gateway is a test at the end of a pipe; `vllm_worker_process` begins it.

Payloads of the channel go both ways; `REPORT` asks for a line of JSON, which is an answer that begins with "{".
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

import msgspec

from diptych.channel.frames import decode_from_gateway, pack_message
from diptych.messages import Hello, ToGateway, ToWorker
from diptych.specs import WorkerSpec
from kvtransfer.transports.links import OfferedTransports
from vllm_worker.buffer import open_buffer
from vllm_worker.engine import VllmEngine
from vllm_worker.port import EnginePort
from vllm_worker.roles import VllmRoles
from worker.loop import LatestStats, WorkerLoop

KEY, FINGERPRINT = bytes(range(32)), "model"
NUM_SLABS = 40
REPORT = b"report"


def report_nothing() -> dict[str, object]:
    """There is no loop yet."""
    return {}


class PipeLink:
    """A `worker.loop.GatewayLink` over a pipe. Its end is that of the process."""

    def __init__(self, connection: Connection) -> None:
        self.gateway_lost = self.is_congested = False
        self._connection, self._lock = connection, threading.Lock()
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Makes the line of JSON that is asked for; it is called on the loop's thread.
        self.report: Callable[[], dict[str, object]] = report_nothing
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                payload = self._connection.recv_bytes()
            except (EOFError, OSError):
                payload = b""
            self._inbox.put(payload)
            if not payload:
                return

    def send(self, message: ToGateway) -> None:
        self._write(pack_message(message))

    def send_line(self, line: dict[str, object]) -> None:
        self._write(json.dumps(line).encode())

    def _write(self, payload: bytes) -> None:
        """Send a payload; that the test has gone is noticed by `_read`."""
        with self._lock, suppress(OSError):
            self._connection.send_bytes(payload)

    def poll_messages(self, timeout_s: float) -> list[ToWorker]:
        payloads, messages = list[bytes | None](), list[ToWorker]()
        try:
            payloads.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                payloads.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        for payload in payloads:
            if payload == b"":
                sys.exit(0)
            if payload == REPORT:
                self.send_line(self.report())
            elif payload is not None:
                messages.append(decode_from_gateway(payload))
        return messages

    def wake_poll(self) -> None:
        self._inbox.put(None)


def make_hello(name: str, role: str) -> Hello:
    """What the roles read of a `Hello`."""
    return Hello(
        worker=name,
        role=role,
        incarnation=uuid.uuid4().hex,
        fingerprint=FINGERPRINT,
        identity={},
        host="",
        pid=0,
        num_slabs=0,
        chunk_bytes=0,
        max_model_len=0,
        endpoints={},
    )


def make_report(
    loop: WorkerLoop, roles: VllmRoles, port: EnginePort, latest: LatestStats
) -> dict[str, object]:
    """What is held, and what was counted."""
    return {
        "busy": loop.is_busy,
        "used": roles.books.used,
        "owners": roles.books.owners(),
        "held_blocks": port.held_blocks,
        "stats": msgspec.structs.asdict(latest.stats),
        "cpu_s": time.process_time(),
    }


def serve(name: str, first_role: str, link: PipeLink, port: EnginePort) -> None:
    """Serve in roles until told to drain."""
    buffer = open_buffer(port.facts, NUM_SLABS * port.facts.slab_bytes)
    port.attach_buffer(buffer)
    engine = VllmEngine(port)
    spec = WorkerSpec(
        worker=name, role=first_role, gateway="", keys_dir="", model="", transports=("shm",), lease_s=60.0
    )
    roles, role = VllmRoles(spec, engine, buffer, KEY, FINGERPRINT), first_role
    while role:
        hello = make_hello(name, role)
        sources, latest = None, LatestStats()
        if role == "prefill":
            sources = OfferedTransports(["shm"], [(buffer.pool.shards[0], buffer.memory)], name)
            made, close = roles.make_prefill(link, hello, sources)
        else:
            made, close = roles.make_decode(link)
        loop = WorkerLoop(link, engine, made, roles.books, latest, fingerprint=FINGERPRINT)
        link.report = partial(make_report, loop, roles, port, latest)
        endpoints = {} if sources is None else sources.endpoints()
        address = buffer.memory.address()
        link.send_line(
            {
                "role": role,
                "incarnation": hello.incarnation,
                "endpoints": {key: value.hex() for key, value in endpoints.items()},
                "memory": msgspec.msgpack.encode(address).hex(),
                "slab_bytes": port.facts.slab_bytes,
                "vocab": port.facts.vocab_size,
                "ranks": port.facts.ranks,
            }
        )
        loop.run_until_drained()
        close()
        if sources is not None:
            sources.close()
        role = loop.next_role
        if role:
            loop.check_settled()
    port.close()
    buffer.close()
