"""Runs of a model on several ranks whose heads drop rows."""

from __future__ import annotations

import numpy as np

from diptych.eviction_spec import FASTGEN, KeepSpec
from kvcache.eviction.kept_rows import KeptRows
from kvcache.eviction.policies import FULL, KeepRule
from tests.engine.cpu.eviction.evicted_runs import (
    EvictedRun,
    read_map,
    source_tokens,
)
from tests.engine.cpu.spread_model import SpreadModel

PROMPT, ANSWER, SLABS = 330, 140, 40
SPEC = KeepSpec(0.9, 64, FASTGEN)
TOKENS = source_tokens(PROMPT + ANSWER)
COUNTS = [300, 30, 64, 64, 8]


class SpreadRun(EvictedRun):
    """A sequence on a runner of several ranks; `rank_maps` are the maps of all ranks at each decision."""

    def __init__(self, made: SpreadModel, tokens: list[int], prompt: int, spec: KeepSpec, key: str) -> None:
        super().__init__(made.runner, made.pools[0][1], tokens, prompt, spec, key)
        self.made, self.rank_maps = made, list[list[KeptRows]]()

    def evict(self) -> None:
        """As for one rank; slabs that the sequence gave back are not-a-number on all ranks."""
        super().evict()
        bag = self.slabs[self.spec.boundary_chunks + 1 :]
        self.rank_maps.append([read_map(pool, bag) for _, pool in self.made.pools])
        for kept in self.rank_maps[-1]:
            kept.check()

    def _give_back(self, slabs: list[int]) -> None:
        for _, pool in self.made.pools:
            pool.data[slabs] = float("nan")
        super()._give_back(slabs)


def assert_same_rows(found: np.ndarray, wanted: np.ndarray, policy: int) -> None:
    """Equal, but for frequent tokens whose scores differ by rounding alone: partial sums are added in another order."""
    swapped = len(np.setxor1d(found, wanted))
    parts = () if policy == FULL else KeepRule().policy_parts(policy)
    assert swapped <= (2 if "frequent" in parts else 0)


def release(run: SpreadRun) -> None:
    run.pool.give_back(run.slabs, run.key)
    run.runner.forget_kept(run.key)
