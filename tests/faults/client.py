"""An HTTP client, cheap per token, that sees how an answer ended: cleanly, with an error in the stream, or cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from diptych.request import Grammar, SamplingParams
from tests.faults.toy_model import END_TOKEN

HEAD_BYTES = 64 << 10


@dataclass(slots=True)
class ClientRequest:
    """One request: what is sent, and what it means (`sampling`), so that the oracle can be asked."""

    nonce: int
    prompt: list[int]
    sampling: SamplingParams
    phase: str = "free"
    stop: tuple[str, ...] = ()

    def body(self) -> dict[str, Any]:
        """Of `POST /v1/completions`, streamed."""
        asked = self.sampling
        body: dict[str, Any] = {
            "model": "toy",
            "prompt": self.prompt,
            "max_tokens": asked.max_tokens,
            "min_tokens": asked.min_tokens,
            "temperature": asked.temperature,
            "seed": asked.seed,
            "presence_penalty": asked.presence_penalty,
            "frequency_penalty": asked.frequency_penalty,
            "repetition_penalty": asked.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in asked.logit_bias.items()},
            "ignore_eos": not asked.stop_token_ids,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.stop:
            body["stop"] = list(self.stop)
        if asked.logprobs is not None:
            body["logprobs"] = asked.logprobs
        if asked.grammar is not None:
            body["response_format"] = _response_format(asked.grammar)
        return body


def _response_format(grammar: Grammar) -> dict[str, Any]:
    assert grammar.kind == "json_schema", "the only kind that is asked for here"
    return {"type": "json_schema", "json_schema": {"name": "toy", "schema": json.loads(grammar.text)}}


@dataclass(slots=True)
class ClientAnswer:
    """What came back. `ends` are the endings that were seen, in order: "finish", "done", "error", "status", "cut"."""

    ask: ClientRequest
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    finish: str | None = None
    logprobs: list[float] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    received_s: list[float] = field(default_factory=list)  # when pieces of text came
    id: str = ""
    left: bool = False  # we went away

    @property
    def whole(self) -> bool:
        return self.ends == ["finish", "done"]

    @property
    def code(self) -> str:
        """How it failed, in a word; "" if it did not."""
        return "" if self.whole else str(self.error.get("code") or "+".join(self.ends) or "silence")

    @property
    def gap_s(self) -> float:
        """The longest pause between two pieces."""
        moments = [self.began_s, *self.received_s]
        return max((b - a for a, b in zip(moments, moments[1:], strict=False)), default=0.0)


class StreamingClient:
    """Asks one gateway on 127.0.0.1; a connection per request."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(
        self, ask: ClientRequest, leave: asyncio.Event | None = None, timeout_s: float = 120.0
    ) -> ClientAnswer:
        """Send and read to the end, or until `leave` is set. Whatever happens is in the answer."""
        answer = ClientAnswer(ask, began_s=time.monotonic())
        reading = asyncio.ensure_future(self._exchange(answer))
        going = asyncio.ensure_future(leave.wait()) if leave is not None else None
        try:
            waiting = {reading} | ({going} if going is not None else set())
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                answer.left = leave is not None and leave.is_set()
                if not answer.left:
                    answer.ends.append("hang")
        finally:
            for task in (reading, going):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
            answer.ended_s = time.monotonic()
        return answer

    async def _exchange(self, answer: ClientAnswer) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        except OSError:
            answer.ends.append("refused")
            return
        try:
            content = json.dumps(answer.ask.body()).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
            )
            await writer.drain()
            await self._head(answer, reader)
            await (self._stream(answer, reader) if answer.status == 200 else self._refusal(answer, reader))
        except (OSError, EOFError):
            answer.ends.append("cut")
        finally:
            writer.transport.abort()

    async def _head(self, answer: ClientAnswer, reader: asyncio.StreamReader) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        answer.status = int(first.split()[1])
        for line in lines:
            if ":" in line:
                name, _, value = line.partition(":")
                answer.headers[name.lower()] = value.strip()

    async def _refusal(self, answer: ClientAnswer, reader: asyncio.StreamReader) -> None:
        size = int(answer.headers.get("content-length", "0"))
        answer.error = json.loads(await reader.readexactly(size))["error"] if size else {}
        answer.ends.append("status")

    async def _stream(self, answer: ClientAnswer, reader: asyncio.StreamReader) -> None:
        """Chunks of HTTP, events of SSE in them; a body that ends without its last chunk raises EOFError."""
        rest = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            rest += (await reader.readexactly(size + 2))[:-2]
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    self._take(answer, event[6:])
        await reader.readexactly(2)

    def _take(self, answer: ClientAnswer, data: bytes) -> None:
        if data == b"[DONE]":
            answer.ends.append("done")
            return
        piece = json.loads(data)
        if "error" in piece:
            answer.error = piece["error"]
            answer.ends.append("error")
            return
        answer.id = piece.get("id", answer.id)
        if piece.get("usage"):
            answer.usage.append(piece["usage"])
        for choice in piece["choices"]:
            if choice["text"]:
                answer.text += choice["text"]
                answer.received_s.append(time.monotonic())
            if choice.get("logprobs"):
                answer.logprobs += choice["logprobs"]["token_logprobs"]
            if choice["finish_reason"]:
                answer.finish = choice["finish_reason"]
                answer.ends.append("finish")


def stop_token_ids(eos: bool) -> tuple[int, ...]:
    """`stop_token_ids` as the gateway resolves them."""
    return (END_TOKEN,) if eos else ()
