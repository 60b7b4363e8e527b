"""Writes a generation to its client, as one body or as server-sent events (SSE).

    a stream:   (role chunk, deltas, finish chunk) per choice, interleaved ─▶ final chunk if asked for ─▶ [DONE]

Nothing is written before the first token, not even a ping. So an early failure is an HTTP error with its own status,
however long it took. A later failure is an event `{"error": ...}` followed by [DONE]. If that cannot be written, the
connection is reset: a clean end would look like success to official clients. In every case, sequences that still run
are cancelled at the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.chunks import RAW_CLASS
from diptych.errors import RequestError
from diptych.logs.log_format import about_request
from services.gateway.generation.formats import MAX_WRITTEN_TOKENS, OutputFormat, best_answers
from services.gateway.generation.generation import Generation, SequenceStream
from services.gateway.generation.timings import SERVER_TIMING_HEADER, describe_timings, server_timing
from services.gateway.http.connection import ClientStalled, ResponseWriter
from services.gateway.http.error_response import JSON_TYPE, error_response, log_failure
from services.gateway.http.request_scope import request_ids_of, trace_of
from services.gateway.openai.schemas.response_schema import AnswerDetails, DetailsField
from services.gateway.outcomes import GATEWAY_FAILED, GATEWAY_STOPPED, Ending
from services.gateway.tracing.spans import TracedSequence

# Seconds between two pings after the first token. They keep proxies and clients from timing out.
PING_INTERVAL_S = 10.0
# Answers with more bytes are sent in chunks of this size, and have no content-length.
MAX_FULL_BODY_BYTES = 256 << 10
# Other tasks may run after a piece with this many bytes, or after this many seconds.
PAUSE_BYTES, PAUSE_S = 1024, 0.005
SSE_PING = b": ping\n\n"
SSE_DONE = b"data: [DONE]\n\n"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = logging.getLogger(__name__)


def sse_event(body: object) -> bytes:
    """One server-sent event with `body` as JSON."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class GenerationResponse(Response):
    """Runs `generation` and writes it in `output_format`.

    The generation is in `running` while it is being written. `arrived_s` and `deadline_s` say when the request came and
    when it must have ended, on the monotonic clock. A client that reads too little for `stall_s` seconds is
    disconnected. `ping_s` is the time between pings. With `timings` the answer says where its time went.
    `own_deadline` says that the client set the deadline.
    """

    def __init__(
        self,
        generation: Generation,
        output_format: OutputFormat,
        running: set[Generation],
        *,
        arrived_s: float,
        deadline_s: float,
        stall_s: float,
        ping_s: float = PING_INTERVAL_S,
        timings: bool = False,
        own_deadline: bool = False,
    ) -> None:
        super().__init__()
        self._timings = timings
        self.generation, self.output_format, self._running = generation, output_format, running
        self._arrived_s, self._deadline_s, self._own_deadline = arrived_s, deadline_s, own_deadline
        self._stall_s, self._ping_s = stall_s, ping_s
        # The time at which this task last let other tasks run.
        self._paused_s = 0.0
        self._dropped = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = ResponseWriter(scope, send, self._stall_s)
        work = asyncio.create_task(self._run_generation(wire, scope, receive, send))
        left = asyncio.create_task(_wait_for_disconnect(receive))
        dropped = asyncio.create_task(self._dropped.wait())
        self._running.add(self.generation)
        self.generation.metrics.open.set(len(self._running))
        try:
            await asyncio.wait((work, left, dropped), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif dropped.done():
                raise ClientStalled
        except ClientStalled:
            self.generation.metrics.cut.inc()
            self.generation.cancel_sequences(Ending.SLOW_READER)
            why = ", and the memory of its answer is needed for others" if self._dropped.is_set() else ""
            log.warning("is disconnected: the client reads too slowly%s", why, extra=self._log_ids(scope))
            await self._reset_connection(wire, left)
        except BaseException as error:
            # This includes the cancellation of a server that stops: what was written must not look complete.
            stopped = isinstance(error, asyncio.CancelledError)
            self.generation.fail_request(GATEWAY_STOPPED if stopped else GATEWAY_FAILED)
            await self._reset_connection(wire, left)
            raise
        finally:
            self._running.discard(self.generation)
            self.generation.metrics.open.set(len(self._running))
            self.generation.cancel_sequences()
            self.generation.release_bytes()
            self._complete_trace(scope)
            work.cancel()
            left.cancel()
            dropped.cancel()

    def _complete_trace(self, scope: Scope) -> None:
        """Add the sequences to the trace of the request, if it is traced."""
        if (trace := trace_of(scope)) is not None:
            generation = self.generation
            trace.left = generation.failure is None and not generation.done
            trace.sequences = [
                TracedSequence(stream.request, stream.record, stream.timeline)
                for stream in generation.streams
            ]

    def _drop_answer(self) -> None:
        """Disconnect the client, since the memory is needed for answers of others."""
        self.generation.release_bytes()
        self._dropped.set()

    def _log_ids(self, scope: Scope) -> dict[str, object]:
        """The `extra` of log records about this request."""
        return about_request(request_ids_of(scope, self.generation.name))

    async def _reset_connection(self, writer: ResponseWriter, left: asyncio.Task[None]) -> None:
        """Reset the connection if a response was begun, so that the client does not take it for complete."""
        if writer.started:
            writer.abort()
            # uvicorn notices the reset a moment later. If this task ended before, uvicorn would log an error.
            await asyncio.wait((left,), timeout=1.0)

    async def _run_generation(
        self, writer: ResponseWriter, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Submit the sequences and write the response, or an error if nothing was written before."""
        log.info("generates %d sequences", len(self.generation.streams), extra=self._log_ids(scope))
        self.generation.submit_sequences(self._arrived_s, self._deadline_s, self._own_deadline)
        try:
            if self.generation.resolved.stream:
                await self._write_stream(writer)
            else:
                await self._write_whole(writer)
        except RequestError as error:
            await error_response(error.failure, self.generation.name)(scope, receive, send)
        else:
            if self.generation.failure is not None:
                log_failure(scope, self.generation.failure, self.generation.name)

    async def _write_whole(self, writer: ResponseWriter) -> None:
        """Write the answers as one JSON body once all are complete. Raises RequestError if one fails."""
        generation = self.generation
        await generation.wait_until_complete()
        for stream in generation.streams:
            stream.mark_written(stream.record.first_token_s or time.monotonic())
        headers = [(b"content-type", JSON_TYPE.encode()), *self._name_kv_class()]
        details = self._describe_answer()
        if details is not UNSET:
            headers.append((SERVER_TIMING_HEADER.encode(), server_timing(details.timings)))
        answers = best_answers(generation.resolved, generation.answers)
        pieces = self.output_format.full_body_parts(answers, generation.usage, details)
        with generation.wait_for_reader(self._drop_answer):
            await self._write_pieces(writer, pieces, headers)
        generation.mark_completed()
        await writer.end_response()

    async def _write_pieces(
        self, writer: ResponseWriter, pieces: Iterator[bytes], headers: list[tuple[bytes, bytes]]
    ) -> None:
        """Write a body that consists of these pieces."""
        body, complete = await _gather_pieces(pieces, MAX_FULL_BODY_BYTES)
        if complete:
            headers.append((b"content-length", str(len(body)).encode()))
        await writer.start_response(200, headers)
        await writer.write_body(body)
        # Further parts are encoded only as fast as the client reads.
        while not complete:
            body, complete = await _gather_pieces(pieces, MAX_FULL_BODY_BYTES)
            await writer.write_body(body)

    def _name_kv_class(self) -> list[tuple[bytes, bytes]]:
        """Write the KV class, which is known now, into the head of all bodies; returns the headers that name it."""
        head, kv = self.output_format.head, self.generation.kv
        head.kv_class = "" if kv is None or kv.kv_class == RAW_CLASS else kv.kv_class
        return head.headers

    async def _write_stream(self, writer: ResponseWriter) -> None:
        """Write the stream. Raises RequestError only while nothing has been written."""
        generation, streams = self.generation, self.generation.streams
        # No pings are sent here, since they would need a status first. The request's own deadline bounds the wait.
        await generation.wait_for_news(None)
        if generation.failure is not None:
            raise RequestError(generation.failure)
        await writer.start_response(200, [*SSE_HEADERS, *self._name_kv_class()])
        frames = [
            sse_event(body)
            for choice in range(len(streams))
            for body in self.output_format.begin_chunks(choice, self.generation.usage_so_far(choice))
        ]
        open_streams = dict(enumerate(streams))
        while True:
            news = {choice: await self._new_frames(choice, stream) for choice, stream in open_streams.items()}
            new_frames = {choice: choice_frames for choice, (choice_frames, _) in news.items()}
            frames += [frame for choice_frames in new_frames.values() for frame in choice_frames]
            # An answer may end while this task sleeps. Its stream is complete only when its end is among the frames.
            open_streams = {i: stream for i, stream in open_streams.items() if not news[i][1]}
            over = generation.failure is not None or not open_streams
            frames += self._closing_frames() if over and not self._timings else []
            with generation.wait_for_reader(self._drop_answer):
                await writer.write_body(b"".join(frames) or SSE_PING)
            for choice, choice_frames in new_frames.items():
                if choice_frames:
                    streams[choice].mark_written(time.monotonic())
            if over:
                break
            frames = []
            await generation.wait_for_news(self._ping_s)
            if generation.flooded:
                raise ClientStalled
        if self._timings:
            # They say when the frames before them were written.
            await writer.write_body(b"".join(self._closing_frames()))
        if generation.failure is None:
            generation.mark_completed()
        await writer.end_response()

    async def _new_frames(self, choice: int, stream: SequenceStream) -> tuple[list[bytes], bool]:
        """The new events of one choice, and whether its end is among them.

        The end is an event of its own. Much text becomes several events, with pauses in which other tasks run.
        """
        await stream.pack_logprobs()
        piece, ended = stream.take_piece(), stream.answer.finish
        usage = self.generation.usage_so_far(choice)
        frames = []
        for part in piece.split_pieces(MAX_WRITTEN_TOKENS) if piece else ():
            frames.append(sse_event(self.output_format.delta_chunk(choice, part, usage)))
            if part.start or self._paused_s + PAUSE_S < time.monotonic():
                await asyncio.sleep(0)
                self._paused_s = time.monotonic()
        if ended is not None:
            frames.append(sse_event(self.output_format.end_chunk(choice, ended, usage)))
        return frames, ended is not None

    def _closing_frames(self) -> list[bytes]:
        """The last events of a stream: an error, or usage and timings if asked for, and then [DONE]."""
        generation = self.generation
        if generation.failure is not None:
            return [sse_event(generation.failure.error_body()), SSE_DONE]
        if not generation.resolved.include_usage and not self._timings:
            return [SSE_DONE]
        usage = generation.usage if generation.resolved.include_usage else UNSET
        return [sse_event(self.output_format.final_chunk(usage, self._describe_answer())), SSE_DONE]

    def _describe_answer(self) -> DetailsField:
        """What the answer says about how it was made; UNSET if the client did not ask for that."""
        if not self._timings:
            return UNSET
        return AnswerDetails(describe_timings(self.generation.streams, time.monotonic()))


async def _gather_pieces(pieces: Iterator[bytes], num_bytes: int) -> tuple[bytes, bool]:
    """Join pieces until they have `num_bytes`, with pauses for other tasks. The flag says whether none is left."""
    gathered = bytearray()
    for piece in pieces:
        gathered += piece
        if len(gathered) >= num_bytes:
            return bytes(gathered), False
        if len(piece) >= PAUSE_BYTES:
            await asyncio.sleep(0)
    return bytes(gathered), True


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
