"""`diptych serve`: brings a deployment up phase by phase, says where it is, and stays until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
from rich.console import Console

from diptych.config import Config, GatewaySpec
from diptych.errors import ConfigError, DiptychError, StartError
from diptych.load import Loaded, keys
from planner.plan_file import PlanFile, Traffic
from services.cli import talk
from services.cli.model import Model, find
from services.cli.plan import budget, most_workers, plan
from services.cli.planned import check_model
from services.cli.ports import claim
from services.cli.replanning import Replan
from services.cli.stop import FAILED, INTERRUPTED, OK, USAGE, Stop
from services.cli.versions import installed
from services.cli.view import View
from services.cluster.deployment import RAY, Deployment
from services.cluster.head import Head
from services.cluster.parts import Plan
from services.cluster.supervisor import Status, raised

T = TypeVar("T")

READY_EVERY_S = 0.1
CONTROL_LOST = (
    "the control plane is lost ({} has ended): serving goes on, and workers that die are started again"
)


def serve(loaded: Loaded, answer: PlanFile | None, folder: Path) -> int:
    """Bring up what the settings say, with `folder` for keys, sockets and logs. Returns the exit status.

    `answer` is the plan that they come from, if they do.
    """
    config = loaded.config
    logs = config.log_dir.absolute() if config.log_dir else folder / "logs"
    view = View(Console(file=sys.stdout), sum(config.pools))
    try:
        logs.mkdir(parents=True, exist_ok=True)
        # Ray prints to standard output what its own processes have to say; that belongs to the logs.
        with (logs / "ray.log").open("a", encoding="utf-8") as ray_log, contextlib.redirect_stdout(ray_log):
            return asyncio.run(Start(loaded, answer, folder, logs, view).run())
    except DiptychError as error:
        view.fail(error)
        return USAGE if isinstance(error, ConfigError) else FAILED
    finally:
        view.close()


class Start:
    """One run of `diptych serve`, from the first check to the last process."""

    def __init__(self, loaded: Loaded, answer: PlanFile | None, folder: Path, logs: Path, view: View) -> None:
        config = loaded.config
        if config.replan and config.admin_key is None:
            # The replanner gives orders by the routes that a person would use.
            loaded = replace(loaded, config=replace(config, admin_key=secrets.token_hex(24)))
        self._loaded, self._config, self._answer = loaded, loaded.config, answer
        self._folder, self._logs, self._view = folder, logs, view
        self._stop = Stop()
        self._deployment: Deployment | None = None
        self._replan: Replan | None = None

    async def run(self) -> int:
        """Stay until told to stop. Whatever happens, everything that was started is stopped again.

        Raises:
            DiptychError: it did not come up.
        """
        self._stop.listen()
        config, view = self._config, self._view
        api_keys = keys(self._loaded)
        port = claim(config.host, config.port, self._loaded.origin("port"))
        view.line(f"diptych {installed('diptych')} · {config.model} · {pools(config)}")
        if self._answer is not None:
            view.line(promise(config.plan, self._answer))
        head = Head(self._folder / "ray", budget(config))
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await self._up(head, port, api_keys)
            await self._stop.asked.wait()
            view.line("stopping")
            return OK if view.up else INTERRUPTED
        except TimeoutError:
            why = f"waited {config.start_timeout_s:.0f} s (start_timeout_s)"
            raise StartError("the deployment is not ready", why, self._look()) from None
        finally:
            if self._replan is not None:
                await self._replan.end()
            await self._down(head, self._deployment)

    async def _up(self, head: Head, port: int, api_keys: tuple[str, ...]) -> None:
        """Bring everything up, or return early when asked to stop before."""
        loaded, view = self._loaded, self._view
        model = await self._unless_stopped(self._prepare(head))
        if model is None:
            return
        check_model(self._answer, model)
        self._replan = Replan.of(self._config, model, self._answer)
        channel = claim("127.0.0.1", 0)
        what = plan(loaded, model, self._folder, self._logs, channel, port, api_keys, self._answer)
        self._deployment, began_s = Deployment(what, head, self._hear), time.monotonic()
        if await self._unless_stopped(self._bring_up(self._deployment, what)):
            view.up = True
            view.box("ready", box(what.gateway, model))
            if self._replan is not None:
                took_s = time.monotonic() - began_s
                self._replan.begin(self._deployment, what, address(what.gateway), took_s, view.line)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns; None when asked to stop before, and then it is cancelled."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.asked.wait())
        try:
            await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            asked.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    async def _prepare(self, head: Head) -> Model:
        """Read the model's files in another process while Ray starts in this one."""
        view = self._view
        view.begin("model")
        view.begin("ray")
        finding = asyncio.create_task(find(self._config, most_workers(self._config)))
        await asyncio.sleep(0)  # it is started before Ray blocks this thread
        try:
            head.start()
            self._stop.listen()  # again: Ray has put a handler of its own on SIGTERM
            view.done("ray", f"head on {head.address}, token authentication")
            model = await finding
        finally:
            finding.cancel()
        view.done("model", model.told)
        return model

    async def _bring_up(self, deployment: Deployment, what: Plan) -> bool:
        """Start gateway and workers, and wait until the canary has been handed over."""
        self._view.begin("load")
        self._failed: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        deployment.start()
        ready = asyncio.create_task(self._ready(what.gateway))
        try:
            either: list[asyncio.Future[Any]] = [ready, self._failed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                status = self._failed.result()
                raise raised(status, what.log(status.name))
            ready.result()
            return True
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    def _hear(self, status: Status) -> None:
        if status.name == RAY:
            self._view.line(CONTROL_LOST.format(status.phase))
            return
        self._view.hear(status)
        if status.state == "failed" and not self._failed.done():
            self._failed.set_result(status)

    async def _ready(self, gateway: GatewaySpec) -> None:
        """Ask until a canary has gone every way there is, so that the first request finds all workers."""
        view, key = self._view, gateway.api_keys[0] if gateway.api_keys else None
        async with httpx.AsyncClient(
            base_url=address(gateway), headers=talk.bearer(key), trust_env=False
        ) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/ready", timeout=30.0)).status_code == 200:
                        state = talk.state((await client.get("/status", timeout=10.0)).json())
                        if state.ready and not state.reasons and view.workers_ready:
                            break
                await asyncio.sleep(READY_EVERY_S)
        view.done("load")
        view.done("warm-up")
        view.done("canary", "; ".join(state.links) or "answered")

    async def _down(self, head: Head, deployment: Deployment | None) -> None:
        """Stop in order; a second press of Ctrl-C leaves the rest to the guard."""
        drain_s = self._config.drain_s if self._view.up else 0.0
        stopping = asyncio.create_task(deployment.stop(drain_s)) if deployment else None
        hurry = asyncio.create_task(self._stop.hurry.wait())
        if stopping is not None:
            await asyncio.wait([stopping, hurry], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
        hurry.cancel()
        head.stop()

    def _look(self) -> str:
        kept = self._config.log_dir is not None
        return f"see {self._logs}" if kept else "see why with --log-dir DIR --log-level info"


def pools(config: Config) -> str:
    """The pools in words."""
    prefill, decode = config.pools
    return f"{prefill} prefill + {decode} decode" if prefill else f"{decode} colocated"


def promise(path: Path | None, answer: PlanFile) -> str:
    """What a plan says of itself: what it is found to carry, of which traffic, and within which objectives."""
    told = answer.predicted
    low, high = told.interval_rps
    between = f" ({low:.3g} to {high:.3g})" if low < high else ""
    searched = f"; searched {told.searched_rps:.3g}" if told.searched_rps is not None else ""
    return (
        f"plan {path}: {answer.placement}, predicted to carry {told.goodput_rps:.3g} requests/s{between} of "
        f"{_traffic(answer.traffic)} at {told.attainment:.0%} attainment of {_objectives(answer)}{searched}"
    )


def _traffic(traffic: Traffic) -> str:
    """Its name, with what is known of it."""
    name, told = traffic.name or "the traffic that it is for", list[str]()
    if traffic.prompt_mean > 0.0:
        lengths = f"{traffic.prompt_mean:.3g} and answers of {traffic.output_mean:.3g} tokens on average"
        told.append(f"prompts of {lengths}")
    if traffic.rate_rps is not None:
        told.append(f"{traffic.rate_rps:.3g} requests/s asked for")
    if traffic.burstiness_cv != 1.0:
        told.append(f"burstiness {traffic.burstiness_cv:g}")
    return f"{name} ({', '.join(told)})" if told else name


def _objectives(answer: PlanFile) -> str:
    """Of each kind of request: TTFT 500 ms, TPOT 50 ms."""
    kinds = []
    for kind, slo in sorted(answer.promises.items()):
        limits = [("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)]
        told = ", ".join(f"{name} {limit * 1e3:.4g} ms" for name, limit in limits if math.isfinite(limit))
        kinds.append(f"{kind} ({told})" if kind else told)
    return " and ".join(kinds) or "no objective"


def address(gateway: GatewaySpec) -> str:
    """The URL of a gateway as a client on this machine would write it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(gateway.host, gateway.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{gateway.port}"


def box(gateway: GatewaySpec, model: Model) -> str:
    """URL, a first request in curl and in Python, and the metrics."""
    url, name, secured = address(gateway), gateway.served_names[0], bool(gateway.api_keys)
    header = " -H 'Authorization: Bearer '\"$DIPTYCH_API_KEY\"" if secured else ""
    key = 'os.environ["DIPTYCH_API_KEY"]' if secured else '"none"'
    imports = "import os, openai" if secured else "import openai"
    if model.chats or gateway.chat_template:
        path, ask = "chat/completions", '"messages":[{"role":"user","content":"What is a list in Python?"}]'
        call = 'chat.completions.create(messages=[{"role": "user", "content": "What is a list in Python?"}], '
        take = "choices[0].delta.content"
    else:
        path, ask = "completions", '"prompt":"Once upon a time"'
        call, take = 'completions.create(prompt="Once upon a time", ', "choices[0].text"
    body = f'{{"model":"{name}","stream":true,"max_tokens":64,{ask}}}'
    return f"""\
{url}/v1

curl -N {url}/v1/{path} -H 'Content-Type: application/json'{header} \\
  -d '{body}'

{imports}
client = openai.OpenAI(base_url="{url}/v1", api_key={key})
for part in client.{call}model="{name}", stream=True):
    print(part.{take} or "", end="", flush=True)

metrics {url}/metrics    docs {url}/docs    stop with Ctrl-C"""
