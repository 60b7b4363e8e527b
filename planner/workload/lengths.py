"""Defines distributions of prompt and answer lengths, and of reused prefixes, from which a workload draws its requests.

They are: the requests of a trace; correlated lognormals; lognormals fitted to a trace, with the prefixes reused there;
and any of these limited to a context length. No numpy.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from planner.types import Job
from planner.workload.prefixes import PrefixReuse, prefix_reuses

# A reused prefix is drawn from this many trace requests of the most similar length.
ALIKE = 64
# Number of iterations that move a fit towards the trace's mean lengths.
SHIFTS = 8
# 60 equally likely values of the standard normal distribution.
QUANTILES = tuple(statistics.NormalDist().inv_cdf((step + 0.5) / 60) for step in range(60))


class RequestDraw(NamedTuple):
    """The lengths of a request in tokens, and the prefix that it reuses."""

    prompt: int
    output: int
    reuse: PrefixReuse = PrefixReuse()


class LengthDistribution(Protocol):
    """A distribution from which the lengths of requests are drawn."""

    def draw(self, chance: random.Random) -> RequestDraw:
        """Draws one request with the random generator `chance`."""


class EmpiricalLengths:
    """Draws requests of a trace, with replacement."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.draws = [
            RequestDraw(job.prompt, job.output, reuse)
            for job, reuse in zip(jobs, prefix_reuses(jobs), strict=True)
        ]

    def draw(self, chance: random.Random) -> RequestDraw:
        """Draws one request of the trace, all equally likely."""
        return self.draws[chance.randrange(len(self.draws))]


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """Correlated lognormal lengths, given by mean and deviation of the logarithms.

    A request longer than `most` tokens (prompt and answer) is drawn again.
    """

    prompt_mean: float
    prompt_deviation: float
    output_mean: float
    output_deviation: float
    correlation: float = 0.0
    most: int = 1 << 20

    def draw(self, chance: random.Random) -> RequestDraw:
        """Draws one request of at most `most` tokens, which reuses no prefix."""
        while True:
            prompt, output = self.at(chance.gauss(0.0, 1.0), chance.gauss(0.0, 1.0))
            if prompt + output <= self.most:
                return RequestDraw(prompt, output)

    def at(self, one: float, more: float) -> tuple[int, int]:
        """Tokens of (prompt, answer) for two independent standard normal numbers, without the limit `most`."""
        other = self.correlation * one + math.sqrt(1.0 - self.correlation**2) * more
        prompt = max(1, round(math.exp(self.prompt_mean + self.prompt_deviation * one)))
        return prompt, max(1, round(math.exp(self.output_mean + self.output_deviation * other)))


@dataclass(frozen=True, slots=True)
class FittedLengths:
    """Lognormals fitted to a trace; the reused prefix is drawn from trace requests with a similar prompt length.

    `prompts` are the trace's prompt lengths in ascending order, `reused_prefixes` the prefix that each of them reused.
    """

    lengths: LognormalLengths
    prompts: Sequence[int]
    reused_prefixes: Sequence[PrefixReuse]

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> FittedLengths:
        """Fits the distribution to `jobs`, which are in order of arrival."""
        pairs = [(job.prompt, reuse) for job, reuse in zip(jobs, prefix_reuses(jobs), strict=True)]
        # Among requests of equal length, early ones reuse least. Shuffling keeps any part that is cut out
        # representative.
        random.Random("fitted").shuffle(pairs)
        pairs.sort(key=lambda one: one[0])
        return cls(fit_lognormals(jobs), [prompt for prompt, _ in pairs], [reuse for _, reuse in pairs])

    def draw(self, chance: random.Random) -> RequestDraw:
        """Draws lengths from the lognormals, and the reused prefix of a trace request with about that prompt length."""
        prompt, output, _ = self.lengths.draw(chance)
        low, high = bisect_left(self.prompts, prompt), bisect_right(self.prompts, prompt)
        # Requests of exactly this length may be too few: the range is widened to `ALIKE` neighbours.
        wider = max(0, ALIKE - (high - low))
        low = max(0, min(low - wider // 2, len(self.prompts) - ALIKE))
        high = min(len(self.prompts), max(high, low + ALIKE))
        return RequestDraw(prompt, output, self.reused_prefixes[chance.randrange(low, high)])


@dataclass(frozen=True, slots=True)
class ShrunkLengths:
    """Another distribution with all lengths divided by `by` (at least 1 token), at most `most` tokens in all."""

    source: LengthDistribution
    by: float
    most: int

    def draw(self, chance: random.Random) -> RequestDraw:
        """Draws from `source` and divides the lengths; the reused prefix stays as drawn."""
        prompt, output, reuse = self.source.draw(chance)
        output = min(max(1, round(output / self.by)), self.most - 1)
        return RequestDraw(min(max(1, round(prompt / self.by)), self.most - output), output, reuse)


@dataclass(frozen=True, slots=True)
class ContextLimitedLengths:
    """Another distribution, drawn again as long as a request is longer than `most` tokens."""

    source: LengthDistribution
    most: int

    def draw(self, chance: random.Random) -> RequestDraw:
        """Draws from `source` until a request fits into `most` tokens."""
        while True:
            found = self.source.draw(chance)
            if found.prompt + found.output <= self.most:
                return found


def fit_lognormals(jobs: Sequence[Job]) -> LognormalLengths:
    """Fits lognormals to a trace by the moments of the logarithms, then adjusts them to the trace's mean lengths.

    No drawn request is longer than the longest of the trace.
    """
    prompts = [math.log(job.prompt) for job in jobs]
    outputs = [math.log(job.output) for job in jobs]
    one, other = statistics.pstdev(prompts), statistics.pstdev(outputs)
    together = statistics.correlation(prompts, outputs) if one and other else 0.0
    together = max(-1.0, min(1.0, together))
    most = max(job.prompt + job.output for job in jobs)
    found_lengths = LognormalLengths(
        statistics.fmean(prompts), one, statistics.fmean(outputs), other, together, most
    )
    means = statistics.fmean(job.prompt for job in jobs), statistics.fmean(job.output for job in jobs)
    for _ in range(SHIFTS):
        found_lengths = _shift_means(found_lengths, *means)
    return found_lengths


def _shift_means(found_lengths: LognormalLengths, prompt: float, output: float) -> LognormalLengths:
    """Moves the lognormals so that their means come closer to `prompt` and `output` tokens.

    Draws longer than `most` are rejected, which lowers the means; this corrects for it. Medians stay below half of
    `most`, so that not most draws are rejected.
    """
    drawn = [found_lengths.at(one, more) for one in QUANTILES for more in QUANTILES]
    kept = [lengths for lengths in drawn if sum(lengths) <= found_lengths.most]
    if not kept:
        return found_lengths
    highest = math.log(found_lengths.most / 2.0)
    return replace(
        found_lengths,
        prompt_mean=min(
            found_lengths.prompt_mean + math.log(prompt / statistics.fmean(one for one, _ in kept)),
            max(found_lengths.prompt_mean, highest),
        ),
        output_mean=min(
            found_lengths.output_mean + math.log(output / statistics.fmean(one for _, one in kept)),
            max(found_lengths.output_mean, highest),
        ),
    )
