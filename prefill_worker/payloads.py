"""Payload hashes of chunks that change no more, so that the bytes of each are read once.

A chunk of the prefix tree keeps its hash for as long as it is known: the next request with this beginning does not hash
it again. The tree's own node is the key, so a hash is forgotten with its chunk, and a slab that was evicted and written
anew cannot have an old one. What a sequence does not share is remembered until it drops it.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from engine.sequence import Sequence
from kvcache.holdings import Holdings
from kvcache.layout import CHUNK_TOKENS
from kvcache.prefix_tree import Node


class Payloads:
    """`read(slab)` hashes the chunk in a slab (`kvtransfer.parts.Parts.payload`); `reads` counts that."""

    def __init__(self, holdings: Holdings, read: Callable[[int], bytes]) -> None:
        self._holdings, self._read = holdings, read
        self._shared: WeakKeyDictionary[Node, bytes] = WeakKeyDictionary()
        self._private: dict[str, dict[int, tuple[int, bytes]]] = {}  # by sequence and place: slab and hash
        self.reads = 0

    def advance(self, seq: Sequence) -> None:
        """Hash those of its chunks that are full by now and have no hash yet."""
        self._hash(seq, seq.computed // CHUNK_TOKENS)

    def all(self, seq: Sequence) -> list[bytes]:
        """The payload hashes of all its slabs, in token order; nothing may write to them any more."""
        return self._hash(seq, len(seq.slabs))

    def drop(self, key: str) -> None:
        """Forget what was remembered of a sequence. What it shared stays."""
        self._private.pop(key, None)

    def _hash(self, seq: Sequence, count: int) -> list[bytes]:
        path = self._holdings.path(seq.key)
        found = [self._of_node(node) for node in path[:count]]
        own = self._private.setdefault(seq.key, {}) if count > len(path) else {}
        for place in range(len(path), count):
            slab = seq.slabs[place]
            known, payload = own.get(place, (-1, b""))
            if known != slab:
                payload = self._once(slab)
                own[place] = slab, payload
            found.append(payload)
        return found

    def _of_node(self, node: Node) -> bytes:
        payload = self._shared.get(node)
        if payload is None:
            payload = self._shared[node] = self._once(node.slab)
        return payload

    def _once(self, slab: int) -> bytes:
        self.reads += 1
        return self._read(slab)
