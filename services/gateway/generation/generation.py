"""Holds all answers of one HTTP request, between the backend that makes tokens and the task that writes the response.

    backend ── SequenceSink ─▶ SequenceStream ─▶ OutputText ── pieces ─▶ streaming.py, whole_answer.py
                                     └─▶ SequenceRecord ─▶ RequestOutcomes, GatewayMetrics

A client that reads a stream too slowly is disconnected once more than `max_bytes` of its answers wait to be written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from msgspec import UNSET, UnsetType

from diptych.errors import RequestError
from diptych.failure_statuses import RequestFailure
from diptych.logs.log_format import about_request
from diptych.logs.request_ids import ids_of_sequence
from diptych.messages import Output
from diptych.request import Request, SamplingParams
from router.effects import StageDurations, TelemetryEffect
from services.gateway.generation.answer_memory import AnswerMemory
from services.gateway.generation.output_text import OutputPiece, OutputText
from services.gateway.generation.parsed_text import make_text
from services.gateway.generation.usage import count_usage
from services.gateway.http.connection import ClientStalled
from services.gateway.metrics.prometheus import TTFT_STAGES, GatewayMetrics
from services.gateway.metrics.timeline import SequenceTimeline
from services.gateway.openai.keep_options import describe_kv
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.schemas.response_schema import KvDetails, Usage
from services.gateway.outcomes import (
    GATEWAY_FAILED,
    GATEWAY_STOPPED,
    Ending,
    KvClassRecord,
    RequestOutcomes,
    SequenceRecord,
)
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.tokenization.tokenizer import GatewayTokenizer

# Most log-probabilities that are packed at once, before other tasks may run.
MAX_PACKED_TOKENS = 512

log = logging.getLogger(__name__)


class SequenceSink(Protocol):
    """Receives one sequence from the backend. Either `finish_sequence` or `fail_sequence` ends it."""

    def deliver_output(self, output: Output, now_s: float) -> None:
        """Take the new tokens of a step. `now_s` is when they came, on the monotonic clock."""

    def record_effect(self, effect: TelemetryEffect, now_s: float) -> None:
        """Take what the relay reports about the sequence. `now_s` is on the monotonic clock."""

    def record_kv_class(self, kv_class: str, reason: str, details: KvDetails | None) -> None:
        """Take the KV class of the attempt that begins, why it has it, and `details` if the answer tells of it."""

    def finish_sequence(self, reason: str, now_s: float) -> None:
        """The sequence is complete; `reason` is its finish reason."""

    def fail_sequence(self, failure: RequestFailure) -> None:
        """The sequence failed; `failure` is what the client sees."""


class GenerationBackend(Protocol):
    """Turns requests into tokens: the relay and the workers behind it, or a script in tests."""

    def submit_requests(self, asked_requests: Sequence[tuple[Request, SequenceSink]]) -> None:
        """Start the sequences of one HTTP request: all of them, or none."""

    def cancel_request(self, request: str, *others: str) -> None:
        """Cancel sequences of one HTTP request because its client has left. Unknown ids are ignored."""

    def stop_request(self, request: str) -> None:
        """Stop a sequence whose text has ended; `finish_sequence` follows."""

    def find_refusal(self, num_requests: int, tenant: str) -> RequestFailure | None:
        """Why `num_requests` more sequences of `tenant` would be refused now; None if they may be admitted."""


class Generation:
    """The sequences of one HTTP request. They are submitted together, and each of them ends once for `outcomes`.

    If one sequence fails or the client leaves, all of them are cancelled. The request came at `arrived_s` and must have
    ended at `deadline_s` (monotonic seconds); `own_deadline` says that the client set the latter.
    """

    def __init__(
        self,
        name: str,
        resolved: ResolvedRequest,
        tokenizer: GatewayTokenizer,
        backend: GenerationBackend,
        metrics: GatewayMetrics,
        max_bytes: int,
        memory: AnswerMemory,
        outcomes: RequestOutcomes | None = None,
        *,
        arrived_s: float,
        deadline_s: float,
        own_deadline: bool = False,
        markup: ModelMarkup | None = None,
    ) -> None:
        self.name, self.resolved = name, resolved
        self.ids = ids_of_sequence(name, resolved.origin.client_id)
        self.arrived_s, self.deadline_s, self.own_deadline = arrived_s, deadline_s, own_deadline
        self.outcomes = outcomes or RequestOutcomes()
        self._memory, self._held_bytes = memory, 0
        self.failure: RequestFailure | None = None
        # Whether the sequences were cancelled because the client read too slowly.
        self.flooded = False
        self.backend, self.metrics, self._max_bytes = backend, metrics, max_bytes
        self._news = asyncio.Event()
        # Writes new text at once (`TokenPush`); returns whether it did.
        self.push: Callable[[], bool] | None = None
        plan = [(prompt, i) for prompt in resolved.prompts for i in range(resolved.best_of)]
        self.streams = [
            SequenceStream(
                self,
                f"{name}.{index}" if len(plan) > 1 else name,
                make_text(resolved, index, prompt, tokenizer, markup),
                resolved.sampling_for(prompt, i),
            )
            for index, (prompt, i) in enumerate(plan)
        ]

    @property
    def answers(self) -> list[OutputText]:
        """The answers of all sequences, in the order of choices."""
        return [stream.answer for stream in self.streams]

    @contextmanager
    def run_sequences(self, running: set[Generation]) -> Iterator[None]:
        """Hand all sequences to the backend, for a body that takes the answers. An exception of the body fails them.

        However the body ends, those that still run are cancelled then, and no memory is held any more. Meanwhile the
        generation is in `running`.
        """
        running.add(self)
        self.metrics.open.set(len(running))
        try:
            self.submit_sequences()
            yield
        except ClientStalled:
            self.metrics.cut.inc()
            self.cancel_sequences(Ending.SLOW_READER)
            raise
        except BaseException as error:
            # This includes the cancellation of a server that stops: what was written must not look complete.
            stopped = isinstance(error, asyncio.CancelledError)
            self.fail_request(GATEWAY_STOPPED if stopped else GATEWAY_FAILED)
            raise
        finally:
            running.discard(self)
            self.metrics.open.set(len(running))
            self.cancel_sequences()
            self.release_bytes()

    def submit_sequences(self) -> None:
        """Hand all sequences to the backend."""
        log.info("generates %d sequences", len(self.streams), extra=about_request(self.ids))
        self.metrics.params_n.labels(self.resolved.model).observe(self.resolved.n)
        self.backend.submit_requests([(stream.make_request(), stream) for stream in self.streams])

    def cancel_sequences(self, ending: Ending = Ending.LEFT) -> None:
        """Cancel all sequences that still run, because no client reads them. Idempotent; the first `ending` counts."""
        self.metrics.cancelled.inc(self._close_sequences(ending))

    @property
    def done(self) -> bool:
        """Whether every answer is complete."""
        return all(stream.answer.finish is not None for stream in self.streams)

    async def wait_for_news(self, timeout_s: float | None) -> bool:
        """Wait for new text, an end or a failure. Returns False if `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    async def wait_until_complete(self) -> None:
        """Wait until every answer is complete.

        Raises:
            RequestError: one of them failed.
        """
        is_done = False
        while not is_done and self.failure is None:
            # What comes while log-probabilities are packed is packed in the next round.
            is_done = self.done
            for stream in self.streams:
                await stream.pack_logprobs()
            if not is_done:
                await self.wait_for_news(None)
        if self.failure is not None:
            raise RequestError(self.failure)

    def notify_writer(self) -> None:
        """Wake the task that writes the response. Cancels the request if its client reads too slowly."""
        if self.resolved.stream and self._held_bytes > self._max_bytes and not self.flooded:
            self.flooded = sum(stream.answer.waiting_bytes for stream in self.streams) > self._max_bytes
            if self.flooded:
                self.cancel_sequences(Ending.SLOW_READER)
        self._news.set()

    def hold_bytes(self, num_bytes: int) -> None:
        """Count `num_bytes` more (or fewer) of this request's answers. Fails the request if they are too many."""
        self._held_bytes += num_bytes
        try:
            self._memory.hold_bytes(self.resolved.origin.tenant, num_bytes)
        except RequestError as error:
            self.fail_request(error.failure)

    @contextmanager
    def wait_for_reader(self) -> Iterator[None]:
        """While the body runs, the answers wait only for their reader, and make room for those of others if need be.

        Raises:
            ClientStalled: they have made room.
        """
        task, is_dropped = asyncio.current_task(), False
        assert task is not None

        def drop() -> None:
            nonlocal is_dropped
            is_dropped = task.cancel()
            self.release_bytes()

        try:
            with self._memory.wait_for_reader(self.resolved.origin.tenant, drop):
                yield
        except asyncio.CancelledError:
            # The task may have been cancelled from elsewhere, too.
            if not is_dropped or task.uncancel():
                raise
            raise ClientStalled(", and the memory of its answer is needed for others") from None

    def release_bytes(self) -> None:
        """Stop counting the memory of all answers, which are no longer kept."""
        self.hold_bytes(-self._held_bytes)

    def fail_request(self, failure: RequestFailure) -> None:
        """Fail the whole request with `error`, and cancel all sequences that still run. The first error counts."""
        if self.failure is None:
            self.failure = failure
            self._close_sequences(Ending.FAILED, failure)
            self.notify_writer()

    def _close_sequences(self, ending: Ending, failure: RequestFailure | None = None) -> int:
        """Report how the sequences ended, and cancel all that still run at once; returns how many these were."""
        running = [stream.request for stream in self.streams if stream.close(ending, failure)]
        if running:
            self.backend.cancel_request(*running)
        return len(running)

    def mark_completed(self) -> None:
        """Record that the last byte was handed to the connection."""
        now_s = time.monotonic()
        for stream in self.streams:
            stream.mark_written(now_s)
            stream.record.ended_s = now_s
            stream.end_once(Ending.ANSWERED)
        if self.resolved.pooled is not None:
            return self.metrics.pooled.observe_request(self.streams[0].record)
        longest = max(stream.record.tokens for stream in self.streams)
        self.metrics.max_generation.labels(self.resolved.model).observe(longest)

    @property
    def usage(self) -> Usage:
        """Token counts of the whole request.

        Prompt tokens count once per prompt, and cached tokens as the prompt's first sequence found them. New tokens
        count for every sequence.
        """
        return count_usage(self.resolved.prompt_tokens, self.cached_tokens, self.answers, self.kv)

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens that were cached."""
        return sum(stream.answer.cached_tokens for stream in self.streams[:: self.resolved.best_of])

    @property
    def kv(self) -> KvDetails | None:
        """What the answer tells of the request's KV, if anything. Its sequences have one class."""
        details = next((stream.kv for stream in self.streams if stream.kv is not None), None)
        return describe_kv(details, self.resolved.keep, [stream.record.kv.kept for stream in self.streams])

    def usage_so_far(self, choice: int) -> Usage | None | UnsetType:
        """The `usage` field of a chunk of one choice.

        It holds the choice's counts so far if the client asked for usage in every chunk. It is null if usage comes
        only at the end, and absent if the client did not ask for usage.
        """
        if not self.resolved.include_usage:
            return UNSET
        if not self.resolved.continuous_usage:
            return None
        answer = self.streams[choice].answer
        prompt_tokens, kv = len(answer.prompt.tokens), self.streams[choice].kv
        return count_usage(prompt_tokens, answer.cached_tokens, [answer], kv)


class SequenceStream:
    """The `SequenceSink` of one sequence: feeds its answer and records its times."""

    def __init__(
        self, generation: Generation, request: str, text: OutputText, sampling: SamplingParams
    ) -> None:
        self.request, self.answer, self.sampling = request, text, sampling
        pooled = generation.resolved.pooled
        self.record = SequenceRecord(
            generation.resolved.model, len(text.prompt.tokens), pooled=pooled.route if pooled else ""
        )
        self.timeline = SequenceTimeline()
        self._generation, self._metrics = generation, generation.metrics
        # Whether the backend has the sequence; and whether it arrived and its outcome is not known yet.
        self._open = self._is_pending = False
        self._held_bytes = 0
        # How the KV of the running attempt is coded; None if the answer does not tell.
        self._kv: KvDetails | None = None

    @property
    def kv(self) -> KvDetails | None:
        """What the answer tells of the sequence's KV, if anything."""
        return describe_kv(self._kv, self._generation.resolved.keep, [self.record.kv.kept])

    async def pack_logprobs(self) -> None:
        """Pack the prompt's log-probabilities into arrays, with pauses in which other tasks run."""
        while self.answer.pack_logprobs(MAX_PACKED_TOKENS):
            await asyncio.sleep(0)

    def take_piece(self) -> OutputPiece:
        """Take the text and tokens that wait to be written. They no longer count as held memory."""
        piece = self.answer.take_piece()
        self._update_held_bytes()
        return piece

    def _update_held_bytes(self) -> None:
        """Report to the request by how much the memory of this answer has changed."""
        more = self.answer.held_bytes - self._held_bytes
        self._held_bytes += more
        self._generation.hold_bytes(more)

    def make_request(self) -> Request:
        """The request for the backend."""
        generation, arrived_s = self._generation, self._generation.arrived_s
        self.record.arrived_s = arrived_s
        self.record.client_deadline_s = generation.deadline_s if generation.own_deadline else None
        request = Request(
            self.request,
            self.answer.prompt.tokens,
            self.sampling,
            generation.deadline_s,
            tenancy=generation.resolved.origin,
            kv_class=generation.resolved.kv,
            default_class=generation.resolved.default_kv,
            keep=generation.resolved.keep,
            chunks=self.answer.prompt.chunks,
        )
        request.entered_s[request.stage] = arrived_s
        generation.outcomes.add_arrival(self.record)
        self._metrics.params_max.labels(self.record.model).observe(self.sampling.max_tokens)
        self._open = self._is_pending = True
        return request

    def end_once(self, ending: Ending, failure: RequestFailure | None = None) -> None:
        """Report how the sequence ended, if it arrived. Only the first call counts."""
        if self._is_pending:
            self._is_pending = False
            self._generation.outcomes.end_sequence(self.record, ending, failure)

    def close(self, ending: Ending, failure: RequestFailure | None = None) -> bool:
        """Report how the sequence ended. Returns whether it still ran, so that the backend must cancel it."""
        self.end_once(ending, failure)
        was_open, self._open = self._open, False
        return was_open

    def mark_written(self, now_s: float) -> None:
        """Record the time that counts for TTFT, and report it to the metrics. Only the first call counts.

        It is when a stream's first token, or end without one, was written, or another answer's reached the gateway.
        """
        if self.record.first_written_s is None:
            self.record.first_written_s = now_s
            self._metrics.on_first_token(self.record)

    # ---- called by the backend

    def deliver_output(self, output: Output, now_s: float) -> None:
        """Feed the tokens of a step to the answer; stop the sequence if they complete a stop string."""
        if not self._open:
            return
        record, answer, count = self.record, self.answer, len(output.tokens)
        answer.feed_output(output)
        record.kv.kept = output.kept or record.kv.kept
        if count and record.first_token_s is None:
            record.first_token_s = record.last_token_s = now_s
            count -= 1
        if count and record.last_token_s is not None:
            self._metrics.observe_gap(record.model, now_s - record.last_token_s, count)
        record.last_token_s = now_s
        record.tokens, record.cached_tokens = answer.num_tokens, answer.cached_tokens
        if answer.finish is not None and output.finish is None:
            self._generation.backend.stop_request(self.request)  # `finish_sequence` follows
        push = self._generation.push
        if push is None or not push():
            self._update_held_bytes()
            self._generation.notify_writer()

    def record_kv_class(self, kv_class: str, reason: str, details: KvDetails | None) -> None:
        """Keep the KV class for the answer and the metrics. With the first token it stays the same."""
        sizes = details and (details.kv_bytes_saved_per_token, details.kv_bytes_per_token)
        self.record.kv, self._kv = KvClassRecord(kv_class, reason, *(sizes or (0, 0))), details

    def record_effect(self, effect: TelemetryEffect, now_s: float) -> None:
        """Add to the timeline. The stages of the first token are kept until it is written."""
        self.timeline.record_effect(effect, now_s)
        if not isinstance(effect, StageDurations):
            return
        if TTFT_STAGES[0] in effect.seconds:
            self.record.stages = effect.seconds
        else:
            for stage, duration in effect.seconds.items():
                self._metrics.handoff_stage.labels(stage).observe(duration)

    def finish_sequence(self, reason: str, now_s: float) -> None:
        """Complete the answer. A stop string found before gives its finish reason; otherwise it is `reason`."""
        self._open, self.record.is_complete = False, True
        self.answer.end_sequence(reason)
        self.record.finish = self.answer.finish or reason
        self._generation.notify_writer()

    def fail_sequence(self, failure: RequestFailure) -> None:
        """Fail the whole HTTP request, unless this answer's text is complete already."""
        if self.answer.finish is not None:
            return self.finish_sequence(self.answer.finish, time.monotonic())
        self._open = False
        self._generation.fail_request(failure)
