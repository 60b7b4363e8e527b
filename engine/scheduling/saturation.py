"""Measures how many tokens a prefill step needs to keep the device busy: the saturation length L_m.

Source: DistServe §4.3 (prefill batches are built up to L_m tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from diptych.chunks import CHUNK_TOKENS
from engine.step_work import StepWork

MIN_TOKENS = 16
# Share of the best tokens per second from which on a step counts as saturated.
SATURATED_SHARE = 0.95
# Most rounds of measurements; each round measures every length.
MAX_ROUNDS = 8
# Seconds of a step outside the model (scheduling, sending, hashing), which `measure_curve` does not run.
STEP_OVERHEAD_S = 0.5e-3


class SlabSource(Protocol):
    """Allocates slabs for the measurement (`kvcache.allocator.KvAllocator`)."""

    @property
    def free(self) -> int:
        """Slabs that can be allocated now."""

    def allocate(self, key: str, n: int) -> list[int]:
        """Allocate `n` slabs to the owner `key` and return their numbers."""

    def release(self, key: str) -> None:
        """Free all slabs of the owner `key`."""


def saturation_length(curve: Sequence[tuple[int, float]], share: float = SATURATED_SHARE) -> int:
    """The fewest tokens of `curve` (tokens, seconds) with `share` of the best tokens per second; 0 for an empty
    curve.
    """
    best = max((tokens / seconds for tokens, seconds in curve), default=0.0)
    return min((tokens for tokens, seconds in curve if tokens / seconds >= share * best), default=0)


def measure_curve(
    run: Callable[[list[StepWork]], Any],
    slabs: SlabSource,
    longest: int,
    clock: Callable[[], float],
    patience_s: float = 0.5,
) -> list[tuple[int, float]]:
    """(tokens, seconds of a step) for single prompts of 16, 32, 64 ... up to `longest` tokens.

    All lengths are measured in rounds, until `patience_s` seconds have passed, and the best time of each counts: other
    programs on the machine make some runs longer, long ones above all, but none shorter. A length is only begun if, at
    the rate measured so far, at least half of this time remains for the rounds after the first.

    A `clock` of CPU time is best, since it stands still while other programs use the core. Slabs come from `slabs`, and
    are released at the end.
    """
    owner, begun_s = "saturation", clock()
    longest = min(longest, slabs.free * CHUNK_TOKENS)
    best: dict[int, float] = {}
    held = slabs.allocate(owner, -(-longest // CHUNK_TOKENS))
    tokens, last_s = min(MIN_TOKENS, longest), 0.0
    try:
        while 0 < tokens <= longest and clock() - begun_s + 2 * last_s <= patience_s / 2:
            best[tokens] = last_s = _time_prefill(run, tokens, held, clock)
            tokens *= 2
        for _ in range(MAX_ROUNDS - 1):
            if clock() - begun_s + sum(best.values()) > patience_s:
                break
            for length, known_s in best.items():
                best[length] = min(known_s, _time_prefill(run, length, held, clock))
    finally:
        slabs.release(owner)
    return [(length, seconds + STEP_OVERHEAD_S) for length, seconds in best.items()]


def _time_prefill(
    run: Callable[[list[StepWork]], Any], tokens: int, slabs: list[int], clock: Callable[[], float]
) -> float:
    """Seconds of one prefill step of `tokens` tokens."""
    begun_s = clock()
    run([StepWork([0] * tokens, 0, slabs, "last")])
    return max(clock() - begun_s, 1e-9)
