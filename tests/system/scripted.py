"""A gateway whose tokens come from a script: the real HTTP server in a thread, no workers.

What a prompt says decides what happens to it, so that a test needs nothing but an HTTP client:
"FAIL-EARLY" before the first token, "FAIL-LATE" after three, "CRASH" in our own code, "HANG" for ever, "SLOW" 30 ms a
token, "FLOOD" without pause; anything else is answered with `SCRIPT`, over and over, and an end token where it ends.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych.errors import RequestError
from diptych.messages import Logprob, Output
from diptych.metrics import Metrics, Objectives
from diptych.request import Request
from services.gateway.app import Api, Probes, build
from services.gateway.auth import Keys
from services.gateway.generation import Reader
from services.gateway.grammars import Grammars
from services.gateway.limits import Limits
from services.gateway.server import Server, listen
from services.gateway.service import Patience, Service
from services.gateway.tokens import Tokens
from services.gateway.validate import Rules

SCRIPT = "Grüße, 世界! 👩‍👩‍👧 One two three four five. STOP here {and} there."
STAGES = {"admission": 0.001, "retry": 0.0, "prefill_queue": 0.002, "prefill": 0.003, "deliver": 0.001}


class Script:
    """Implements `generation.Backend`. `open` are the requests that run; `left` counts those given up."""

    def __init__(self, tokens: Tokens, text: str = SCRIPT) -> None:
        self.tokens, self.text = tokens, text
        self.open: dict[str, asyncio.Task[None]] = {}
        self.left = 0
        self.seen: list[Request] = []
        self.prompts: dict[str, list[list[int]]] = {}  # by scope: "cached" when asked again

    def arrive(self, request: Request, reader: Reader) -> None:
        self.seen.append(request)
        self.open[request.id] = asyncio.get_running_loop().create_task(self._play(request, reader))

    def leave(self, request: str) -> None:
        task = self.open.pop(request, None)
        if task is not None:
            self.left += 1
            task.cancel()

    def stop(self, request: str) -> None:
        """The script looks at `open` before each token."""
        self.open.pop(request, None)

    def refusal(self, num_requests: int) -> RequestError | None:
        """A script has always time."""
        return None

    async def _play(self, request: Request, reader: Reader) -> None:
        prompt = self.tokens.decode(list(request.prompt), skip_special=False)
        for word, status in (("FAIL-EARLY", 503), ("CRASH", 500)):
            if word in prompt:
                self.open.pop(request.id, None)
                code = "no_workers" if status == 503 else "internal_error"
                return reader.fail(
                    RequestError("as the script says", status=status, kind="server_error", code=code)
                )
        if "HANG" in prompt:
            await asyncio.Event().wait()
        reader.measure(STAGES)
        await self._answer(request, reader, prompt)

    async def _answer(self, request: Request, reader: Reader, prompt: str) -> None:
        pause_s = 0.03 if "SLOW" in prompt else 0.0
        ids, sampling = self.tokens.encode(self.text, False), request.sampling
        seen = self.prompts.setdefault(request.origin.scope, [])
        known_tokens = 64 * ((len(request.prompt) - 1) // 64) if request.prompt in seen else 0
        seen.append(request.prompt)
        scores = None
        if sampling.prompt_logprobs is not None:
            scores = [None, *(self._logprob(token, sampling.prompt_logprobs) for token in request.prompt[1:])]
        if sampling.max_tokens == 0:
            reader.deliver(
                Output(request.id, 0, [], prompt_logprobs=scores, finish="length"), time.monotonic()
            )
        for i in range(sampling.max_tokens):
            await asyncio.sleep(pause_s)
            if request.id not in self.open:
                return reader.finish("stop", time.monotonic())
            if "FAIL-LATE" in prompt and i == 3:
                self.open.pop(request.id, None)
                return reader.fail(
                    RequestError("worker_lost", status=503, kind="server_error", code="worker_lost")
                )
            ends = i and i % len(ids) == 0 and i >= sampling.min_tokens and bool(sampling.stop_token_ids)
            token = sampling.stop_token_ids[0] if ends else ids[i % len(ids)]
            finish = "stop" if ends else "length" if i == sampling.max_tokens - 1 else None
            logprobs = None if sampling.logprobs is None else [self._logprob(token, sampling.logprobs)]
            output = Output(request.id, 0, [token], logprobs, scores, finish, cached_tokens=known_tokens)
            reader.deliver(output, time.monotonic())
            scores = None
            if finish:
                break
        self.open.pop(request.id, None)
        reader.finish("stop" if sampling.max_tokens and ends else "length", time.monotonic())

    def _logprob(self, token: int, top: int) -> Logprob:
        return Logprob(token, -0.5, [(token + k, -0.5 - k if k else float("-inf")) for k in range(top)])


class Running:
    """A gateway that runs in a thread of this process."""

    def __init__(self, service: Service, script: Script, url: str) -> None:
        self.service, self.script, self.url = service, script, url

    @property
    def api(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def scripted(
    folder: Path,
    *,
    keys: tuple[str, ...] = (),
    limits: Limits | None = None,
    patience: Patience | None = None,
    objectives: Objectives | None = None,
    text: str = SCRIPT,
    drain_s: float = 0.5,
) -> Iterator[Running]:
    """Serve `folder` on a free port of 127.0.0.1."""
    tokens, metrics = Tokens.load(str(folder)), Metrics(objectives)
    script = Script(tokens, text)
    rules = Rules(tokens, ("toy", "org/toy"), tokens.context_tokens, limits or Limits())
    service = Service(rules, script, metrics, Grammars(tokens), lambda: "fp_toy", patience or Patience())
    app = build(Api(service, Probes(), "0.0.0-test", 1_700_000_000), Keys(keys), "127.0.0.1")
    bound = listen("127.0.0.1", 0)
    server = Server(app, service, drain_s)
    thread = threading.Thread(target=_run, args=(server, bound), name="gateway")
    thread.start()
    try:
        yield Running(service, script, f"http://127.0.0.1:{bound.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(120)
        service.close()
        bound.close()


def _run(server: Server, bound: object) -> None:
    asyncio.run(server.serve(sockets=[bound]))  # type: ignore[list-item]
