"""The waiting sequences of an engine, in one queue per priority, tenant and KV class, each in order of arrival."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from engine.scheduling.fairness import VirtualTokenCounter
from engine.sequence import EngineLimits, Sequence

PromptQueueKey = tuple[int, str, str]  # priority, tenant, KV class


class PromptQueues:
    """Waiting sequences by key, and by queue. Of `limits`, only the division into arenas counts."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.waiting: dict[str, Sequence] = {}
        # Tokens that are to be prefilled, of all waiting sequences.
        self.num_tokens = 0
        # Number of tokens that each waiting sequence contributes to `num_tokens`.
        self._pending: dict[str, int] = {}
        # The waiting sequences of each queue, in order of arrival.
        self._queues: dict[PromptQueueKey, dict[str, Sequence]] = {}

    def key_of(self, seq: Sequence) -> PromptQueueKey:
        """The queue in which a sequence waits."""
        return seq.tenancy.priority, seq.tenancy.tenant, self._limits.arena_name(seq)

    def add(self, seq: Sequence) -> None:
        """Put a sequence to its place in the order of arrival, which is its own if it waited before."""
        self.waiting[seq.key] = seq
        self._pending[seq.key] = seq.pending
        self.num_tokens += seq.unprefilled_tokens
        name = self.key_of(seq)
        queue = self._queues.setdefault(name, {})
        late = not queue or next(reversed(queue.values())).number < seq.number
        queue[seq.key] = seq
        if not late:
            self._queues[name] = {
                other.key: other for other in sorted(queue.values(), key=lambda seq: seq.number)
            }

    def remove(self, key: str) -> Sequence:
        """Take a sequence out of its queue. Raises KeyError if it does not wait."""
        seq = self.waiting.pop(key)
        self.num_tokens -= self._pending.pop(key)
        name = self.key_of(seq)
        del self._queues[name][key]
        if not self._queues[name]:
            del self._queues[name]
        return seq

    def list_arena(self, name: str, token_counter: VirtualTokenCounter) -> Iterator[Sequence]:
        """The waiting sequences of an arena, in the order in which they are to be served."""
        order = sorted(self._queues, key=lambda key: (key[0], token_counter.served_tokens(key[1]), key[1]))
        return chain.from_iterable(self._queues[key].values() for key in order if key[2] == name)

    def open_queues(self, prefilling: Iterable[Sequence]) -> dict[PromptQueueKey, Iterator[Sequence]]:
        """The sequences in prefill, then the waiting ones, by queue."""
        begun: dict[PromptQueueKey, list[Sequence]] = {}
        for seq in prefilling:
            begun.setdefault(self.key_of(seq), []).append(seq)
        names = list({**begun, **self._queues})
        if self._limits.arena_slabs:
            # Queues of one tenant are served in this order: the one with the oldest prompt first.
            heads = {name: islice(self._queues.get(name, {}).values(), 1) for name in names}
            names.sort(key=lambda name: min(seq.number for seq in chain(begun.get(name, ()), heads[name])))
        queues: dict[PromptQueueKey, Iterator[Sequence]] = {}
        for name in names:
            first = sorted(begun.get(name, ()), key=lambda seq: seq.number)
            queues[name] = chain(first, self._queues.get(name, {}).values())
        return queues

    def without(self, held: set[str]) -> PromptQueues:
        """A copy that lacks the sequences with these keys."""
        copy = PromptQueues(self._limits)
        for seq in self.waiting.values():
            if seq.key not in held:
                copy.add(seq)
        return copy
