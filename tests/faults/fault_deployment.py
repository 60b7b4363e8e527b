"""A deployment of real processes for the proving ground: one gateway, toy workers, each under its supervisor.

`address_of` may put something between a worker and the gateway's channel (a proxy). The control socket on which toy
workers tell their phases ends here, in a thread of its own; whoever waits is woken by every line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from diptych.channel.keys import make_keys
from diptych.specs import GatewaySpec, WorkerSpec
from services.host.ports import claim_port
from services.host.supervision.supervisor import Supervisor
from tests.faults.toy_model import CONTEXT, make_folder, toy_layout
from tests.support.waiting import wait_for
from tests.support.warm_process import WarmSupervisor

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
# Bulk work runs beside answers, too: a step of them takes 2 to 50 ms.
BULK_SLICE_MS, BULK_TPOT_MS = 10.0, 100.0
BOOKS = ("slabs_used", "leases", "staging_bytes", "running", "waiting")  # 0 in every worker at rest


@dataclass(frozen=True, slots=True)
class DeploymentShape:
    """What a deployment is made of; the scenario files' `deployment`."""

    prefill: int = 2
    decode: int = 2
    num_slabs: int = 256
    step_s: float = 0.002
    token_s: float = 0.0
    gb_per_s: float | None = None  # of what links say they are capable, so that KV is pulled ahead
    step_tokens: int = 256
    beat_s: float = 0.25
    lease_s: float = 10.0
    drain_s: float = 5.0
    recovery_s: float = 15.0
    transports: tuple[str, ...] = ("shm",)
    pipelined: bool = True
    # The KV codec of all workers; empty: none.
    codec: str = ""
    # Lines of each batch that is kept open beside the requests (`tests.faults.bulk_backlog`); 0: no batches.
    bulk_lines: int = 0
    # Each worker in a network namespace of its own (`tests.faults.namespace_deployment`).
    houses: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # more of the gateway's specification


@dataclass(slots=True)
class ToyReports:
    """What toy workers have reported. `held` are the requests at doors: nonce -> (phase, worker); `rest` by worker."""

    pids: dict[str, int] = field(default_factory=dict)
    held: dict[int, tuple[str, str]] = field(default_factory=dict)
    rest: dict[str, tuple[bool, float]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


class GateControl:
    """The runner's end of the doors (`tests.faults.phase_gates`)."""

    def __init__(self, path: Path) -> None:
        self.path, self.said = path, ToyReports()
        self.changed = threading.Condition()
        self._lines: dict[str, socket.socket] = {}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(64)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def go(self, *nonces: int) -> None:
        """Let requests go on, here and wherever they come later."""
        with self.changed:
            self.said.gone.update(nonces)
            for nonce in nonces:
                for line in self._lines.values():
                    with contextlib.suppress(OSError):
                        line.sendall(json.dumps({"go": nonce}).encode() + b"\n")

    def wait(self, condition: Callable[[ToyReports], bool], timeout_s: float = PATIENCE_S) -> bool:
        """Until `condition` holds of what was said; False if it did not in time."""
        with self.changed:
            return self.changed.wait_for(lambda: condition(self.said), timeout_s)

    def close(self) -> None:
        self._server.close()
        with self.changed:
            for line in self._lines.values():
                line.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(line,), name="control line", daemon=True).start()

    def _hear(self, line: socket.socket) -> None:
        worker = ""
        with contextlib.suppress(OSError, ValueError), line, line.makefile("r", encoding="utf-8") as words:
            for word in words:
                said = json.loads(word)
                with self.changed:
                    if not worker:
                        worker = said["worker"]
                        self.said.pids[worker] = said["pid"]
                        self._lines[worker] = line
                        line.sendall(json.dumps({"gone": sorted(self.said.gone)}).encode() + b"\n")
                    elif "at" in said:
                        self.said.held[said["nonce"]] = (said["at"], worker)
                    elif "rest" in said:
                        self.said.rest[worker] = (said["rest"], time.monotonic())
                    self.changed.notify_all()


class FaultDeployment:
    """A running deployment. Names are "gateway", "prefill-0", "decode-1"."""

    def __init__(
        self,
        folder: Path,
        shape: DeploymentShape,
        address_of: Callable[[str, str], str] = lambda worker, real: real,
    ):
        self.folder, self.shape = folder, shape
        self.model = make_folder(folder / "toy")
        self.control = GateControl(folder / "control")
        self.port = claim_port("127.0.0.1", 0)
        self.channel = f"tcp://127.0.0.1:{claim_port('127.0.0.1', 0)}"
        once = httpx.Limits(max_keepalive_connections=0)  # the gateway may be another one the next time
        url = f"http://127.0.0.1:{self.port}"
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=60, limits=once)
        self.log = folder / "requests.jsonl"
        self.names = [f"prefill-{n}" for n in range(shape.prefill)] + [
            f"decode-{n}" for n in range(shape.decode)
        ]
        make_keys(folder / "keys")
        self.parts = {"gateway": self._supervise("gateway", "services.gateway", self._gateway())}
        for name in self.names:
            spec = self._worker(name, address_of(name, self.channel))
            self.parts[name] = self._supervise(name, "tests.faults.toy_worker", spec)

    def _gateway(self) -> GatewaySpec:
        shape = self.shape
        settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "channel": self.channel,
            "keys_dir": str(self.folder / "keys"),
            "model": str(self.model),
            "served_names": ("toy",),
            "num_prefill": shape.prefill,
            "num_decode": shape.decode,
            "max_model_len": CONTEXT,
            "beat_s": shape.beat_s,
            "lease_s": shape.lease_s,
            "drain_s": shape.drain_s,
            "recovery_s": shape.recovery_s,
            "pipelined": shape.pipelined,
            "request_log": str(self.log),
            "data_dir": str(self.folder / "data") if shape.bulk_lines else None,
        }
        return GatewaySpec(**settings | dict(shape.settings))

    def _worker(self, name: str, address: str) -> WorkerSpec:
        shape = self.shape
        return WorkerSpec(
            worker=name,
            role=name.split("-")[0],
            gateway=address,
            keys_dir=str(self.folder / "keys"),
            model="toy",
            kv_bytes=shape.num_slabs * toy_layout(shape.codec).chunk_bytes,
            max_num_seqs=min(128, shape.step_tokens),
            max_num_batched_tokens=shape.step_tokens,
            transports=shape.transports,
            lease_s=shape.lease_s,
            drain_s=shape.drain_s,
            pipelined=shape.pipelined,
            bulk_slice_ms=BULK_SLICE_MS,
            bulk_tpot_ms=BULK_TPOT_MS,
        )

    def _supervise(self, name: str, module: str, spec: WorkerSpec | GatewaySpec) -> Supervisor:
        shape = self.shape
        toy = {
            "control": str(self.control.path),
            "step_s": shape.step_s,
            "token_s": shape.token_s,
            "gb_per_s": shape.gb_per_s,
            "codec": shape.codec,
        }
        environ = os.environ | {"DIPTYCH_TOY": json.dumps(toy), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", module]
        log = self.folder / "logs" / f"{name}.log"
        return WarmSupervisor(name, command, msgspec.json.encode(spec), log, environ)

    def start(self) -> None:
        """Start everything; returns when a request can go every way.

        Raises:
            AssertionError: a part failed, or the deployment is not ready in time.
        """
        for part in self.parts.values():
            part.start()
        for part in self.parts.values():
            self.until_ready(part)
        pairs = self.shape.prefill * self.shape.decode or self.shape.decode
        self.until(
            lambda: self.ready() and len(self.status()["links"]) >= (pairs if self.shape.prefill else 0)
        )

    def until_ready(self, part: Supervisor) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while (status := part.status()).state != "ready":
            part.wait_status(status.version, 5.0)
            assert time.monotonic() < ends_s and status.state != "failed", (status, self.words(part.name))

    def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
        """Seconds until `condition` held. Raises AssertionError with the status if it did not in time."""
        return wait_for(condition, timeout_s, explain=self.toy_reports)

    def stop(self) -> None:
        """End everything, gateway first; nothing is left."""
        for part in self.parts.values():
            with contextlib.suppress(ProcessLookupError, ValueError):  # one that is stopped cannot end
                os.kill(part.status().pid, signal.SIGCONT)
            part.stop(2.0)
        self._http.close()
        self.control.close()

    # ---- looking

    def status(self) -> dict[str, Any]:
        """`GET /status`."""
        body: dict[str, Any] = self._http.get("/status").json()
        return body

    def ready(self) -> bool:
        """Whether `GET /ready` says so; a refused connection is a no."""
        try:
            return self._http.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def metrics(self) -> dict[str, float]:
        """All samples of `GET /metrics`, by name with labels."""
        text = self._http.get("/metrics").text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def held(self) -> dict[str, float]:
        """Whatever is not 0 in the books, by worker and book; empty at rest."""
        state = self.status()
        kept = {f"{w['worker']}.{b}": w["stats"][b] for w in state["workers"] for b in BOOKS if w["stats"][b]}
        return kept | {name: state[name] for name in ("open_requests", "sequences") if state[name]}

    def toy_reports(self) -> dict[str, Any]:
        """For the message of a failure."""
        try:
            state = self.status()
        except httpx.HTTPError as error:
            return {"no status": repr(error), "gateway": self.words("gateway")}
        workers = {w["worker"]: {b: w["stats"][b] for b in BOOKS} for w in state["workers"]}
        return {"reasons": state["reasons"], "sequences": state["sequences"], "workers": workers}

    def pid(self, name: str) -> int:
        return self.parts[name].status().pid

    def words(self, name: str) -> str:
        """The end of a part's log."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text("utf-8", "replace")[-1500:] if path.exists() else ""


@contextmanager
def running_deployment(
    folder: Path, shape: DeploymentShape, address_of: Callable[[str, str], str] = lambda worker, real: real
) -> Iterator[FaultDeployment]:
    """A deployment that is ready; at the end nothing of it is left."""
    fleet = FaultDeployment(folder, shape, address_of)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()
