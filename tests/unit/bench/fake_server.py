"""A server that answers as it is asked to, over real sockets: what `diptych bench` may meet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from services.bench.http_client import BenchClient, ServerAddress

Answer = Callable[["Asked", asyncio.StreamWriter], Awaitable[None]]

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Fake:
    """`connections` counts those that were opened, `left` those that clients have closed; `asked` has every request."""

    port: int = 0
    connections: int = 0
    left: int = 0
    asked: list[Asked] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> BenchClient:
        return BenchClient(ServerAddress.from_url(self.url))


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Fake]:
    """Serve until the block ends; connections are kept unless `answer` closes them."""
    fake = Fake()
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fake.connections += 1
        writers.append(writer)
        while not writer.is_closing():
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
            except (asyncio.IncompleteReadError, ConnectionError):
                fake.left += 1
                break
            method, path, _ = head.split(" ", 2)
            length = [
                int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:")
            ]
            body = json.loads(await reader.readexactly(length[0])) if length else {}
            fake.asked.append(Asked(method, path, body))
            await answer(fake.asked[-1], writer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await server.wait_closed()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(words: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": words, "finish_reason": finish}]})


def usage(prompt: int, answer: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": answer}})


DONE = b"data: [DONE]\n\n"


def whole(*events: bytes) -> bytes:
    """A complete streamed response, an event a chunk."""
    return SSE + b"".join(map(chunk, events)) + b"0\r\n\r\n"


def plain(status: int, body: Any) -> bytes:
    """A complete response that is no stream."""
    content = json.dumps(body).encode()
    return (
        b"HTTP/1.1 %d No\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (status, len(content))
        + content
    )


def refusal(status: int, code: str, message: str = "as asked") -> bytes:
    return plain(status, {"error": {"code": code, "message": message, "type": "t", "param": None}})
