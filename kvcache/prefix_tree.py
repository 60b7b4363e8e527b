"""The prefix tree: records which slab holds the KV of which 64 tokens, so that later requests reuse it.

A full chunk has an address made from everything its KV depends on: SHA-256 over the address of the chunk before it and
its own 64 token ids. The root's address stands for the model, the encoding of KV, and the scope (who may share). Equal
addresses therefore mean equal KV, and requests of different scopes never share.

    root(model, scope) ── tokens 0..63 ──┬── tokens 64..127 ── ...
                                         └── other 64..127 ── ...

A sequence that holds a chunk also holds all chunks before it, and releases its chunks from the last to the first. In
the order of release a child therefore comes before its parent, so evicting the chunk that was released first always
evicts a leaf and is least recently used as well. No torch, clock or memory here; a slab is a number. Source:
ChunkAttention, PAKV; kv_papers §2.1, §2.4 (retention).
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from diptych.chunks import CHUNK_TOKENS
from diptych.hashing import hash_fields

_CHUNK = struct.Struct(f"<{CHUNK_TOKENS}I")


def root_key(fingerprint: str, scope: str, codec: str = "", variant: str = "") -> bytes:
    """The root address (32 bytes) before the first chunk of every prefix of `scope`.

    `fingerprint` identifies the model and the layout of its KV, `codec` how KV is encoded, `variant` which part of the
    KV was left out.
    """
    return hash_fields(["prefix", fingerprint, scope, codec, variant])


def chunk_keys(tokens: Sequence[int], root: bytes, known: list[bytes] | None = None) -> list[bytes]:
    """The addresses of the full chunks of `tokens`, 32 bytes each; an unfinished last chunk has none.

    `tokens` begin at position 0. `known` are the addresses of their first chunks, computed by an earlier call: the list
    is extended in place and returned, so nothing is hashed twice. With an empty `root` no chunk has an address.

    Raises:
        struct.error: a token id is not within 0 to 2^32 - 1.
    """
    keys = [] if known is None else known
    if not root:
        return keys
    parent = keys[-1] if keys else root
    for start in range(len(keys) * CHUNK_TOKENS, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        parent = hash_fields((parent, _CHUNK.pack(*tokens[start : start + CHUNK_TOKENS])))
        keys.append(parent)
    return keys


class PrefixNode:
    """One full chunk: its address, slab and parent (the chunk before it), and how many holders and children it has.

    `lent` of its `refs` holders hold it only as long as no other sequence wants its slab (`kvcache.lending`), and no
    other ever held it if `only_lent`. `depth` is the number of chunks before it. A `doubtful` one is not stored, nor
    one that is not `lasting`. Once it is `evicted` its slab may be written: whoever reads the slab in another thread
    looks at that afterwards.
    """

    __slots__ = (
        "__weakref__", "children", "depth", "doubtful", "evicted", "key", "lasting", "lent", "only_lent", "parent",
        "refs", "slab",
    )  # fmt: skip

    def __init__(self, key: bytes, slab: int, parent: PrefixNode | None) -> None:
        self.key, self.slab, self.parent = key, slab, parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.evicted = self.doubtful = False
        self.lasting = True
        self.refs = 0
        self.lent = 0
        self.only_lent = False
        self.children = 0

    @property
    def is_lent(self) -> bool:
        """Whether it has holders, and all of them would give it back."""
        return 0 < self.refs == self.lent


class PrefixTree:
    """The known chunks, by address. The caller supplies the slab of each chunk and protects it from other uses."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, PrefixNode] = {}
        # Nodes without a holder, in the order in which they are evicted: those that were only ever lent, then the one
        # released longest ago.
        self._unheld: OrderedDict[bytes, PrefixNode] = OrderedDict()
        # Number of chunks that only sequences hold which would give them back.
        self.num_lent = 0
        # Called with chunks whose last holder has just released them, the deepest first; without those that were only
        # ever lent, and those that are in doubt.
        self.on_released: Callable[[list[PrefixNode]], None] | None = None
        # Called with the addresses of chunks that are in doubt, so that copies of them go as well.
        self.on_forgotten: Callable[[list[bytes]], None] | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes.values())

    @property
    def num_unheld(self) -> int:
        """Number of chunks that no sequence holds; all of them can be evicted."""
        return len(self._unheld)

    def match_prefix(self, keys: Sequence[bytes]) -> list[PrefixNode]:
        """The chunks of the longest known prefix of `keys`. A look-up does not count as use for eviction."""
        nodes: list[PrefixNode] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def insert_chunk(
        self, key: bytes, slab: int, parent: PrefixNode | None, lent: bool = False
    ) -> PrefixNode:
        """Add the chunk with address `key`, stored in `slab`, after `parent` (None: it is the first chunk of a prefix).

        The caller must hold `parent`, and holds the new chunk once; `lent`: until another sequence wants the slab.

        Raises:
            ValueError: the chunk is known already, or no sequence holds its parent.
        """
        if key in self._nodes:
            raise ValueError(f"chunk {key.hex()} is in the tree already")
        if parent is not None and not parent.refs:
            raise ValueError(f"nobody holds {parent.key.hex()}, the parent of {key.hex()}")
        node = self._nodes[key] = PrefixNode(key, slab, parent)
        node.refs, node.lent, node.only_lent = 1, int(lent), lent
        self.num_lent += lent
        if parent is not None:
            parent.children += 1
        return node

    def lock_nodes(self, nodes: Sequence[PrefixNode], lent: bool = False) -> None:
        """Add one holder to each of `nodes`, a path from the root. A held chunk is not evicted until it is unlocked.

        `lent`: it holds them only until another sequence wants their slabs.
        """
        for node in nodes:
            if not node.refs:
                del self._unheld[node.key]
            self._count_holder(node, 1, lent)

    def _count_holder(self, node: PrefixNode, change: int, lent: bool) -> None:
        """Change the number of holders of a chunk, and of those that would give it back if `lent`, by `change`."""
        before = node.is_lent
        node.refs += change
        node.lent += change * lent
        node.only_lent = node.only_lent and lent
        self.num_lent += node.is_lent - before

    def unlock_nodes(self, nodes: Sequence[PrefixNode], lent: bool = False, keep: bool = True) -> None:
        """Remove one holder from each of `nodes`, a path from the root; `lent` as it was given to `lock_nodes`.

        Chunks that were only ever lent are evicted first, so that they displace no other ones. Without `keep` their
        content is in doubt: nobody is told of them.

        Raises ValueError (no change) if one is unheld.
        """
        if any(not node.refs for node in nodes):
            raise ValueError("a chunk that nobody holds cannot be released")
        # Children are released first. Eviction goes in the order of release, so it then takes leaves first.
        gone_nodes: list[PrefixNode] = []
        for node in reversed(nodes):
            self._count_holder(node, -1, lent)
            if not node.refs:
                self._unheld[node.key] = node
                gone_nodes.append(node)
        # A chunk with other children is not evicted before them.
        first = takewhile(
            lambda one: one[1].only_lent and one[1].children == min(one[0], 1), enumerate(gone_nodes)
        )
        for _, node in reversed(list(first)):
            self._unheld.move_to_end(node.key, last=False)
        if self.on_released is not None and keep:
            self.on_released(
                [node for node in gone_nodes if node.lasting and not (node.only_lent or node.doubtful)]
            )

    def evict_chunks(self, n: int) -> list[int]:
        """Remove the first `n` unheld chunks, or all if fewer; returns their slabs.

        Those that were only ever lent come first, then those that were released longest ago.
        """
        slabs = []
        for _ in range(min(n, len(self._unheld))):
            key, node = self._unheld.popitem(last=False)
            assert not node.children, "a chunk is evicted before its children"
            del self._nodes[key]
            node.evicted = True
            if node.parent is not None:
                node.parent.children -= 1
            slabs.append(node.slab)
        return slabs

    def forget_nodes(self, nodes: Sequence[PrefixNode]) -> list[int]:
        """Remove those of `nodes`, a path from the root, without holders and children; returns their slabs.

        All are in doubt from now on.
        """
        for node in nodes:
            node.doubtful = True
        if self.on_forgotten is not None and nodes:
            self.on_forgotten([node.key for node in nodes])
        slabs = []
        for node in reversed(nodes):
            if node.refs or node.children:
                break
            del self._unheld[node.key], self._nodes[node.key]
            node.evicted = True
            if node.parent is not None:
                node.parent.children -= 1
            slabs.append(node.slab)
        return slabs

    def check_books(self) -> None:
        """Check that the tree's links and counts agree.

        Raises:
            AssertionError: a parent is gone or has fewer holders than its child, a count of children is wrong, two
                chunks share a slab, or the list of unheld chunks is incomplete or has a parent before its child.
        """
        children: Counter[bytes] = Counter()
        for key, node in self._nodes.items():
            if node.parent is not None:
                children[node.parent.key] += 1
                if self._nodes.get(node.parent.key) is not node.parent or node.parent.refs < node.refs:
                    raise AssertionError(f"chunk {key.hex()} hangs from one that is gone or less held")
        wrong = [node.key.hex() for node in self if node.children != children[node.key]]
        if wrong:
            raise AssertionError(f"chunks {wrong} miscount their children")
        if self.num_lent != sum(node.is_lent for node in self):
            raise AssertionError(f"{self.num_lent} chunks are counted as lent")
        if len({node.slab for node in self}) != len(self):
            raise AssertionError("two chunks have one slab")
        if set(self._unheld) != {node.key for node in self if not node.refs}:
            raise AssertionError("the list of unheld chunks is wrong")
        place = {key: i for i, key in enumerate(self._unheld)}
        for key, node in self._unheld.items():
            if node.parent is not None and place.get(node.parent.key, len(place)) < place[key]:
                raise AssertionError(f"chunk {key.hex()} would be evicted after its parent")
