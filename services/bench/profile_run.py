"""Measures a deployment of this machine for the planner: it serves a workload at several depths and records it.

The deployment is the product's own, started for this, with logs of its steps and of its requests. Requests are sent as
others end (a fixed number of them open at a time), so that no rate has to be known before; from one at a time, where a
request meets nobody, to as many as keep every worker busy. Then they arrive in open loop, at shares of the best pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import StartError
from diptych.eviction_spec import ADA
from diptych.slo import Slo
from planner.costs import profiler
from planner.costs.fit import fit_handling
from planner.costs.kv.codec import find_codec
from planner.costs.model import ModelDims, dims_on_cpu, find_model
from planner.costs.profile import CostProfile
from planner.costs.profiler import MeasuredStep, MeasuredTransfer, WorkerTrace
from planner.costs.step import StepCost
from planner.hardware import CPU, Device, served_device
from planner.types import GatewayCpuCost, Job, KvClassWork, Parallelism
from planner.workload.kv_mix import KvMixedSource
from planner.workload.workload import JobSource
from services.bench.load_generator import LoadGenerator, LoadRun, RunOptions
from services.bench.server import BenchServer, probe_server
from services.bench.signals import interrupt_on_sigterm
from services.host.child_environment import import_path_environment
from services.host.ports import claim_port
from services.host.supervision.process_guard import tied_command

# Numbers of requests that are kept open at a time, stage by stage.
DEPTHS = (1, 2, 4, 8, 16)
# In further stages requests arrive at random, at these shares of the highest rate that was served. With a fixed
# number of open requests, steps with many rows always coincide with busy neighbours, and the two effects could not be
# distinguished.
OPEN_LOOP_SHARES = (0.4, 0.6, 0.8)
# Fewest requests of a stage.
MIN_STAGE_REQUESTS = 12
# Fewest requests of a stage for each request that is kept open.
MIN_REQUESTS_PER_SLOT = 3
START_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 60.0
# Number of requests sent to each worker so that it steps again, and number of tokens of their answers.
TOUCHES, TOUCH_TOKENS = 3, 4
GATEWAY_CPU_METRIC = "process_cpu_seconds_total"
# Seconds to wait until the next step of each worker writes its step log: a little more than the worker's `FLUSH_S`.
FLUSH_WAIT_S = 1.2

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """How many workers of each role are deployed; `colocated` ones do both."""

    prefill: int = 1
    decode: int = 1
    colocated: int = 0

    @property
    def flags(self) -> list[str]:
        """The flags of `diptych serve` for these pools."""
        if self.colocated:
            return ["--colocated", str(self.colocated)]
        return ["--prefill", str(self.prefill), "--decode", str(self.decode)]

    def __str__(self) -> str:
        return f"colocated {self.colocated}" if self.colocated else f"{self.prefill}P{self.decode}D"


@dataclass(slots=True)
class LiveDeployment:
    """A deployment that is up. `model` is the folder of its model ("": the embedded one); `folder` has its logs."""

    pools: PoolSizes
    model: str
    url: str
    folder: Path
    server: BenchServer
    runner: asyncio.Runner

    def get_status(self) -> dict[str, Any]:
        """The gateway's /status, decoded. Raises httpx.HTTPError if it does not answer."""
        status = httpx.get(f"{self.url}/status", timeout=START_TIMEOUT_S, trust_env=False).json()
        assert isinstance(status, dict)
        return status

    def gateway_cpu_s(self) -> float:
        """CPU seconds that the gateway has used so far; 0 if its system does not report them."""
        answer = httpx.get(f"{self.url}/metrics", timeout=START_TIMEOUT_S, trust_env=False)
        families = text_string_to_metric_families(answer.raise_for_status().text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == GATEWAY_CPU_METRIC
        )

    def send_load(self, jobs: Sequence[Job], options: RunOptions) -> LoadRun:
        """Send the requests of `jobs`, and wait for every answer."""
        run = LoadRun(0.0, 0, len(jobs), options.warmup_s)
        return self.runner.run(LoadGenerator(self.server, jobs, options, run).run_load())

    def read_step_logs(self) -> list[WorkerTrace]:
        """The step logs of all workers so far."""
        time.sleep(FLUSH_WAIT_S)
        self.runner.run(self._flush_step_logs())
        paths = sorted(self.folder.glob("*.steps"))
        return [
            life for path in paths for life in profiler.parse_step_log(_complete_lines(path.read_bytes()))
        ]

    async def _flush_step_logs(self) -> None:
        """Let every worker step again: it writes what it has gathered. At one time, so that they are spread over all,
        and for answers that the decode workers have a part in.
        """
        count = TOUCHES * max(1, self.pools.colocated, self.pools.decode)
        await asyncio.gather(*(self.server.send_smallest(TOUCH_TOKENS) for _ in range(count)))

    def read_handoffs(self, names: set[str]) -> list[MeasuredTransfer]:
        """The measured hand-offs of the requests `names`."""
        lines = (
            msgspec.json.decode(line) for line in _complete_lines((self.folder / "requests").read_bytes())
        )
        return [
            MeasuredTransfer(line["num_bytes"], line["seconds"])
            for line in lines
            if line["event"] == "moved" and line["request"] in names
        ]

    def read_kept_share(self, names: Container[str]) -> float:
        """The share of their rows that the requests `names` kept of their prompts; 1 if none of them has decided."""
        first: dict[str, tuple[int, int]] = {}
        for content in _complete_lines((self.folder / "requests").read_bytes()):
            line = msgspec.json.decode(content)
            if line["event"] == "tokens" and "all_rows" in line and line["request"] in names:
                first.setdefault(line["request"], (line["kept_rows"], line["all_rows"]))
        kept, rows = (sum(counts[place] for counts in first.values()) for place in (0, 1))
        return kept / rows if rows else 1.0

    def find_keep_rule(self) -> str:
        """The rule by which requests have dropped rows that named none; that of `KvKeep` if none has decided."""
        measured = self.get_status()["kv_keep"]["measured"]
        return str(measured[-1]["rule"]) if measured else ADA


def _complete_lines(content: bytes) -> list[bytes]:
    """The complete lines of `content`."""
    return content.split(b"\n")[:-1]


@contextlib.contextmanager
def running_deployment(
    pools: PoolSizes, model: str = "", options: Sequence[str] = ()
) -> Iterator[LiveDeployment]:
    """`diptych serve` on a free port, with logs in a folder that is removed afterwards.

    Raises:
        StartError: it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="diptych-measure-") as name, contextlib.ExitStack() as owned:
        # Entered first, so that it holds until the deployment has ended.
        owned.enter_context(interrupt_on_sigterm())
        folder = Path(name)
        port = claim_port("127.0.0.1", 0)
        command = [sys.executable, "-m", "services.cli.main", "serve", *([model] if model else [])]
        command += ["--port", str(port), *pools.flags, *options]
        command += ["--step-log", str(folder), "--request-log", str(folder / "requests")]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DIPTYCH_")}
        with (folder / "stderr").open("wb") as log_file:
            process = subprocess.Popen(
                tied_command(command),
                stdout=subprocess.DEVNULL,
                stderr=log_file,
                env=kept | import_path_environment(kept),
                start_new_session=True,
            )
        owned.callback(_stop_process, process)
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, url, folder / "stderr")
        runner = owned.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        server = runner.run(probe_server(url, None, None, "completions"))
        owned.callback(server.client.close_idle)
        yield LiveDeployment(pools, model, url, folder, server, runner)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise StartError(
                "the deployment to be measured did not start",
                log_path.read_text(errors="replace").strip()[-400:],
            )
        # The body must say that the gateway is ready; status 200 alone does not suffice. A server of Ray's may have
        # taken the port before the gateway could.
        with contextlib.suppress(httpx.TransportError, ValueError, AttributeError):
            if httpx.get(f"{url}/ready", timeout=10, trust_env=False).json().get("ready"):
                return
        time.sleep(0.3)
    raise StartError(
        "the deployment to be measured did not start", f"it was not ready after {START_TIMEOUT_S:.0f} s"
    )


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- one measurement


@dataclass(slots=True)
class LoadStage:
    """A part of the measurement: with a fixed number of open requests, or (None) with a request rate.
    `ttfts_s` are as the client saw them; `tokens` were answered, and `gateway_s` seconds of its processor the gateway
    took for it all.
    """

    depth: int | None
    begun_s: float
    ended_s: float
    ttfts_s: list[float] = field(default_factory=list)
    rate: float | None = None
    tokens: int = 0
    gateway_s: float = 0.0

    @property
    def rate_rps(self) -> float:
        """Requests a second; of such that came as they liked, what was asked for at most."""
        return len(self.ttfts_s) / (self.ended_s - self.begun_s)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A profile, L_m of the workers that only read (0: there are none), what the gateway's processor does, and what
    all this was made from.
    """

    profile: CostProfile
    saturation_tokens: int
    traces: list[WorkerTrace]
    stages: list[LoadStage]
    counts: dict[str, int]
    cpu_cost: GatewayCpuCost = GatewayCpuCost()
    # The stages that measured each further class of KV.
    class_stages: Mapping[str, list[LoadStage]] = field(default_factory=dict)

    def steps_of(self, stage: LoadStage) -> list[MeasuredStep]:
        """The steps of all workers during this stage."""
        traces = [life.between(stage.begun_s, stage.ended_s) for life in self.traces]
        return [step for life in traces for step in life.steps]


def run_stages(
    live: LiveDeployment,
    source: JobSource,
    seconds: float,
    depths: Sequence[int],
    seed: int,
    pace: float,
    say: Say,
) -> list[LoadStage]:
    """Serve the workload at each depth, then at `OPEN_LOOP_SHARES` of the best pace, for about `seconds` in all.

    `pace` is expected of the first. Raises StartError: not one request was answered.
    """
    done: list[LoadStage] = []
    each_s = seconds / (len(depths) + len(OPEN_LOOP_SHARES))
    for number, depth in enumerate(depths):
        count = max(
            MIN_STAGE_REQUESTS,
            MIN_REQUESTS_PER_SLOT * depth,
            round((done[-1].rate_rps if done else pace) * each_s),
        )
        jobs = [replace(job, at_s=0.0) for job in source.sample(count, 1.0, seed + number)]
        done.append(_run_stage(live, jobs, depth))
        say(f"{live.pools}: {depth} at a time, {count} requests, {done[-1].rate_rps:.3g} a second")
    best = max(stage.rate_rps for stage in done)
    for number, share in enumerate(OPEN_LOOP_SHARES, len(depths)):
        rate = share * best
        jobs = source.sample(max(MIN_STAGE_REQUESTS, round(rate * each_s)), rate, seed + number)
        done.append(_run_stage(live, jobs, None, rate))
        say(f"{live.pools}: {rate:.3g} a second come, {len(jobs)} requests")
    return done


def _run_stage(
    live: LiveDeployment, jobs: Sequence[Job], depth: int | None, rate: float | None = None
) -> LoadStage:
    spent_s, begun_s = live.gateway_cpu_s(), time.monotonic()
    run = live.send_load(jobs, RunOptions(Slo(), max_open=depth))
    ended_s = time.monotonic()
    spent_s = live.gateway_cpu_s() - spent_s
    stage = LoadStage(
        depth, begun_s, ended_s, rate=rate, tokens=sum(one.tokens for one in run.records), gateway_s=spent_s
    )
    # If the client bounds the number of open requests, it sends some of them late. This delay is the client's doing
    # and is subtracted.
    ours = depth is not None
    stage.ttfts_s = [
        one.result.ttft_s - (one.late_s if ours else 0.0) for one in run.records if not one.result.failed
    ]
    if not stage.ttfts_s:
        raise StartError(
            "not one request was answered", run.records[0].error_text if run.records else "none was sent"
        )
    return stage


def measure_profile(
    live: LiveDeployment,
    workload: JobSource,
    seconds: float = 40.0,
    depths: Sequence[int] = DEPTHS,
    seed: int = 1,
    say: Say = lambda line: None,
    kv_classes: Sequence[str] = (),
    keep: float = 1.0,
) -> Measurement:
    """The profile of a deployment that is up.

    `kv_classes` are those of its workers, if there are several. Costs are fitted to steps on KV of the first one; each
    other one is measured in as many stages of its own, and so are requests that evict at the threshold `keep`, if it is
    below 1. All of them share `seconds`.

    Raises:
        ConfigError: the workers' device is not known, or the workload has too few unlike requests to fit costs to.
        StartError: no request was answered.
    """
    base, rounds = (kv_classes[0] if kv_classes else ""), max(1, len(kv_classes)) + (keep < 1)
    each_s = seconds / rounds
    # Before anything is measured: a profile of a device or model that is not known could not be written.
    device, dims, room = _served_shape(live, base)
    source: JobSource = KvMixedSource(workload, {base: 1.0})
    first = [replace(job, at_s=0.0) for job in source.sample(MIN_STAGE_REQUESTS, 1.0, seed + 1000)]
    cold = _run_stage(live, first, depths[0])
    done = run_stages(live, source, each_s, depths, seed, cold.rate_rps, say)
    further = dict[str, list[LoadStage]]()
    for name in kv_classes[1:]:
        say(f"KV of the class {name}:")
        mixed = KvMixedSource(workload, {name: 1.0})
        further[name] = run_stages(live, mixed, each_s, depths, seed, cold.rate_rps, say)
    evicting = list[LoadStage]()
    if keep < 1:
        say(f"requests that keep {keep} of their attention:")
        asking = replace(live, server=replace(live.server, keep=keep))
        evicting = run_stages(asking, source, each_s, depths, seed, cold.rate_rps, say)
    logs = live.read_step_logs()
    traces = [life.between(*_span_s(done)) for life in logs]
    # With one request at a time, none waits for a step to end. The simulator models that wait itself.
    alone = done[0]
    calm = [life.between(alone.begun_s, alone.ended_s) for life in traces]
    moves = live.read_handoffs({name for life in calm for name in life.come})
    ttft_s = statistics.fmean(alone.ttfts_s)
    costs = profiler.fit_costs([step for life in traces for step in life.steps])
    beside = profiler.measure_overheads(calm, traces, ttft_s, moves)
    where = f"measured on this machine: {live.pools}, {len(traces)} workers, {os.cpu_count()} cores"
    profile = profiler.build_profile(dims, device, Parallelism(), room, costs, beside, where)
    profile = _add_classes(profile, costs.cost, logs, further)
    if evicting:
        evicted = [life.between(*_span_s(evicting)) for life in logs]
        profile = _add_keep(profile, costs.cost, live, evicted, keep)
    busy = max((life.saturation_tokens for life in traces if life.role == "prefill"), default=0)
    measurement = Measurement(profile, busy, traces, done, dict(costs.counts), class_stages=further)
    handled = [
        (len(measurement.steps_of(stage)), stage.tokens, len(stage.ttfts_s), stage.gateway_s)
        for stage in done
    ]
    return replace(measurement, cpu_cost=fit_handling(handled))


def _add_classes(
    profile: CostProfile,
    cost: StepCost,
    logs: Sequence[WorkerTrace],
    further: Mapping[str, Sequence[LoadStage]],
) -> CostProfile:
    """The profile with what steps cost on KV of further classes, and with the errors of these fits."""
    works, errors = dict[str, KvClassWork](), dict(profile.fit_error)
    for name, stages in further.items():
        traces = [life.between(*_span_s(stages)) for life in logs]
        works[name], error = profiler.fit_kv_class([step for life in traces for step in life.steps], cost)
        errors |= error.name_all(f"kv_{name}")
    return replace(profile, kv_classes=works, fit_error=errors)


def _add_keep(
    profile: CostProfile,
    cost: StepCost,
    live: LiveDeployment,
    traces: Sequence[WorkerTrace],
    threshold: float,
) -> CostProfile:
    """The profile with what eviction at a threshold keeps and costs, from the logs of the stages that evicted."""
    share = live.read_kept_share({name for life in traces for name in life.come})
    steps = [step for life in traces for step in life.steps]
    keep, error = profiler.fit_kv_keep(steps, cost, threshold, share, live.find_keep_rule())
    errors = {**profile.fit_error, **error.name_all(f"keep_{threshold}")}
    return replace(profile, kv_keep=(keep,), fit_error=errors)


def _span_s(stages: Sequence[LoadStage]) -> tuple[float, float]:
    """When the first of the stages began and the last one ended."""
    return stages[0].begun_s, stages[-1].ended_s


def _served_shape(live: LiveDeployment, base: str) -> tuple[Device, ModelDims, int]:
    """The device and the model's dimensions as it is served, and a worker's room for KV in tokens (`_worker_room`)."""
    status, dims = live.get_status(), find_model(live.model or "embedded")
    device = served_device(worker["device"] for worker in status["workers"])
    dims = replace(dims_on_cpu(dims) if device.name == CPU else dims, max_len=status["max_model_len"])
    return device, dims, min(_worker_room(dims, worker, base) for worker in status["workers"])


def _worker_room(dims: ModelDims, worker: Mapping[str, Any], base: str) -> int:
    """The tokens that a worker would have room for if all its KV were of the class `base`; "": it has one class."""
    pools = worker["kv_classes"]
    if not base:
        return CHUNK_TOKENS * int(worker["stats"]["slabs_total"])
    own = find_codec(dims, pools, base)
    assert own is not None, f"{base} was measured, and is not among {', '.join(pools)}"
    num_bytes = sum(pool["slabs"] * pool["chunk_bytes"] for pool in pools.values())
    return CHUNK_TOKENS * int(num_bytes // pools[own]["chunk_bytes"])
