"""What each sequence holds of the pool: chunks of the prefix tree, shared, and slabs of its own.

    idle ──take──▶ private ──share──▶ held in the tree ──end──▶ cached (in the tree, unheld) ──evicted by a take──▶ idle
                      └──give, end──▶ idle                         └──attach──▶ held in the tree

This is the only thing that takes slabs from the pool and gives them back while sequences run. Names are
`<request>#<epoch>`. A full chunk in the tree is immutable; what a sequence still writes is private. A chunk that is
held is never evicted: to attach is to lease. Pure bookkeeping, for one thread at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.errors import OutOfBlocks
from kvcache.layout import CHUNK_TOKENS
from kvcache.prefix_tree import Node, PrefixTree
from kvcache.slabs import Slabs

TREE = "prefix tree"  # who owns the tree's slabs in the pool


@dataclass(slots=True)
class _Hold:
    shared: list[Node] = field(default_factory=list)  # a path from the root
    private: dict[int, None] = field(default_factory=dict)  # a set that keeps its order


class Holdings:
    """The slabs of `pool`, by sequence. Without a `tree` nothing is shared, and nothing outlives its sequence.

    `queries` and `hits` count the tokens that were looked up by `attach`, and those of them that were found.
    """

    def __init__(self, pool: Slabs, tree: PrefixTree | None = None) -> None:
        self.pool, self.tree = pool, tree
        self.queries = 0
        self.hits = 0
        self._holds: dict[str, _Hold] = {}

    @property
    def free(self) -> int:
        """Slabs that can be had now: idle ones, and cached ones that nobody holds."""
        return self.pool.free + self.cached

    @property
    def used(self) -> int:
        """Slabs that somebody holds; 0 at rest."""
        return self.pool.used - self.cached

    @property
    def cached(self) -> int:
        """Slabs in the tree that nobody holds."""
        return self.tree.unheld if self.tree is not None else 0

    def look(self, keys: Sequence[bytes]) -> int:
        """How many leading chunks of `keys` an `attach` would find now. Changes and counts nothing."""
        return len(self.tree.match(keys)) if self.tree is not None else 0

    def look_free(self, keys: Sequence[bytes]) -> int:
        """How many of those nobody holds: `free` falls by so many if they are attached."""
        return sum(not node.refs for node in self.tree.match(keys)) if self.tree is not None else 0

    def attach(self, key: str, keys: Sequence[bytes]) -> list[int]:
        """Let `key` hold the longest known prefix of the chunks `keys`; its slabs, in order, not to be written to.

        Raises:
            ValueError: `key` holds something already.
        """
        if key in self._holds:
            raise ValueError(f"{key} holds slabs already")
        if self.tree is None:
            return []
        nodes = self.tree.match(keys)
        self.queries += len(keys) * CHUNK_TOKENS
        self.hits += len(nodes) * CHUNK_TOKENS
        if nodes:
            self.tree.lock(nodes)
            self._holds[key] = _Hold(nodes)
        return [node.slab for node in nodes]

    def take(self, key: str, n: int) -> list[int]:
        """`n` private slabs for `key`; cached chunks make way, those released longest ago first.

        Raises:
            OutOfBlocks: fewer than `n` can be had; nothing was taken or evicted.
        """
        if n > self.free:
            raise OutOfBlocks(
                f"the KV pool has {self.free} slabs to give of {self.pool.num_slabs}, and {n} were asked for",
                f"asked for by {key}; {len(self._holds)} sequences hold {self.used}",
            )
        if self.tree is not None and n > self.pool.free:
            self.pool.give(self.tree.evict(n - self.pool.free), TREE)
        slabs = self.pool.take(n, key)
        if slabs:
            self._holds.setdefault(key, _Hold()).private.update(dict.fromkeys(slabs))
        return slabs

    def share(self, key: str, keys: Sequence[bytes], slabs: list[int]) -> None:
        """Make the complete chunks of `key` known: `slabs[i]` holds the chunk `keys[i]`, for every i < len(keys).

        Private ones become the tree's, held by `key`. Where the tree has an equal chunk already, `slabs[i]` is replaced
        in place by that one's slab and the duplicate goes back to the pool. What was shared before costs nothing.

        Raises:
            ValueError: a slab that is to be shared is not a private one of `key`; those before it are shared.
        """
        hold = self._holds.get(key)
        if self.tree is None or hold is None:
            return
        for place in range(len(hold.shared), len(keys)):
            slab, chunk = slabs[place], keys[place]
            if slab not in hold.private:
                raise ValueError(f"slab {slab} is not a private one of {key}")
            del hold.private[slab]
            known = self.tree.match((chunk,))
            if known:
                self.tree.lock(known)
                self.pool.give((slab,), key)
                slabs[place] = known[0].slab
                hold.shared.append(known[0])
            else:
                self.pool.move((slab,), key, TREE)
                hold.shared.append(self.tree.insert(chunk, slab, hold.shared[-1] if hold.shared else None))

    def give(self, key: str, slabs: Sequence[int]) -> None:
        """Return private slabs of `key` to the pool.

        Raises:
            ValueError: one of them is not a private one of `key`, or is named twice; nothing was returned.
        """
        self.pool.give(slabs, key)
        hold = self._holds.get(key)
        if hold is not None:
            for slab in slabs:
                del hold.private[slab]
            self._forget(key, hold)

    def end(self, key: str, keep: bool = True) -> None:
        """Let go of everything that `key` holds: private slabs are idle, shared chunks stay cached. May be repeated.

        Without `keep` its chunks are forgotten, as far as nobody else holds them or goes on from them.
        """
        hold = self._holds.pop(key, None)
        if hold is None:
            return
        self.pool.give(list(hold.private), key)
        if self.tree is not None:
            self.tree.unlock(hold.shared)
            if not keep:
                self.pool.give(self.tree.forget(hold.shared), TREE)

    def holds(self, key: str) -> int:
        """How many slabs `key` holds, shared and private."""
        hold = self._holds.get(key)
        return len(hold.shared) + len(hold.private) if hold else 0

    def path(self, key: str) -> list[Node]:
        """The chunks of the tree that `key` holds, from the first; their bytes change no more. Not to be changed.

        A `Node` lives as long as its chunk is known: what is remembered by it is forgotten with it.
        """
        hold = self._holds.get(key)
        return hold.shared if hold else []

    def owners(self) -> dict[str, int]:
        """Slabs by holder, those of none left out. A shared one counts for each of its holders."""
        held = Counter({key: len(hold.shared) for key, hold in self._holds.items() if hold.shared})
        held.update({owner: n for owner, n in self.pool.owners().items() if owner != TREE})
        return dict(held)

    def clear(self) -> int:
        """Forget all cached chunks that nobody holds; how many they were."""
        slabs = self.tree.evict(self.tree.unheld) if self.tree is not None else []
        self.pool.give(slabs, TREE)
        return len(slabs)

    def check(self) -> None:
        """Prove conservation in the pool, in the tree, and between them.

        Raises:
            AssertionError: a slab is lost or has two owners, a chunk counts other holders than it has, or the tree's
                slabs are not those that it owns in the pool.
        """
        self.pool.check()
        nodes = list(self.tree) if self.tree is not None else []
        if self.tree is not None:
            self.tree.check()
        refs = Counter(node.key for hold in self._holds.values() for node in hold.shared)
        wrong = [node.key.hex() for node in nodes if node.refs != refs.pop(node.key, 0)]
        if wrong or refs:
            raise AssertionError(f"chunks {wrong} count other holders than they have; {len(refs)} are gone")
        astray = [node.slab for node in nodes if self.pool.owner(node.slab) != TREE]
        if astray or self.pool.owners().get(TREE, 0) != len(nodes):
            raise AssertionError(f"the tree has {len(nodes)} slabs, {astray} of them without owning them")
        for key, hold in self._holds.items():
            if self.pool.owners().get(key, 0) != len(hold.private):
                raise AssertionError(f"{key} owns {self.pool.owners().get(key, 0)}, not {len(hold.private)}")
            if any(self.pool.owner(slab) != key for slab in hold.private):
                raise AssertionError(f"{key} lists slabs of others as its own")

    def _forget(self, key: str, hold: _Hold) -> None:
        if not hold.shared and not hold.private:
            del self._holds[key]
