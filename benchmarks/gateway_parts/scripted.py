"""The real process of the gateway, with its real sockets, between workers that are scripts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gateway_parts.paced_worker import CONTEXT_TOKENS, LongPuppet, PacedWorker
from tests.support.gateway_process import Gateway, serving
from tests.support.model_folder import make_folder
from tests.support.waiting import wait_for

BODY: dict[str, Any] = {"model": "toy", "prompt": "x", "temperature": 0, "ignore_eos": True}
START_S = 60.0


@dataclass(frozen=True)
class Server:
    """A server that is measured: its port, its processes, and the worker that sets its pace, if it has one."""

    port: int
    processes: tuple[psutil.Process, ...]
    worker: PacedWorker | None = None

    def cpu_s(self) -> float:
        """Processor seconds so far, of all its processes."""
        return sum(self.each_cpu_s())

    def each_cpu_s(self) -> list[float]:
        """Processor seconds so far, of each process."""
        return [sum(process.cpu_times()[:2]) for process in self.processes]


@contextlib.contextmanager
def scripted_workers(gateway: Gateway, beat_s: float) -> Iterator[PacedWorker]:
    """The decode worker of a gateway, which has a prefill worker too, and is ready."""
    keys = Path(gateway.spec.keys_dir)
    prefill = LongPuppet("prefill", 0, gateway.spec.channel, keys)
    decode = PacedWorker(gateway.spec.channel, keys, beat_s)
    try:
        wait_for(lambda: gateway.ready()["ready"], START_S)
        yield decode
    finally:
        prefill.kill()
        decode.kill()


@contextlib.contextmanager
def scripted_gateway(beat_s: float, gateways: int = 1) -> Iterator[Server]:
    """The gateway with one prefill and one decode worker; `gateways` processes take HTTP."""
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = str(make_folder(folder / "long", context=CONTEXT_TOKENS))
        gateway = stack.enter_context(serving(folder, model=model, gateways=gateways))
        worker = stack.enter_context(scripted_workers(gateway, beat_s))
        process = psutil.Process(gateway.process.pid)
        yield Server(gateway.spec.port, (process, *process.children(recursive=True)), worker)
