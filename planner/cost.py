"""What a step costs: lines fitted to measurements, and how they change with the number of stages.

Source: DistServe appendix A and its artefact's fits (prefill a + b·Σl + c·Σl², decode a + b·context + c·rows), made
monotone: coefficients are not negative, and a decode step costs the larger of its lines, so that no batch size is a
cliff which a search could exploit. Seconds; no numpy, since the simulator asks millions of times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from planner.terms import Batch, Link

Line = tuple[float, float, float]
# As `size_of` tells kinds and sizes apart.
Sizes = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, `planner.terms.Cost`.

    `prefill` is (constant, per token, per square of tokens); `decode` lines are (constant, per token of context, per
    row), of which the largest holds. A step with both pays its work twice but its constants once: `shared` of the
    smaller constant is saved (1: weights are read once; 0: two passes). `cross` is per prompt token × row.
    With `pp` stages the work is divided evenly, and each stage adds `hop_s`.

    Raises:
        ValueError: a coefficient is negative, `shared` is not within 0 to 1, or there is no decode line.
    """

    prefill: Line
    decode: tuple[Line, ...]
    pp: int = 1
    hop_s: float = 0.0
    shared: float = 1.0
    cross: float = 0.0

    def __post_init__(self) -> None:
        numbers = (*self.prefill, *(number for line in self.decode for number in line))
        if min(*numbers, self.hop_s, self.cross) < 0 or not 0 <= self.shared <= 1:
            raise ValueError(f"a cost that can fall with the batch is refused: {self}")
        if not self.decode or self.pp < 1:
            raise ValueError(f"a cost needs a decode line and a stage: {self}")

    def work_s(self, batch: Batch) -> float:
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
            less = constant if constant < first else first
            seconds = first + constant - self.shared * less + per_context * context + per_row * rows
            if seconds > longest:
                longest = seconds
        work = per_token * batch.tokens + per_square * batch.squares + self.cross * batch.tokens * rows
        return longest + work

    def across(self, links: int, link: Link, state_bytes: float) -> StepCost:
        """With `links` of the ways between stages slower: each hands every token's hidden state over `link`."""
        handed = links * state_bytes / link.bytes_per_s
        first, token, square = self.prefill
        return replace(
            self,
            prefill=(first, token + handed, square),
            decode=tuple((constant, context, row + handed) for constant, context, row in self.decode),
            hop_s=self.hop_s + links * link.latency_s / self.pp,
        )

    def step_s(self, batch: Batch) -> float:
        work = self.work_s(batch)
        return work + self.pp * self.hop_s if self.pp > 1 and work else work

    def stage_s(self, batch: Batch) -> float:
        work = self.work_s(batch)
        return work / self.pp + self.hop_s if self.pp > 1 and work else work


def size_of(batch: Batch) -> tuple[int, int]:
    """Which steps are of one size, from 1 on: of those that only write (0) by rows, of those that only read (1) or do
    both (2) by half powers of two of their tokens.
    """
    if not batch.tokens:
        return 0, batch.rows
    return 1 + (batch.rows > 0), 1 + round(2 * log2(batch.tokens))


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How the steps of one worker of a shared machine differ from their cost.

    `alone` and `beside` are seconds over cost while no other worker of the machine is in a step, and while one is: of
    steps that only write, and of steps that read. `sizes` multiply that for steps of each `size_of`: a line through
    all sizes is off where a kernel changes with the rows. `tapes` are what is left of each step of either kind, in the
    order in which they ran: a slow moment lasts for many steps, and what is drawn step by step would lose that in the
    mean. `gaps_s` are seconds before a step with rows, by their number; empty: as the machine says of all.
    """

    alone: tuple[float, float] = (1.0, 1.0)
    beside: tuple[float, float] = (1.0, 1.0)
    sizes: Sizes = ((1.0,), (1.0,), (1.0,))
    tapes: tuple[tuple[float, ...], tuple[float, ...]] = ((1.0,), (1.0,))
    gaps_s: tuple[float, ...] = ()

    def gap_s(self, batch: Batch, usual_s: float) -> float:
        """Seconds that go by before such a step; `usual_s` before one that only reads."""
        gaps_s = self.gaps_s
        return gaps_s[min(batch.rows, len(gaps_s)) - 1] if batch.rows and gaps_s else usual_s

    def factor(self, batch: Batch, beside: bool) -> float:
        """Seconds over cost of such a step, without what a tape says."""
        kind, size = size_of(batch)
        sizes = self.sizes[kind]
        factors = self.beside if beside else self.alone
        return factors[batch.tokens > 0] * sizes[min(size, len(sizes)) - 1]

    def after(self, share: float) -> Rhythm:
        """The same, but its tapes begin after that share of them, and their begins come at the end."""

        def turned(tape: tuple[float, ...]) -> tuple[float, ...]:
            place = int(share * len(tape))
            return tape[place:] + tape[:place]

        return replace(self, tapes=(turned(self.tapes[0]), turned(self.tapes[1])))
