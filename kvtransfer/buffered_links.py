"""The links of a decode worker whose pool is on a device: KV is pulled into its transfer buffer, then copied on.

    free buffer slabs ─▶ pull, hash ─▶ copy to the device's slabs ─▶ copies have ended ─▶ free buffer slabs

KV is moved piece by piece, so a request of any length needs a bounded part of the buffer. While the buffer is full,
pulls wait for their turn, in the order in which they asked for a piece; none fails. Pieces that are pulled from one
source take half of the buffer at most: while it stalls, the KV of other sources goes on. A pull ends only when nothing
writes to its slabs any more, in the buffer and on the device, whether it succeeds, fails or is stopped.

A piece is hashed in the buffer, and copied on before its digest is compared: it goes into slabs that are reserved for
the request, and nobody reads these before `kvtransfer.handoff.hand_off` has verified every digest and commits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from kvtransfer.cooperative import CoopTask
from kvtransfer.digests import PayloadHasher
from kvtransfer.handoff import HandoffAborted
from kvtransfer.layer_progress import ProgressEntries
from kvtransfer.pipelined_pull import MAX_POLL_S, MIN_POLL_S, LayerCopy, SourceConnection
from kvtransfer.ticket import Ticket
from kvtransfer.transfer_buffer import TransferBuffer
from kvtransfer.transports.links import KvLinks, MeasuredRoute

if TYPE_CHECKING:
    # It imports torch, which only what copies needs.
    from kvcache.device.copies import CopyBatch, SlabCopies

PULL_OWNER = "pulls"
# Most slabs of a piece; in a small buffer a quarter of it, so that a source that stalls holds no more.
MAX_PIECE_SLABS = 8
# Most pieces of one pull that are being copied to the device while it pulls the next one.
MAX_UPLOADS = 2

StopCheck = Callable[[], bool]
# Pulls chunks `first`, `first` + 1, ... of a request into these buffer slabs.
PullPiece = Callable[[int, list[int]], CoopTask[None]]


class BufferedLinks:
    """Pulls over `links`, whose own pool is that of `buffer`; `copies` are between the buffer and the device's pool.

    It has the methods of `links`. In pairs and in copies, own slabs are those of the device's pool. Only one thread may
    pull.
    """

    def __init__(self, links: KvLinks, buffer: TransferBuffer, copies: SlabCopies) -> None:
        self._links, self._buffer, self._copies = links, buffer, copies
        # The pulls that wait for a piece, by source, in the order in which they asked; and the places in their queue.
        self._waiting: dict[str, deque[PieceUploads]] = {}
        self._places = count()
        self._piece_slabs = max(1, min(MAX_PIECE_SLABS, buffer.num_slabs // 4))
        # Slabs of the pieces that are being pulled from each source, and the most of one source.
        self._pulling: Counter[str] = Counter()
        self._max_pulling = max(1, buffer.num_slabs // 2)

    @property
    def hasher(self) -> Callable[[], PayloadHasher]:
        """Makes the payload hash of a chunk."""
        return self._links.hasher

    def link_task(
        self, worker: str, incarnation: str, endpoints: Mapping[str, bytes]
    ) -> CoopTask[MeasuredRoute]:
        """See `kvtransfer.transports.links.TransportLinks.link_task`."""
        return self._links.link_task(worker, incarnation, endpoints)

    def route_to(self, worker: str) -> MeasuredRoute | None:
        """The transport that reaches `worker` with its measured speed; None if there is no link."""
        return self._links.route_to(worker)

    def unlink_worker(self, worker: str, incarnation: str | None = None) -> None:
        """Drop the link to a worker (only to this `incarnation`, if given). Idempotent."""
        self._links.unlink_worker(worker, incarnation)

    def close(self) -> None:
        """Drop all links and close all transports. No pull may run any more."""
        self._links.close()

    def connection_to(self, worker: str, incarnation: str) -> BufferedConnection:
        """The connection to this life of a worker, for pulling whole chunks ahead of the ticket.

        Raises StaleTicket without a link.
        """
        return BufferedConnection(self, worker, self._links.connection_to(worker, incarnation))

    def pull_task(
        self, ticket: Ticket, pairs: Sequence[tuple[int, int]], stop: StopCheck | None = None
    ) -> CoopTask[list[bytes]]:
        """Pull slabs that `ticket` offers to the device; `pairs` are (source slab, own slab).

        Returns the payload hashes of the copies in the buffer. When it returns or raises, no copy writes to the own
        slabs. `stop` is called between slabs.

        Raises:
            StaleTicket: there is no link to this life of the worker.
            HandoffAborted: `stop` returned True.
            TransferError: the transfer failed.
        """
        payloads: list[bytes] = []

        def pull_piece(first: int, slabs: list[int]) -> CoopTask[None]:
            piece = [(source, slab) for (source, _), slab in zip(pairs[first:], slabs, strict=False)]
            payloads.extend((yield from self._links.pull_task(ticket, piece, stop)))

        yield from self.move_pieces(ticket.worker, [own for _, own in pairs], pull_piece, stop)
        return payloads

    def move_pieces(
        self, worker: str, own_slabs: Sequence[int], pull_piece: PullPiece, stop: StopCheck | None
    ) -> CoopTask[None]:
        """Pull chunks of `worker` through the buffer to `own_slabs` of the device, piece by piece.

        Raises as `pull_task`.
        """
        uploads, first = PieceUploads(self._buffer, self._copies), 0
        try:
            while first < len(own_slabs):
                most = min(self._piece_slabs, len(own_slabs) - first)
                slabs = yield from self._take_piece(worker, uploads, most, stop)
                try:
                    yield from pull_piece(first, slabs)
                    uploads.begin_upload(slabs, own_slabs[first : first + len(slabs)])
                except Exception:
                    # Nothing writes to the piece any more, and nothing of it is being copied on.
                    self._buffer.give_back(slabs, PULL_OWNER)
                    raise
                finally:
                    self._pulling[worker] -= len(slabs)
                    if not self._pulling[worker]:
                        # Workers come and go.
                        del self._pulling[worker]
                first += len(slabs)
        except Exception:
            yield from uploads.finish_uploads()
            raise
        yield from uploads.finish_uploads()

    def _take_piece(
        self, worker: str, uploads: PieceUploads, most: int, stop: StopCheck | None
    ) -> CoopTask[list[int]]:
        """Take up to `most` buffer slabs, when no pull before this one waits for them. Raises HandoffAborted."""
        waiting, uploads.place = self._waiting.setdefault(worker, deque()), next(self._places)
        waiting.append(uploads)
        pause_s = MIN_POLL_S
        try:
            while True:
                if stop is not None and stop():
                    raise HandoffAborted("the pull was stopped")
                uploads.free_uploaded()
                if self._is_next(uploads) and len(uploads) < MAX_UPLOADS:
                    room = min(most, self._max_pulling - self._pulling[worker])
                    if slabs := self._buffer.take_free(room, PULL_OWNER):
                        self._pulling[worker] += len(slabs)
                        return slabs
                yield pause_s
                pause_s = min(2 * pause_s, MAX_POLL_S)
        finally:
            waiting.remove(uploads)
            if not waiting:
                del self._waiting[worker]

    def _is_next(self, uploads: PieceUploads) -> bool:
        """Whether it is a pull's turn: sources that have all that they may have of the buffer are passed over."""
        may_take = (
            waiting[0]
            for worker, waiting in self._waiting.items()
            if self._pulling[worker] < self._max_pulling
        )
        return min(may_take, key=lambda one: one.place, default=None) is uploads


class PieceUploads:
    """The pieces of one pull that are being copied from the buffer to the device."""

    def __init__(self, buffer: TransferBuffer, copies: SlabCopies) -> None:
        self._buffer, self._copies = buffer, copies
        # The place of the pull among those that wait for a piece.
        self.place = 0
        self._running: deque[tuple[CopyBatch, list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._running)

    def begin_upload(self, slabs: list[int], own_slabs: Sequence[int]) -> None:
        """Begin to copy buffer slabs to slabs of the device. They are given back when the copies have ended.

        If that raises an `Exception`, none has begun, and the slabs stay the caller's.
        """
        batch = self._copies.to_device(list(zip(slabs, own_slabs, strict=True)))
        self._buffer.count_copies(len(slabs))
        self._running.append((batch, slabs))

    def free_uploaded(self) -> None:
        """Give back the buffer slabs of pieces whose copies have ended."""
        while self._running and self._running[0][0].is_done():
            _, slabs = self._running.popleft()
            self._buffer.count_copies(-len(slabs))
            self._buffer.give_back(slabs, PULL_OWNER)

    def finish_uploads(self) -> CoopTask[None]:
        """Wait until all copies have ended. They cannot be stopped."""
        pause_s = MIN_POLL_S
        self.free_uploaded()
        while self._running:
            yield pause_s
            pause_s = min(2 * pause_s, MAX_POLL_S)
            self.free_uploaded()


class BufferedConnection:
    """A `kvtransfer.pipelined_pull.SourceConnection` through the buffer: only whole chunks are pulled ahead."""

    def __init__(self, links: BufferedLinks, worker: str, connection: SourceConnection) -> None:
        self._links, self._worker, self._connection = links, worker, connection

    @property
    def layers(self) -> int:
        """Number of layers of a whole chunk."""
        return self._connection.layers

    @property
    def num_slabs(self) -> int:
        """Number of slabs of the source's pool."""
        return self._connection.num_slabs

    def read_progress(self, slabs: Sequence[int]) -> CoopTask[ProgressEntries | None]:
        """None: chunks that are being computed are not pulled layer by layer, only complete ones."""
        yield from ()
        return None

    def copy_layers(self, copies: Sequence[LayerCopy], stop: StopCheck) -> CoopTask[None]:
        """Make the copies, which must be of whole chunks. Raises as `BufferedLinks.pull_task`, and ValueError."""
        if any((copy.first, copy.end) != (0, self.layers) for copy in copies):
            raise ValueError("only whole chunks go through a transfer buffer")

        def pull_piece(first: int, slabs: list[int]) -> CoopTask[None]:
            piece = [replace(copy, own=slab) for copy, slab in zip(copies[first:], slabs, strict=False)]
            yield from self._connection.copy_layers(piece, stop)

        yield from self._links.move_pieces(self._worker, [copy.own for copy in copies], pull_piece, stop)
