"""The tree of known prefixes: which slab holds the KV of which 64 tokens after which ones (ChunkAttention, PAKV).

A full chunk is addressed by what its KV depends on: SHA-256 over its parent's address and its 64 token ids. The address
of the root stands for all else: the model, how KV is stored, and who may share it. So equal addresses mean equal KV,
and requests of different scopes never meet.

    root(model, scope) ── tokens 0..63 ──┬── tokens 64..127 ── ...
                                         └── other 64..127 ── ...

Who holds a chunk holds everything above it. Released from the leaf upwards, an unheld chunk therefore always stands
behind its children in the order of release: the oldest unheld one is a leaf, and evicting it is both least recently
used and leaves first. No torch, clock or memory here; a slab is a number. Source: kv_papers §2.1, §2.4 (retention).
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from diptych.hashing import digest
from kvcache.layout import CHUNK_TOKENS

_CHUNK = struct.Struct(f"<{CHUNK_TOKENS}I")


def root(fingerprint: str, scope: str, codec: str = "", variant: str = "") -> bytes:
    """The address, 32 bytes, that the first chunk of every prefix of `scope` hangs from.

    `fingerprint` names the model and the layout of its KV, `codec` how KV is encoded, `variant` what was left out of
    it.
    """
    return digest(["prefix", fingerprint, scope, codec, variant])


def chunk_keys(tokens: Sequence[int], root: bytes, known: list[bytes] | None = None) -> list[bytes]:
    """The addresses of the full chunks of `tokens`, 32 bytes each; an unfinished tail has none.

    `tokens` begin at position 0. `known` are the addresses of their first chunks as far as they are known: the list is
    extended in place and returned. Under an empty `root` nothing has an address.

    Raises:
        struct.error: a token id is not within 0 to 2^32 - 1.
    """
    keys = [] if known is None else known
    if not root:
        return keys
    parent = keys[-1] if keys else root
    for start in range(len(keys) * CHUNK_TOKENS, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        parent = digest((parent, _CHUNK.pack(*tokens[start : start + CHUNK_TOKENS])))
        keys.append(parent)
    return keys


class Node:
    """One full chunk: its address, its slab, the chunk before it, and how many hold it and follow it."""

    __slots__ = ("__weakref__", "children", "key", "parent", "refs", "slab")

    def __init__(self, key: bytes, slab: int, parent: Node | None) -> None:
        self.key, self.slab, self.parent = key, slab, parent
        self.refs = 0
        self.children = 0


class PrefixTree:
    """The chunks that are known, by address. Which slabs they have is told; that nobody else uses them is trusted."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._unheld: OrderedDict[bytes, Node] = OrderedDict()  # released longest ago first

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    @property
    def unheld(self) -> int:
        """Chunks that nobody holds; all of them can be evicted."""
        return len(self._unheld)

    def match(self, keys: Sequence[bytes]) -> list[Node]:
        """The chunks at the longest known prefix of `keys`. Looking does not count as use."""
        found: list[Node] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def insert(self, key: bytes, slab: int, parent: Node | None) -> Node:
        """A new chunk in `slab` after `parent` (None: it is the first), held once, by the caller, who holds `parent`.

        Raises:
            ValueError: the chunk is known already, or nobody holds its parent.
        """
        if key in self._nodes:
            raise ValueError(f"chunk {key.hex()} is in the tree already")
        if parent is not None and not parent.refs:
            raise ValueError(f"nobody holds {parent.key.hex()}, the parent of {key.hex()}")
        node = self._nodes[key] = Node(key, slab, parent)
        node.refs = 1
        if parent is not None:
            parent.children += 1
        return node

    def lock(self, nodes: Sequence[Node]) -> None:
        """Hold `nodes` once more: none of them is evicted before as many `unlock`s. They reach up to the root."""
        for node in nodes:
            if not node.refs:
                del self._unheld[node.key]
            node.refs += 1

    def unlock(self, nodes: Sequence[Node]) -> None:
        """Hold `nodes`, a path downwards, once less. Raises ValueError, changing nothing, if one is not held."""
        if any(not node.refs for node in nodes):
            raise ValueError("a chunk that nobody holds cannot be released")
        for node in reversed(nodes):  # so that in the order of release children stand before their parents
            node.refs -= 1
            if not node.refs:
                self._unheld[node.key] = node

    def evict(self, n: int) -> list[int]:
        """Forget the `n` chunks that were released longest ago, or all unheld ones; their slabs."""
        slabs = []
        for _ in range(min(n, len(self._unheld))):
            key, node = self._unheld.popitem(last=False)
            assert not node.children, "a chunk is evicted before its children"
            del self._nodes[key]
            if node.parent is not None:
                node.parent.children -= 1
            slabs.append(node.slab)
        return slabs

    def forget(self, nodes: Sequence[Node]) -> list[int]:
        """Forget those of `nodes`, a path downwards, that nobody holds and that nothing hangs from; their slabs."""
        slabs = []
        for node in reversed(nodes):
            if node.refs or node.children:
                break
            del self._unheld[node.key], self._nodes[node.key]
            if node.parent is not None:
                node.parent.children -= 1
            slabs.append(node.slab)
        return slabs

    def check(self) -> None:
        """Prove the tree's own books.

        Raises:
            AssertionError: a chunk hangs from one that is gone or less held, children or slabs are miscounted, or the
                unheld ones are not exactly those without a holder, children before parents.
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
        if len({node.slab for node in self}) != len(self):
            raise AssertionError("two chunks have one slab")
        if set(self._unheld) != {node.key for node in self if not node.refs}:
            raise AssertionError("the list of unheld chunks is wrong")
        place = {key: i for i, key in enumerate(self._unheld)}
        for key, node in self._unheld.items():
            if node.parent is not None and place.get(node.parent.key, len(place)) < place[key]:
                raise AssertionError(f"chunk {key.hex()} would be evicted after its parent")
