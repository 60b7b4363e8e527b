"""Defines the step cost that is fitted to measurements, and how pipeline stages change it.

Source: DistServe appendix A and its artefact's fits (prefill a + b·Σl + c·Σl², decode a + b·context + c·rows).
Here, unlike there, a cost never falls when the batch grows: no coefficient is negative, and a decode step costs the
larger of its lines. Otherwise the search could exploit a batch size at which the cost drops. All times are seconds.
There is no numpy here: the simulator calls these functions millions of times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from planner.types import CostModel, LinkSpec, StepBatch

CostLine = tuple[float, float, float]
# Measured time / predicted time, by kind of step and by size class (`step_size_class` gives both indices).
RatiosBySize = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step as a function of its batch (a `planner.types.CostModel`).

    `prefill` is (constant, per token, per squared token). Each `decode` line is (constant, per token of context, per
    row); the largest line counts. A mixed step pays for both kinds of work, but saves `shared` of the smaller constant
    (1: weights are read once; 0: two passes), and pays `cross` per prompt token × row. With `pp` pipeline stages the
    work is divided evenly, and each stage adds `hop_s` seconds.

    Raises:
        ValueError: a coefficient is negative, `shared` is not within 0 to 1, or there is no decode line.
    """

    prefill: CostLine
    decode: tuple[CostLine, ...]
    pp: int = 1
    hop_s: float = 0.0
    shared: float = 1.0
    cross: float = 0.0

    def __post_init__(self) -> None:
        numbers = (*self.prefill, *(number for line in self.decode for number in line))
        if min(*numbers, self.hop_s, self.cross) < 0 or not 0 <= self.shared <= 1:
            raise ValueError(f"a cost must not fall when the batch grows: {self}")
        if not self.decode or self.pp < 1:
            raise ValueError(f"a cost needs at least one decode line and one stage: {self}")

    def work_s(self, batch: StepBatch) -> float:
        """Seconds of all stages together, without hops; 0 for an empty batch."""
        if not batch.rows:
            if not batch.tokens:
                return 0.0
            constant, per_token, per_square = self.prefill
            return constant + per_token * batch.tokens + per_square * batch.squares
        rows, context, longest = batch.rows, batch.context, 0.0
        if not batch.tokens:
            for constant, per_context, per_row in self.decode:
                seconds = constant + per_context * context + per_row * rows
                if seconds > longest:
                    longest = seconds
            return longest
        first, per_token, per_square = self.prefill
        for constant, per_context, per_row in self.decode:
            smaller = constant if constant < first else first
            seconds = first + constant - self.shared * smaller + per_context * context + per_row * rows
            if seconds > longest:
                longest = seconds
        work = per_token * batch.tokens + per_square * batch.squares + self.cross * batch.tokens * rows
        return longest + work

    def across(self, links: int, link: LinkSpec, state_bytes: float) -> StepCost:
        """The cost if `links` of the links between pipeline stages are `link`, which carries each hidden state."""
        handed = links * state_bytes / link.bytes_per_s
        first, token, square = self.prefill
        return replace(
            self,
            prefill=(first, token + handed, square),
            decode=tuple((constant, context, row + handed) for constant, context, row in self.decode),
            hop_s=self.hop_s + links * link.latency_s / self.pp,
        )

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of a step through all stages, with the hops between them (see `CostModel`)."""
        work = self.work_s(batch)
        return work + self.pp * self.hop_s if self.pp > 1 and work else work

    def stage_s(self, batch: StepBatch) -> float:
        """Seconds for which the step occupies one stage (see `CostModel`)."""
        work = self.work_s(batch)
        return work / self.pp + self.hop_s if self.pp > 1 and work else work


@dataclass(frozen=True, slots=True)
class CostWithOverhead:
    """A step cost plus `extra_s` seconds per step for the engine's own work, as measured in a profile."""

    cost: CostModel
    extra_s: float

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of a step, overhead included."""
        return self.cost.step_s(batch) + self.extra_s

    def stage_s(self, batch: StepBatch) -> float:
        """Seconds in the slowest stage, overhead included."""
        return self.cost.stage_s(batch) + self.extra_s


def step_size_class(batch: StepBatch) -> tuple[int, int]:
    """(kind, size) of a step; steps of the same class are expected to cost about the same.

    The kind is 0 for decode steps, 1 for prefill and 2 for mixed steps. The size of a decode step is its number of
    rows; the size of other steps grows by 1 when their prompt tokens grow by √2, beginning with 1.
    """
    if not batch.tokens:
        return 0, batch.rows
    return 1 + (batch.rows > 0), 1 + round(2 * log2(batch.tokens))


@dataclass(frozen=True, slots=True)
class StepVariation:
    """How measured steps of one worker deviate from its fitted cost, for a replay of a shared machine.

    All are ratios of measured to fitted time. `alone` and `beside` are the mean ratios, as (decode steps, steps with
    prefill), while no other worker of the machine runs a step, and while one does. `sizes` multiply them for each
    `step_size_class`, since kernels change with the number of rows. `tapes` are the remaining ratios of (decode,
    prefill) steps in the order in which they ran: a slow phase lasts for many steps, and independent draws
    would average it away. `gaps_s` are the seconds before a decode step by number of rows; empty means that the
    machine's usual gap holds.
    """

    alone: tuple[float, float] = (1.0, 1.0)
    beside: tuple[float, float] = (1.0, 1.0)
    sizes: RatiosBySize = ((1.0,), (1.0,), (1.0,))
    tapes: tuple[tuple[float, ...], tuple[float, ...]] = ((1.0,), (1.0,))
    gaps_s: tuple[float, ...] = ()

    def gap_s(self, batch: StepBatch, usual_s: float) -> float:
        """Seconds between the previous step and this one; `usual_s` for steps that only prefill."""
        gaps_s = self.gaps_s
        return gaps_s[min(batch.rows, len(gaps_s)) - 1] if batch.rows and gaps_s else usual_s

    def factor(self, batch: StepBatch, beside: bool) -> float:
        """Expected measured time / fitted cost of such a step, without the variation that the tapes add."""
        kind, size = step_size_class(batch)
        sizes = self.sizes[kind]
        factors = self.beside if beside else self.alone
        return factors[batch.tokens > 0] * sizes[min(size, len(sizes)) - 1]

    def after(self, share: float) -> StepVariation:
        """The same variation, with its tapes rotated: they start at `share` (0 to 1) of their length."""

        def rotated(tape: tuple[float, ...]) -> tuple[float, ...]:
            place = int(share * len(tape))
            return tape[place:] + tape[:place]

        return replace(self, tapes=(rotated(self.tapes[0]), rotated(self.tapes[1])))
