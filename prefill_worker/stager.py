"""Announces KV while it is computed, and hashes it as soon as it is complete.

    took ──▶ a fresh mark          a slab's mark changes before anything else is written to it
    begin ─▶ tell (a hint) ─▶ layer after layer, on the board       chunks that the coming step completes
    hash_full ─▶ payload hashes of what became full                 between two steps, after its tokens were told

The board says of every slab what it has the content of (the mark), and how many layers of that are complete. A chunk is
announced when the step begins that completes it; chunks that were complete before, found in the prefix tree or brought
back from the host tier, at once. All this is a hint: what counts are the digests in the ticket.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from itertools import groupby

import numpy as np

from engine.seams import LayersDone
from engine.sequence import Sequence, chunks
from kvcache.holdings import Holdings
from kvcache.layout import CHUNK_TOKENS
from kvtransfer.board import DONE, Board
from prefill_worker.payloads import Payloads

Tell = Callable[
    [Sequence, int, list[int], int], None
]  # of a sequence: first chunk, slabs from there, their mark


class Stager:
    """Follows held sequences (`engine.seams.Follower`). `layers` are those of a whole chunk.

    Without a `board` nothing is announced, and only hashes are made ahead.
    """

    def __init__(
        self, holdings: Holdings, payloads: Payloads, layers: int, board: Board | None, tell: Tell
    ) -> None:
        self._holdings, self._payloads, self._layers = holdings, payloads, layers
        self._board, self._tell = board, tell
        self._marks: list[int] = [DONE] * holdings.pool.num_slabs
        self._announced: dict[str, int] = {}  # of each sequence, the chunks that others were told of
        self._reading: dict[str, Sequence] = {}  # those of the last step
        self.took(range(holdings.pool.num_slabs))  # what was said in an earlier life is over

    def took(self, slabs: Many[int]) -> None:
        if self._board is None:
            return
        mark = self._board.mark()
        self._board.stage(slabs, mark)
        for slab in slabs:
            self._marks[slab] = mark

    def begin(self, parts: Many[tuple[Sequence, int]]) -> LayersDone | None:
        coming: list[int] = []
        for seq, end in parts:
            self._reading[seq.key] = seq
            if seq.stage and self._board is not None:
                coming += self._announce(seq, end, self._board)
        if self._board is None or not coming:
            return None
        return partial(self._board.advance, np.array(coming))

    def _announce(self, seq: Sequence, end: int, board: Board) -> list[int]:
        """Tell of the chunks that are complete, or will be after this step; the slabs of the latter."""
        first, known = self._announced.get(seq.key, 0), len(self._holdings.path(seq.key))
        complete = max(first, seq.computed // CHUNK_TOKENS)
        last = chunks(end) if end == seq.total else end // CHUNK_TOKENS
        if known < complete:  # it was read before, and is shared with nobody
            board.advance(seq.slabs[max(first, known) : complete], self._layers)

        def mark(place: int) -> int:
            return DONE if place < known else self._marks[seq.slabs[place]]

        for common, places in groupby(range(first, last), mark):
            run = list(places)
            self._tell(seq, run[0], seq.slabs[run[0] : run[-1] + 1], common)
        self._announced[seq.key] = max(first, last)
        return seq.slabs[complete:last]

    def hash_full(self) -> None:
        """Hash what the last step has completed, of sequences that go on."""
        for seq in self._reading.values():
            self._payloads.advance(seq)
        self._reading.clear()

    def finish(self, seq: Sequence) -> list[bytes]:
        """It has left the engine with its slabs; the payload hashes of all of them, in token order."""
        payloads = self._payloads.all(seq)
        self.dropped(seq.key)
        return payloads

    def dropped(self, key: str) -> None:
        self._announced.pop(key, None)
        self._reading.pop(key, None)
        self._payloads.drop(key)
