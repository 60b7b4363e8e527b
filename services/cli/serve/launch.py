"""One run of `diptych serve`: phase by phase, a deployment comes up, and it stays until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import ssl
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from diptych.config.load import ApiKeys, LoadedConfig, collect_api_keys, with_operator_keys
from diptych.config.options import Config
from diptych.errors import DiptychError, StartError
from diptych.specs import VLLM, GatewaySpec
from planner.placement.plan_file import PlanFile, PlanTraffic
from services.cli.client.gateway_http import get_route
from services.cli.client.status import format_bulk_plan
from services.cli.client.status import parse_state as read_state
from services.cli.serve.from_plan import check_planned_model
from services.cli.serve.progress import StartProgress
from services.cli.serve.signals import StopSignals
from services.cli.serve.specs import check_certificate, deployment_spec, device_budget, num_probed
from services.cluster.local_deployment import GATEWAY, RAY, LocalDeployment
from services.cluster.spec import DeploymentSpec
from services.gateway.tls.trust import trust_certificate
from services.host.exit_codes import INTERRUPTED, OK
from services.host.gpus import find_gpus
from services.host.model_probe import ProbedModel, resolve_model
from services.host.ports import claim_port
from services.host.supervision.start_deadline import StartDeadline
from services.host.supervision.supervisor import ChildStatus, start_error
from services.host.versions import installed_version

# Imported for types only: one imports the planner, the other Ray, which takes about a second.
if TYPE_CHECKING:
    from services.cli.serve.replan_setup import ReplanSession
    from services.cluster.local_ray.ray_head import LocalRay

T = TypeVar("T")

READY_POLL_S = 0.05
# Longest time in seconds to wait for an answer from `/ready`, which sends canaries.
MAX_CANARY_WAIT_S = 30.0
CONTROL_LOST = (
    "the control plane is lost ({} has ended): serving goes on, and workers that die are started again"
)


class ServeRun:
    """One run of `diptych serve`, from the first check to the last process."""

    def __init__(
        self, loaded: LoadedConfig, plan: PlanFile | None, folder: Path, logs: Path, view: StartProgress
    ) -> None:
        config = loaded.config
        self._loaded, self._config, self._plan = loaded, config, plan
        self._folder, self._logs, self._view = folder, logs, view
        self._stop, self._deadline = StopSignals(), StartDeadline(config.start_timeout_s)
        self._deployment: LocalDeployment | None = None
        self._replan: ReplanSession | None = None
        self._local_ray: LocalRay | None = None
        # What the gateway said when it was ready of files and batches, and of the policy of bulk workers.
        self._gateway_lines: list[str] = []

    async def run_until_stopped(self) -> int:
        """Start everything, and serve until a signal asks to stop. Everything that was started is always stopped again.

        Returns the exit status: `INTERRUPTED` if it was not up yet, or a second Ctrl-C has cut the stop short.

        Raises:
            DiptychError: the deployment did not start, or the gateway has failed for good.
        """
        self._stop.listen_signals()
        self._failed_status: asyncio.Future[ChildStatus] = asyncio.get_running_loop().create_future()
        self._loaded = with_operator_keys(self._loaded)
        self._config = self._loaded.config
        config, view = self._config, self._view
        keys = collect_api_keys(self._loaded)
        check_certificate(self._loaded)
        port = claim_port(config.host, config.port, self._loaded.origin_of("port"))
        view.print_line(f"diptych {installed_version('diptych')} · {config.model} · {describe_pools(config)}")
        if self._plan is not None:
            view.print_line(describe_plan(config.plan, self._plan))
        try:
            async with self._deadline.limit():
                await self._start_all(port, keys)
            await self._unless_stopped(self._await_failure())
            view.print_line("stopping")
        except TimeoutError:
            why = self._deadline.describe()
            raise StartError("the deployment is not ready", why, self._logs_hint()) from None
        finally:
            if self._replan is not None:
                await self._replan.end_steering()
            await self._stop_all()
        return OK if view.up and not self._stop.hurry_asked.is_set() else INTERRUPTED

    async def _start_all(self, port: int, keys: ApiKeys) -> None:
        """Bring everything up, or return early when asked to stop before."""
        view, began_s = self._view, time.monotonic()
        found = await self._unless_stopped(self._find_and_start(port, keys))
        if found is None:
            return
        deployment, spec, model = found
        if await self._unless_stopped(self._start_workers(deployment, spec)):
            view.up = True
            view.print_box("ready", ready_box(spec.gateway, model))
            for line in [*self._describe_places(deployment), *self._gateway_lines]:
                view.print_line(line)
            if self._replan is not None:
                took_s = time.monotonic() - began_s
                self._replan.begin_steering(
                    deployment, spec, gateway_url(spec.gateway), took_s, view.print_line
                )

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if a stop is asked for first, which cancels `work`."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.stop_asked.wait())
        try:
            await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            asked.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    async def _find_and_start(
        self, port: int, keys: ApiKeys
    ) -> tuple[LocalDeployment, DeploymentSpec, ProbedModel]:
        """Find the model, and start the gateway and Ray, each as early as can be.

        Starting Ray blocks this thread. A model in a folder is found before, and the gateway starts beside Ray; a model
        of the hub is looked for by another process meanwhile.
        """
        self._view.begin_phase("model")
        finding = asyncio.create_task(resolve_model(self._config, num_probed(self._config)))
        # Lets the task run: it reads a folder at once, and for anything else it starts the other process.
        await asyncio.sleep(0)
        try:
            if finding.done():
                opened = self._start_gateway(finding.result(), port, keys)
                self._start_ray()
                return opened
            self._start_ray()
            return self._start_gateway(await finding, port, keys)
        finally:
            finding.cancel()

    def _start_gateway(
        self, model: ProbedModel, port: int, keys: ApiKeys
    ) -> tuple[LocalDeployment, DeploymentSpec, ProbedModel]:
        """Decide what is started for this model, and start the gateway."""
        check_planned_model(self._plan, model)
        self._view.end_phase("model", model.summary)
        if self._config.replan:
            from services.cli.serve.replan_setup import ReplanSession

            self._replan = ReplanSession.from_settings(self._config, model, self._plan)
        channel = claim_port("127.0.0.1", 0)
        spec = deployment_spec(
            self._loaded, model, self._folder, self._logs, channel, port,
            keys.every, self._plan, keys.urgent,
        )  # fmt: skip
        if self._plan is not None:
            note = describe_plan(self._config.plan, self._plan)
            spec = replace(spec, gateway=msgspec.structs.replace(spec.gateway, plan_note=note))
        if self._config.replan and spec.gateway.admin_key is None:
            # The replanner gives orders through the same routes as a person, so it needs an admin key.
            gateway = msgspec.structs.replace(spec.gateway, admin_key=secrets.token_hex(24))
            spec = replace(spec, gateway=gateway)
        self._deployment, spec = self._make_deployment(spec)
        self._deployment.start_gateway()
        return self._deployment, spec, model

    def _make_deployment(self, spec: DeploymentSpec) -> tuple[LocalDeployment, DeploymentSpec]:
        """The deployment that runs `spec`, and what it runs."""
        return LocalDeployment(spec, self._on_status), spec

    def _describe_places(self, deployment: LocalDeployment) -> list[str]:
        """Lines about where workers run, for the user."""
        return []

    def _start_ray(self) -> None:
        """Import Ray and start its head; blocks for some seconds."""
        self._view.begin_phase("ray")
        from services.cluster.local_ray.ray_head import LocalRay

        config = self._config
        gpus = len(find_gpus(own_torch=config.engine != VLLM)) if config.device == "cuda" else 0
        self._local_ray = local_ray = LocalRay(self._folder / "ray", device_budget(self._config), gpus)
        local_ray.start()
        # Repeated, because Ray has installed its own handler of SIGTERM.
        self._stop.listen_signals()
        self._view.end_phase("ray", f"head on {local_ray.address}, token authentication")

    async def _start_placed(self, deployment: LocalDeployment) -> None:
        """Start the workers where Ray places them."""
        assert self._local_ray is not None, "Ray is started before the workers"
        await deployment.start_workers(self._local_ray)

    async def _start_workers(self, deployment: LocalDeployment, spec: DeploymentSpec) -> bool:
        """Start the workers, and wait until the canary has been handed over."""
        self._view.begin_phase("load")
        await self._start_placed(deployment)
        ready = asyncio.create_task(self._await_ready(spec.gateway))
        try:
            either: list[asyncio.Future[Any]] = [ready, self._failed_status]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failed_status.done():
                await self._await_failure()
            ready.result()
            return True
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    def _on_status(self, status: ChildStatus) -> None:
        if status.name == RAY:
            self._view.print_line(CONTROL_LOST.format(status.phase))
            return
        self._view.on_status(status)
        if not self._view.up:
            self._deadline.note_status(status)
        # The run fails if the gateway fails, since nothing is served without it, or if any part fails during the
        # start. Later a worker may be missing.
        decisive = status.name == GATEWAY or not self._view.up
        if status.state == "failed" and decisive and not self._failed_status.done():
            self._failed_status.set_result(status)

    async def _await_failure(self) -> None:
        """Wait until an essential part has failed for good; raises its error."""
        await asyncio.wait([self._failed_status])
        raise self._failure_error(self._failed_status.result())

    def _failure_error(self, status: ChildStatus) -> DiptychError:
        """The error of a part that has failed for good."""
        return start_error(status, self._logs / f"{status.name}.log")

    async def _await_ready(self, gateway: GatewaySpec) -> None:
        """Ask `/ready` until canaries have passed through every worker, so that the first request finds all of them."""
        view, key = self._view, gateway.status_key
        url, tls = gateway_url(gateway), trust_own_certificate(gateway)
        ask_status = functools.partial(get_route, url, key, "/status", tls=tls)
        while True:
            await asyncio.sleep(READY_POLL_S)
            if not view.workers_ready:
                continue
            # An error means that the gateway is not there yet, or not ready.
            with contextlib.suppress(StartError, ValueError):
                await asyncio.to_thread(get_route, url, key, "/ready", MAX_CANARY_WAIT_S, tls)
                state = read_state(json.loads(await asyncio.to_thread(ask_status)))
                if state.ready and not state.reasons:
                    self._gateway_lines = [
                        *describe_data_dir(gateway, state.body.get("batches", {})),
                        *format_bulk_plan(state.body.get("bulk_plan")),
                        *describe_gateways(gateway.gateways, len(os.sched_getaffinity(0))),
                    ]
                    break
        view.end_phase("load")
        view.end_phase("warm-up")
        answered = "none: batches only" if gateway.bulk_only else "answered"
        view.end_phase("canary", "; ".join(state.links) or answered)

    async def _stop_all(self) -> None:
        """Stop in order; a second press of Ctrl-C ends at once what is left."""
        deployment = self._deployment
        drain_s = self._config.drain_s if self._view.up else 0.0
        stopping = asyncio.create_task(deployment.stop(drain_s)) if deployment else None
        hurry = asyncio.create_task(self._stop.hurry_asked.wait())
        if stopping is not None:
            await asyncio.wait([stopping, hurry], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
        hurry.cancel()
        self._stop_ray()

    def _stop_ray(self) -> None:
        """End what is left after a second Ctrl-C, and stop Ray and all processes that it has started."""
        if self._deployment is not None:
            self._deployment.end_at_once()
        if self._local_ray is not None:
            self._local_ray.stop()

    def _logs_hint(self) -> str:
        kept = self._config.log_dir is not None
        return f"see {self._logs}" if kept else "see why with --log-dir DIR --log-level info"


def describe_data_dir(gateway: GatewaySpec, batches: dict[str, Any]) -> list[str]:
    """Where files and batches are kept, or why they are off; `batches` is that part of `/status`.

    Nothing is said where the settings have turned them off.
    """
    if gateway.data_dir is None:
        return []
    if batches.get("enabled"):
        return [f"files and batches are kept in {gateway.data_dir}"]
    return [
        f"files and batches are off: {batches.get('off')}; --data-dir DIR gives this server a folder of its own"
    ]


def describe_gateways(gateways: int, cores: int) -> list[str]:
    """How many processes take HTTP, if there are several, and whether there are cores for them."""
    few = f"; this machine has {cores} cores for them" if gateways > cores else ""
    return [f"{gateways} processes take HTTP{few}"] if gateways > 1 else []


def describe_pools(config: Config) -> str:
    """The pools in words."""
    if config.bulk:
        return f"{config.bulk} bulk"
    prefill, decode = config.pools
    return f"{prefill} prefill + {decode} decode" if prefill else f"{decode} colocated"


def describe_plan(path: Path | None, plan: PlanFile) -> str:
    """A plan in one line: its predicted goodput, its traffic and its SLOs."""
    predicted = plan.predicted
    low, high = predicted.interval_rps
    between = f" ({low:.3g} to {high:.3g})" if low < high else ""
    searched = f"; searched {predicted.searched_rps:.3g}" if predicted.searched_rps is not None else ""
    return (
        f"plan {path}: {plan.placement}, predicted to carry {predicted.goodput_rps:.3g} requests/s{between} of "
        f"{_describe_traffic(plan.traffic)} at {predicted.attainment:.0%} attainment of "
        f"{_describe_slos(plan)}{searched}"
    )


def _describe_traffic(traffic: PlanTraffic) -> str:
    """Its name, with what is known of it."""
    name, parts = traffic.name or "the traffic that it is for", list[str]()
    if traffic.prompt_mean > 0.0:
        lengths = f"{traffic.prompt_mean:.3g} and answers of {traffic.output_mean:.3g} tokens on average"
        parts.append(f"prompts of {lengths}")
    if traffic.rate_rps is not None:
        parts.append(f"{traffic.rate_rps:.3g} requests/s asked for")
    if traffic.burstiness_cv != 1.0:
        parts.append(f"burstiness {traffic.burstiness_cv:g}")
    if traffic.kv_mix:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in traffic.kv_mix.items())
        parts.append(f"KV classes {shares}")
    return f"{name} ({', '.join(parts)})" if parts else name


def _describe_slos(plan: PlanFile) -> str:
    """Of each kind of request: TTFT 500 ms, TPOT 50 ms."""
    kinds = []
    for kind, slo in sorted(plan.slos_by_kind.items()):
        limits_shown = ", ".join(
            f"{name.upper()} {limit_s * 1e3:.4g} ms"
            for name, limit_s in slo.limits_s().items()
            if limit_s is not None
        )
        kinds.append(f"{kind} ({limits_shown})" if kind else limits_shown)
    return " and ".join(kinds) or "no SLO"


def gateway_url(gateway: GatewaySpec) -> str:
    """The URL of a gateway as a client on this machine would write it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(gateway.host, gateway.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{'https' if gateway.ssl_certfile else 'http'}://{host}:{gateway.port}"


def trust_own_certificate(gateway: GatewaySpec) -> ssl.SSLContext | None:
    """What trusts the gateway's certificate, whatever name it is asked by; None over plain HTTP."""
    return None if gateway.ssl_certfile is None else trust_certificate(gateway.ssl_certfile)


def ready_box(gateway: GatewaySpec, model: ProbedModel) -> str:
    """URL, a first request in curl and in Python, and the metrics."""
    if gateway.bulk_only:
        url = gateway_url(gateway)
        return f"{url}/v1/batches\n\nmetrics {url}/metrics    docs {url}/docs    stop with Ctrl-C"
    url, name, secured = gateway_url(gateway), gateway.served_names[0], bool(gateway.api_keys)
    header = " -H 'Authorization: Bearer '\"$DIPTYCH_API_KEY\"" if secured else ""
    key = 'os.environ["DIPTYCH_API_KEY"]' if secured else '"none"'
    imports = "import os, openai" if secured else "import openai"
    if model.has_chat_template or gateway.chat_template:
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
