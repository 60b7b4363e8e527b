"""How much those that run are expected to grow, and what it costs to take a sequence's memory away (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Ratio:
    """The share of what they still may write that running sequences are reckoned to write.

    1 would reserve all of `max_tokens` and leave most of the pool empty; 0 would admit everybody and preempt all the
    time. So it falls slowly while all is well and jumps at a preemption.
    """

    value: float = 0.5
    lowest: float = 0.05
    fall: float = 0.0005  # per step in which something decodes
    jump: float = 0.2  # per preemption

    def calm(self) -> None:
        """A step went by without a preemption."""
        self.value = max(self.lowest, self.value - self.fall)

    def tight(self) -> None:
        """A sequence had to be preempted."""
        self.value = min(1.0, self.value + self.jump)


@dataclass(slots=True)
class Rate:
    """Amount per second, as measured: recent work counts more. `value` is a guess until something was measured."""

    value: float
    memory: float = 0.9
    _amount: float = 0.0
    _seconds: float = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """`amount` took `seconds`."""
        self._amount = self.memory * self._amount + amount
        self._seconds = self.memory * self._seconds + seconds
        if self._amount > 0 and self._seconds > 0:
            self.value = self._amount / self._seconds


def parks(tokens: int, num_bytes: int, read_rate: float, copy_rate: float) -> bool:
    """Whether to copy a preempted sequence's KV away and back, rather than to compute it again.

    `tokens` with `num_bytes` of KV, at `read_rate` tokens and `copy_rate` bytes per second.
    """
    return 2 * num_bytes / copy_rate < tokens / read_rate
