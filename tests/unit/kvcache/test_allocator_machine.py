"""Tree, pool and holdings under any order of calls, against a flat dictionary: 10,000 steps, and 50,000 in `make soak`.

A chunk's 64 tokens are one letter here, so a sequence is a word and the chunk at place i is known by the word's first
i + 1 letters. The oracle has no tree, no reference counts and no list of recent use: a dictionary from (scope, letters)
to who holds the chunk and when it was last let go, and a shadow of what was last written to each slab.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import OutOfSlabs
from kvcache.allocator import TREE_OWNER, KvAllocator
from kvcache.prefix_tree import PrefixTree, chunk_keys, root_key
from kvcache.slab_ledger import SlabLedger

NUM_SLABS = 9
KEYS = st.sampled_from(["a#0", "a#1", "b#0", "c#0", "d#0"])
SCOPES = st.sampled_from(["", "", "x"])
WORDS = st.text("pq", max_size=5)

Chunk = tuple[str, str]  # scope, letters up to and with this chunk


@cache
def addresses(scope: str, word: str) -> tuple[bytes, ...]:
    tokens = [ord(letter) for letter in word for _ in range(CHUNK_TOKENS)]
    return tuple(chunk_keys(tokens, root_key("model", scope)))


@dataclass
class ModelSequence:
    """What a sequence should hold: `slabs[i]` has the chunk of `word[: i + 1]`; the first `shared` are the tree's."""

    scope: str
    word: str
    slabs: list[int]
    shared: int

    @property
    def chunks(self) -> list[Chunk]:
        return [(self.scope, self.word[: i + 1]) for i in range(len(self.slabs))]


@dataclass
class KnownChunk:
    """A chunk that the tree should have."""

    slab: int
    holders: set[str] = field(default_factory=set)
    let_go: int = 0


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences that come, share, grow, fail and go."""

    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).steps -= 1  # the invariants are looked at before the first step, too
        self.holdings = KvAllocator(SlabLedger(NUM_SLABS), PrefixTree())
        self.seqs: dict[str, ModelSequence] = {}
        self.known: dict[Chunk, KnownChunk] = {}
        self.written: dict[int, Chunk] = {}  # slab: what was last written to it
        self.clock = self.queries = self.hits = 0

    # What ought to be

    def prefix(self, scope: str, word: str) -> list[KnownChunk]:
        found: list[KnownChunk] = []
        while len(found) < len(word) and (scope, word[: len(found) + 1]) in self.known:
            found.append(self.known[scope, word[: len(found) + 1]])
        return found

    def unheld(self) -> list[Chunk]:
        return [chunk for chunk, known in self.known.items() if not known.holders]

    def private(self) -> int:
        return sum(len(seq.slabs) - seq.shared for seq in self.seqs.values())

    def room(self) -> int:
        held = sum(bool(known.holders) for known in self.known.values())
        return NUM_SLABS - held - self.private()

    def make_way(self, slabs: int) -> None:
        """The least recently used leaf goes, as often as it takes for `slabs` to be idle."""
        while NUM_SLABS - len(self.known) - self.private() < slabs:
            leaves = [
                (scope, word)
                for scope, word in self.unheld()
                if not any(s == scope and w[:-1] == word for s, w in self.known)
            ]
            del self.known[min(leaves, key=lambda chunk: self.known[chunk].let_go)]

    def write(self, slabs: Iterable[int], chunks: Iterable[Chunk]) -> None:
        for slab, chunk in zip(slabs, chunks, strict=True):
            assert slab not in {known.slab for known in self.known.values()}, "a shared chunk is written to"
            self.written[slab] = chunk

    # What is done

    @rule(key=KEYS, scope=SCOPES, word=WORDS)
    def attach(self, key: str, scope: str, word: str) -> None:
        """A sequence comes and leases what is known of it. It has no more than that, for now."""
        if key in self.seqs:
            with pytest.raises(ValueError, match="already"):
                self.holdings.attach_prefix(key, addresses(scope, word))
            return
        found = self.prefix(scope, word)
        assert self.holdings.count_cached(addresses(scope, word)) == len(found)
        assert self.holdings.count_unheld(addresses(scope, word)) == sum(not known.holders for known in found)
        slabs = self.holdings.attach_prefix(key, addresses(scope, word))
        assert slabs == [known.slab for known in found]
        self.queries += CHUNK_TOKENS * len(word)
        self.hits += CHUNK_TOKENS * len(found)
        for known in found:
            known.holders.add(key)
        if slabs:
            self.seqs[key] = ModelSequence(scope, word[: len(slabs)], slabs, len(slabs))

    @rule(key=KEYS, scope=SCOPES, letters=WORDS)
    def grow(self, key: str, scope: str, letters: str) -> None:
        """A sequence computes or pulls chunks of its own."""
        room, before = self.room(), self.holdings.owners()
        if len(letters) > room:
            with pytest.raises(OutOfSlabs):
                self.holdings.allocate(key, len(letters))
            assert self.holdings.owners() == before
            return
        self.make_way(len(letters))
        slabs = self.holdings.allocate(key, len(letters))
        assert len(slabs) == len(letters)
        if slabs:
            seq = self.seqs.setdefault(key, ModelSequence(scope, "", [], 0))
            seq.word, seq.slabs = seq.word + letters, seq.slabs + slabs
            self.write(slabs, seq.chunks[-len(slabs) :])

    @rule(key=KEYS, beyond=st.integers(0, 5))
    def share(self, key: str, beyond: int) -> None:
        """Some of what a sequence completed becomes known; what others know already is not kept twice."""
        seq = self.seqs.get(key)
        if seq is None:
            self.holdings.publish(key, addresses("", "pq"), [])
            return
        count = min(seq.shared + beyond, len(seq.slabs))
        before = seq.slabs[:]
        self.holdings.publish(key, addresses(seq.scope, seq.word[:count]), before)
        for i, chunk in enumerate(seq.chunks[:count]):
            self.known.setdefault(chunk, KnownChunk(seq.slabs[i])).holders.add(key)
            seq.slabs[i] = self.known[chunk].slab
        seq.shared = max(seq.shared, count)
        assert before == seq.slabs

    @rule(key=KEYS, n=st.integers(0, 4))
    def give(self, key: str, n: int) -> None:
        """The last private slabs go back."""
        seq = self.seqs.get(key)
        if seq is None:
            return
        keep = max(seq.shared, len(seq.slabs) - n)
        self.holdings.free_slabs(key, seq.slabs[keep:])
        seq.slabs, seq.word = seq.slabs[:keep], seq.word[:keep]
        if not seq.slabs:
            del self.seqs[key]

    @rule(key=KEYS, keep=st.booleans())
    def end(self, key: str, keep: bool = True) -> None:
        """A sequence finishes, is preempted, aborted or fails; whoever hears it twice does no harm."""
        seq = self.seqs.pop(key, None)
        for chunk in reversed(seq.chunks[: seq.shared] if seq else []):
            self.clock += 1
            self.known[chunk].holders.remove(key)
            self.known[chunk].let_go = self.clock
        for scope, word in reversed(seq.chunks[: seq.shared] if seq and not keep else []):
            follows = any(s == scope and w[:-1] == word for s, w in self.known)
            if not self.known[scope, word].holders and not follows:
                del self.known[scope, word]
        self.holdings.release(key, keep)
        self.holdings.release(key, keep)

    @precondition(lambda self: self.seqs)
    @rule(key=KEYS, other=KEYS)
    def steal(self, key: str, other: str) -> None:
        """Slabs of another, and shared ones, cannot be given away."""
        seq = self.seqs.get(other)
        wanted = seq.slabs if seq and key != other else seq.slabs[: seq.shared] if seq else []
        if wanted:
            with pytest.raises(ValueError, match="not owned"):
                self.holdings.free_slabs(key, wanted)

    @rule(sure=st.integers(0, 7))
    def clear(self, sure: int) -> None:
        """Now and then everything that nobody holds is forgotten."""
        if sure == 0:
            gone = self.unheld()
            assert self.holdings.evict_cached() == len(gone)
            for chunk in gone:
                del self.known[chunk]

    # What must hold after each of them

    @invariant()
    def conserved(self) -> None:
        type(self).steps += 1
        self.holdings.check_books()
        assert (self.holdings.free, self.holdings.used) == (self.room(), NUM_SLABS - self.room())
        assert self.holdings.cached == len(self.unheld())
        assert self.holdings.owners() == {key: len(seq.slabs) for key, seq in self.seqs.items()}
        assert all(self.holdings.num_held(key) == len(seq.slabs) for key, seq in self.seqs.items())
        assert (self.holdings.prefix_queries, self.holdings.prefix_hits) == (self.queries, self.hits)

    @invariant()
    def read_back(self) -> None:
        """Whatever is held or known is what was written; what is leased has not been evicted."""
        for key, seq in self.seqs.items():
            assert [self.written[slab] for slab in seq.slabs] == seq.chunks, (
                f"{key} reads what it did not write"
            )
            assert self.holdings.count_cached(addresses(seq.scope, seq.word)) >= seq.shared
        for (scope, word), known in self.known.items():
            assert self.written[known.slab] == (scope, word)
            assert self.holdings.ledger.owner_of(known.slab) == TREE_OWNER

    def teardown(self) -> None:
        for key in [*self.seqs]:
            self.end(key)
        assert self.holdings.used == 0 and self.holdings.ledger.used == self.holdings.cached
        self.holdings.evict_cached()
        self.holdings.check_books()
        assert self.holdings.ledger.used == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("examples", [240, pytest.param(1200, marks=pytest.mark.slow)])
def test_any_order_of_calls_keeps_every_slab_and_every_byte(examples: int) -> None:
    AllocatorMachine.steps = 0
    run_state_machine_as_test(
        AllocatorMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            derandomize=True,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=(HealthCheck.too_slow,),
        ),
    )
    assert AllocatorMachine.steps > 40 * examples
