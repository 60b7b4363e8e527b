"""Announces a prompt's KV while it is being computed, and hashes chunks as soon as they are complete.

    on_slabs_taken ──▶ a new mark      a slab's mark changes before new content is written to the slab
    on_step_begin ───▶ send a hint ─▶ count the layers done, in the layer progress       chunks that the step completes
    hash_full ───────▶ payload hashes of chunks that became full     between two steps, after their outputs were sent

With such an announcement a decode worker can copy KV layer by layer while prefill still runs. The layer progress
(shared memory) has for every slab a mark, which identifies its content, and the number of layers of this content that
are done. A chunk is announced at the beginning of the step that completes it. Chunks that were complete before, from
the prefix tree or the host tier, are announced at once. Announcements are only hints: the digests in the ticket decide.

Of a sequence that may drop tokens only the chunks below its boundary are announced, and hashed before its ticket.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from itertools import groupby

import numpy as np

from diptych.chunks import CHUNK_TOKENS
from engine.protocols import OnLayersDone
from engine.sequence import Sequence, num_chunks
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvtransfer.layer_progress import COMPLETE_MARK, LayerProgress
from prefill_worker.chunk_hashes import ChunkHashes, count_whole_chunks

# Called with a sequence, the index of the first announced chunk, the slabs from there on, and their common mark.
SendHint = Callable[[Sequence, int, list[int], int], None]


class KvAnnouncer:
    """Announces and hashes the KV of the sequences that the engine prefills (`engine.protocols.KvObserver`).

    `layers` is the number of layers of a whole chunk. Without `progress` nothing is announced: chunks are only hashed
    ahead of the ticket.
    """

    def __init__(
        self,
        kv: KvAllocator | KvArenas,
        hashes: ChunkHashes,
        layers: int,
        progress: LayerProgress | None,
        send_hint: SendHint,
    ) -> None:
        self._kv, self._hashes, self._layers = kv, hashes, layers
        self._progress, self._send_hint = progress, send_hint
        self._marks: list[int] = [COMPLETE_MARK] * kv.num_slabs
        # Number of chunks that were announced of each sequence.
        self._announced: dict[str, int] = {}
        # The sequences of the last step.
        self._in_step: dict[str, Sequence] = {}
        # New marks make void everything that was announced in an earlier life of the worker.
        self.on_slabs_taken(range(kv.num_slabs))

    def on_slabs_taken(self, slabs: Many[int]) -> None:
        """Give each of these slabs a new mark before it is written to, so that pullers reject its old content."""
        if self._progress is None:
            return
        mark = self._progress.next_mark()
        self._progress.stage_slabs(slabs, mark)
        for slab in slabs:
            self._marks[slab] = mark

    def on_step_begin(self, parts: Many[tuple[Sequence, int]]) -> OnLayersDone | None:
        """Announce the chunks that the coming step completes.

        `parts` are the sequences in the step, each with its number of computed tokens after the step. Returns a
        callback for the model, which calls it whenever layers are done, or None if no chunk of the step was announced.
        """
        coming: list[int] = []
        for seq, end in parts:
            self._in_step[seq.key] = seq
            if seq.stage and self._progress is not None:
                coming += self._announce_chunks(seq, end, self._progress)
        if self._progress is None or not coming:
            return None
        return partial(self._progress.advance_layers, np.array(coming))

    def _announce_chunks(self, seq: Sequence, end: int, progress: LayerProgress) -> list[int]:
        """Announce the chunks of `seq` that are complete now or after this step; returns the slabs of the latter."""
        first, known = self._announced.get(seq.key, 0), len(self._kv.shared_nodes(seq.key))
        most = count_whole_chunks(seq)
        complete = max(first, min(most, seq.computed // CHUNK_TOKENS))
        last = min(most, num_chunks(end) if end == seq.total else end // CHUNK_TOKENS)
        if known < complete:
            # Chunks that are complete but not in the prefix tree: all their layers are done, so they are counted now.
            progress.advance_layers(seq.slabs[max(first, known) : complete], self._layers)

        def mark(place: int) -> int:
            return COMPLETE_MARK if place < known else self._marks[seq.slabs[place]]

        for common, places in groupby(range(first, last), mark):
            run = list(places)
            self._send_hint(seq, run[0], seq.slabs[run[0] : run[-1] + 1], common)
        self._announced[seq.key] = max(first, last)
        return seq.slabs[complete:last]

    def hash_full(self) -> None:
        """Hash the chunks that the last step completed, of sequences that are still in the engine."""
        for seq in self._in_step.values():
            self._hashes.hash_full(seq)
        self._in_step.clear()

    def finish_sequence(self, seq: Sequence, slabs: Many[int]) -> list[bytes]:
        """After prefill: return the payload hashes of the offered `slabs` of `seq`, and forget the sequence.

        They are those of its whole chunks in token order, and then those of its bag.
        """
        payloads = self._hashes.hash_offered(seq, slabs)
        self.on_sequence_dropped(seq.key)
        return payloads

    def on_sequence_dropped(self, key: str) -> None:
        """Forget the sequence `key`: nothing more is announced for it and its hashes are dropped."""
        self._announced.pop(key, None)
        self._in_step.pop(key, None)
        self._hashes.drop_sequence(key)
