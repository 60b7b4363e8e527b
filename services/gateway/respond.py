"""Writing a generation to its client: whole, or as server-sent events.

    a stream:   (role chunk, deltas, finish chunk) per choice, interleaved ─▶ usage chunk if asked for ─▶ [DONE]

Until the first token is there nothing is written, so that an early failure is an HTTP error with its own status. After
that a failure is an event `{"error": ...}` followed by [DONE], and if that cannot be written the connection is reset:
never a clean end, which official clients take for success. Whatever happens, what is still held is given up.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.errors import RequestError
from services.gateway.errors import JSON, error_response
from services.gateway.generation import Generation, Voice
from services.gateway.views import View, chosen
from services.gateway.wire import Stalled, Wire

PING_S = 10.0  # while nothing happens, so that idle timers of proxies and clients see life
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = logging.getLogger(__name__)


def event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Respond(Response):
    """The response that runs `generation` and writes it in the shape of `view`.

    It is in `running` meanwhile. `arrived_s` is when the request came, `deadline_s` when it must have ended, on the
    monotonic clock.
    """

    def __init__(
        self,
        generation: Generation,
        view: View,
        running: set[Generation],
        *,
        arrived_s: float,
        deadline_s: float,
        stall_s: float,
        ping_s: float = PING_S,
    ) -> None:
        super().__init__()
        self.generation, self.view, self._running = generation, view, running
        self._arrived_s, self._deadline_s = arrived_s, deadline_s
        self._stall_s, self._ping_s = stall_s, ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = Wire(scope, send, self._stall_s)
        work = asyncio.create_task(self._run(wire, scope, receive, send))
        left = asyncio.create_task(_left(receive))
        self._running.add(self.generation)
        self.generation.metrics.open.set(len(self._running))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except Stalled:
            self.generation.metrics.cut.inc()
            log.info("%s cut: its reader takes nothing", self.generation.name)
            await self._cut(wire, left)
        except BaseException:  # including a cancelled server: what was written must not look complete
            await self._cut(wire, left)
            raise
        finally:
            self._running.discard(self.generation)
            self.generation.metrics.open.set(len(self._running))
            self.generation.close()
            work.cancel()
            left.cancel()

    async def _cut(self, wire: Wire, left: asyncio.Task[None]) -> None:
        if wire.started:
            wire.abort()
            # uvicorn hears of it a moment later, and then does not complain
            await asyncio.wait((left,), timeout=1.0)

    async def _run(self, wire: Wire, scope: Scope, receive: Receive, send: Send) -> None:
        log.info("%s generates %s", scope.get("state", {}).get("request_id"), self.generation.name)
        self.generation.begin(self._arrived_s, self._deadline_s)
        try:
            if self.generation.ask.stream:
                await self._stream(wire)
            else:
                await self._whole(wire)
        except RequestError as error:
            log.warning("%s failed: %s: %s", self.generation.name, error.code, error.what)
            await error_response(error)(scope, receive, send)

    async def _whole(self, wire: Wire) -> None:
        generation = self.generation
        await generation.whole()
        for voice in generation.voices:
            voice.wrote(voice.lived.token_s or time.monotonic())
        body = msgspec.json.encode(
            self.view.whole(chosen(generation.ask, generation.answers), generation.usage)
        )
        length = str(len(body)).encode()
        await wire.start(200, [(b"content-type", JSON.encode()), (b"content-length", length)])
        await wire.body(body)
        generation.completed()
        await wire.end()

    async def _stream(self, wire: Wire) -> None:
        """Raises RequestError only while nothing has been written."""
        generation, voices = self.generation, self.generation.voices
        await generation.news(self._ping_s)
        if generation.failure is not None:
            raise generation.failure
        await wire.start(200, SSE_HEADERS)
        frames = [event(body) for choice in range(len(voices)) for body in self.view.begin(choice)]
        open_voices = dict(enumerate(voices))
        while True:
            spoken = {choice: self._frames(choice, voice) for choice, voice in open_voices.items()}
            frames += [frame for spoke in spoken.values() for frame in spoke]
            open_voices = {i: voice for i, voice in open_voices.items() if voice.answer.finish is None}
            over = generation.failure is not None or not open_voices
            frames += self._closing() if over else []
            await wire.body(b"".join(frames) or PING)
            for choice, spoke in spoken.items():
                if spoke:
                    voices[choice].wrote(time.monotonic())
            if over:
                break
            frames = []
            await generation.news(self._ping_s)
            if generation.flooded:
                raise Stalled
        if generation.failure is None:
            generation.completed()
        await wire.end()

    def _frames(self, choice: int, voice: Voice) -> list[bytes]:
        """What is new of one choice, and its end in a chunk of its own."""
        piece, ended = voice.answer.take(), voice.answer.finish
        frames = [event(self.view.delta(choice, piece))] if piece else []
        if ended is not None:
            frames.append(event(self.view.end(choice, ended)))
        return frames

    def _closing(self) -> list[bytes]:
        generation = self.generation
        if generation.failure is not None:
            return [event(generation.failure.body()), DONE]
        return [event(self.view.usage(generation.usage)), DONE] if generation.ask.include_usage else [DONE]


async def _left(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
