"""Writes a generation to its client, as one body or as server-sent events (SSE).

    a stream:   (begin, deltas, end) per choice, interleaved ─▶ closing events

What the events are is the format's affair (`formats.OutputFormat`). Nothing is written before the first token, not even
a ping. So an early failure is an HTTP error with its own status, however long it took. A later failure is an event. If
that cannot be written, the connection is reset: a clean end would look like success to official clients. In every case,
sequences that still run are cancelled at the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.errors import RequestError
from diptych.logs.log_format import about_request
from services.gateway.generation.formats import MAX_WRITTEN_TOKENS, OutputFormat
from services.gateway.generation.generation import Generation, SequenceStream
from services.gateway.generation.timings import SERVER_TIMING_HEADER, describe_timings, server_timing
from services.gateway.generation.whole_answer import MAX_PART_BYTES, complete_answer, write_parts
from services.gateway.http.connection import ClientStalled
from services.gateway.http.error_response import JSON_TYPE, error_response, record_failure
from services.gateway.http.request_scope import trace_of
from services.gateway.http.response_writer import ResponseWriter
from services.gateway.openai.schemas.response_schema import AnswerDetails, DetailsField
from services.gateway.tracing.spans import TracedSequence

# Seconds between two pings after the first token. They keep proxies and clients from timing out.
PING_INTERVAL_S = 10.0
# Other tasks may run after this many seconds.
PAUSE_S = 0.005
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = logging.getLogger(__name__)


class GenerationResponse(Response):
    """Runs `generation` and writes it in `output_format`.

    The generation is in `running` while it is being written. A client that reads too little for `stall_s` seconds is
    disconnected. `ping_s` is the time between pings. With `timings` the answer says where its time went.
    """

    def __init__(
        self,
        generation: Generation,
        output_format: OutputFormat,
        running: set[Generation],
        *,
        stall_s: float,
        ping_s: float = PING_INTERVAL_S,
        timings: bool = False,
    ) -> None:
        super().__init__()
        self.generation, self.output_format, self._running = generation, output_format, running
        self._stall_s, self._ping_s, self._timings = stall_s, ping_s, timings
        # The time at which this task last let other tasks run.
        self._paused_s = 0.0
        self._kept_bytes = 0
        # The time at which a part of a stream was last written.
        self._written_s = 0.0
        # Frames of a stream that are to be written next, and their bytes.
        self._frames: list[bytes] = []
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(scope, send, self._stall_s)
        left = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            with self.generation.run_sequences(self._running):
                self._hold_kept()
                work = asyncio.create_task(self._write_answer(writer, scope, receive, send))
                try:
                    await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
                    if work.done():
                        work.result()
                finally:
                    work.cancel()
        except ClientStalled as stalled:
            about = about_request(self.generation.ids)
            log.warning("is disconnected: the client reads too slowly%s", stalled, extra=about)
            await self._reset_connection(writer, left)
        except BaseException:
            await self._reset_connection(writer, left)
            raise
        finally:
            self._complete_trace(scope)
            left.cancel()

    def _complete_trace(self, scope: Scope) -> None:
        """Add the sequences to the trace of the request, if it is traced."""
        if (trace := trace_of(scope)) is not None:
            generation = self.generation
            trace.left = generation.failure is None and not generation.done
            trace.sequences = [
                TracedSequence(stream.request, stream.record, stream.timeline)
                for stream in generation.streams
            ]

    async def _reset_connection(self, writer: ResponseWriter, left: asyncio.Task[None]) -> None:
        """Reset the connection if a response was begun, so that the client does not take it for complete."""
        if writer.started:
            writer.abort()
            # uvicorn notices the reset a moment later. If this task ended before, uvicorn would log an error.
            await asyncio.wait((left,), timeout=1.0)

    async def _write_answer(self, writer: ResponseWriter, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the response, or an error if nothing was written before."""
        try:
            if self.generation.resolved.stream:
                await self._write_stream(writer)
            else:
                await self._write_whole(writer)
        except RequestError as error:
            await error_response(error.failure, self.generation.name)(scope, receive, send)
        else:
            if self.generation.failure is not None:
                record_failure(scope, self.generation.failure, self.generation.name)

    async def _write_whole(self, writer: ResponseWriter) -> None:
        """Write the answers as one JSON body once all are complete. Raises RequestError if one fails."""
        await complete_answer(self.generation, self.output_format)
        details = self._describe_answer()
        headers = [(b"content-type", JSON_TYPE.encode()), *self.output_format.head.headers]
        if details is not UNSET:
            headers.append((SERVER_TIMING_HEADER.encode(), server_timing(details.timings)))

        async def write_part(part: bytes, is_last: bool) -> None:
            if not writer.started:
                length = [(b"content-length", str(len(part)).encode())] if is_last else []
                await writer.start_response(200, headers + length)
            await writer.write_body(part)

        await write_parts(self.generation, self.output_format, write_part, details)
        await writer.end_response()

    async def _write_stream(self, writer: ResponseWriter) -> None:
        """Write the stream. Raises RequestError only while nothing has been written."""
        generation, streams = self.generation, self.generation.streams
        # No pings are sent here, since they would need a status first. The request's own deadline bounds the wait.
        await generation.wait_for_news(None)
        if generation.failure is not None:
            raise RequestError(generation.failure)
        head = self.output_format.head
        head.name_kv_class(generation.kv)
        head.cached_tokens = generation.cached_tokens
        await writer.start_response(200, [*SSE_HEADERS, *head.headers])
        self._written_s = time.monotonic()
        for choice in range(len(streams)):
            await self._add_frames(
                writer, self.output_format.begin_events(choice, generation.usage_so_far(choice))
            )
        open_streams = dict(enumerate(streams))
        push = self._make_push(writer)
        while True:
            news = {
                choice: await self._add_news(writer, choice, stream)
                for choice, stream in open_streams.items()
            }
            # An answer may end while this task sleeps. Its stream is complete only when its end is among the frames.
            open_streams = {i: stream for i, stream in open_streams.items() if not news[i][1]}
            over = generation.failure is not None or not open_streams
            if over and not self._timings:
                await self._add_frames(writer, self._closing_frames())
            await self._write_frames(writer)
            for choice, (is_new, _) in news.items():
                if is_new:
                    streams[choice].mark_written(time.monotonic())
            if over:
                break
            await self._wait_for_news(push)
            if generation.flooded:
                raise ClientStalled
        if self._timings:
            # They say when the frames before them were written.
            await self._add_frames(writer, self._closing_frames())
            await self._write_frames(writer)
        if generation.failure is None:
            generation.mark_completed()
        await writer.end_response()

    def _make_push(self, writer: ResponseWriter) -> TokenPush | None:
        """What writes new text while the task waits; None if the task has to do it."""
        if not TokenPush.fits(self.generation):
            return None
        return TokenPush(self.generation, self.output_format, writer, self._hold_kept)

    async def _wait_for_news(self, push: TokenPush | None) -> None:
        """Wait for something to write; that is a ping if nothing was written for long."""
        wait_s = self._written_s + self._ping_s - time.monotonic()
        if push is None:
            is_news = await self.generation.wait_for_news(wait_s)
        else:
            with push.while_waiting():
                is_news = await self.generation.wait_for_news(wait_s)
            self._written_s = max(self._written_s, push.written_s)
        if not is_news and time.monotonic() >= self._written_s + self._ping_s:
            self._frames.append(self.output_format.ping)

    async def _add_news(
        self, writer: ResponseWriter, choice: int, stream: SequenceStream
    ) -> tuple[bool, bool]:
        """Add the new events of one choice. Returns whether there were some, and whether its end is among them.

        The end is an event of its own. Much text becomes several events, with pauses in which other tasks run.
        """
        await stream.pack_logprobs()
        piece, ended = stream.take_piece(), stream.answer.finish
        usage, is_new = self.generation.usage_so_far(choice), False
        for part in piece.split_pieces(MAX_WRITTEN_TOKENS) if piece else ():
            events = self.output_format.delta_events(choice, part, usage)
            is_new |= await self._add_frames(writer, events, must_pause=bool(part.start))
        if ended is not None:
            is_new |= await self._add_frames(
                writer, self.output_format.end_events(choice, stream.answer, usage)
            )
        self._hold_kept()
        return is_new, ended is not None

    async def _add_frames(
        self, writer: ResponseWriter, frames: Iterable[bytes], must_pause: bool = False
    ) -> bool:
        """Add frames, with pauses in which other tasks run. Returns whether there were any.

        When there are many, they are written.
        """
        is_any = False
        for frame in frames:
            is_any = True
            self._frames.append(frame)
            self._num_bytes += len(frame)
            if must_pause or self._paused_s + PAUSE_S < time.monotonic():
                await asyncio.sleep(0)
                self._paused_s, must_pause = time.monotonic(), False
            if self._num_bytes >= MAX_PART_BYTES:
                await self._write_frames(writer)
        return is_any

    async def _write_frames(self, writer: ResponseWriter) -> None:
        """Write the frames that were added, if any."""
        if not self._frames:
            return
        frames, self._frames, self._num_bytes = self._frames, [], 0
        with self.generation.wait_for_reader():
            await writer.write_body(b"".join(frames))
        self._written_s = time.monotonic()

    def _hold_kept(self) -> None:
        """Count the memory of what the format keeps of the answer."""
        kept_bytes = self.output_format.kept_bytes
        if kept_bytes != self._kept_bytes:
            self.generation.hold_bytes(kept_bytes - self._kept_bytes)
            self._kept_bytes = kept_bytes

    def _closing_frames(self) -> Iterable[bytes]:
        """The last events of a stream: an error, or usage and timings if asked for."""
        generation = self.generation
        if generation.failure is not None:
            return self.output_format.failure_events(generation.failure)
        usage = generation.usage if generation.resolved.include_usage else UNSET
        return self.output_format.closing_events(usage, self._describe_answer())

    def _describe_answer(self) -> DetailsField:
        """What the answer says about how it was made; UNSET if the client did not ask for that."""
        if not self._timings:
            return UNSET
        return AnswerDetails(describe_timings(self.generation.streams, time.monotonic()))


class TokenPush:
    """Writes the text of one choice when it comes, while the task that writes the answer waits for it.

    What may take long, or has to wait, is left to that task: log-probabilities, token ids, the end of an answer, a
    failure, and whatever comes while the client reads too slowly.
    """

    def __init__(
        self,
        generation: Generation,
        output_format: OutputFormat,
        writer: ResponseWriter,
        hold_kept: Callable[[], None],
    ) -> None:
        """`hold_kept` counts the memory of what the format keeps of the answer."""
        self._generation, self._format, self._writer = generation, output_format, writer
        self._stream, self._hold_kept = generation.streams[0], hold_kept
        # When something was last written, on the monotonic clock; and what failed, for the task to raise.
        self.written_s = 0.0
        self.error: Exception | None = None

    @staticmethod
    def fits(generation: Generation) -> bool:
        """Whether the pieces of an answer are small, and of one choice."""
        resolved = generation.resolved
        scored = resolved.logprobs is not None or resolved.prompt_logprobs is not None
        return len(generation.streams) == 1 and not (scored or resolved.return_ids or resolved.echo)

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """Within this context new text is written when it comes.

        Raises:
            Exception: what failed meanwhile.
        """
        self._generation.push = self.write_news
        try:
            yield
        finally:
            self._generation.push = None
        if self.error is not None:
            raise self.error

    def write_news(self) -> bool:
        """Write what is new. Returns False if the task has to do it."""
        stream = self._stream
        ended = stream.answer.finish is not None or self._generation.failure is not None
        if ended or self.error is not None or not self._writer.can_write_now:
            return False
        try:
            piece = stream.answer.take_piece()
            if not piece:
                return True
            used = self._generation.usage_so_far(0)
            frames = b"".join(
                [
                    frame
                    for part in piece.split_pieces(MAX_WRITTEN_TOKENS)
                    for frame in self._format.delta_events(0, part, used)
                ]
            )
        except Exception as error:
            # It concerns this answer alone.
            self.error = error
            return False
        self._hold_kept()
        if frames:
            self._writer.write_now(frames)
            self.written_s = time.monotonic()
            stream.mark_written(self.written_s)
        return True


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
