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
    shared_nodes: list[PrefixNode] = field(default_factory=list)
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
    """Gives out the slabs of `ledger` and remembers which sequence holds which.

    Slabs that were lent (`kvcache.lending.LentKv`) count as free: `allocate` takes them back when no others are left.

    Without a `tree` no chunk is shared, and every slab is idle again when its sequence ends. `prefix_queries` and
    `prefix_hits` count tokens: all tokens that `attach_prefix` looked up, and the tokens it found.
    """

    def __init__(self, ledger: SlabLedger, tree: PrefixTree | None = None) -> None:
        self.ledger, self.tree = ledger, tree
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
        return self.ledger.num_slabs

    @property
    def free(self) -> int:
        """Slabs that `allocate` can give now: the idle ones, the cached ones, which it evicts, and the lent ones."""
        return self.unused + self.lent

    @property
    def unused(self) -> int:
        """Slabs that no sequence holds."""
        return self.ledger.free + self.cached

    @property
    def lent(self) -> int:
        """Slabs that only sequences hold which give them back at once."""
        return self.lent_slabs.private + (self.tree.num_lent if self.tree is not None else 0)

    @property
    def used(self) -> int:
        """Slabs held by at least one sequence, lent ones included; 0 at rest."""
        return self.ledger.used - self.cached

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

    def attach_prefix(self, key: str, keys: Sequence[bytes], counted: bool = True) -> list[int]:
        """Let sequence `key` hold the longest cached prefix of `keys`, the chunk addresses of its tokens.

        Returns the slabs of the attached chunks, in token order. The caller must not write to them. Unless `counted`,
        no request asks for it, and `prefix_queries` and `prefix_hits` stay.

        Raises:
            ValueError: `key` holds slabs already.
        """
        if key in self._sequences:
            raise ValueError(f"{key} holds slabs already")
        if self.tree is None:
            return []
        nodes = self.tree.match_prefix(keys)
        if counted:
            self.prefix_queries += len(keys) * CHUNK_TOKENS
            self.prefix_hits += len(nodes) * CHUNK_TOKENS
        if nodes:
            self.tree.lock_nodes(nodes, self._lends)
            self._open_sequence(key).shared_nodes.extend(nodes)
        return [node.slab for node in nodes]

    def allocate(self, key: str, n: int) -> list[int]:
        """Take `n` private slabs for sequence `key`. If too few are idle, cached chunks are evicted, oldest first.

        If that is not enough, lent slabs are taken back.

        Raises:
            OutOfSlabs: fewer than `n` slabs are free; none was taken or evicted.
        """
        if n > self.free:
            raise OutOfSlabs(
                f"the KV pool has {self.free} slabs to give of {self.ledger.num_slabs}, and {n} were asked for",
                f"asked for by {key}; {len(self._sequences)} sequences hold {self.used}",
            )
        self._take_back(n)
        if self.tree is not None and n > self.ledger.free:
            self.ledger.give_back(self.tree.evict_chunks(n - self.ledger.free), TREE_OWNER)
        slabs = self.ledger.take_slabs(n, key)
        if slabs:
            seq_slabs = self._sequences.get(key) or self._open_sequence(key)
            seq_slabs.private.update(dict.fromkeys(slabs))
            self._count_private(seq_slabs, len(slabs))
        return slabs

    def _open_sequence(self, key: str) -> _SequenceSlabs:
        """A sequence begins to hold slabs."""
        seq_slabs = self._sequences[key] = _SequenceSlabs(lent=self._lends)
        if self._lends:
            self.lent_slabs.holders.add(key)
        return seq_slabs

    def _take_back(self, n: int) -> None:
        """Take lent slabs back until no sequence holds `n` slabs. Raises OutOfSlabs."""
        reclaim = self.lent_slabs.reclaim
        while n > self.unused:
            if reclaim is None or not reclaim():
                raise OutOfSlabs(f"{self.lent} slabs were lent, and nobody gives them back")

    def set_lent(self, key: str, lent: bool) -> None:
        """Let all that `key` holds count as lent, or as its own. Whoever lends has set `lent_slabs.reclaim`."""
        seq_slabs = self._sequences.get(key)
        if seq_slabs is None or seq_slabs.lent == lent:
            return
        if self.tree is not None:
            self.tree.lock_nodes(seq_slabs.shared_nodes, lent)
            self.tree.unlock_nodes(seq_slabs.shared_nodes, not lent)
        seq_slabs.lent = lent
        self.lent_slabs.private += len(seq_slabs.private) * (1 if lent else -1)
        if lent:
            self.lent_slabs.holders.add(key)
        else:
            self.lent_slabs.holders.discard(key)

    def _count_private(self, seq_slabs: _SequenceSlabs, change: int) -> None:
        """Count private slabs of a sequence that were taken, or given back or published (`change` below 0)."""
        if seq_slabs.lent:
            self.lent_slabs.private += change

    def publish(self, key: str, keys: Sequence[bytes], slabs: list[int]) -> None:
        """Put the complete chunks of sequence `key` into the prefix tree, so that other sequences can attach them.

        `slabs[i]` holds the chunk with address `keys[i]`, for every i < len(keys). The slab of a new chunk passes from
        `key` to the tree, and `key` still holds the chunk. If the tree has an equal chunk already, its slab replaces
        `slabs[i]` in place, and the duplicate slab returns to the pool. Chunks that were published before are skipped.

        Raises:
            ValueError: a slab to be published is not a private slab of `key`; the slabs before it are published.
        """
        seq_slabs = self._sequences.get(key)
        if self.tree is None or seq_slabs is None:
            return
        for place in range(len(seq_slabs.shared_nodes), len(keys)):
            slab, chunk = slabs[place], keys[place]
            if slab not in seq_slabs.private:
                raise ValueError(f"slab {slab} is not a private one of {key}")
            del seq_slabs.private[slab]
            self._count_private(seq_slabs, -1)
            known = self.tree.match_prefix((chunk,))
            if known:
                self.tree.lock_nodes(known, seq_slabs.lent)
                self.ledger.give_back((slab,), key)
                slabs[place] = known[0].slab
                seq_slabs.shared_nodes.append(known[0])
            else:
                self.ledger.change_owner((slab,), key, TREE_OWNER)
                seq_slabs.shared_nodes.append(
                    self.tree.insert_chunk(
                        chunk,
                        slab,
                        seq_slabs.shared_nodes[-1] if seq_slabs.shared_nodes else None,
                        seq_slabs.lent,
                    )
                )

    def free_slabs(self, key: str, slabs: Sequence[int]) -> None:
        """Return private slabs of sequence `key` to the pool.

        Raises:
            ValueError: a slab is not a private slab of `key`, or is listed twice; none was returned.
        """
        self.ledger.give_back(slabs, key)
        seq_slabs = self._sequences.get(key)
        if seq_slabs is not None:
            for slab in slabs:
                del seq_slabs.private[slab]
            self._count_private(seq_slabs, -len(slabs))
            self._drop_if_empty(key, seq_slabs)

    def release_tail(self, key: str, slabs: Sequence[int]) -> None:
        """Release the last slabs that sequence `key` holds: private ones become idle, shared chunks stay cached.

        `slabs` are in token order, shared chunks before private slabs.

        Raises:
            ValueError: they are not the last chunks and private slabs of `key`; none was released.
        """
        seq_slabs = self._sequences.get(key) or _SequenceSlabs()
        private = [slab for slab in slabs if slab in seq_slabs.private]
        stay = len(seq_slabs.shared_nodes) + len(private) - len(slabs)
        if stay < 0 or [*(node.slab for node in seq_slabs.shared_nodes[stay:]), *private] != list(slabs):
            raise ValueError(f"slabs {slabs} are not the last ones of {key}")
        gone = seq_slabs.shared_nodes[stay:]
        if gone and len(private) < len(seq_slabs.private):
            raise ValueError(f"private slabs of {key} come after the chunks {slabs}")
        self.ledger.give_back(private, key)
        for slab in private:
            del seq_slabs.private[slab]
        self._count_private(seq_slabs, -len(private))
        if self.tree is not None and gone:
            self.tree.unlock_nodes(gone, seq_slabs.lent)
            seq_slabs.shared_nodes = seq_slabs.shared_nodes[:stay]
        if key in self._sequences:
            self._drop_if_empty(key, seq_slabs)

    def release(self, key: str, keep: bool = True) -> None:
        """Release every slab that sequence `key` holds: private slabs become idle, shared chunks stay cached.
        Idempotent.

        With `keep=False` the tree also forgets the sequence's chunks, except those that another sequence holds or that
        have children in the tree.
        """
        seq_slabs = self._sequences.pop(key, None)
        if seq_slabs is None:
            return
        self.lent_slabs.holders.discard(key)
        self.ledger.give_back(list(seq_slabs.private), key)
        self._count_private(seq_slabs, -len(seq_slabs.private))
        if self.tree is not None:
            self.tree.unlock_nodes(seq_slabs.shared_nodes, seq_slabs.lent, keep)
            if not keep:
                self.ledger.give_back(self.tree.forget_nodes(seq_slabs.shared_nodes), TREE_OWNER)

    def num_held(self, key: str) -> int:
        """How many slabs `key` holds, shared and private."""
        seq_slabs = self._sequences.get(key)
        return len(seq_slabs.shared_nodes) + len(seq_slabs.private) if seq_slabs else 0

    def shared_nodes(self, key: str) -> list[PrefixNode]:
        """The chunks of the prefix tree that sequence `key` holds, in token order. Do not change the list.

        Their bytes are immutable. A `PrefixNode` exists as long as the tree knows its chunk, so a caller that keys a
        weak dictionary by the node (such as a cache of hashes) forgets its entry together with the chunk.
        """
        seq_slabs = self._sequences.get(key)
        return seq_slabs.shared_nodes if seq_slabs else []

    def count_freed_by(self, holders: Sequence[str]) -> int:
        """How many more slabs would be free if all `holders` released theirs: slabs that no other sequence holds.

        They must not hold lent slabs, which are free already.
        """
        owned_slabs = [self._sequences[key] for key in holders if key in self._sequences]
        shared = Counter(node.key for seq_slabs in owned_slabs for node in seq_slabs.shared_nodes)
        refs = {
            node.key: self._count_keepers(node)
            for seq_slabs in owned_slabs
            for node in seq_slabs.shared_nodes
        }
        return sum(len(seq_slabs.private) for seq_slabs in owned_slabs) + sum(
            refs[key] == n for key, n in shared.items()
        )

    def count_freed_tail(self, key: str, slabs: Sequence[int]) -> int:
        """How many more slabs would be free after `release_tail` with the last `slabs` that sequence `key` holds."""
        seq_slabs = self._sequences.get(key) or _SequenceSlabs()
        alone = {node.slab for node in seq_slabs.shared_nodes if self._count_keepers(node) == 1}
        return sum(slab in seq_slabs.private or slab in alone for slab in slabs)

    def _count_keepers(self, node: PrefixNode) -> int:
        """The holders of a chunk that do not give it back."""
        return node.refs - node.lent

    def count_shared(self, key: str) -> int:
        """How many of the chunks that sequence `key` holds are also held by another sequence."""
        seq_slabs = self._sequences.get(key)
        return sum(node.refs > 1 for node in seq_slabs.shared_nodes) if seq_slabs else 0

    def owners(self) -> dict[str, int]:
        """Number of slabs by holder, without holders of 0. A shared slab counts once for each of its holders."""
        held = Counter(
            {
                key: len(seq_slabs.shared_nodes)
                for key, seq_slabs in self._sequences.items()
                if seq_slabs.shared_nodes
            }
        )
        held.update({owner: n for owner, n in self.ledger.count_by_owner().items() if owner != TREE_OWNER})
        return dict(held)

    def evict_cached(self) -> int:
        """Evict all cached chunks; returns how many."""
        slabs = self.tree.evict_chunks(self.tree.num_unheld) if self.tree is not None else []
        self.ledger.give_back(slabs, TREE_OWNER)
        return len(slabs)

    def check_books(self) -> None:
        """Check that the accounts of the pool, of the tree, and of the sequences agree.

        Raises:
            AssertionError: a slab is lost or has two owners, the number of a chunk's holders is wrong, or the tree's
                slabs differ from the slabs that the pool lists for it.
        """
        self.ledger.check_books()
        nodes = list(self.tree) if self.tree is not None else []
        if self.tree is not None:
            self.tree.check_books()
        refs = Counter(node.key for seq_slabs in self._sequences.values() for node in seq_slabs.shared_nodes)
        wrong = [node.key.hex() for node in nodes if node.refs != refs.pop(node.key, 0)]
        if wrong or refs:
            raise AssertionError(
                f"chunks {wrong} have a wrong number of holders; {len(refs)} held chunks are not in the tree"
            )
        lent = Counter(
            node.key
            for seq_slabs in self._sequences.values()
            if seq_slabs.lent
            for node in seq_slabs.shared_nodes
        )
        private = sum(len(seq_slabs.private) for seq_slabs in self._sequences.values() if seq_slabs.lent)
        if self.lent_slabs.holders != {key for key, seq_slabs in self._sequences.items() if seq_slabs.lent}:
            raise AssertionError(f"{self.lent_slabs.holders} are listed as holders of lent slabs")
        if private != self.lent_slabs.private or any(node.lent != lent[node.key] for node in nodes):
            raise AssertionError(
                f"{self.lent_slabs.private} private slabs are counted as lent, not {private}"
            )
        astray = [node.slab for node in nodes if self.ledger.owner_of(node.slab) != TREE_OWNER]
        if astray or self.ledger.count_by_owner().get(TREE_OWNER, 0) != len(nodes):
            raise AssertionError(f"the tree has {len(nodes)} slabs, and does not own {astray} of them")
        for key, seq_slabs in self._sequences.items():
            if self.ledger.count_by_owner().get(key, 0) != len(seq_slabs.private):
                raise AssertionError(
                    f"{key} owns {self.ledger.count_by_owner().get(key, 0)}, not {len(seq_slabs.private)}"
                )
            if any(self.ledger.owner_of(slab) != key for slab in seq_slabs.private):
                raise AssertionError(f"{key} lists slabs of others as its own")

    def _drop_if_empty(self, key: str, seq_slabs: _SequenceSlabs) -> None:
        """Forget a sequence that holds no slab any more."""
        if not seq_slabs.shared_nodes and not seq_slabs.private:
            del self._sequences[key]
            self.lent_slabs.holders.discard(key)
