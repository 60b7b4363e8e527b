"""How long a prefill step must be to keep the device busy: L_m, chosen from a measured curve.

Source: DistServe §4.3 (prefill batches are built up to L_m tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.work import Work
from kvcache.layout import CHUNK_TOKENS

SHORTEST = 16
SHARE = 0.95  # of the best rate: what counts as busy
STEP_S = 0.5e-3  # what a step takes besides the model, which is all that `measure` runs: deciding, telling, hashing


class Slabs(Protocol):
    """Where memory comes from (`kvcache.holdings.Holdings`)."""

    @property
    def free(self) -> int: ...

    def take(self, key: str, n: int) -> list[int]: ...

    def end(self, key: str) -> None: ...


def shortest(curve: Sequence[tuple[int, float]], share: float = SHARE) -> int:
    """The fewest tokens of (tokens, seconds) that reach `share` of the best tokens per second; 0 without a curve."""
    best = max((tokens / seconds for tokens, seconds in curve), default=0.0)
    return min((tokens for tokens, seconds in curve if tokens / seconds >= share * best), default=0)


def measure(
    run: Callable[[list[Work]], Any],
    slabs: Slabs,
    longest: int,
    clock: Callable[[], float],
    patience_s: float = 0.5,
) -> list[tuple[int, float]]:
    """(tokens, seconds of a step) of single prompts of 16, 32, 64 ... up to `longest` tokens, the better of two runs.

    No length begins that would, at the rate seen so far, end after `patience_s`. Memory is taken from `slabs`, and
    given back.
    """
    owner, begun_s = "saturation", clock()
    longest = min(longest, slabs.free * CHUNK_TOKENS)
    curve: list[tuple[int, float]] = []
    held = slabs.take(owner, -(-longest // CHUNK_TOKENS))
    tokens, last_s = min(SHORTEST, longest), 0.0
    try:
        while 0 < tokens <= longest and clock() - begun_s + 4 * last_s <= patience_s:
            last_s = min(_seconds(run, tokens, held, clock) for _ in range(2))
            curve.append((tokens, last_s + STEP_S))
            tokens *= 2
    finally:
        slabs.end(owner)
    return curve


def _seconds(
    run: Callable[[list[Work]], Any], tokens: int, slabs: list[int], clock: Callable[[], float]
) -> float:
    begun_s = clock()
    run([Work([0] * tokens, 0, slabs, "last")])
    return max(clock() - begun_s, 1e-9)
