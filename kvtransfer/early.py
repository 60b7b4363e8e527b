"""Pulling before there is a ticket: layer by layer, as far as hints and the source's board say that KV is complete.

    hint: chunk 3 in slab 7, mark 41 ──▶ look at the board: 41|5 ──▶ copy layers 0 to 4, hash the copies ──▶ look again
    ticket: chunk 3 in slab 7        ──▶ copy the other layers, hash them ──▶ the payload hash of chunk 3

Hashes go on from layer to layer, in the chunk's order, always over what was copied. Nothing here is trusted, and
nothing that goes wrong here fails a request: a chunk under another mark is begun anew when a hint says so, and whatever
does not match its digest in the end is pulled again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.board import DONE, Entries, split
from kvtransfer.digests import Hasher
from kvtransfer.ticket import Hint, Ticket
from kvtransfer.turns import UNTIL_STIRRED, Turns

LOOK_S = 0.5e-3  # between two looks at a board on which nothing has happened
LOOK_MOST_S = 4e-3


@dataclass(slots=True)
class Copy:
    """Layers `first` to `end` - 1 of the source's slab `far` go to the own slab `own`; `payload` hashes the copies."""

    far: int
    own: int
    first: int
    end: int
    payload: Hasher


class Lane(Protocol):
    """The way to one life of one source. Nothing writes to own slabs when `copy` has returned or raised."""

    @property
    def layers(self) -> int:
        """Of a whole chunk."""

    @property
    def num_slabs(self) -> int:
        """Of the source."""

    def look(self, slabs: Sequence[int]) -> Turns[Entries | None]:
        """What the source's board says of these slabs; None if it has no board. Raises TransferError."""

    def copy(self, copies: Sequence[Copy], stop: Callable[[], bool]) -> Turns[None]:
        """Make copies. Raises TransferError, or Aborted when `stop` says so."""


@dataclass(slots=True)
class _Chunk:
    """One that was announced: where it comes from, under which mark, and how many of its layers were copied."""

    far: int
    mark: int
    payload: Hasher
    copied: int = 0


class Early:
    """What comes ahead of one request's ticket, into `slabs` (own slab by index of the chunk)."""

    def __init__(self, slabs: Mapping[int, int], hasher: Callable[[], Hasher]) -> None:
        self._slabs, self._hasher = slabs, hasher
        self._chunks: dict[int, _Chunk] = {}
        self._pause_s = LOOK_S
        self.worker, self.incarnation = "", ""  # where it comes from; a hint from elsewhere begins anew

    def hint(self, hint: Hint) -> None:
        """Take note of what is being computed; chunks that are not wanted are passed over."""
        if (hint.worker, hint.incarnation) != (self.worker, self.incarnation):
            self.worker, self.incarnation = hint.worker, hint.incarnation
            self._chunks.clear()
        for index, far in enumerate(hint.slabs, hint.start):
            known = self._chunks.get(index)
            if index in self._slabs and (known is None or (known.far, known.mark) != (far, hint.mark)):
                self._chunks[index] = _Chunk(far, hint.mark, self._hasher())
        self._pause_s = LOOK_S

    def drop(self) -> None:
        """Forget everything: it cannot be had from there."""
        self._chunks.clear()

    def advance(self, lane: Lane, stop: Callable[[], bool]) -> Turns[float]:
        """Copy what can be copied now; returns for how long there is nothing to look for. Raises as `Lane.copy`."""
        open_ = {i: chunk for i, chunk in self._chunks.items() if chunk.copied < lane.layers}
        for index in [i for i, chunk in open_.items() if chunk.far >= lane.num_slabs]:
            del open_[index], self._chunks[index]  # a slab that does not exist; the ticket will not name it
        if not open_:
            return UNTIL_STIRRED
        ready = yield from self._ready(lane, open_)
        if not ready:
            self._pause_s = min(2 * self._pause_s, LOOK_MOST_S)
            return self._pause_s if self._chunks else UNTIL_STIRRED
        self._pause_s = LOOK_S
        yield from lane.copy([self._copy(index, end) for index, end in ready.items()], stop)
        for index, end in ready.items():
            self._chunks[index].copied = end
        return 0.0

    def finish(self, lane: Lane, ticket: Ticket, stop: Callable[[], bool]) -> Turns[dict[int, bytes]]:
        """The ticket is there, so every chunk is complete: copy what is missing of those that were begun where it says.

        Returns the payload hashes of all chunks that were copied ahead, wholly or in part. Raises as `Lane.copy`.
        """
        same = (ticket.worker, ticket.incarnation) == (self.worker, self.incarnation)
        begun = {
            i: chunk
            for i, chunk in self._chunks.items()
            if i < len(ticket.chunks)
            and (
                chunk.copied == lane.layers
                or (same and chunk.copied > 0 and chunk.far == ticket.chunks[i].slab)
            )
        }
        rest = [self._copy(i, lane.layers) for i, chunk in begun.items() if chunk.copied < lane.layers]
        yield from lane.copy(rest, stop)
        return {index: chunk.payload.digest() for index, chunk in begun.items()}

    def _ready(self, lane: Lane, chunks: Mapping[int, _Chunk]) -> Turns[dict[int, int]]:
        """Up to which layer each chunk can be copied, of those that can; one under another mark is forgotten."""
        ends = {index: lane.layers for index, chunk in chunks.items() if chunk.mark == DONE}
        asked = [index for index in chunks if index not in ends]
        held = (yield from lane.look([chunks[index].far for index in asked])) if asked else None
        if held is None:
            return ends
        for index, (mark, layers) in zip(asked, split(held), strict=True):
            if mark != chunks[index].mark:
                del self._chunks[index]
            elif layers > chunks[index].copied:
                ends[index] = min(layers, lane.layers)
        return ends

    def _copy(self, index: int, end: int) -> Copy:
        chunk = self._chunks[index]
        return Copy(chunk.far, self._slabs[index], chunk.copied, end, chunk.payload)
