"""Pulls KV while the prefill worker still computes it: layer by layer, before there is a ticket.

    hint: chunk 3 in slab 7, mark 41 ──▶ read the layer progress: 41|5 ──▶ copy layers 0 to 4, hash them ──▶ repeat
    ticket: chunk 3 in slab 7        ──▶ copy the other layers, hash them ──▶ the payload hash of chunk 3

The hash of a chunk continues from layer to layer, in the chunk's order, and always covers the copied bytes. Hints are
not trusted, and an error here never fails a request: when a hint gives a chunk another mark its copy starts again, and
a chunk that does not match its digest in the end is pulled again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.cooperative import UNTIL_WOKEN, CoopTask
from kvtransfer.digests import PayloadHasher
from kvtransfer.layer_progress import COMPLETE_MARK, ProgressEntries, split_entries
from kvtransfer.ticket import StagingHint, Ticket

# Seconds between two reads of unchanged layer progress. They are doubled each time, up to the maximum.
MIN_POLL_S = 0.5e-3
MAX_POLL_S = 4e-3


@dataclass(slots=True)
class LayerCopy:
    """Copy layers `first` to `end` - 1 of the source's slab `far` to the own slab `own`; `payload` hashes the copy."""

    far: int
    own: int
    first: int
    end: int
    payload: PayloadHasher


class SourceConnection(Protocol):
    """The connection to one life of one source. After `copy_layers` returns or raises, nothing writes to own slabs."""

    @property
    def layers(self) -> int:
        """Number of layers of a whole chunk."""

    @property
    def num_slabs(self) -> int:
        """Number of slabs of the source's pool."""

    def read_progress(self, slabs: Sequence[int]) -> CoopTask[ProgressEntries | None]:
        """The source's layer progress of these slabs; None if the source has none. Raises TransferError."""

    def copy_layers(self, copies: Sequence[LayerCopy], stop: Callable[[], bool]) -> CoopTask[None]:
        """Make the copies. Raises TransferError, or HandoffAborted once `stop` returns True."""


@dataclass(slots=True)
class _AnnouncedChunk:
    """An announced chunk: its slab at the source, the mark of its content, and how many layers were copied."""

    far: int
    mark: int
    payload: PayloadHasher
    copied: int = 0


class PipelinedPull:
    """Pulls one request's KV ahead of its ticket, into `slabs` (chunk index -> own slab)."""

    def __init__(self, slabs: Mapping[int, int], hasher: Callable[[], PayloadHasher]) -> None:
        self._slabs, self._hasher = slabs, hasher
        self._chunks: dict[int, _AnnouncedChunk] = {}
        self._pause_s = MIN_POLL_S
        # The source of the announced chunks. A hint from another source starts again.
        self.worker, self.incarnation = "", ""

    def add_hint(self, hint: StagingHint) -> None:
        """Note which chunks are being computed; chunks that are not in `slabs` are ignored.

        The hint's mark changes with the content of the source's slabs. A chunk whose slab or mark differs from the last
        hint is copied again from layer 0.
        """
        if (hint.worker, hint.incarnation) != (self.worker, self.incarnation):
            self.worker, self.incarnation = hint.worker, hint.incarnation
            self._chunks.clear()
        for index, far in enumerate(hint.slabs, hint.start):
            known = self._chunks.get(index)
            if index in self._slabs and (known is None or (known.far, known.mark) != (far, hint.mark)):
                self._chunks[index] = _AnnouncedChunk(far, hint.mark, self._hasher())
        self._pause_s = MIN_POLL_S

    def drop_chunks(self) -> None:
        """Forget all announced chunks, because they cannot be pulled from this source."""
        self._chunks.clear()

    def copy_ready(self, connection: SourceConnection, stop: Callable[[], bool]) -> CoopTask[float]:
        """Copy all layers that are ready; returns the seconds until it is worth looking again.

        Raises as `SourceConnection.copy_layers`.
        """
        open_ = {i: chunk for i, chunk in self._chunks.items() if chunk.copied < connection.layers}
        for index in [i for i, chunk in open_.items() if chunk.far >= connection.num_slabs]:
            # The announced slab does not exist in the source's pool. The ticket will not name it.
            del open_[index], self._chunks[index]
        if not open_:
            return UNTIL_WOKEN
        ready = yield from self._ready_layers(connection, open_)
        if not ready:
            self._pause_s = min(2 * self._pause_s, MAX_POLL_S)
            return self._pause_s if self._chunks else UNTIL_WOKEN
        self._pause_s = MIN_POLL_S
        yield from connection.copy_layers([self._make_copy(index, end) for index, end in ready.items()], stop)
        for index, end in ready.items():
            self._chunks[index].copied = end
        return 0.0

    def finish_with_ticket(
        self, connection: SourceConnection, ticket: Ticket, stop: Callable[[], bool]
    ) -> CoopTask[dict[int, bytes]]:
        """With the ticket every chunk is complete: copy the missing layers of chunks that were begun from its slabs.

        Returns the payload hashes of all chunks that were copied ahead, by chunk index. Raises as
        `SourceConnection.copy_layers`.
        """
        same = (ticket.worker, ticket.incarnation) == (self.worker, self.incarnation)
        begun = {
            i: chunk
            for i, chunk in self._chunks.items()
            if i < len(ticket.chunks)
            and (
                chunk.copied == connection.layers
                or (same and chunk.copied > 0 and chunk.far == ticket.chunks[i].slab)
            )
        }
        rest = [
            self._make_copy(i, connection.layers)
            for i, chunk in begun.items()
            if chunk.copied < connection.layers
        ]
        yield from connection.copy_layers(rest, stop)
        return {index: chunk.payload.digest() for index, chunk in begun.items()}

    def _ready_layers(
        self, connection: SourceConnection, chunks: Mapping[int, _AnnouncedChunk]
    ) -> CoopTask[dict[int, int]]:
        """Chunk index -> number of layers that can be copied now. Chunks that have another mark by now are dropped."""
        ends = {index: connection.layers for index, chunk in chunks.items() if chunk.mark == COMPLETE_MARK}
        asked = [index for index in chunks if index not in ends]
        held = (
            (yield from connection.read_progress([chunks[index].far for index in asked])) if asked else None
        )
        if held is None:
            return ends
        for index, (mark, layers) in zip(asked, split_entries(held), strict=True):
            if mark != chunks[index].mark:
                del self._chunks[index]
            elif layers > chunks[index].copied:
                ends[index] = min(layers, connection.layers)
        return ends

    def _make_copy(self, index: int, end: int) -> LayerCopy:
        """The copy of a chunk's layers from the first missing one up to `end` - 1."""
        chunk = self._chunks[index]
        return LayerCopy(chunk.far, self._slabs[index], chunk.copied, end, chunk.payload)
