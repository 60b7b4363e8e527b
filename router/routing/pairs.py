"""Which pairs of workers could serve a request, and the workers of many pairs (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property

# A prefill and a decode worker, or (None, name) for a worker that does both.
Pair = tuple[str | None, str]


class PairList(list[Pair]):
    """Pairs, with the workers among them. It is not changed after it was made."""

    @cached_property
    def sources(self) -> frozenset[str]:
        """The prefill workers."""
        return frozenset({source for source, _ in self if source is not None})

    @cached_property
    def targets(self) -> frozenset[str]:
        """The decode workers, those that also prefill included."""
        return frozenset({target for _, target in self})

    @cached_property
    def alone(self) -> frozenset[str]:
        """The workers that do both prefill and decode."""
        return frozenset({target for source, target in self if source is None})

    @cached_property
    def workers(self) -> frozenset[str]:
        """All workers."""
        return self.sources | self.targets

    def without(self, workers: Collection[str]) -> PairList:
        """The pairs that use none of `workers`."""
        if self.workers.isdisjoint(workers):
            return self
        return PairList([pair for pair in self if pair[1] not in workers and pair[0] not in workers])

    @cached_property
    def with_local(self) -> PairList:
        """These, and the decode workers of linked pairs, each as a pair by itself that does both prefill and decode."""
        linked = {target for source, target in self if source is not None}
        return PairList([*self, *((None, name) for name in sorted(linked))])


def workers_of_pair(pair: Pair) -> set[str]:
    """The one or two workers of a pair."""
    return {name for name in pair if name is not None}


def pair_list(pairs: Iterable[Pair]) -> PairList:
    """The pairs with their workers, without a copy if they have them already."""
    return pairs if isinstance(pairs, PairList) else PairList(pairs)
