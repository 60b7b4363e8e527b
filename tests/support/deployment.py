"""A whole deployment of the embedded model for a test, on a free port, and what to ask of it.

`serve` is the real command with all that it starts. `serve_parts` starts gateway and workers alone, from the same
settings and specifications, each under its supervisor: for tests whose subject is what these do together. It spares
them Ray, whose processes cost as much to start as a worker's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import httpx
import msgspec
import openai
import psutil
import typer

from diptych.channel.keys import make_keys
from diptych.config.load import LoadedConfig, collect_api_keys
from diptych.specs import GatewaySpec, WorkerSpec
from services.cli.client.gateway_http import bearer_header
from services.cli.serve.settings_flags import bind_settings
from services.cli.serve.specs import deployment_spec, num_probed
from services.cluster.spec import DeploymentSpec
from services.host.child_environment import child_environment, ucx_on_loopback
from services.host.device_settings import apply_device
from services.host.model_probe import resolve_model
from services.host.ports import claim_port
from services.host.supervision.supervisor import Supervisor
from services.host.vllm.interpreter import worker_command, worker_environment
from tests.support import waiting
from tests.support.terminal import PATIENCE_S, Terminal, clean_environ
from tests.support.warm_process import WarmSupervisor

T = TypeVar("T")
GRACE_S = 2.0  # of workers that are to end
PATIENT = ("--max-queue-wait-s", str(PATIENCE_S))
# 0 in every worker at rest.
BOOKS = (
    "slabs_used", "leases", "staging_bytes", "running", "waiting", "buffer_used", "copies_in_flight", "offers_waiting",
)  # fmt: skip


def sum_samples(shown: str, name: str, **labels: str) -> float:
    """Sum of all samples of a metric, in what `/metrics` showed, whose labels contain `labels`; 0 if there is none."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in shown.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(f'{k}="{v}"' in line for k, v in labels.items())
    )


@dataclass(frozen=True, slots=True)
class Served:
    """A deployment that is ready. `url` has no `/v1`; `key` is what it asks for, if it does."""

    url: str
    key: str = "none"
    # Folder with a log of each part, if the parts were started one by one.
    logs: Path | None = None

    @contextmanager
    def client(self, **options: Any) -> Iterator[openai.OpenAI]:
        """A client of OpenAI's library, until the block ends."""
        # One that nobody closes is closed by the garbage collector, which warns in whatever test runs then.
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, **options) as client:
            yield client

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=bearer_header(self.key), timeout=60)

    def status(self) -> dict[str, Any]:
        """`GET /status`."""
        body: dict[str, Any] = self.get("/status").raise_for_status().json()
        return body

    def ready(self) -> bool:
        """Whether `GET /ready` says so; a refused connection is a no."""
        try:
            return self.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def log_tails(self, num_lines: int = 40) -> str:
        """The last lines of each part's log; empty if the deployment keeps none for tests."""
        if self.logs is None:
            return ""
        tails = {one.name: one.read_text(errors="replace") for one in sorted(self.logs.glob("*.log"))}
        return "\n".join(
            f"--- {name}\n" + "\n".join(shown.splitlines()[-num_lines:]) for name, shown in tails.items()
        )

    def metric(self, name: str, **labels: str) -> float:
        """Sum of all samples of a metric whose labels contain `labels`; 0 when there is none."""
        return sum_samples(self.get("/metrics").text, name, **labels)

    def moved_chunks(self, raw_chunk_bytes: int) -> tuple[float, float]:
        """Chunks of KV that were handed over, and hand-overs, both at one moment.

        Canaries go through every class, and move one chunk of it each. Chunks of codecs have fewer bytes than the
        `raw_chunk_bytes` of others, so bytes alone do not say how many chunks they were.
        """
        shown = self.get("/metrics").text
        num_bytes = sum_samples(shown, "diptych:transfer_bytes_total")
        num_bytes += sum_samples(shown, "diptych:kv_saved_bytes_total", where="transfer")
        return num_bytes / raw_chunk_bytes, sum_samples(shown, "diptych:transfer_seconds_count")

    def moved_bytes(self) -> tuple[float, float]:
        """Bytes of KV that were handed over, and hand-overs, those of canaries included, both at one moment."""
        shown = self.get("/metrics").text
        return (
            sum_samples(shown, "diptych:transfer_bytes_total"),
            sum_samples(shown, "diptych:transfer_seconds_count"),
        )

    def worker(self, name: str) -> psutil.Process:
        """The process of a worker, as its own introduction names it."""
        found = [one for one in self.status()["workers"] if one["worker"] == name]
        return psutil.Process(found[0]["pid"])

    def writers(self) -> list[str]:
        """The decode workers that write answers, by their last heartbeats.

        A canary takes one slab and is none; an answer takes more.
        """
        workers = self.status()["workers"]
        return [
            one["worker"] for one in workers if one["role"] == "decode" and one["stats"]["slabs_used"] > 1
        ]

    def held(self) -> dict[str, float]:
        """Whatever is not 0 in the books, by worker and book; empty at rest."""
        state = self.status()
        kept = {f"{w['worker']}.{b}": w["stats"][b] for w in state["workers"] for b in BOOKS if w["stats"][b]}
        return kept | {name: state[name] for name in ("open_requests", "sequences") if state[name]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched(Served):
    """One that `diptych serve` has started, in `terminal`."""

    terminal: Terminal


@contextmanager
def serve(*arguments: str) -> Iterator[Launched]:
    """`diptych serve ARGUMENTS` until the block ends; then Ctrl-C, and nothing may be left of it.

    No request is refused because its wait is long: machines of tests are slow. `arguments` may set another limit.
    """
    port = str(claim_port("127.0.0.1", 0))
    with Terminal("serve", "--port", port, *PATIENT, *arguments) as terminal:
        terminal.expect("stop with Ctrl-C")
        yield Launched(url=f"http://127.0.0.1:{port}", terminal=terminal)
        terminal.interrupt()
        assert not terminal.left()


@contextmanager
def serve_parts(*arguments: str, worker_module: str = "", fresh: bool = False) -> Iterator[Served]:
    """Gateway and workers of `diptych serve ARGUMENTS`, without Ray, until the block ends; nothing may be left.

    Requests wait as with `serve`. Workers run `worker_module` instead of the product's, if it is given. With `fresh`
    all parts are started as the product starts them, for tests that look at a process from outside.
    """
    with tempfile.TemporaryDirectory(prefix="diptych-test-") as name:
        what = plan_deployment((*PATIENT, *arguments), Path(name))
        make_keys(what.gateway.keys_dir)
        kind = Supervisor if fresh else WarmSupervisor
        parts = [make_part("gateway", what.gateway_module, what.gateway, what, kind=kind)]
        module = worker_module or what.worker_module
        parts += [make_part(spec.worker, module, spec, what, kind=kind) for spec in what.workers]
        started: list[psutil.Process] = []
        try:
            for part in parts:
                part.start()
            for part in parts:
                wait_part_ready(part)
            _until_linked(what)
            yield Served(
                f"http://127.0.0.1:{what.gateway.port}", what.gateway.status_key or "none", what.logs
            )
            started += [one for part in parts for one in _family(part.status().pid)]
        finally:
            parts[0].stop(what.gateway.drain_s + GRACE_S)
            with ThreadPoolExecutor(len(parts)) as threads:
                list(threads.map(lambda part: part.stop(GRACE_S), parts))
        _, alive = psutil.wait_procs(started, timeout=60)
        assert started and not alive


def _family(pid: int) -> list[psutil.Process]:
    one = psutil.Process(pid)
    return [one, *one.children(recursive=True)]


def _loaded(arguments: Sequence[str]) -> LoadedConfig:
    """The settings that the command line would serve with."""
    found: list[LoadedConfig] = []

    def take(loaded: LoadedConfig) -> int:
        found.append(loaded)
        return 0

    app = typer.Typer(add_completion=False)
    app.command()(bind_settings("serve", take))
    with mock.patch.dict(os.environ, clean_environ(), clear=True):
        app(list(arguments), standalone_mode=False)
    return found[0]


def plan_deployment(arguments: Sequence[str], folder: Path) -> DeploymentSpec:
    """What `diptych serve ARGUMENTS` would start; keys and logs are in `folder`."""
    loaded = apply_device(_loaded(arguments))
    model = asyncio.run(resolve_model(loaded.config, num_probed(loaded.config)))
    channel, port = claim_port("127.0.0.1", 0), claim_port("127.0.0.1", 0)
    accepted = collect_api_keys(loaded)
    return deployment_spec(
        loaded, model, folder, folder / "logs", channel, port, accepted.every, None, accepted.urgent
    )


def make_part(
    name: str,
    module: str,
    spec: WorkerSpec | GatewaySpec,
    what: DeploymentSpec,
    steady_s: float = 30.0,
    kind: type[Supervisor] = WarmSupervisor,
) -> Supervisor:
    command, environ = [sys.executable, "-m", module], child_environment(1, clean_environ())
    if isinstance(spec, WorkerSpec):
        command, environ = worker_command(spec, module), worker_environment(spec, clean_environ())
    environ = ucx_on_loopback(environ)
    return kind(name, command, msgspec.json.encode(spec), what.log_path(name), environ, steady_s=steady_s)


def wait_part_ready(part: Supervisor) -> None:
    seen = part.status()
    while seen.state != "ready":
        newer = part.wait_status(seen.version, PATIENCE_S)
        assert newer.version != seen.version and newer.state != "failed", (seen, newer.error)
        seen = newer


def _until_linked(what: DeploymentSpec) -> None:
    """Until a canary has gone every way there is."""
    headers, ways = bearer_header(what.gateway.status_key), what.gateway.num_prefill * what.gateway.num_decode
    with httpx.Client(base_url=f"http://127.0.0.1:{what.gateway.port}", headers=headers, timeout=60) as http:

        def linked() -> bool:
            state = http.get("/status").raise_for_status().json()
            return state["ready"] and not state["reasons"] and len(state["links"]) == ways

        wait_for(linked)


def call_at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all the calls at the same time, each in a thread; returns their results in order.

    Raises:
        ExceptionGroup: some raised; with what each of them raised.
    """
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
    raised = [error for one in futures if isinstance(error := one.exception(), Exception)]
    if raised:
        raise ExceptionGroup(f"{len(raised)} of {len(calls)} calls at once failed", raised)
    return [one.result() for one in futures]


def wait_for(
    condition: Callable[[], Any],
    timeout_s: float = PATIENCE_S,
    pause_s: float = 0.05,
    explain: Callable[[], Any] = lambda: "",
) -> float:
    """Seconds until `condition` held.

    Raises:
        AssertionError: it did not hold in time; with what `explain` returns.
    """
    return waiting.wait_for(condition, timeout_s, pause_s, explain)
