"""The least that a server of streams can do: one uvloop protocol that writes prepared bytes.

    python -m benchmarks.gateway_parts.bare_server

Standard input gives one line of JSON: the seconds between two tokens, the head of an answer, the bytes of an event, and
those of the end. Standard output then has the port. What a request says is read only as far as the number of tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import dataclass, field

import uvloop

import benchmarks.script_path  # noqa: F401

ASKED = re.compile(rb'"max_tokens": ?(\d+)')


@dataclass(frozen=True)
class PreparedBytes:
    """What an answer consists of."""

    head: bytes
    event: bytes
    end: bytes

    def as_chunk(self, part: bytes) -> bytes:
        """A part as a chunk of HTTP/1.1."""
        return b"%x\r\n%s\r\n" % (len(part), part)


@dataclass(eq=False)
class BareProtocol(asyncio.Protocol):
    """A connection. An answer that has begun is in `running`, with the number of its tokens that are left."""

    prepared: PreparedBytes
    running: dict[BareProtocol, int]
    transport: asyncio.Transport | None = None
    received: bytearray = field(default_factory=bytearray)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """A request has arrived when the number of its tokens has: bodies are short."""
        self.received += data
        if (found := ASKED.search(self.received)) is not None and self.received.endswith(b"}"):
            assert self.transport is not None
            self.transport.write(self.prepared.head)
            self.running[self] = int(found[1])
            self.received = bytearray()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        self.running.pop(self, None)

    def write_token(self) -> None:
        """Write the next event, and the end after the last one."""
        assert self.transport is not None
        left = self.running[self] = self.running[self] - 1
        self.transport.write(self.prepared.as_chunk(self.prepared.event))
        if not left:
            self.transport.write(self.prepared.as_chunk(self.prepared.end) + b"0\r\n\r\n")
            del self.running[self]


async def serve(beat_s: float, prepared: PreparedBytes) -> None:
    """Serve until standard input ends."""
    running: dict[BareProtocol, int] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BareProtocol(prepared, running), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)
    due_s = loop.time()
    while not over.is_set():
        due_s = max(due_s + beat_s, loop.time())
        await asyncio.sleep(due_s - loop.time())
        for protocol in list(running):
            protocol.write_token()


def main() -> None:
    """Read what is to be written, and serve."""
    beat_s, *parts = json.loads(sys.stdin.readline())
    uvloop.run(serve(beat_s, PreparedBytes(*(part.encode() for part in parts))))


if __name__ == "__main__":
    main()
