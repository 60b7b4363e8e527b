"""The offers of a prefill worker whose pool is on a device: KV leaves for the transfer buffer while prompts run.

    step ─▶ copy_full_chunks ─▶ copy to a buffer slab ─▶ [hint] ─▶ hash    chunks that a step completed, if they fit
    begin_offer ─▶ queue ─▶ the other chunks ─▶ device slabs released ─▶ all hashed ─▶ poll returns the offer

Tickets, hints and leases name slabs of the buffer, so an offer holds no slab of the device once its copies have ended
(`prefill_worker.buffered_chunks`). Hints announce a chunk when its copy has ended, as complete, so decode workers pull
it ahead of the ticket; there is no layer progress.

**A full buffer.** Offers take slabs in the order in which they were begun. The first one gets those that are free or
unused, then those of sequences that are still in prefill or wait behind it. These lose their chunks in the buffer, and
copy them again later; a decode worker that pulls such a chunk meanwhile finds another digest, and pulls it again. What
is left are leases and copies, which end. So no offer waits for one that waits for it. Waiting offers hold slabs of the
device: it fills up, and prompts wait in the engine's queue.

**Device slabs** are released when all copies that read them have ended. When the engine drops a sequence, it waits for
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import WorkerStats
from engine.protocols import OnLayersDone
from engine.sequence import Sequence
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvtransfer.layer_progress import COMPLETE_MARK
from kvtransfer.pipelined_pull import MIN_POLL_S
from kvtransfer.transfer_buffer import TransferBuffer
from prefill_worker.announcer import SendHint
from prefill_worker.buffered_chunks import BufferedChunk, BufferedChunks

if TYPE_CHECKING:
    # It imports torch, which only what copies needs.
    from kvcache.device.copies import SlabCopies


@dataclass(slots=True, eq=False)
class OutgoingKv:
    """The KV of one sequence on its way to the buffer: `chunks` are its first chunks there, in token order."""

    seq: Sequence
    chunks: list[BufferedChunk] = field(default_factory=list)
    # Chunks that it does not use any more, and whose copies may still read its slabs on the device.
    dropped: list[BufferedChunk] = field(default_factory=list)
    # Number of chunks that were announced.
    announced: int = 0
    # Number of chunks to offer, once its prefill is complete.
    num_offered: int | None = None
    # Whether its slabs on the device were released.
    released: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all chunks that it offers have a slab in the buffer."""
        return len(self.chunks) == self.num_offered

    @property
    def is_copied(self) -> bool:
        """Whether no copy reads its slabs on the device any more."""
        return all(chunk.is_copied for chunk in (*self.chunks, *self.dropped))


@dataclass(frozen=True, slots=True)
class ReadyOffer:
    """A sequence whose KV is in the buffer: its slabs there in token order, and their payload hashes."""

    seq: Sequence
    slabs: list[int]
    payloads: list[bytes]


class BufferedOffers:
    """Moves the KV of the sequences that the engine prefills to `buffer` (`engine.protocols.KvObserver`).

    `copies` are between the pool of `kv` and the buffer, `algorithm` is the payload hash (a key of `HASH_FUNCTIONS`).
    `wake` is called from another thread when `poll` has something to do. `PrefillWorker` opens and closes it.
    """

    def __init__(
        self,
        kv: KvAllocator | KvArenas,
        buffer: TransferBuffer,
        copies: SlabCopies,
        algorithm: str,
        wake: Callable[[], None],
    ) -> None:
        self._kv, self._buffer = kv, buffer
        self._chunks = BufferedChunks(buffer, copies, algorithm, wake)
        self._send_hint: SendHint | None = None
        # Sequences that are in prefill or wait to be offered; those of the last step; offers that lack buffer slabs.
        self._outgoing: dict[str, OutgoingKv] = {}
        self._in_step: dict[str, Sequence] = {}
        self._queue: dict[str, OutgoingKv] = {}
        # Ended offers whose copies still read slabs of the device.
        self._leaving: list[OutgoingKv] = []
        # The chunks of offers that `poll` has returned.
        self._offered: dict[str, list[BufferedChunk]] = {}

    def open(self, send_hint: SendHint) -> None:
        """Start to move KV. `send_hint` announces chunks."""
        self._send_hint = send_hint
        self._chunks.open()

    def close(self) -> None:
        """Wait for all copies, and give unused slabs back. Only `poll` and the ends of offers may follow."""
        self._chunks.close()

    @property
    def is_busy(self) -> bool:
        """Whether a sequence waits to be offered, or a chunk is being copied or hashed. Leases are not counted."""
        return bool(self.num_waiting or self._leaving) or self._chunks.is_busy

    @property
    def num_waiting(self) -> int:
        """Sequences whose prefill is complete and that are not offered yet."""
        return sum(1 for _ in self._waiting())

    @property
    def deadline_s(self) -> float | None:
        """The earliest deadline of all waiting offers (clock seconds)."""
        return min((outgoing.seq.deadline_s for outgoing in self._waiting()), default=None)

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """`stats` with the counts of the buffer and of waiting offers added."""
        return msgspec.structs.replace(self._buffer.complete_stats(stats), offers_waiting=self.num_waiting)

    # ---- the engine's steps

    def on_slabs_taken(self, slabs: Many[int]) -> None:
        """Nothing: what was announced is in the buffer."""

    def on_step_begin(self, parts: Many[tuple[Sequence, int]]) -> OnLayersDone | None:
        """Note the sequences of the step. Their chunks leave when it has ended."""
        self._in_step.update((seq.key, seq) for seq, _ in parts)
        return None

    def copy_full_chunks(self) -> None:
        """Begin to copy the chunks that the last step completed, if there is room and no offer waits for it."""
        for key, seq in self._in_step.items():
            if not self._queue and not seq.keep.evicts:
                outgoing = self._outgoing.setdefault(key, OutgoingKv(seq))
                self._extend(outgoing, seq.computed // CHUNK_TOKENS)
        self._in_step.clear()

    def on_sequence_dropped(self, key: str) -> None:
        """Forget a sequence that is about to release its slabs: wait until no copy reads them any more."""
        self._in_step.pop(key, None)
        if (outgoing := self._outgoing.pop(key, None)) is not None:
            _block_until_copied(outgoing)
            self._drop_chunks(outgoing)

    # ---- offers

    def begin_offer(self, seq: Sequence) -> None:
        """Queue a sequence whose prefill is complete; `poll` returns it.

        It keeps its slabs on the device under its key until `poll` releases them.

        Raises:
            ValueError: its KV can never be in the buffer: it has too many chunks, or heads that drop tokens. Its slabs
                stay the caller's.
        """
        if seq.keep.evicts or len(seq.slabs) > self._buffer.num_slabs:
            self.on_sequence_dropped(seq.key)
            what = "whose heads drop tokens" if seq.keep.evicts else f"of {len(seq.slabs)} chunks"
            raise ValueError(f"KV {what} does not fit a transfer buffer of {self._buffer.num_slabs} slabs")
        self._in_step.pop(seq.key, None)
        outgoing = self._outgoing.setdefault(seq.key, OutgoingKv(seq))
        outgoing.num_offered = len(seq.slabs)
        self._queue[seq.key] = outgoing

    def poll(self) -> list[ReadyOffer]:
        """Let offers progress. Returns those that are complete in the buffer, each once.

        Their chunks are under lease from now on, until `free_offer`. Their slabs on the device are released. Raises the
        error that ended the thread.
        """
        self._chunks.refresh()
        self._fill_queue()
        self._release_copied()
        self._announce_copied()
        return self._take_ready()

    def free_offer(self, key: str, keep: bool) -> None:
        """The lease of an offer has ended, or was not granted. Idempotent.

        Unless `keep`, its chunks are not offered again: they may be why the transfer failed.
        """
        chunks = self._offered.pop(key, [])
        if not keep:
            self._chunks.forget(chunks)
        self._chunks.let_go(key, chunks)

    def end_attempts(self, request: str, epoch: int) -> None:
        """Drop the request's waiting offers of this epoch and older ones."""
        for outgoing in list(self._waiting()):
            if outgoing.seq.id == request and outgoing.seq.epoch <= epoch:
                self._abandon(outgoing)

    def drop_expired(self, now_s: float) -> list[Sequence]:
        """Drop the waiting offers whose deadline has passed; returns their sequences."""
        ended = [outgoing for outgoing in self._waiting() if outgoing.seq.deadline_s <= now_s]
        for outgoing in ended:
            self._abandon(outgoing)
        return [outgoing.seq for outgoing in ended]

    def abandon_all(self) -> list[tuple[str, int]]:
        """Drop all waiting offers; returns their attempts (request, epoch)."""
        ended = list(self._waiting())
        for outgoing in ended:
            self._abandon(outgoing)
        return [(outgoing.seq.id, outgoing.seq.epoch) for outgoing in ended]

    def _waiting(self) -> Iterator[OutgoingKv]:
        return (outgoing for outgoing in self._outgoing.values() if outgoing.num_offered is not None)

    def _abandon(self, outgoing: OutgoingKv) -> None:
        """Drop a waiting offer. Its slabs on the device are released when no copy reads them."""
        seq = outgoing.seq
        del self._outgoing[seq.key]
        self._queue.pop(seq.key, None)
        self._drop_chunks(outgoing)
        if not outgoing.released:
            self._leaving.append(outgoing)
        self._release_copied()

    def _fill_queue(self) -> None:
        """Give buffer slabs to the offers, the first one first."""
        while self._queue:
            outgoing = next(iter(self._queue.values()))
            count = outgoing.num_offered or 0
            while not self._extend(outgoing, count) and self._make_room(outgoing):
                pass
            if not outgoing.is_complete:
                return
            del self._queue[outgoing.seq.key]

    def _make_room(self, first: OutgoingKv) -> bool:
        """Let sequences that are in prefill, or wait behind the offer `first`, lose their chunks: the latest one first.

        Returns whether there is room now. While a slab will become free anyway, none loses anything.
        """
        while not self._chunks.awaits_room:
            others = (one for one in reversed(self._outgoing.values()) if one.chunks and one is not first)
            loser = next((one for one in others if not one.is_complete), None)
            if loser is None:
                return False
            self._drop_chunks(loser)
            if self._chunks.has_room:
                return True
        return False

    def _release_copied(self) -> None:
        """Release the device's slabs of offers, and of ended ones, that no copy reads any more."""
        for outgoing in self._waiting():
            if outgoing.is_complete and not outgoing.released and outgoing.is_copied:
                outgoing.released = True
                self._kv.release(outgoing.seq.key)
        for outgoing in [one for one in self._leaving if one.is_copied]:
            self._leaving.remove(outgoing)
            self._kv.release(outgoing.seq.key)

    def _announce_copied(self) -> None:
        """Send hints for chunks whose copies have ended, of sequences that ask for them."""
        for outgoing in self._outgoing.values():
            if not outgoing.seq.stage or self._send_hint is None:
                continue
            end = start = outgoing.announced
            while end < len(outgoing.chunks) and outgoing.chunks[end].is_copied:
                end += 1
            if end > start:
                slabs = [chunk.slab for chunk in outgoing.chunks[start:end]]
                self._send_hint(outgoing.seq, start, slabs, COMPLETE_MARK)
                outgoing.announced = end

    def _take_ready(self) -> list[ReadyOffer]:
        """The offers whose chunks are all hashed; these are under lease from now on."""
        ready = []
        for outgoing in list(self._waiting()):
            chunks, key = outgoing.chunks, outgoing.seq.key
            if outgoing.released and all(chunk.payload for chunk in chunks):
                self._offered[key] = self._outgoing.pop(key).chunks
                self._chunks.lease_chunks(key, chunks)
                slabs = [chunk.slab for chunk in chunks]
                ready.append(ReadyOffer(outgoing.seq, slabs, [chunk.payload for chunk in chunks]))
        return ready

    def _extend(self, outgoing: OutgoingKv, count: int) -> bool:
        """Let a sequence use its first `count` chunks in the buffer. Returns False if there is not enough room."""
        seq, path = outgoing.seq, self._kv.shared_nodes(outgoing.seq.key)
        places = range(len(outgoing.chunks), count)
        wanted = ((seq.slabs[place], path[place] if place < len(path) else None) for place in places)
        outgoing.chunks += self._chunks.use_chunks(seq.key, wanted)
        return len(outgoing.chunks) >= count

    def _drop_chunks(self, outgoing: OutgoingKv) -> None:
        """A sequence does not use its chunks in the buffer any more; it may copy them again."""
        chunks, outgoing.chunks, outgoing.announced = outgoing.chunks, [], 0
        outgoing.dropped = [chunk for chunk in (*outgoing.dropped, *chunks) if not chunk.is_copied]
        self._chunks.let_go(outgoing.seq.key, chunks)


def _block_until_copied(outgoing: OutgoingKv) -> None:
    """Wait until no copy reads a sequence's slabs on the device: milliseconds, since a copy cannot be stopped."""
    while not outgoing.is_copied:
        time.sleep(MIN_POLL_S)
