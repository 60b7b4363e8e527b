"""Measures a deployment of this machine for the planner: it serves a workload at several depths, and keeps its books.

The deployment is the product's own, started for this, with logs of its steps and of its requests. Requests are sent as
others end (a fixed number of them open at a time), so that no rate has to be known before; from one at a time, where a
request meets nobody, to as many as keep every worker busy. Then they come as they like, at shares of the best pace.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from diptych.errors import StartError
from planner import profiler
from planner.fit import fit_handling
from planner.hardware import CPU, device
from planner.profile import Profile
from planner.profiler import Life, Move, Step
from planner.shape import Shape, known, on_cpu
from planner.terms import Handling, Job, Slo, Split
from planner.workload import Source
from services.bench.drive import Drive, Plan, Run
from services.bench.signals import interruptible
from services.bench.target import Target, meet
from services.cli.ports import claim

DEPTHS = (1, 2, 4, 8, 16)  # requests open at a time
# Of the most requests a second that were served: how many then come as they like. With a fixed number of them open,
# many rows go with busy neighbours, and the two could not be told apart.
OPEN = (0.4, 0.6, 0.8)
FIRST = 12  # requests of a stage, at least
FEWEST = 3  # requests of a stage for each that is open
START_S, STOP_S = 300.0, 60.0
TOUCHES, TOUCH_TOKENS = 3, 4  # requests for each worker, and the length of their answers
GATEWAY_SPENT = "process_cpu_seconds_total"
FLUSH_S = 1.2  # after which a worker writes what it noted, at its next step

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pools:
    """What is deployed: so many workers of each kind, or `colocated` ones that do both."""

    prefill: int = 1
    decode: int = 1
    colocated: int = 0

    @property
    def flags(self) -> list[str]:
        if self.colocated:
            return ["--colocated", str(self.colocated)]
        return ["--prefill", str(self.prefill), "--decode", str(self.decode)]

    def __str__(self) -> str:
        return f"colocated {self.colocated}" if self.colocated else f"{self.prefill}P{self.decode}D"


@dataclass(slots=True)
class Live:
    """A deployment that is up. `model` is the folder of its model ("": the embedded one); `folder` has its logs."""

    pools: Pools
    model: str
    url: str
    folder: Path
    target: Target
    runner: asyncio.Runner

    def status(self) -> dict[str, Any]:
        told = httpx.get(f"{self.url}/status", timeout=START_S, trust_env=False).json()
        assert isinstance(told, dict)
        return told

    def gateway_s(self) -> float:
        """Seconds of a processor that the gateway has taken so far; 0 where its system does not tell."""
        answer = httpx.get(f"{self.url}/metrics", timeout=START_S, trust_env=False)
        families = text_string_to_metric_families(answer.raise_for_status().text)
        return sum(
            sample.value for family in families for sample in family.samples if sample.name == GATEWAY_SPENT
        )

    def drive(self, jobs: Sequence[Job], plan: Plan) -> Run:
        """Send them, and follow each to its end."""
        run = Run(0.0, 0, len(jobs), plan.warmup_s)
        return self.runner.run(Drive(self.target, jobs, plan, run).go())

    def lives(self) -> list[Life]:
        """What its workers noted so far."""
        time.sleep(FLUSH_S)
        self.runner.run(self._stir())
        paths = sorted(self.folder.glob("*.steps"))
        return [life for path in paths for life in profiler.parse(_whole(path.read_bytes()))]

    async def _stir(self) -> None:
        """Let every worker step again: it writes what it has gathered. At one time, so that they are spread over all,
        and for answers that the decode workers have a part in.
        """
        count = TOUCHES * max(1, self.pools.colocated, self.pools.decode)
        await asyncio.gather(*(self.target.touch(TOUCH_TOKENS) for _ in range(count)))

    def moves(self, names: set[str]) -> list[Move]:
        """Hand-offs of these requests."""
        lines = (msgspec.json.decode(line) for line in _whole((self.folder / "requests").read_bytes()))
        return [
            Move(line["num_bytes"], line["seconds"])
            for line in lines
            if line["event"] == "moved" and line["request"] in names
        ]


def _whole(content: bytes) -> list[bytes]:
    """Lines that have ended."""
    return content.split(b"\n")[:-1]


@contextlib.contextmanager
def deployed(pools: Pools, model: str = "", options: Sequence[str] = ()) -> Iterator[Live]:
    """`diptych serve` on a free port, with logs in a folder that is removed afterwards.

    Raises:
        StartError: it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="diptych-measure-") as name, contextlib.ExitStack() as owned:
        owned.enter_context(interruptible())  # first, so that it holds until the deployment has ended
        folder = Path(name)
        port = claim("127.0.0.1", 0)
        command = [sys.executable, "-m", "services.cli.main", "serve", *([model] if model else [])]
        command += ["--port", str(port), *pools.flags, *options]
        command += ["--step-log", str(folder), "--request-log", str(folder / "requests")]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("DIPTYCH_")}
        with (folder / "told").open("wb") as told:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=told, env=environ, start_new_session=True
            )
        owned.callback(_stop, process)
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, folder / "told")
        runner = owned.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        target = runner.run(meet(url, None, None, "completions"))
        owned.callback(target.client.close)
        yield Live(pools, model, url, folder, target, runner)


def _wait(process: subprocess.Popen[bytes], url: str, told: Path) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise StartError(
                "the deployment to be measured did not start", told.read_text(errors="replace").strip()[-400:]
            )
        # Not any 200: what is free when it is looked for may be taken by a server of Ray's before the gateway is there.
        with contextlib.suppress(httpx.TransportError, ValueError, AttributeError):
            if httpx.get(f"{url}/ready", timeout=10, trust_env=False).json().get("ready"):
                return
        time.sleep(0.3)
    raise StartError("the deployment to be measured did not start", f"it was not ready after {START_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- one measurement


@dataclass(slots=True)
class Stage:
    """A part of the measurement with so many requests open at a time, or (None) such that came at a rate a second.
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
    def pace(self) -> float:
        """Requests a second; of such that came as they liked, what was asked for at most."""
        return len(self.ttfts_s) / (self.ended_s - self.begun_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile, L_m of the workers that only read (0: there are none), what the gateway's processor does, and what
    all this was made from.
    """

    profile: Profile
    saturation_tokens: int
    lives: list[Life]
    stages: list[Stage]
    counts: dict[str, int]
    handling: Handling = Handling()

    def steps(self, stage: Stage) -> list[Step]:
        """All workers' steps of that part."""
        lives = [life.between(stage.begun_s, stage.ended_s) for life in self.lives]
        return [step for life in lives for step in life.steps]


def stages(
    live: Live, workload: Source, seconds: float, depths: Sequence[int], seed: int, pace: float, say: Say
) -> list[Stage]:
    """Serve the workload at each depth, then at `OPEN` of the best pace, for about `seconds` in all.

    `pace` is expected of the first. Raises StartError: not one request was answered.
    """
    done: list[Stage] = []
    each_s = seconds / (len(depths) + len(OPEN))
    for number, depth in enumerate(depths):
        count = max(FIRST, FEWEST * depth, round((done[-1].pace if done else pace) * each_s))
        jobs = [replace(job, at_s=0.0) for job in workload.sample(count, 1.0, seed + number)]
        done.append(_served(live, jobs, depth))
        say(f"{live.pools}: {depth} at a time, {count} requests, {done[-1].pace:.3g} a second")
    best = max(stage.pace for stage in done)
    for number, share in enumerate(OPEN, len(depths)):
        rate = share * best
        jobs = workload.sample(max(FIRST, round(rate * each_s)), rate, seed + number)
        done.append(_served(live, jobs, None, rate))
        say(f"{live.pools}: {rate:.3g} a second come, {len(jobs)} requests")
    return done


def _served(live: Live, jobs: Sequence[Job], depth: int | None, rate: float | None = None) -> Stage:
    spent_s, begun_s = live.gateway_s(), time.monotonic()
    run = live.drive(jobs, Plan(Slo(), concurrency=depth))
    ended_s = time.monotonic()
    spent_s = live.gateway_s() - spent_s
    stage = Stage(
        depth, begun_s, ended_s, rate=rate, tokens=sum(one.tokens for one in run.seen), gateway_s=spent_s
    )
    # A bound on those that are open makes requests late: the client's doing. Without one, times need no correction.
    ours = depth is not None
    stage.ttfts_s = [
        one.served.ttft_s - (one.late_s if ours else 0.0) for one in run.seen if not one.served.failed
    ]
    if not stage.ttfts_s:
        raise StartError("not one request was answered", run.seen[0].told if run.seen else "none was sent")
    return stage


def measure(
    live: Live,
    workload: Source,
    seconds: float = 40.0,
    depths: Sequence[int] = DEPTHS,
    seed: int = 1,
    say: Say = lambda told: None,
) -> Measured:
    """The profile of a deployment that is up.

    Raises:
        ConfigError: the workload has too few unlike requests to fit costs to.
        StartError: no request was answered.
    """
    first = [replace(job, at_s=0.0) for job in workload.sample(FIRST, 1.0, seed + 1000)]
    cold = _served(live, first, depths[0])
    done = stages(live, workload, seconds, depths, seed, cold.pace, say)
    lives = [life.between(done[0].begun_s, done[-1].ended_s) for life in live.lives()]
    alone = done[0]  # with one at a time nobody waits for a step to end, which the simulator knows by itself
    calm = [life.between(alone.begun_s, alone.ended_s) for life in lives]
    moves = live.moves({name for life in calm for name in life.come})
    ttft_s = statistics.fmean(alone.ttfts_s)
    shape, room = _shape(live)
    costs = profiler.fit_costs([step for life in lives for step in life.steps])
    beside = profiler.overheads(calm, lives, ttft_s, moves)
    source = f"measured on this machine: {live.pools}, {len(lives)} workers, {os.cpu_count()} cores"
    made = profiler.profile(shape, device(CPU), Split(), room, costs, beside, source)
    busy = [life.saturation_tokens for life in lives if life.role == "prefill"]
    found = Measured(made, max(busy, default=0), lives, done, dict(costs.counts))
    handled = [(len(found.steps(stage)), stage.tokens, len(stage.ttfts_s), stage.gateway_s) for stage in done]
    return replace(found, handling=fit_handling(handled))


def _shape(live: Live) -> tuple[Shape, int]:
    """The model's dimensions as it is served, and the tokens of KV of one worker."""
    status = live.status()
    shape = known(live.model or "embedded")
    slabs = min(worker["stats"]["slabs_total"] for worker in status["workers"])
    return replace(on_cpu(shape), max_len=status["max_model_len"]), 64 * slabs
