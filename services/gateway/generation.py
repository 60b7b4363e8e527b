"""All answers of one HTTP request, between the backend that produces tokens and whoever writes to the client.

    backend ── Reader ─▶ Voice ─▶ Answer ── pieces ─▶ writer
                           └─▶ Lived, Metrics

Between the two lie at most `max_bytes` per HTTP request: a stream whose reader falls further behind is given up.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from diptych.errors import RequestError
from diptych.messages import Output
from diptych.metrics import TTFT_STAGES, Lived, Metrics
from diptych.request import Request, Sampling
from services.gateway.answer import Answer
from services.gateway.replies import PromptDetails, Usage
from services.gateway.tokens import Tokens
from services.gateway.validate import Ask


class Reader(Protocol):
    """Whoever asked for a sequence, as the backend sees it. Exactly one of `finish` and `fail` ends it."""

    def deliver(self, output: Output, now_s: float) -> None: ...

    def measure(self, seconds: dict[str, float]) -> None: ...

    def finish(self, reason: str, now_s: float) -> None: ...

    def fail(self, error: RequestError) -> None: ...


class Backend(Protocol):
    """What turns requests into tokens: the relay and the workers behind it, or a script in tests."""

    def arrive(self, request: Request, reader: Reader) -> None: ...

    def leave(self, request: str) -> None: ...

    def stop(self, request: str) -> None: ...

    def refusal(self, num_requests: int) -> RequestError | None: ...


class Generation:
    """Submitted together, and given up together when one sequence fails or the client leaves."""

    def __init__(
        self, name: str, ask: Ask, tokens: Tokens, backend: Backend, metrics: Metrics, max_bytes: int
    ) -> None:
        self.name, self.ask = name, ask
        self.failure: RequestError | None = None
        self.flooded = False  # the writer fell too far behind
        self.backend, self.metrics, self._max_bytes = backend, metrics, max_bytes
        self._news = asyncio.Event()
        plan = [(prompt, i) for prompt in ask.prompts for i in range(ask.best_of)]
        self.voices = [
            Voice(
                self,
                f"{name}.{index}" if len(plan) > 1 else name,
                Answer(ask, index, prompt, tokens),
                ask.sampling_of(prompt, i),
            )
            for index, (prompt, i) in enumerate(plan)
        ]

    @property
    def answers(self) -> list[Answer]:
        return [voice.answer for voice in self.voices]

    def begin(self, arrived_s: float, deadline_s: float) -> None:
        """Hand every sequence to the backend. `arrived_s` is when the HTTP request came."""
        self.metrics.params_n.labels(self.ask.model).observe(self.ask.n)
        for voice in self.voices:
            if self.failure is None:
                voice.begin(arrived_s, deadline_s)

    def close(self) -> None:
        """Nobody reads any more: give up whatever still runs. Idempotent."""
        for voice in self.voices:
            voice.leave()

    @property
    def done(self) -> bool:
        return all(voice.answer.finish is not None for voice in self.voices)

    async def news(self, timeout_s: float | None) -> bool:
        """Wait for something to take, an end or a failure; False when `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    async def whole(self) -> None:
        """Wait until every answer is complete.

        Raises:
            RequestError: one of them failed.
        """
        while not self.done and self.failure is None:
            await self.news(None)
        if self.failure is not None:
            raise self.failure

    def wake(self) -> None:
        """Something changed; see also that nothing piles up for a reader who does not read."""
        if self.ask.stream and sum(voice.answer.waiting_bytes for voice in self.voices) > self._max_bytes:
            self.flooded = True
            self.close()
        self._news.set()

    def give_up(self, error: RequestError) -> None:
        """One sequence failed, so the request has."""
        if self.failure is None:
            self.failure = error
            self.close()
            self.wake()

    def completed(self) -> None:
        """The last byte was handed to the connection."""
        now_s = time.monotonic()
        for voice in self.voices:
            voice.wrote(now_s)
            voice.lived.ended_s = now_s
            self.metrics.ended(voice.lived)

    @property
    def usage(self) -> Usage:
        """Prompt tokens count once per prompt, as its first sequence found them; new tokens of every sequence."""
        cached = sum(voice.answer.cached_tokens for voice in self.voices[:: self.ask.best_of])
        new = sum(voice.answer.num_tokens for voice in self.voices)
        return Usage(
            prompt_tokens=self.ask.prompt_tokens,
            completion_tokens=new,
            total_tokens=self.ask.prompt_tokens + new,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
        )


class Voice:
    """The `Reader` of one sequence: feeds its answer and keeps its times."""

    def __init__(self, generation: Generation, request: str, answer: Answer, sampling: Sampling) -> None:
        self.request, self.answer, self.sampling = request, answer, sampling
        self.lived = Lived(generation.ask.model, len(answer.prompt.tokens))
        self._generation, self._metrics = generation, generation.metrics
        self._open = False

    def begin(self, arrived_s: float, deadline_s: float) -> None:
        self.lived.arrived_s = arrived_s
        request = Request(
            self.request,
            self.answer.prompt.tokens,
            self.sampling,
            deadline_s,
            origin=self._generation.ask.origin,
        )
        request.entered_s[request.stage] = arrived_s
        self._metrics.came(self.lived)
        self._metrics.params_max.labels(self.lived.model).observe(self.sampling.max_tokens)
        self._open = True
        self._generation.backend.arrive(request, self)

    def leave(self) -> None:
        """Give the sequence up if it still runs."""
        if self._open:
            self._open = False
            self._metrics.cancelled.inc()
            self._generation.backend.leave(self.request)

    def wrote(self, now_s: float) -> None:
        """The first token (or an end without one) is with the client."""
        if self.lived.first_s is None:
            self.lived.first_s = now_s
            self._metrics.first(self.lived)

    # the backend speaks

    def deliver(self, output: Output, now_s: float) -> None:
        if not self._open:
            return
        lived, answer, count = self.lived, self.answer, len(output.tokens)
        answer.feed(output)
        if count and lived.token_s is None:
            lived.token_s = lived.last_s = now_s
            count -= 1
        if count and lived.last_s is not None:
            self._metrics.gap(lived.model, now_s - lived.last_s, count)
        lived.last_s = now_s
        lived.tokens, lived.cached_tokens = answer.num_tokens, answer.cached_tokens
        if answer.finish is not None and output.finish is None:
            self._generation.backend.stop(self.request)  # `finish` follows
        self._generation.wake()

    def measure(self, seconds: dict[str, float]) -> None:
        """Stages of the first token (kept until it is written) or of the hand-off."""
        if TTFT_STAGES[0] in seconds:
            self.lived.stages = seconds
        else:
            for stage, duration in seconds.items():
                self._metrics.handoff_stage.labels(stage).observe(duration)

    def finish(self, reason: str, now_s: float) -> None:
        self._open = False
        self.answer.end(reason)
        self.lived.finish = self.answer.finish or reason
        self._generation.wake()

    def fail(self, error: RequestError) -> None:
        if self.answer.finish is not None:  # its text had ended already: nothing is missing
            return self.finish(self.answer.finish, time.monotonic())
        self._open = False
        self._metrics.failures.labels(error.code or "unknown").inc()
        self._metrics.missed(self.lived)
        if error.status in (429, 503):
            self._metrics.rejections.labels(error.code or "unknown").inc()
        self._generation.give_up(error)
