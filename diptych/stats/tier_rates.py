"""How fast the tiers of KV below a pool are read, and how much of a prefix to read back (pure).

Workers decide by it, for prompts and for KV that they would pull, and the router predicts what they decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from diptych.stats.tiers import TierStats

# Leading chunks by the tier that they are in: how many of them follow each other there.
TierRuns = Iterable[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class TierRate:
    """How fast a tier is read: seconds before the first byte, and bytes per second, verified."""

    delay_s: float
    bytes_per_s: float


# The tiers, and how fast they are read until that was measured.
HOST, DISK = "host", "disk"
FIRST_RATES = {HOST: TierRate(0.002, 1e9), DISK: TierRate(0.004, 2e8)}


class RestoreChoice(NamedTuple):
    """How many leading chunks to read back, and the seconds that this saves."""

    num_chunks: int
    saved_s: float


def choose_restore(
    runs: TierRuns, chunk_bytes: int, rates: Mapping[str, TierRate], chunk_s: float
) -> RestoreChoice:
    """How many of the leading chunks to read back: as many as save most time, or none.

    Args:
        runs: the leading chunks that are stored, by tier.
        chunk_bytes: the bytes of a chunk.
        rates: how fast each tier of `runs` is read.
        chunk_s: the seconds that a chunk takes otherwise: to compute it, or to pull it.
    """
    choice, count, saved_s, asked = RestoreChoice(0, 0.0), 0, 0.0, set[str]()
    for tier, length in runs:
        rate = rates[tier]
        if tier not in asked:
            asked.add(tier)
            saved_s -= rate.delay_s
        count += length
        saved_s += length * (chunk_s - chunk_bytes / rate.bytes_per_s)
        if saved_s > choice.saved_s:
            choice = RestoreChoice(count, saved_s)
    return choice


def group_runs(tiers: Many[str]) -> list[tuple[str, int]]:
    """The runs of chunks that are in these tiers."""
    return [(tier, len(list(chunks))) for tier, chunks in groupby(tiers)]


def predict_restore_s(tiers: Many[str], chunk_bytes: int, rates: Mapping[str, TierRate]) -> float:
    """For how many seconds chunks in these tiers are read."""
    return sum(rates[tier].delay_s for tier in set(tiers)) + sum(
        chunk_bytes / rates[tier].bytes_per_s for tier in tiers
    )


def reported_rates(tiers: Mapping[str, TierStats]) -> dict[str, TierRate]:
    """The rates of those tiers whose worker says how fast it reads them."""
    return {
        name: TierRate(one.read_delay_s, one.read_bytes_per_s)
        for name, one in tiers.items()
        if one.read_bytes_per_s > 0
    }
