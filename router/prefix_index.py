"""Which prefixes a worker was lately sent (pure): a guess at what its prefix cache holds, never a promise.

A prompt is cut as the workers cut it, into chunks of 64 tokens, each named by a digest of itself and all before it, so
equal names mean equal prefixes of one scope. Per worker the names are kept in order of use, and no more of them than it
has slabs: a name that was pushed out here was most likely pushed out there. A wrong guess costs time, and nothing else.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

CHUNK_TOKENS = 64
MAX_CHUNKS = 65_536  # per worker, however large its pool is
NAME_BYTES = 8

Chunks = tuple[bytes, ...]


class PrefixIndex:
    """Names of chunks by worker, least recently used first. With `max_chunks` 0 nothing is ever expected anywhere."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self.max_chunks = max_chunks
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def cut(self, tokens: Sequence[int], scope: str, known: Chunks = ()) -> Chunks:
        """The names of all full chunks of `tokens`; `known` are the first of them, from an earlier call."""
        if not self.max_chunks:
            return ()
        names = list(known)
        name = names[-1] if names else blake2b(scope.encode(), digest_size=NAME_BYTES).digest()
        for start in range(len(names) * CHUNK_TOKENS, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
            body = array("q", tokens[start : start + CHUNK_TOKENS]).tobytes()
            name = blake2b(name + body, digest_size=NAME_BYTES).digest()
            names.append(name)
        return tuple(names)

    def sent(self, worker: str, chunks: Chunks, num_slabs: int) -> None:
        """A worker with a pool of `num_slabs` has these chunks now, or soon."""
        held = self._held.setdefault(worker, OrderedDict())
        for name in reversed(chunks):  # so that a chunk is always newer than those that build on it
            held[name] = None
            held.move_to_end(name)
        for _ in range(len(held) - min(self.max_chunks, num_slabs)):
            held.popitem(last=False)

    def shared(self, worker: str, chunks: Chunks) -> int:
        """How many of the leading chunks the worker is thought to have."""
        held = self._held.get(worker)
        return sum(1 for _ in takewhile(held.__contains__, chunks)) if held else 0

    def forget(self, worker: str) -> None:
        """That life of the worker is over, and its cache with it."""
        self._held.pop(worker, None)

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))
