"""The proxy's process: `python -m tests.faults.proxy_server CONTROL_SOCKET`; `tests.faults.proxy` speaks to it.

    worker ──TCP──▶ line (a port of its own) ──TCP──▶ gateway            one line per worker, any number of connections

The control socket takes a JSON object per line and answers with one: `{"do": "line", "name", "host", "port",
"framing"}`, `{"do": "rule", "line", "rule": {...}}`, `{"do": "evidence", "line", "rule": n}`, `{"do": "heal", ...}`,
`{"do": "counters", "line"}`.
The process ends when the one that holds the control socket closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import socket
import struct
import sys
import termios
import time
from dataclasses import dataclass, field
from typing import Any

from tests.faults.proxy_rules import (
    CUTS,
    DIRECTIONS,
    LASTING,
    PassedMessages,
    ProxyRule,
    injure_piece,
)
from tests.faults.zmtp_frames import SPLITTERS, WirePiece

READ_BYTES = 64 << 10
MAX_QUEUED = 64  # pieces between the two ends of a way
POLL_S = 0.02  # a drip's


@dataclass(slots=True)
class ByteCount:
    """What has passed one way of a line, at both of its ends."""

    bytes_in: int = 0
    bytes_out: int = 0
    pieces_in: int = 0
    pieces_out: int = 0
    messages_in: int = 0
    messages_out: int = 0


class ServedLine:
    """One address that stands for another, and the rules that hold there."""

    def __init__(self, name: str, host: str, port: int, framing: str) -> None:
        self.name, self.target, self.framing = name, (host, port), framing
        self.rules: list[ProxyRule] = []
        self.counts = {way: ByteCount() for way in DIRECTIONS}
        self.memories = {way: PassedMessages() for way in DIRECTIONS}
        self.open: dict[int, ProxyConnection] = {}
        self.accepted = self.refused = 0
        self.changed = asyncio.Event()  # set, and replaced, whenever a rule comes or goes
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str) -> int:
        """Begin to accept; returns the port."""
        self._server = await asyncio.start_server(self._enter, host, 0, limit=READ_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.accepted += 1
        number = self.accepted
        try:
            await self.passable("up")  # behind a black hole nobody is reached
            far = await asyncio.open_connection(*self.target, limit=READ_BYTES)
        except OSError:
            self.refused += 1
            writer.transport.abort()
            return
        connection = ProxyConnection(self, number, (reader, writer), far)
        self.open[number] = connection
        try:
            await connection.run()
        finally:
            del self.open[number]
            connection.close()

    def lasting(self, kind: str, way: str) -> ProxyRule | None:
        """The rule of a lasting kind that stands for this way, the newest."""
        return next((rule for rule in reversed(self.rules) if rule.kind == kind and rule.concerns(way)), None)

    async def passable(self, way: str) -> None:
        """Until no black hole stands in this way."""
        while self.lasting("blackhole", way) is not None:
            await self.changed.wait()

    def stir(self) -> None:
        """A rule has come or gone."""
        self.changed.set()
        self.changed = asyncio.Event()

    def add(self, rule: ProxyRule) -> int:
        """A rule from now on; its number."""
        rule.began_s = time.monotonic()
        if rule.kind in CUTS:
            for connection in list(self.open.values()):
                connection.cut(rule)
        if rule.kind == "blackhole":
            rule.bytes_out = -sum(self.counts[way].bytes_out for way in DIRECTIONS if rule.concerns(way))
        self.rules.append(rule)
        self.stir()
        return len(self.rules) - 1

    def evidence(self, number: int) -> dict[str, Any]:
        """The evidence of a rule. Of a black hole: bytes that wait in front of it, bytes that came out since."""
        rule = self.rules[number]
        fields = rule.evidence() | {"lasted_s": time.monotonic() - rule.began_s}
        if rule.kind == "blackhole" and rule.standing:
            ways = [way for way in DIRECTIONS if rule.concerns(way)]
            waiting = sum(connection.waiting(way) for connection in self.open.values() for way in ways)
            fields["bytes_in"] = waiting
            fields["bytes_out"] = rule.bytes_out + sum(self.counts[way].bytes_out for way in ways)
            fields["applied"] = int(waiting > 0) + len(self._tasks) - len(self.open)
        return fields

    def heal(self, number: int) -> dict[str, Any]:
        fields = self.evidence(number)
        self.rules[number].standing = False
        self.stir()
        return fields

    def counters(self) -> dict[str, Any]:
        ways = {
            way: {name: getattr(count, name) for name in ByteCount.__slots__}
            for way, count in self.counts.items()
        }
        return {"accepted": self.accepted, "refused": self.refused, "open": len(self.open), **ways}


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProxyConnection:
    """One connection through a line: two ways, each read by one task and written by another."""

    def __init__(self, line: ServedLine, number: int, near: Ends, far: Ends) -> None:
        self.line, self.number = line, number
        self._ends = {"up": (near[0], far[1]), "down": (far[0], near[1])}
        self._queues: dict[str, asyncio.Queue[tuple[float, WirePiece] | None]] = {
            way: asyncio.Queue(MAX_QUEUED) for way in DIRECTIONS
        }
        self._shut: set[str] = set()  # ways that were half-closed: what still comes is swallowed
        self._kept: dict[str, int] = dict.fromkeys(DIRECTIONS, 0)  # bytes read and not written yet

    async def run(self) -> None:
        """Until both ways have ended, or one of them broke."""
        with contextlib.suppress(OSError, ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                for way in DIRECTIONS:
                    tasks.create_task(self._read(way))
                    tasks.create_task(self._write(way))

    def close(self) -> None:
        for _, writer in self._ends.values():
            writer.transport.abort()

    def cut(self, rule: ProxyRule) -> None:
        """Reset both ends, or tell one of them that nothing more will come."""
        if rule.kind == "reset":
            for _, writer in self._ends.values():
                held: socket.socket = writer.get_extra_info("socket")
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
        else:
            for way in DIRECTIONS:
                if rule.concerns(way) and way not in self._shut:
                    self._shut.add(way)
                    self._ends[way][1].write_eof()
        rule.applied += 1

    def waiting(self, way: str) -> int:
        """Bytes that have been sent this way and have not gone out."""
        reader, _ = self._ends[way]
        held: socket.socket = self._ends["down" if way == "up" else "up"][1].get_extra_info("socket")
        unread = struct.unpack("i", fcntl.ioctl(held.fileno(), termios.FIONREAD, bytes(4)))[0]
        return int(unread) + self._kept[way] + len(reader._buffer)  # type: ignore[attr-defined]

    async def _read(self, way: str) -> None:
        reader, queue, count = self._ends[way][0], self._queues[way], self.line.counts[way]
        splitter = SPLITTERS[self.line.framing]()
        while data := await reader.read(READ_BYTES):
            count.bytes_in += len(data)
            for piece in splitter.feed(data):
                count.pieces_in += 1
                count.messages_in += piece.kind == "message"
                for out in self._injured(way, piece):
                    self._kept[way] += len(out.raw)
                    await queue.put((time.monotonic(), out))
        if splitter.rest:
            await queue.put((time.monotonic(), WirePiece("bytes", splitter.rest)))
        await queue.put(None)

    def _injured(self, way: str, piece: WirePiece) -> list[WirePiece]:
        memory, out = self.line.memories[way], [piece]
        for rule in self.line.rules:
            if rule.wants(way, piece):
                changed = injure_piece(rule, piece, self.number, memory)
                if changed is not None:
                    out = [WirePiece(piece.kind, raw, piece.body_at) for raw in changed]
                    break
        if piece.kind == "message":
            memory.add(self.number, piece.raw)
        return out

    async def _write(self, way: str) -> None:
        writer, queue, count = self._ends[way][1], self._queues[way], self.line.counts[way]
        while (item := await queue.get()) is not None:
            born_s, piece = item
            await self._hold(way, born_s)
            for part in self._parts(way, piece.raw):
                await self.line.passable(way)
                if way not in self._shut:
                    writer.write(part)
                    await writer.drain()
                    count.bytes_out += len(part)
                self._kept[way] -= len(part)
                await self._drip(way, len(part))
            count.pieces_out += 1
            count.messages_out += piece.kind == "message"
        if way not in self._shut:
            await self.line.passable(way)
            self._shut.add(way)
            writer.write_eof()

    async def _hold(self, way: str, born_s: float) -> None:
        rule = self.line.lasting("delay", way)
        if rule is None:
            return
        await asyncio.sleep(max(0.0, born_s + rule.value - time.monotonic()))
        held_s = time.monotonic() - born_s
        rule.applied += 1
        rule.least_s = held_s if rule.least_s < 0 else min(rule.least_s, held_s)

    def _parts(self, way: str, raw: bytes) -> list[bytes]:
        rule = self.line.lasting("drip", way)
        if rule is None:
            return [raw]
        size = max(1, int(rule.value * POLL_S))
        return [raw[at : at + size] for at in range(0, len(raw), size)]

    async def _drip(self, way: str, size: int) -> None:
        rule = self.line.lasting("drip", way)
        if rule is not None:
            await asyncio.sleep(size / rule.value)
            rule.applied += 1
            rule.bytes_out += size


@dataclass(slots=True)
class ProxyServer:
    """All lines of the process."""

    lines: dict[str, ServedLine] = field(default_factory=dict)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "line":
                line = ServedLine(request["name"], request["host"], request["port"], request["framing"])
                self.lines[line.name] = line
                return {"port": await line.listen(request["listen"])}
            case "rule":
                rule = ProxyRule(**request["rule"])
                if rule.kind in LASTING:
                    rule.times = 0
                return {"rule": self.lines[request["line"]].add(rule)}
            case "evidence":
                return self.lines[request["line"]].evidence(request["rule"])
            case "heal":
                return self.lines[request["line"]].heal(request["rule"])
            case "counters":
                return self.lines[request["line"]].counters()
        raise ValueError(f"a proxy does not know {request['do']!r}")


async def serve_control(path: str) -> None:
    """Serve one holder of the control socket, until it is gone."""
    reader, writer = await asyncio.open_unix_connection(path)
    proxy = ProxyServer()
    while line := await reader.readline():
        try:
            answer = await proxy.answer(json.loads(line))
        except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
            answer = {"error": repr(error)}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()


if __name__ == "__main__":
    asyncio.run(serve_control(sys.argv[1]))
