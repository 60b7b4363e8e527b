"""Estimates how much running sequences will still grow, and whether swapping a preempted one out is worth it (pure)."""

from __future__ import annotations

from dataclasses import dataclass

# Prompt tokens that an engine computes per second, until it was measured.
FIRST_PREFILL_RATE = 2000.0


@dataclass(slots=True)
class NewTokenRatio:
    """The share of their remaining `max_tokens` that running sequences are expected to generate.

    Admission reserves memory by it. 1 would leave most of the pool empty, 0 would cause preemptions all the time. So
    the ratio falls slowly while nothing is preempted, and jumps up at every preemption.
    """

    value: float = 0.5
    lowest: float = 0.05
    # Decrease of the ratio per step with decode rows.
    fall: float = 0.0005
    # Increase of the ratio per preemption.
    jump: float = 0.2

    def decay_once(self) -> None:
        """A step ended without a preemption."""
        self.value = max(self.lowest, self.value - self.fall)

    def raise_for_preemption(self) -> None:
        """A sequence was preempted."""
        self.value = min(1.0, self.value + self.jump)


@dataclass(slots=True)
class MeasuredRate:
    """A measured rate (amount per second) in which recent work counts more.

    `value` is a guess until the first sample.
    """

    value: float
    memory: float = 0.9
    _amount: float = 0.0
    _seconds: float = 0.0

    def add_sample(self, amount: float, seconds: float) -> None:
        """`amount` took `seconds`. Samples of 0 seconds were not timed, and are ignored."""
        if seconds <= 0:
            return
        self._amount = self.memory * self._amount + amount
        self._seconds = self.memory * self._seconds + seconds
        if self._amount > 0 and self._seconds > 0:
            self.value = self._amount / self._seconds


def swap_is_cheaper(tokens: int, num_bytes: int, prefill_rate: float, copy_rate: float) -> bool:
    """Whether copying a preempted sequence's KV out and back is faster than computing it again.

    The sequence has `tokens` with `num_bytes` of KV; `prefill_rate` is in tokens per second, `copy_rate` in bytes per
    second.
    """
    return 2 * num_bytes / copy_rate < tokens / prefill_rate
