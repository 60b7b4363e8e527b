"""A gateway whose tokens come from a script: the real HTTP server in a thread, no workers.

What a prompt says decides what happens to it, so that a test needs nothing but an HTTP client: "FAIL-WITH reason" fails
for this reason, "FAIL-EARLY" before the first token, "FAIL-SLOWLY" too, but after half a second, "FAIL-LATE" after
three, "CRASH" in our own code, "HANG" at its deadline, "HANG-LATE" hangs after three tokens, "SLOW" takes 30 ms a
token, "FLOOD" has no pause; anything else is answered with `SCRIPT`, over and over, and an end token where it ends.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.messages import Logprob, Output
from diptych.request import Pooling, Request
from diptych.slo import Slo
from diptych.specs import StorageShares
from engine.model.pooling import ModelPooler
from router.effects import StageDurations
from services.gateway.api_routes import ApiRoutes
from services.gateway.app import build_app
from services.gateway.batches.batch_service import BatchesOff, BatchService, open_batch_service
from services.gateway.generation.generation import SequenceSink
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.http.access_keys import AccessKeys, BearerKeys
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.tenancy import tenants_of_keys
from services.gateway.openai.validate import RequestRules
from services.gateway.ops.admin import AdminRoutes
from services.gateway.outcomes import RequestOutcomes
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.preparation.preparer_pool import PreparerPool
from services.gateway.server import MAX_CONNECTIONS, GatewayServer, open_listener
from services.gateway.service import GatewayService, RequestTimeouts
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.healthy_probes import HealthyProbes

SCRIPT = "Grüße, 世界! 👩‍👩‍👧 One two three four five. STOP here {and} there."
CAUSE = "the cause is for the log"
POOLED_SIZE = 8
STAGES = {"admission": 0.001, "retry": 0.0, "prefill_queue": 0.002, "prefill": 0.003, "deliver": 0.001}


class Script:
    """Implements `GenerationBackend`. `open` are the requests that run; `left` counts those given up."""

    def __init__(self, tokens: GatewayTokenizer, text: str = SCRIPT) -> None:
        self.tokens, self.text = tokens, text
        self.open: dict[str, asyncio.Task[None]] = {}
        self.left = 0
        self.refuses: RequestFailure | None = None  # everything, with this failure
        self.seen: list[Request] = []
        self.prompts: dict[str, list[list[int]]] = {}  # by scope: "cached" when asked again

    def submit_requests(self, asked: Sequence[tuple[Request, SequenceSink]]) -> None:
        for request, reader in asked:
            self.seen.append(request)
            self.open[request.id] = asyncio.get_running_loop().create_task(self._play(request, reader))

    def cancel_request(self, request: str, *others: str) -> None:
        for name in (request, *others):
            task = self.open.pop(name, None)
            if task is not None:
                self.left += 1
                task.cancel()

    def stop_request(self, request: str) -> None:
        """The script looks at `open` before each token."""
        self.open.pop(request, None)

    def find_refusal(self, num_requests: int, tenant: str) -> RequestFailure | None:
        """A script has always time, unless a test says otherwise."""
        return self.refuses

    async def _play(self, request: Request, reader: SequenceSink) -> None:
        prompt = self.tokens.decode(list(request.prompt), skip_special=False)
        if "FAIL-SLOWLY" in prompt:
            await asyncio.sleep(0.5)
        if "FAIL-WITH" in prompt:
            self.open.pop(request.id, None)
            reason = FailureReason(prompt.partition("FAIL-WITH")[2].split()[0])
            return reader.fail_sequence(RequestFailure(reason, "as the script says", cause=CAUSE))
        crash, missing = FailureReason.INTERNAL_ERROR, FailureReason.NO_WORKERS
        for word, reason in (("FAIL-EARLY", missing), ("FAIL-SLOWLY", missing), ("CRASH", crash)):
            if word in prompt:
                self.open.pop(request.id, None)
                wait_s = 0.05 if reason is missing else None
                cause = "ZeroDivisionError: in a worker" if reason is crash else ""
                return reader.fail_sequence(
                    RequestFailure(reason, "as the script says", wait_s=wait_s, cause=cause)
                )
        if "HANG" in prompt and "HANG-LATE" not in prompt:
            await asyncio.sleep(request.deadline_s - time.monotonic())
            self.open.pop(request.id, None)
            passed = RequestFailure(FailureReason.DEADLINE_EXCEEDED, "its deadline has passed")
            return reader.fail_sequence(passed)
        reader.record_effect(StageDurations(request.id, STAGES), time.monotonic())
        await self._answer(request, reader, prompt)

    async def _answer(self, request: Request, reader: SequenceSink, prompt: str) -> None:
        pause_s = 0.03 if "SLOW" in prompt else 0.0
        ids, sampling = self.tokens.encode(self.text, False), request.sampling
        seen = self.prompts.setdefault(request.tenancy.scope, [])
        ids_of_prompt = list(request.prompt)
        known_tokens = 64 * ((len(ids_of_prompt) - 1) // 64) if ids_of_prompt in seen else 0
        seen.append(ids_of_prompt)
        scores = None
        if sampling.prompt_logprobs is not None:
            scores = [None, *(self._logprob(token, sampling.prompt_logprobs) for token in request.prompt[1:])]
        if sampling.pooling is not None:
            size = 1 if sampling.pooling.kind == "score" else sampling.pooling.dimensions or POOLED_SIZE
            vector = np.full(size, 0.5, "<f4").tobytes()
            reader.deliver_output(Output(request.id, 0, [], finish="stop", pooled=vector), time.monotonic())
            self.open.pop(request.id, None)
            return reader.finish_sequence("stop", time.monotonic())
        if sampling.max_tokens == 0:
            reader.deliver_output(
                Output(request.id, 0, [], prompt_logprobs=scores, finish="length"), time.monotonic()
            )
        for i in range(sampling.max_tokens):
            await asyncio.sleep(pause_s)
            if request.id not in self.open:
                return reader.finish_sequence("stop", time.monotonic())
            if "HANG-LATE" in prompt and i == 3:
                await asyncio.Event().wait()
            if "FAIL-LATE" in prompt and i == 3:
                self.open.pop(request.id, None)
                return reader.fail_sequence(RequestFailure(FailureReason.WORKER_LOST, "worker_lost"))
            ends = i and i % len(ids) == 0 and i >= sampling.min_tokens and bool(sampling.stop_token_ids)
            token = sampling.stop_token_ids[0] if ends else ids[i % len(ids)]
            finish = "stop" if ends else "length" if i == sampling.max_tokens - 1 else None
            logprobs = None if sampling.logprobs is None else [self._logprob(token, sampling.logprobs)]
            output = Output(request.id, 0, [token], logprobs, scores, finish, cached_tokens=known_tokens)
            reader.deliver_output(output, time.monotonic())
            scores = None
            if finish:
                break
        self.open.pop(request.id, None)
        reader.finish_sequence("stop" if sampling.max_tokens and ends else "length", time.monotonic())

    def _logprob(self, token: int, top: int) -> Logprob:
        return Logprob(token, -0.5, [(token + k, -0.5 - k if k else float("-inf")) for k in range(top)])


class Running:
    """A gateway that runs in a thread of this process."""

    def __init__(
        self, service: GatewayService, script: Script, url: str, batches: BatchService | None = None
    ) -> None:
        self.service, self.script, self.url, self.batches = service, script, url, batches

    @property
    def api(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def scripted(
    folder: Path,
    *,
    keys: tuple[str, ...] = (),
    urgent: tuple[str, ...] = (),
    limits: RequestLimits | None = None,
    patience: RequestTimeouts | None = None,
    objectives: Slo | None = None,
    text: str = SCRIPT,
    drain_s: float = 0.5,
    max_connections: int = MAX_CONNECTIONS,
    data_dir: Path | None = None,
    max_file_bytes: int = 1 << 20,
    shares: StorageShares | None = None,
    admin_key: str = "",
    ignore_unknown: bool = False,
    pooling: Pooling | None = None,
) -> Iterator[Running]:
    """Serve `folder` on a free port of 127.0.0.1; with `data_dir` also files and batches.

    With `admin_key` there are the admin routes, of which those of workers do not work. With `pooling` the model pools,
    and each vector is the same.
    """
    tokens, metrics = GatewayTokenizer.load(str(folder)), GatewayMetrics(objectives)
    script = Script(tokens, text)
    rules = RequestRules(
        tokens,
        ("toy", "org/toy"),
        tokens.context_tokens,
        limits or RequestLimits(),
        markup=ModelMarkup.load(tokens),
        ignore_unknown=ignore_unknown,
        pooler=ModelPooler(pooling, size=POOLED_SIZE) if pooling is not None else ModelPooler(),
    )
    service = GatewayService(
        rules,
        script,
        metrics,
        PreparerPool(rules),
        lambda: "fp_toy",
        patience or RequestTimeouts(),
        outcomes=RequestOutcomes(metrics.slo, [metrics, metrics.history]),
    )
    tenants = tenants_of_keys(keys)
    batches = (
        None
        if data_dir is None
        else open_batch_service(str(data_dir), max_file_bytes, service, shares=shares, tenants=tenants)
    )
    admin = AdminRoutes(cast(RelayBackend, None)) if admin_key else None
    known = AccessKeys(
        BearerKeys(keys), BearerKeys([admin_key] if admin_key else []), urgent=BearerKeys(urgent)
    )
    app = build_app(
        ApiRoutes(service, HealthyProbes(), "0.0.0-test", 1_700_000_000, admin, batches or BatchesOff()),
        known,
        "127.0.0.1",
    )
    bound = open_listener("127.0.0.1", 0)
    server = GatewayServer(app, service, drain_s, max_connections=max_connections, keys=known)
    thread = threading.Thread(target=_run, args=(server, service, bound, batches), name="gateway")
    thread.start()
    try:
        yield Running(service, script, f"http://127.0.0.1:{bound.getsockname()[1]}", batches)
    finally:
        server.should_exit = True
        thread.join(120)
        bound.close()


def _run(
    server: GatewayServer, service: GatewayService, bound: socket.socket, batches: BatchService | None
) -> None:
    async def main() -> None:
        service.preparers.open()
        feeding = None
        if batches is not None:
            feeding = asyncio.get_running_loop().create_task(batches.feeder.run_forever())
        await server.serve(sockets=[bound])
        if batches is not None and feeding is not None:
            feeding.cancel()
            await asyncio.wait([feeding])
            batches.close()
        service.close()

    asyncio.run(main())
