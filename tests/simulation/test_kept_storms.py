"""Storms over requests whose heads drop KV: every answer is right to the last token, whatever moves and breaks."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.protocols import EvictionOrder
from kvcache.eviction.kept_rows import KeptRows
from tests.simulation.dropping_model import DroppingRunner, KeptState
from tests.simulation.faults import FAULTS
from tests.simulation.storms import run_kept_storm
from tests.simulation.virtual_laws import DONE, InvariantBroken

SEEDS = range(8)


def test_no_law_is_broken_while_heads_drop_rows() -> None:
    """There are hits, preemptions and migrations of such answers, and answers beyond further decision points."""
    seen = Counter[str]()
    for seed in SEEDS:
        try:
            world = run_kept_storm(seed, sorted(FAULTS))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for client in world.clients:
            if client.keep.evicts and client.end in DONE:
                seen["done"] += 1
                seen["migrated"] += client.moved_on
                seen["long"] += len(client.got) > 64
                seen["boundary"] += client.keep.boundary > 0
        for process in world.living():
            seen["preempted"] += sum(process.engine.stats.preemptions.values())
            seen["cached"] += process.holdings.prefix_hits
    print(seen)
    assert all(seen[what] for what in ("done", "migrated", "long", "boundary", "preempted", "cached")), seen


class LosingRunner(DroppingRunner):
    """Loses a row of every bag that comes from elsewhere, or back from the host tier."""

    def load_kept(
        self, key: str, boundary: int, length: int, bag_slabs: list[int], *segments: object
    ) -> None:
        super().load_kept(key, boundary, length, bag_slabs, *segments)
        at, _ = self._row_places(self.states[key], 0, 0)
        self._memory.bytes[at : at + self._row_bytes] = bytes(self._row_bytes)


class HistoricalRunner(DroppingRunner):
    """Decides by what it happens to know of a sequence: behind a hand-over it keeps all rows."""

    def _choose(self, order: EvictionOrder, state: KeptState) -> KeptRows:
        kept = super()._choose(order, state)
        if (0, order.prompt_tokens - 1) in state.recorded:
            return kept
        there = [self._positions(order, state, layer) for layer in range(len(kept.policies))]
        return KeptRows.from_heads(kept.layout, kept.boundary, kept.length, kept.policies, there)


@pytest.mark.parametrize("runners", [LosingRunner, HistoricalRunner])
def test_a_runner_that_goes_on_differently_elsewhere_is_seen(runners: type[DroppingRunner]) -> None:
    with pytest.raises(InvariantBroken, match="has got"):
        for seed in SEEDS:
            run_kept_storm(seed, ["slow"], runners)
