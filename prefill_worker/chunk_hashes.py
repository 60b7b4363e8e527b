"""Remembers the payload hashes of immutable chunks, so that the bytes of each chunk are hashed only once.

The hash of a chunk in the prefix tree is kept as long as the tree knows the chunk: a later request with the same
beginning does not hash it again. The key is the tree's node, so the hash disappears with the chunk, and a slab that was
evicted and reused cannot get an old hash. Hashes of private chunks are kept until their sequence is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from weakref import WeakKeyDictionary

from diptych.chunks import CHUNK_TOKENS
from engine.sequence import Sequence, num_chunks
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.prefix_tree import PrefixNode


def count_whole_chunks(seq: Sequence) -> int:
    """How many leading chunks of `seq` are offered whole: as many as it has, or those below its boundary."""
    return seq.keep.boundary_chunks if seq.keep.evicts else num_chunks(seq.total)


class ChunkHashes:
    """`read(slab)` hashes the chunk in a slab (`kvtransfer.resharding.ShardedPool`); `num_hashed` counts the calls."""

    def __init__(self, kv: KvAllocator | KvArenas, read: Callable[[int], bytes]) -> None:
        self._kv, self._read_slab = kv, read
        self._shared: WeakKeyDictionary[PrefixNode, bytes] = WeakKeyDictionary()
        # Slab and hash of each private chunk: sequence key -> chunk index -> (slab, hash).
        self._private: dict[str, dict[int, tuple[int, bytes]]] = {}
        self.num_hashed = 0

    def hash_full(self, seq: Sequence) -> None:
        """Hash the chunks of `seq` that are full by now, will be offered whole, and have no hash yet."""
        self._hash_first(seq, min(count_whole_chunks(seq), seq.computed // CHUNK_TOKENS))

    def hash_offered(self, seq: Sequence, slabs: Many[int]) -> list[bytes]:
        """The payload hashes of `slabs`, which `seq` offers: its whole chunks in token order, then its bag.

        Nothing may write to the slabs any more.
        """
        whole = min(count_whole_chunks(seq), len(slabs))
        return self._hash_first(seq, whole) + [self._hash_slab(slab) for slab in slabs[whole:]]

    def drop_sequence(self, key: str) -> None:
        """Forget the hashes of a sequence's private chunks. Hashes of shared chunks stay."""
        self._private.pop(key, None)

    def _hash_first(self, seq: Sequence, count: int) -> list[bytes]:
        """The payload hashes of the first `count` slabs of `seq`, from memory or computed now."""
        path = self._kv.shared_nodes(seq.key)
        found = [self._hash_node(node) for node in path[:count]]
        own = self._private.setdefault(seq.key, {}) if count > len(path) else {}
        for place in range(len(path), count):
            slab = seq.slabs[place]
            known, payload = own.get(place, (-1, b""))
            if known != slab:
                payload = self._hash_slab(slab)
                own[place] = slab, payload
            found.append(payload)
        return found

    def _hash_node(self, node: PrefixNode) -> bytes:
        """The hash of a chunk in the prefix tree, remembered with its node."""
        payload = self._shared.get(node)
        if payload is None:
            payload = self._shared[node] = self._hash_slab(node.slab)
        return payload

    def _hash_slab(self, slab: int) -> bytes:
        self.num_hashed += 1
        return self._read_slab(slab)
