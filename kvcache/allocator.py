"""Which slabs of the KV pool each sequence holds: chunks shared through the prefix tree, and private slabs.

    idle ──allocate──▶ private ──publish──▶ held in the tree ──release──▶ cached ──evicted by allocate──▶ idle
                          └──free_slabs, release──▶ idle                     └──attach_prefix──▶ held in the tree

While sequences run, only `KvAllocator` takes slabs from the pool and returns them. A sequence is named by its key
`<request>#<epoch>` (the epoch numbers the attempts of a request). A full chunk in the tree is immutable; the chunks
that a sequence still writes are private. A held chunk is never evicted. Pure accounting, not safe for several threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import OutOfSlabs
from kvcache.prefix_tree import PrefixNode, PrefixTree
from kvcache.slab_ledger import SlabLedger

# The owner name under which the pool lists the slabs of the prefix tree.
TREE_OWNER = "prefix tree"


@dataclass(slots=True)
class _SequenceSlabs:
    # The cached chunks that the sequence holds: a path from the root of the prefix tree.
    shared: list[PrefixNode] = field(default_factory=list)
    # The slabs of its own. The dict serves as a set that keeps its order.
    private: dict[int, None] = field(default_factory=dict)
    # Whether it holds them only until another sequence wants them.
    lent: bool = False


@dataclass(slots=True)
class LentSlabs:
    """What `kvcache.lending.LentKv` has lent: the number of private slabs, and how to get slabs back."""

    private: int = 0
    # The sequences that hold them.
    holders: set[str] = field(default_factory=set)
    # Lets one sequence give back all that it was lent; returns False if there is none.
    reclaim: Callable[[], bool] | None = None


class KvAllocator:
    """Gives out the slabs of `pool` and remembers which sequence holds which.

    Slabs that were lent (`kvcache.lending.LentKv`) count as free: `allocate` takes them back when no others are left.

    Without a `tree` no chunk is shared, and every slab is idle again when its sequence ends. `prefix_queries` and
    `prefix_hits` count tokens: all tokens that `attach_prefix` looked up, and the tokens it found.
    """

    def __init__(self, pool: SlabLedger, tree: PrefixTree | None = None) -> None:
        self.pool, self.tree = pool, tree
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._sequences: dict[str, _SequenceSlabs] = {}
        self.lent_slabs = LentSlabs()
        # Whether what is taken here is lent.
        self._lends = False

    def arena_of(self, kv_class: str) -> KvAllocator:
        """The allocator for KV of a class: itself, since a worker with one pool has one class (`kvcache.arenas`)."""
        return self

    @property
    def num_slabs(self) -> int:
        """All slabs, free or not."""
        return self.pool.num_slabs

    @property
    def free(self) -> int:
        """Slabs that `allocate` can give now: the idle ones, the cached ones, which it evicts, and the lent ones."""
        return self.unused + self.lent

    @property
    def unused(self) -> int:
        """Slabs that no sequence holds."""
        return self.pool.free + self.cached

    @property
    def lent(self) -> int:
        """Slabs that only sequences hold which give them back at once."""
        return self.lent_slabs.private + (self.tree.num_lent if self.tree is not None else 0)

    @property
    def used(self) -> int:
        """Slabs held by at least one sequence, lent ones included; 0 at rest."""
        return self.pool.used - self.cached

    @property
    def cached(self) -> int:
        """Slabs of the prefix tree that no sequence holds. They can be evicted."""
        return self.tree.num_unheld if self.tree is not None else 0

    def count_cached(self, keys: Sequence[bytes]) -> int:
        """How many leading chunks of `keys` (chunk addresses) `attach_prefix` would find now. Changes no counter."""
        return len(self.tree.match_prefix(keys)) if self.tree is not None else 0

    def count_unheld(self, keys: Sequence[bytes]) -> int:
        """How many of the chunks found by `attach_prefix` count as free: attaching reduces `free` by this number."""
        if self.tree is None:
            return 0
        return sum(node.is_lent or not node.refs for node in self.tree.match_prefix(keys))

    def attach_prefix(self, key: str, keys: Sequence[bytes]) -> list[int]:
        """Let sequence `key` hold the longest cached prefix of `keys`, the chunk addresses of its tokens.

        Returns the slabs of the attached chunks, in token order. The caller must not write to them.

        Raises:
            ValueError: `key` holds slabs already.
        """
        if key in self._sequences:
            raise ValueError(f"{key} holds slabs already")
        if self.tree is None:
            return []
        nodes = self.tree.match_prefix(keys)
        self.prefix_queries += len(keys) * CHUNK_TOKENS
        self.prefix_hits += len(nodes) * CHUNK_TOKENS
        if nodes:
            self.tree.lock_nodes(nodes, self._lends)
            self._open_sequence(key).shared.extend(nodes)
        return [node.slab for node in nodes]

    def allocate(self, key: str, n: int) -> list[int]:
        """Take `n` private slabs for sequence `key`. If too few are idle, cached chunks are evicted, oldest first.

        If that is not enough, lent slabs are taken back.

        Raises:
            OutOfSlabs: fewer than `n` slabs are free; none was taken or evicted.
        """
        if n > self.free:
            raise OutOfSlabs(
                f"the KV pool has {self.free} slabs to give of {self.pool.num_slabs}, and {n} were asked for",
                f"asked for by {key}; {len(self._sequences)} sequences hold {self.used}",
            )
        self._take_back(n)
        if self.tree is not None and n > self.pool.free:
            self.pool.give_back(self.tree.evict_chunks(n - self.pool.free), TREE_OWNER)
        slabs = self.pool.take_slabs(n, key)
        if slabs:
            owned = self._sequences.get(key) or self._open_sequence(key)
            owned.private.update(dict.fromkeys(slabs))
            self._count_private(owned, len(slabs))
        return slabs

    def _open_sequence(self, key: str) -> _SequenceSlabs:
        """A sequence begins to hold slabs."""
        owned = self._sequences[key] = _SequenceSlabs(lent=self._lends)
        if self._lends:
            self.lent_slabs.holders.add(key)
        return owned

    def _take_back(self, n: int) -> None:
        """Take lent slabs back until no sequence holds `n` slabs. Raises OutOfSlabs."""
        reclaim = self.lent_slabs.reclaim
        while n > self.unused:
            if reclaim is None or not reclaim():
                raise OutOfSlabs(f"{self.lent} slabs were lent, and nobody gives them back")

    def _count_private(self, owned: _SequenceSlabs, change: int) -> None:
        """Count private slabs of a sequence that were taken, or given back or published (`change` below 0)."""
        if owned.lent:
            self.lent_slabs.private += change

    def publish(self, key: str, keys: Sequence[bytes], slabs: list[int]) -> None:
        """Put the complete chunks of sequence `key` into the prefix tree, so that other sequences can attach them.

        `slabs[i]` holds the chunk with address `keys[i]`, for every i < len(keys). The slab of a new chunk passes from
        `key` to the tree, and `key` still holds the chunk. If the tree has an equal chunk already, its slab replaces
        `slabs[i]` in place, and the duplicate slab returns to the pool. Chunks that were published before are skipped.

        Raises:
            ValueError: a slab to be published is not a private slab of `key`; the slabs before it are published.
        """
        owned = self._sequences.get(key)
        if self.tree is None or owned is None:
            return
        for place in range(len(owned.shared), len(keys)):
            slab, chunk = slabs[place], keys[place]
            if slab not in owned.private:
                raise ValueError(f"slab {slab} is not a private one of {key}")
            del owned.private[slab]
            self._count_private(owned, -1)
            known = self.tree.match_prefix((chunk,))
            if known:
                self.tree.lock_nodes(known, owned.lent)
                self.pool.give_back((slab,), key)
                slabs[place] = known[0].slab
                owned.shared.append(known[0])
            else:
                self.pool.change_owner((slab,), key, TREE_OWNER)
                owned.shared.append(
                    self.tree.insert_chunk(
                        chunk, slab, owned.shared[-1] if owned.shared else None, owned.lent
                    )
                )

    def free_slabs(self, key: str, slabs: Sequence[int]) -> None:
        """Return private slabs of sequence `key` to the pool.

        Raises:
            ValueError: a slab is not a private slab of `key`, or is listed twice; none was returned.
        """
        self.pool.give_back(slabs, key)
        owned = self._sequences.get(key)
        if owned is not None:
            for slab in slabs:
                del owned.private[slab]
            self._count_private(owned, -len(slabs))
            self._drop_if_empty(key, owned)

    def release_tail(self, key: str, slabs: Sequence[int]) -> None:
        """Release the last slabs that sequence `key` holds: private ones become idle, shared chunks stay cached.

        `slabs` are in token order, shared chunks before private slabs.

        Raises:
            ValueError: they are not the last chunks and private slabs of `key`; none was released.
        """
        owned = self._sequences.get(key) or _SequenceSlabs()
        private = [slab for slab in slabs if slab in owned.private]
        stay = len(owned.shared) + len(private) - len(slabs)
        if stay < 0 or [*(node.slab for node in owned.shared[stay:]), *private] != list(slabs):
            raise ValueError(f"slabs {slabs} are not the last ones of {key}")
        gone = owned.shared[stay:]
        if gone and len(private) < len(owned.private):
            raise ValueError(f"private slabs of {key} come after the chunks {slabs}")
        self.pool.give_back(private, key)
        for slab in private:
            del owned.private[slab]
        self._count_private(owned, -len(private))
        if self.tree is not None and gone:
            self.tree.unlock_nodes(gone, owned.lent)
            owned.shared = owned.shared[:stay]
        if key in self._sequences:
            self._drop_if_empty(key, owned)

    def release(self, key: str, keep: bool = True) -> None:
        """Release every slab that sequence `key` holds: private slabs become idle, shared chunks stay cached.
        Idempotent.

        With `keep=False` the tree also forgets the sequence's chunks, except those that another sequence holds or that
        have children in the tree.
        """
        owned = self._sequences.pop(key, None)
        if owned is None:
            return
        self.lent_slabs.holders.discard(key)
        self.pool.give_back(list(owned.private), key)
        self._count_private(owned, -len(owned.private))
        if self.tree is not None:
            self.tree.unlock_nodes(owned.shared, owned.lent)
            if not keep:
                self.pool.give_back(self.tree.forget_nodes(owned.shared), TREE_OWNER)

    def num_held(self, key: str) -> int:
        """How many slabs `key` holds, shared and private."""
        owned = self._sequences.get(key)
        return len(owned.shared) + len(owned.private) if owned else 0

    def shared_nodes(self, key: str) -> list[PrefixNode]:
        """The chunks of the prefix tree that sequence `key` holds, in token order. Do not change the list.

        Their bytes are immutable. A `PrefixNode` exists as long as the tree knows its chunk, so a caller that keys a
        weak dictionary by the node (such as a cache of hashes) forgets its entry together with the chunk.
        """
        owned = self._sequences.get(key)
        return owned.shared if owned else []

    def count_freed_by(self, holders: Sequence[str]) -> int:
        """How many more slabs would be free if all `holders` released theirs: slabs that no other sequence holds.

        They must not hold lent slabs, which are free already.
        """
        owned_slabs = [self._sequences[key] for key in holders if key in self._sequences]
        shared = Counter(node.key for owned in owned_slabs for node in owned.shared)
        refs = {node.key: self._count_keepers(node) for owned in owned_slabs for node in owned.shared}
        return sum(len(owned.private) for owned in owned_slabs) + sum(
            refs[key] == n for key, n in shared.items()
        )

    def count_freed_tail(self, key: str, slabs: Sequence[int]) -> int:
        """How many more slabs would be free after `release_tail` with the last `slabs` that sequence `key` holds."""
        owned = self._sequences.get(key) or _SequenceSlabs()
        alone = {node.slab for node in owned.shared if self._count_keepers(node) == 1}
        return sum(slab in owned.private or slab in alone for slab in slabs)

    def _count_keepers(self, node: PrefixNode) -> int:
        """The holders of a chunk that do not give it back."""
        return node.refs - node.lent

    def count_shared(self, key: str) -> int:
        """How many of the chunks that sequence `key` holds are also held by another sequence."""
        owned = self._sequences.get(key)
        return sum(node.refs > 1 for node in owned.shared) if owned else 0

    def owners(self) -> dict[str, int]:
        """Number of slabs by holder, without holders of 0. A shared slab counts once for each of its holders."""
        held = Counter({key: len(owned.shared) for key, owned in self._sequences.items() if owned.shared})
        held.update({owner: n for owner, n in self.pool.count_by_owner().items() if owner != TREE_OWNER})
        return dict(held)

    def evict_cached(self) -> int:
        """Evict all cached chunks; returns how many."""
        slabs = self.tree.evict_chunks(self.tree.num_unheld) if self.tree is not None else []
        self.pool.give_back(slabs, TREE_OWNER)
        return len(slabs)

    def check_books(self) -> None:
        """Check that the accounts of the pool, of the tree, and of the sequences agree.

        Raises:
            AssertionError: a slab is lost or has two owners, the number of a chunk's holders is wrong, or the tree's
                slabs differ from the slabs that the pool lists for it.
        """
        self.pool.check_books()
        nodes = list(self.tree) if self.tree is not None else []
        if self.tree is not None:
            self.tree.check_books()
        refs = Counter(node.key for owned in self._sequences.values() for node in owned.shared)
        wrong = [node.key.hex() for node in nodes if node.refs != refs.pop(node.key, 0)]
        if wrong or refs:
            raise AssertionError(
                f"chunks {wrong} have a wrong number of holders; {len(refs)} held chunks are not in the tree"
            )
        lent = Counter(node.key for owned in self._sequences.values() if owned.lent for node in owned.shared)
        private = sum(len(owned.private) for owned in self._sequences.values() if owned.lent)
        if self.lent_slabs.holders != {key for key, owned in self._sequences.items() if owned.lent}:
            raise AssertionError(f"{self.lent_slabs.holders} are listed as holders of lent slabs")
        if private != self.lent_slabs.private or any(node.lent != lent[node.key] for node in nodes):
            raise AssertionError(
                f"{self.lent_slabs.private} private slabs are counted as lent, not {private}"
            )
        astray = [node.slab for node in nodes if self.pool.owner_of(node.slab) != TREE_OWNER]
        if astray or self.pool.count_by_owner().get(TREE_OWNER, 0) != len(nodes):
            raise AssertionError(f"the tree has {len(nodes)} slabs, and does not own {astray} of them")
        for key, owned in self._sequences.items():
            if self.pool.count_by_owner().get(key, 0) != len(owned.private):
                raise AssertionError(
                    f"{key} owns {self.pool.count_by_owner().get(key, 0)}, not {len(owned.private)}"
                )
            if any(self.pool.owner_of(slab) != key for slab in owned.private):
                raise AssertionError(f"{key} lists slabs of others as its own")

    def _drop_if_empty(self, key: str, owned: _SequenceSlabs) -> None:
        """Forget a sequence that holds no slab any more."""
        if not owned.shared and not owned.private:
            del self._sequences[key]
            self.lent_slabs.holders.discard(key)
