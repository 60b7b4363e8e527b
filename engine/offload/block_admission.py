"""Which sequences are in a block, and what a step computes of each: slots, rooms for KV, batches. No torch, no clock.

    waiting ──admit──▶ a row of a batch, and chunks of its KV room ──release──▶ (its place is free for another)

A step (`plan_step`) has one token of every sequence that decodes and the prompts of those that came since the last
one, batch by batch: FlexGen's column (section 4.2), in which sequences that end leave and others take their place.

A sequence is admitted with room for an answer of the policy's length, or for its longest answer if that is shorter. If
its answer becomes longer, it gets chunk after chunk (`grow_rooms`), so that a line without `max_tokens` does not keep a
whole batch for itself. If no chunk is free, the youngest sequence of the batch is put back and computed again later.
The oldest one always goes on, so a block never stands still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from diptych.chunks import CHUNK_TOKENS
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import batch_chunks
from engine.sequence import Sequence, SequenceRefused, num_chunks


@dataclass(slots=True)
class BlockBatch:
    """One batch of a block: its sequences by key, and the chunks of its KV room that are free."""

    rows: int
    free: list[int]
    running: dict[str, Sequence] = field(default_factory=dict)
    # The waiting sequence for which this batch runs empty: no other one enters it.
    kept_for: str | None = None

    def has_room(self, chunks: int) -> bool:
        """Whether another sequence with so many chunks fits."""
        return len(self.running) < self.rows and len(self.free) >= chunks


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Compute the next `count` tokens of a sequence of batch `batch`."""

    batch: int
    seq: Sequence
    count: int


class BlockAdmission:
    """The sequences of one block engine, for a model whose sequences have at most `max_model_len` tokens."""

    def __init__(self, policy: BlockPolicy, max_model_len: int, max_waiting: int = 1024) -> None:
        chunks = batch_chunks(policy)
        self.policy, self.max_waiting = policy, max_waiting
        # The most tokens of a sequence: what the model takes, and what a batch has room for.
        self.max_model_len = min(max_model_len, chunks * CHUNK_TOKENS)
        self.waiting: dict[str, Sequence] = {}
        self.batches = [BlockBatch(policy.rows, list(range(chunks))) for _ in range(policy.batches)]
        self._arrivals = 0
        # How many later sequences took a place while this one waited for room, by key.
        self._passes: Counter[str] = Counter()
        # Times that a sequence lost its place to an older one.
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self.waiting) + self.num_running

    @property
    def num_running(self) -> int:
        """Sequences that have a place in the block."""
        return sum(len(batch.running) for batch in self.batches)

    def sequences(self) -> Iterator[Sequence]:
        """All sequences, those in the block first."""
        return chain(chain.from_iterable(one.running.values() for one in self.batches), self.waiting.values())

    def find(self, key: str) -> Sequence | None:
        """The sequence of this key, wherever it is."""
        return next((seq for seq in self.sequences() if seq.key == key), None)

    def first_chunks(self, seq: Sequence) -> int:
        """Chunks that `seq` gets with its place: for its tokens, and for those that its answer is expected to have."""
        left = max(0, seq.sampling.max_tokens - len(seq.output))
        return num_chunks(min(seq.total + min(left, self.policy.output_tokens), self.max_model_len))

    def add(self, seq: Sequence, now_s: float) -> None:
        """Queue a sequence.

        Raises:
            SequenceRefused: the queue is full ("overloaded"), or the sequence can never run in this block
                ("internal_error").
            ValueError: it is already here.
        """
        if self.find(seq.key) is not None:
            raise ValueError(f"{seq.key} is already here")
        if not 0 < seq.total <= self.max_model_len:
            raise SequenceRefused(
                "internal_error", f"{seq.total} tokens are not within 1 to {self.max_model_len}"
            )
        if seq.keep.evicts:
            raise SequenceRefused("internal_error", "a block keeps all KV")
        if len(self.waiting) >= self.max_waiting:
            raise SequenceRefused("overloaded", "the worker's queue is full", f"{len(self.waiting)} wait")
        self._arrivals += 1
        seq.number, seq.arrived_s, seq.target = self._arrivals, now_s, seq.total
        self.waiting[seq.key] = seq

    def admit(self, now_s: float) -> list[Sequence]:
        """Give places to waiting sequences, in order of arrival; those that do not fit let later ones pass.

        A sequence that has let as many pass as the block has places gets a batch kept for it until it fits.
        """
        admitted, left_out = [], list[str]()
        for seq in list(self.waiting.values()):
            if not seq.ready:
                continue
            need = self.first_chunks(seq)
            batch = self._find_batch(seq.key, need)
            if batch is None:
                left_out.append(seq.key)
                continue
            self._passes.update(left_out)
            self._forget_waiting(seq.key)
            seq.slabs, batch.free = batch.free[:need], batch.free[need:]
            seq.computed, seq.target = 0, seq.total
            seq.started_s = now_s if seq.started_s is None else seq.started_s
            batch.running[seq.key] = seq
            admitted.append(seq)
        return admitted

    def _find_batch(self, key: str, need: int) -> BlockBatch | None:
        """The batch with the most room of those that a waiting sequence may enter; None if it does not fit."""
        free = [one for one in self.batches if one.kept_for is None]
        kept = [one for one in self.batches if one.kept_for == key]
        best = max(free + kept, key=lambda one: (one.has_room(need), len(one.free)), default=None)
        if best is not None and best.has_room(need):
            return best
        if free and not kept and self._passes[key] >= self.policy.sequences:
            max(free, key=lambda one: len(one.free)).kept_for = key
        return None

    def _forget_waiting(self, key: str) -> Sequence:
        """A sequence does not wait any more. Raises KeyError if it did not."""
        self._passes.pop(key, None)
        for batch in self.batches:
            if batch.kept_for == key:
                batch.kept_for = None
        return self.waiting.pop(key)

    def release(self, key: str) -> Sequence:
        """Forget a sequence, wherever it is; its room is free again. Raises KeyError if it is not here."""
        if key in self.waiting:
            return self._forget_waiting(key)
        batch = next((one for one in self.batches if key in one.running), None)
        if batch is None:
            raise KeyError(key)
        seq = batch.running.pop(key)
        batch.free += seq.slabs
        seq.slabs = []
        return seq

    def grow_rooms(self) -> None:
        """Give each sequence of the block the chunks for its tokens; the oldest ones take them from the youngest.

        Call it between two steps, before others are admitted.
        """
        for batch in self.batches:
            for seq in sorted(batch.running.values(), key=lambda seq: seq.number):
                while seq.key in batch.running and num_chunks(seq.total) > len(seq.slabs):
                    if batch.free:
                        seq.slabs.append(batch.free.pop(0))
                        continue
                    youngest = max(batch.running.values(), key=lambda seq: seq.number)
                    self.put_back(youngest.key)
                    self.preemptions += 1

    def put_back(self, key: str) -> None:
        """Let a sequence of the block wait again, in order of arrival; it will be computed from its first token.

        Raises KeyError if it is not here.
        """
        seq = self.release(key)
        seq.computed, seq.target = 0, seq.total
        waiting = sorted([seq, *self.waiting.values()], key=lambda seq: seq.number)
        self.waiting = {seq.key: seq for seq in waiting}

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything now."""
        return self.num_running > 0 or any(seq.ready for seq in self.waiting.values())

    def plan_step(self) -> list[SequenceStep]:
        """What the next step computes, batch after batch.

        A batch has at most the tokens that its room for activations holds; what is left of a prompt comes in the next
        step.
        """
        room, steps = self.policy.rows * self.policy.prompt_tokens, []
        for number, batch in enumerate(self.batches):
            left = room
            decoding = [seq for seq in batch.running.values() if seq.pending == 1]
            others = [seq for seq in batch.running.values() if seq.pending > 1]
            for seq in decoding + others:
                count = min(seq.pending, left)
                if count > 0:
                    steps.append(SequenceStep(number, seq, count))
                    left -= count
        return steps

    # ---- books

    @property
    def num_chunks(self) -> int:
        """Chunks of KV in all batches, in each layer."""
        return len(self.batches) * batch_chunks(self.policy)

    @property
    def used(self) -> int:
        """Chunks that sequences hold; 0 at rest."""
        return self.num_chunks - sum(len(batch.free) for batch in self.batches)

    def owners(self) -> dict[str, int]:
        """How many chunks each sequence holds."""
        return {key: len(seq.slabs) for batch in self.batches for key, seq in batch.running.items()}

    def check_books(self) -> None:
        """Check that every chunk is free or has exactly one owner. Raises AssertionError if not."""
        for batch in self.batches:
            held = [chunk for seq in batch.running.values() for chunk in seq.slabs]
            assert sorted(held + batch.free) == list(range(batch_chunks(self.policy))), "a chunk is lost"

    # ---- deadlines

    def expired_keys(self, now_s: float) -> list[str]:
        """Keys of the sequences whose time is up."""
        return [seq.key for seq in self.sequences() if seq.deadline_s <= now_s]
