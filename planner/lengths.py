"""How long requests are, and what they take over from earlier ones: distributions that a workload draws from.

Of a trace as it was, of correlated lognormals, of lognormals fitted to a trace with the prefixes that it reused, and of
any of these cut to a context. Without numpy.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from planner.prefixes import Reuse, reuses
from planner.terms import Job

ALIKE = 64  # requests of about one length: of so many a fit takes what a prompt reuses
SHIFTS = 8  # of a fit towards the means that it is to have
QUANTILES = tuple(statistics.NormalDist().inv_cdf((step + 0.5) / 60) for step in range(60))


class Draw(NamedTuple):
    """A request without its arrival."""

    prompt: int
    output: int
    reuse: Reuse = Reuse()


class Lengths(Protocol):
    """A distribution of requests."""

    def draw(self, chance: random.Random) -> Draw: ...


class Empirical:
    """The jobs of a trace, with replacement."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.draws = [
            Draw(job.prompt, job.output, reuse) for job, reuse in zip(jobs, reuses(jobs), strict=True)
        ]

    def draw(self, chance: random.Random) -> Draw:
        return self.draws[chance.randrange(len(self.draws))]


@dataclass(frozen=True, slots=True)
class Lognormals:
    """Correlated lognormal lengths: means and deviations of the logarithm; redrawn while the sum is above `most`."""

    prompt_mean: float
    prompt_deviation: float
    output_mean: float
    output_deviation: float
    correlation: float = 0.0
    most: int = 1 << 20

    def draw(self, chance: random.Random) -> Draw:
        while True:
            prompt, output = self.at(chance.gauss(0.0, 1.0), chance.gauss(0.0, 1.0))
            if prompt + output <= self.most:
                return Draw(prompt, output)

    def at(self, one: float, more: float) -> tuple[int, int]:
        """Tokens of (prompt, answer) for two numbers of the normal distribution, whatever `most` is."""
        other = self.correlation * one + math.sqrt(1.0 - self.correlation**2) * more
        prompt = max(1, round(math.exp(self.prompt_mean + self.prompt_deviation * one)))
        return prompt, max(1, round(math.exp(self.output_mean + self.output_deviation * other)))


@dataclass(frozen=True, slots=True)
class Fitted:
    """The lognormals that fit a trace; what a prompt takes over is what one of about its length did there.

    `prompts` are the trace's lengths, ascending, `reused` what each of these took over.
    """

    lengths: Lognormals
    prompts: Sequence[int]
    reused: Sequence[Reuse]

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Fitted:
        """`jobs` in order of arrival."""
        seen = [(job.prompt, reuse) for job, reuse in zip(jobs, reuses(jobs), strict=True)]
        # Of equal lengths those that came first reuse least: a part of them must not be the first ones.
        random.Random("fitted").shuffle(seen)
        seen.sort(key=lambda one: one[0])
        return cls(fit(jobs), [prompt for prompt, _ in seen], [reuse for _, reuse in seen])

    def draw(self, chance: random.Random) -> Draw:
        prompt, output, _ = self.lengths.draw(chance)
        low, high = bisect_left(self.prompts, prompt), bisect_right(self.prompts, prompt)
        wider = max(0, ALIKE - (high - low))
        low = max(0, min(low - wider // 2, len(self.prompts) - ALIKE))
        high = min(len(self.prompts), max(high, low + ALIKE))
        return Draw(prompt, output, self.reused[chance.randrange(low, high)])


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Another distribution with every length divided, at least 1, and their sum at most `most`."""

    source: Lengths
    by: float
    most: int

    def draw(self, chance: random.Random) -> Draw:
        prompt, output, reuse = self.source.draw(chance)
        output = min(max(1, round(output / self.by)), self.most - 1)
        return Draw(min(max(1, round(prompt / self.by)), self.most - output), output, reuse)


@dataclass(frozen=True, slots=True)
class Fitting:
    """Another distribution, drawn again while a request is longer than `most` tokens."""

    source: Lengths
    most: int

    def draw(self, chance: random.Random) -> Draw:
        while True:
            found = self.source.draw(chance)
            if found.prompt + found.output <= self.most:
                return found


def fit(jobs: Sequence[Job]) -> Lognormals:
    """The lognormals of a trace, by moments of the logarithms, with the trace's means; never a longer request than the
    longest seen.
    """
    prompts = [math.log(job.prompt) for job in jobs]
    outputs = [math.log(job.output) for job in jobs]
    one, other = statistics.pstdev(prompts), statistics.pstdev(outputs)
    together = statistics.correlation(prompts, outputs) if one and other else 0.0
    together = max(-1.0, min(1.0, together))
    most = max(job.prompt + job.output for job in jobs)
    found = Lognormals(statistics.fmean(prompts), one, statistics.fmean(outputs), other, together, most)
    means = statistics.fmean(job.prompt for job in jobs), statistics.fmean(job.output for job in jobs)
    for _ in range(SHIFTS):
        found = _shifted(found, *means)
    return found


def _shifted(found: Lognormals, prompt: float, output: float) -> Lognormals:
    """Nearer to these means: what is longer than `most`, and not drawn, is missing in them. Medians stay below half of
    `most`, so that it is not most of what is drawn.
    """
    drawn = [found.at(one, more) for one in QUANTILES for more in QUANTILES]
    kept = [lengths for lengths in drawn if sum(lengths) <= found.most]
    if not kept:
        return found
    highest = math.log(found.most / 2.0)
    return replace(
        found,
        prompt_mean=min(
            found.prompt_mean + math.log(prompt / statistics.fmean(one for one, _ in kept)),
            max(found.prompt_mean, highest),
        ),
        output_mean=min(
            found.output_mean + math.log(output / statistics.fmean(one for _, one in kept)),
            max(found.output_mean, highest),
        ),
    )
