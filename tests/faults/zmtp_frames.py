"""What goes over a TCP connection, in pieces: frames of ZMTP 3.1 (ZeroMQ's RFC 37), or bytes as they come.

A connection begins with a greeting of 64 bytes each way. Frames follow: a byte of flags (1: more, 2: long, 4: command),
the length of the body in one byte or in eight, the body. With CURVE the commands of the handshake are readable as such,
and every message after it is one frame whose body is a sealed box: whole frames can be moved about, and bytes within
them changed, by somebody who has no key. That is what a proxy does here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

GREETING_BYTES = 64
LONG, COMMAND = 2, 4
MAX_PIECE_BYTES = 64 << 20  # a longer body is no frame: from there on bytes are passed as they come
KINDS = ("greeting", "command", "message", "bytes")


@dataclass(frozen=True, slots=True)
class WirePiece:
    """Something whole that was sent: its kind (one of `KINDS`), its bytes, and where its body begins in them."""

    kind: str
    raw: bytes
    body_at: int = 0


class StreamSplitter(Protocol):
    """Takes bytes as they arrive, gives back what is whole."""

    def feed(self, data: bytes) -> list[WirePiece]: ...

    @property
    def rest(self) -> bytes:
        """What has arrived of a piece that is not whole."""
        ...


class ZmtpSplitter:
    """One direction of a ZMTP connection."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._greeting, self._lost = GREETING_BYTES, False

    @property
    def rest(self) -> bytes:
        return bytes(self._held)

    def feed(self, data: bytes) -> list[WirePiece]:
        self._held += data
        pieces: list[WirePiece] = []
        while (piece := self._next()) is not None:
            del self._held[: len(piece.raw)]
            pieces.append(piece)
        return pieces

    def _next(self) -> WirePiece | None:
        held = self._held
        if self._lost:
            return WirePiece("bytes", bytes(held)) if held else None
        if not held:
            return None
        if self._greeting:  # each side sends the rest of it only when it has seen how the other's begins
            part = bytes(held[: self._greeting])
            self._greeting -= len(part)
            return WirePiece("greeting", part)
        body_at = 9 if held[0] & LONG else 2
        if len(held) < body_at:
            return None
        size = int.from_bytes(held[1:body_at], "big")
        if size > MAX_PIECE_BYTES:
            self._lost = True
            return WirePiece("bytes", bytes(held))
        if len(held) < body_at + size:
            return None
        kind = "command" if held[0] & COMMAND else "message"
        return WirePiece(kind, bytes(held[: body_at + size]), body_at)


class ChannelSplitter(ZmtpSplitter):
    """One direction of a connection of `diptych.channel.hub`: its messages are two frames each, and stay together."""

    def __init__(self) -> None:
        super().__init__()
        self._first: WirePiece | None = None

    @property
    def rest(self) -> bytes:
        return (self._first.raw if self._first else b"") + super().rest

    def feed(self, data: bytes) -> list[WirePiece]:
        pieces: list[WirePiece] = []
        for piece in super().feed(data):
            if self._first is not None:
                pieces.append(WirePiece(piece.kind, self._first.raw + piece.raw, self._first.body_at))
                self._first = None
            elif piece.kind == "message":
                self._first = piece
            else:
                pieces.append(piece)
        return pieces


class RawSplitter:
    """One direction of a connection of which nothing is known: a piece is whatever arrives at once."""

    rest = b""

    def feed(self, data: bytes) -> list[WirePiece]:
        return [WirePiece("bytes", data)] if data else []


SPLITTERS: dict[str, type[ZmtpSplitter] | type[RawSplitter]] = {
    "zmtp": ZmtpSplitter,
    "channel": ChannelSplitter,
    "raw": RawSplitter,
}
