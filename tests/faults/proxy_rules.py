"""What a proxy does to the pieces that pass: the rules, and the evidence that each of them was applied.

`delay`, `drip` and `blackhole` hold for as long as they stand. The others are done once (or `times` times), to the
piece that comes after `skip` others of the kind. `reset` and `half_close` are done to whole connections, at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.faults.zmtp_frames import WirePiece

DIRECTIONS = ("up", "down")  # from the one who connected, and back
LASTING = ("delay", "drip", "blackhole")
INJURIES = ("flip", "truncate", "swap", "duplicate", "replay", "drop")
CUTS = ("reset", "half_close")
REMEMBERED_BYTES = 1 << 20  # of what has passed one way, to be replayed


@dataclass(slots=True)
class ProxyRule:
    """One fault. `value` is seconds (delay) or bytes a second (drip).

    Evidence: `applied` counts pieces (or connections) it was done to, `bytes_in` and `bytes_out` what went into and
    came out of those, `changed` whether that differed every time; `least_s` is the shortest time that a delayed piece
    was held.
    """

    kind: str
    way: str = "both"
    value: float = 0.0
    on: str = "message"  # kind of piece
    skip: int = 0
    times: int = 1
    seed: int = 0
    earlier: bool = False  # replay: of an earlier connection
    applied: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    changed: bool = True
    least_s: float = -1.0
    began_s: float = 0.0
    standing: bool = True
    _held: dict[int, bytes] = field(default_factory=dict)
    _seen: int = 0

    def concerns(self, way: str) -> bool:
        return self.standing and self.way in (way, "both")

    def wants(self, way: str, piece: WirePiece) -> bool:
        """Does this rule apply to this piece?"""
        if not self.concerns(way) or self.kind not in INJURIES or self.applied >= self.times:
            return False
        if piece.kind != self.on:
            return False
        self._seen += 1
        return self._seen > self.skip

    def note(self, went_in: Iterable[bytes], came_out: Iterable[bytes]) -> None:
        """It was applied: these pieces became those."""
        before, after = list(went_in), list(came_out)
        self.applied += 1
        self.bytes_in += sum(map(len, before))
        self.bytes_out += sum(map(len, after))
        self.changed = self.changed and before != after

    def evidence(self) -> dict[str, Any]:
        """The evidence, as it goes over the control socket."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


class PassedMessages:
    """Messages that have passed one way of a line, oldest first, at most `REMEMBERED_BYTES`."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def add(self, connection: int, raw: bytes) -> None:
        self._kept.append((connection, raw))
        self._bytes += len(raw)
        while self._bytes > REMEMBERED_BYTES:
            self._bytes -= len(self._kept.popleft()[1])

    def find(self, connection: int, earlier: bool) -> bytes | None:
        """The oldest that passed on this connection, or on one before it."""
        return next((raw for number, raw in self._kept if (number < connection) == earlier), None)


def injure_piece(
    rule: ProxyRule, piece: WirePiece, connection: int, memory: PassedMessages
) -> list[bytes] | None:
    """What goes out instead of `piece`; None if the rule could not be applied to it.

    Of a swap the first of the two is kept until the second has come.
    """
    raw, rng = piece.raw, random.Random(rule.seed * 1_000_003 + rule.applied)
    match rule.kind:
        case "flip":
            at = rng.randrange(min(piece.body_at, len(raw) - 1), len(raw))
            out = [raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]]
        case "truncate":
            out = [raw[: rng.randrange(len(raw))]]
        case "drop":
            out = []
        case "duplicate":
            out = [raw, raw]
        case "replay":
            old = memory.find(connection, rule.earlier)
            if old is None:
                return None
            out = [raw, old]
        case "swap":
            first = rule._held.pop(connection, None)
            if first is None:
                rule._held[connection] = raw
                return []
            rule.note([first, raw], [raw, first])
            return [raw, first]
        case _:
            raise ValueError(f"a proxy cannot {rule.kind} a frame")
    rule.note([raw], out)
    return out
