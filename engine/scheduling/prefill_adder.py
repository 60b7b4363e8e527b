"""Divides one step's token budget among prompts: which are prefilled, by how much, and which new ones start.

    queue (priority, tenant, KV class): prompts that are being prefilled, then waiting ones, each in order of arrival
    served: best priority first, then the tenant with the least service, until budget, memory or queues end

A prompt that is longer than the remaining budget takes the remainder, with these exceptions, so that short prompts need
not wait until a long one is finished:

- Three quarters of the remainder are first offered to shorter prompts behind it in its queue, the shortest first.
- Half is first offered to other queues of its priority. If the long prompt's tenant has received less service than
  theirs, other tenants get this half less the difference.
- While any prompt finishes its prefill in this step, the long one gets a quarter at most.
- If other prompts arrived recently (`shares_steps`), the long one gets half a step even when alone, unless its
  tenant has received less service: the next arrival is then served sooner.

If the next new prompt does not fit into memory, no new prompt starts in this step. So a large prompt is not overtaken
for ever. Memory is counted per KV class (`kvcache.arenas`): only new prompts of the same class wait for the large one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Keys
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from diptych.chunks import CHUNK_TOKENS
from engine.scheduling.fairness import VirtualTokenCounter
from engine.scheduling.prompt_queues import PromptQueueKey
from engine.sequence import EngineLimits, Sequence

# Most tokens per step of a prompt with `prompt_logprobs`. Each needs a float32 row of logits over the whole
# vocabulary.
MAX_SCORED_ROWS = 256
# Most prompts that are examined behind a long one, and most waiting prompts per step whose prefix is looked up.
LOOKAHEAD_PROMPTS = 64


class KvAvailability(Protocol):
    """Free slabs and cached prefixes of an arena (`kvcache.allocator.KvAllocator`); these calls change nothing."""

    @property
    def free(self) -> int:
        """Slabs that can be allocated now."""

    def count_cached(self, keys: Keys[bytes]) -> int:
        """How many leading chunks of `keys` (chunk hashes) are in the prefix cache."""

    def count_unheld(self, keys: Keys[bytes]) -> int:
        """How many of these cached chunks are held by no sequence, so that reusing them takes free slabs."""

    def count_freed_by(self, holders: Keys[str]) -> int:
        """How many slabs become free if the sequences `holders` all give up their memory."""


class KvStock(Protocol):
    """The arenas of an engine: `kvcache.arenas.KvArenas`, or an allocator that is the only one."""

    def arena_of(self, kv_class: str) -> KvAvailability:
        """The arena for KV of a class."""


class RemainingKv:
    """The slabs left in an arena: those of `availability` less `aside` that are set aside for `passed` sequences."""

    def __init__(self, availability: KvAvailability) -> None:
        self.availability, self.aside, self.passed = availability, 0, 0

    @property
    def free(self) -> int:
        """Slabs that can be allocated now and are not set aside."""
        return self.availability.free - self.aside

    def set_aside(self, need: int) -> None:
        """Set `need` slabs aside for a sequence that does not take them yet."""
        self.aside += need
        self.passed += 1

    def count_cached(self, keys: Keys[bytes]) -> int:
        """How many leading chunks of `keys` (chunk hashes) are in the prefix cache."""
        return self.availability.count_cached(keys)

    def count_unheld(self, keys: Keys[bytes]) -> int:
        """How many of these cached chunks are held by no sequence, so that reusing them takes free slabs."""
        return self.availability.count_unheld(keys)

    def count_freed_by(self, holders: Keys[str]) -> int:
        """How many slabs become free if the sequences `holders` all give up their memory."""
        return self.availability.count_freed_by(holders)


class RemainingArenas:
    """The slabs left in each arena of `availability`, which change as slabs are set aside."""

    def __init__(self, stock: KvStock) -> None:
        self._stock = stock
        self._arenas: dict[str, RemainingKv] = {}

    def arena_of(self, kv_class: str) -> RemainingKv:
        """What is left for KV of a class."""
        if kv_class not in self._arenas:
            self._arenas[kv_class] = RemainingKv(self._stock.arena_of(kv_class))
        return self._arenas[kv_class]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prefill `count` tokens of the sequence `key`, from position `start`."""

    key: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached prefix of a sequence that does not run: number of chunks, and how many of them no sequence holds."""

    chunks: int
    unheld: int

    def slab_cost(self, seq: Sequence, tokens: int) -> int:
        """Free slabs that are used up until `tokens` tokens of `seq` have KV, its unheld cached chunks included."""
        return seq.expected_slabs(tokens, self.chunks >= seq.parked_from) - self.chunks + self.unheld


def find_prefix(seq: Sequence, availability: KvAvailability) -> PrefixHit:
    """Look up the cached prefix of a waiting sequence."""
    keys = seq.attachable_keys()
    return (
        PrefixHit(availability.count_cached(keys), availability.count_unheld(keys))
        if keys
        else PrefixHit(0, 0)
    )


@dataclass(slots=True)
class ArenaRoom:
    """The room of one arena in one step. `free` slabs can be used in it; `left` are not expected to be needed later."""

    availability: KvAvailability
    free: int
    left: int
    # Whether no sequence holds memory. The first one may then start if its prompt fits, however long its answer may
    # be.
    alone: bool
    # The first new sequence that did not fit. No other new sequence of its class starts in this step.
    blocked: Sequence | None = None


@dataclass(slots=True)
class PrefillAdder:
    """Plans the prefill of one step, within the `rooms` of all arenas, by KV class."""

    limits: EngineLimits
    rooms: Mapping[str, ArenaRoom]
    token_counter: VirtualTokenCounter
    running: Mapping[str, Sequence]
    ratio: float
    seats: int
    budget: int
    # Whether other prompts arrived recently while a long one was prefilled.
    shares_steps: bool
    # How many sequences that evict may start.
    evicting_left: int
    admitted: list[str] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    grow: list[tuple[str, int]] = field(default_factory=list)
    # Whether no more new sequences of any class may start in this step.
    _closed: bool = False
    # Number of tokens of the step that a long prompt gets in any case.
    _keep: int = 1
    # The first prompt that is longer than the rest of the budget.
    _long_seq: Sequence | None = None
    # Number of tokens by which one tenant has received less than every other: the tenant being served, and once there
    # is a `_long_seq`, its tenant.
    _owed: float = 0.0
    # Number of tokens reserved for `_long_seq`.
    _rest: int = 0
    # Number of slabs reserved for `_long_seq`.
    _aside: int = 0
    # Whether a prompt finishes its prefill in this step.
    _ending: bool = False
    _found: dict[str, PrefixHit] = field(default_factory=dict)
    # The chunks being computed, and the best priority of the sequences that compute each of them.
    _computing: dict[bytes, int] | None = None

    def add_prompts(self, queues: dict[PromptQueueKey, Iterator[Sequence]]) -> None:
        """Serve the queues in order of service, one prompt at a time.

        Tokens given in this step count as service at once.
        """
        given: Counter[str] = Counter()
        limit = self.budget
        self._keep, half = max(1, limit // 4), max(1, limit // 2)
        while queues and self.budget > 0:
            key = min(
                queues,
                key=lambda key: (
                    key[0],
                    self.token_counter.served_tokens(key[1]) + given[key[1]],
                    key[1],
                ),
            )
            if self._long_seq is not None and key[0] > self._long_seq.tenancy.priority:
                break
            before = self.budget
            if self._long_seq is None:
                self._owed = self._service_deficit(key, queues, given)
            if not self._serve_next(queues[key]):
                del queues[key]
            given[key[1]] += before - self.budget
        if self._long_seq is not None:
            self._room_of(self._long_seq).free += self._aside
            shares = self.shares_steps and self._owed <= 0
            most = self._keep if self._ending else half if shares else limit
            self._grant_tokens(self._long_seq, min(self.budget + self._rest, most))

    def _service_deficit(
        self, key: PromptQueueKey, queues: Iterable[PromptQueueKey], given: Counter[str]
    ) -> float:
        """Tokens by which a queue's tenant has received less service than all others of its priority; 0 if alone."""
        own = self.token_counter.served_tokens(key[1]) + given[key[1]]
        others = [
            self.token_counter.served_tokens(name) + given[name]
            for level, name, _ in queues
            if name != key[1] and level == key[0]
        ]
        return max(0.0, min(others, default=own) - own)

    def _serve_next(self, seqs: Iterator[Sequence]) -> bool:
        """Serve the next prompt of a queue; False if no prompt of it can be served any more."""
        for seq in seqs:
            if self._is_shut_out(seq):
                return False
            if self._must_wait(seq):
                continue
            want, whole = self._wanted_tokens(seq), not self.limits.chunked_prefill
            if want > self.budget and whole and self.chunks:
                # A prompt that must be prefilled whole waits for a step in which it is the only prompt.
                self.budget = 0
                return False
            if not self._admit_sequence(seq):
                return False
            if want > self.budget and not whole and self._long_seq is None:
                self._share_budget(seq, want, seqs)
                return False
            if self._grant_tokens(seq, want if whole else min(want, self.budget)):
                # If it got no tokens, this prompt waits for memory and the next one is tried.
                return True
        return False

    def _share_budget(self, long_seq: Sequence, want: int, seqs: Iterator[Sequence]) -> None:
        """Offer the budget to shorter prompts behind `long_seq`, then to other queues; the rest is reserved for it."""
        keep, budget, room = min(self._keep, self.budget), self.budget, self._room_of(long_seq)
        self._aside = min(
            room.free,
            max(0, long_seq.slabs_for(self._start_position(long_seq) + keep) - self._held_slabs(long_seq)),
        )
        room.free -= self._aside
        behind = [
            seq
            for seq in islice(seqs, LOOKAHEAD_PROMPTS)
            if self._wanted_tokens(seq) < want and not self._must_wait(seq)
        ]
        spare = budget - keep
        for seq in sorted(behind, key=lambda seq: (self._wanted_tokens(seq), seq.number)):
            if spare <= 0:
                break
            if not self._is_shut_out(seq) and not self._must_wait(seq) and self._admit_sequence(seq):
                spare -= self._grant_tokens(seq, min(self._wanted_tokens(seq), spare))
        left, others = self.budget, max(0, budget // 2 - (budget - self.budget) - int(self._owed))
        self._long_seq, self._rest, self.budget = long_seq, left - others, others

    def _grant_tokens(self, seq: Sequence, count: int) -> int:
        """Plan the prefill of up to `count` tokens of `seq`, fewer if slabs are short; returns how many."""
        start, have, room = self._start_position(seq), self._held_slabs(seq), self._room_of(seq)
        count = seq.step_tokens(start, count)
        need = max(0, seq.slabs_for(start + count) - have)
        if need > room.free:
            if not self.limits.chunked_prefill or (seq.kept_slabs and start >= len(seq.prompt)):
                # An evicted sequence that was parked needs its whole bag.
                return 0
            need, count = room.free, (have + room.free) * CHUNK_TOKENS - start
        if count <= 0:
            return 0
        self.chunks.append(PrefillChunk(seq.key, start, count))
        self._ending = self._ending or start + count >= seq.total
        if need:
            self.grow.append((seq.key, need))
        room.free -= need
        self.budget -= count
        return count

    def _wanted_tokens(self, seq: Sequence) -> int:
        """Tokens of `seq` to prefill in one step: all of them, or MAX_SCORED_ROWS at most if its prompt is scored."""
        start = self._start_position(seq)
        pending = seq.step_tokens(start, seq.total - start)
        scored = self.limits.chunked_prefill and seq.scores_prompt
        return min(pending, MAX_SCORED_ROWS) if scored else pending

    def _start_position(self, seq: Sequence) -> int:
        """The position at which the prefill of `seq` continues: its computed, parked or cached tokens."""
        if seq.key in self.running:
            return seq.computed
        known = self._peek_prefix(seq).chunks
        # Parked KV continues the cached chunks that other sequences held. If these chunks are gone, all KV is
        # computed again.
        return seq.computed if seq.parked and known >= seq.parked_from else known * CHUNK_TOKENS

    def _held_slabs(self, seq: Sequence) -> int:
        """Slabs that `seq` holds, or would hold by attaching its cached prefix."""
        return len(seq.slabs) if seq.key in self.running else self._peek_prefix(seq).chunks

    def _peek_prefix(self, seq: Sequence) -> PrefixHit:
        """The cached prefix of `seq`, looked up once per step."""
        found = self._found.get(seq.key)
        if found is None:
            found = self._found[seq.key] = find_prefix(seq, self._room_of(seq).availability)
        return found

    def _room_of(self, seq: Sequence) -> ArenaRoom:
        """The room of the arena of `seq`."""
        return self.rooms[self.limits.arena_name(seq)]

    def _is_shut_out(self, seq: Sequence) -> bool:
        """Whether `seq` is new and no more new sequences may start, or too many were examined in this step."""
        if seq.key in self.running:
            return False
        self._closed = self._closed or self.seats <= 0 or len(self._found) > 2 * LOOKAHEAD_PROMPTS
        return self._closed or self._room_of(seq).blocked is not None

    def _must_wait(self, seq: Sequence) -> bool:
        """Whether `seq` should wait: its grammar is not compiled, too many others evict, or a running sequence computes
        its next chunk already.

        That chunk will be shared, so waiting is better than computing it twice, unless the other sequence has a worse
        priority.
        """
        if seq.key in self.running:
            return False
        if not seq.ready or (seq.keep.evicts and not seq.parked and self.evicting_left <= 0):
            return True
        if seq.parked or seq.scores_prompt:
            return False
        at, keys = self._peek_prefix(seq).chunks, seq.attachable_keys()
        if at >= len(keys):
            return False
        return self._claimed_chunks().get(keys[at], seq.tenancy.priority + 1) <= seq.tenancy.priority

    def _claimed_chunks(self) -> dict[bytes, int]:
        """The chunks that running prefills compute, with the best priority of these prefills; computed once."""
        if self._computing is None:
            self._computing = {}
            for seq in self.running.values():
                if not seq.decoding:
                    self._claim_chunks(seq, seq.computed)
        return self._computing

    def _claim_chunks(self, seq: Sequence, start: int) -> None:
        """Note that `seq` computes its full chunks from position `start` on."""
        claims, priority = self._claimed_chunks(), seq.tenancy.priority
        for key in seq.keys[start // CHUNK_TOKENS : seq.target // CHUNK_TOKENS]:
            claims[key] = min(claims.get(key, priority), priority)

    def _admit_sequence(self, seq: Sequence) -> bool:
        """Whether `seq` runs, or may start now because it fits; if so, its slabs and a seat are reserved."""
        if seq.key in self.running:
            return True
        found, whole = self._peek_prefix(seq), self.limits.expected_tokens(seq, self.ratio)
        room = self._room_of(seq)
        if found.slab_cost(seq, seq.total) > room.free or (
            not room.alone and found.slab_cost(seq, whole) > room.left
        ):
            room.blocked = seq
            return False
        self.admitted.append(seq.key)
        self.seats -= 1
        self.evicting_left -= seq.keep.evicts and not seq.parked
        room.alone = False
        room.free -= found.unheld
        room.left -= found.slab_cost(seq, whole)
        self._claim_chunks(seq, self._start_position(seq))
        return True
