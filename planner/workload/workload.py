"""Defines the traffic that a deployment must serve: lengths, shared prefixes and arrivals, from a trace or a formula.

A `Workload` is the joint distribution of one kind of request. Triples (input, output, reused prefix) are drawn from a
trace, from a fit to it, or from correlated lognormals (`planner.workload.lengths`). A `WorkloadMix` has several kinds,
each with its own SLOs. Arrivals are Poisson, gamma with a given coefficient of variation, or the trace's own. The same
seed gives the same lengths at every rate, and the same gaps up to scale, so that runs at different rates are
comparable. No numpy.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, Protocol

from diptych.errors import ConfigError
from diptych.slo import Slo, Slos
from planner.types import Job
from planner.workload.lengths import (
    ContextLimitedLengths,
    EmpiricalLengths,
    FittedLengths,
    LengthDistribution,
    LognormalLengths,
    RequestDraw,
    ShrunkLengths,
)
from planner.workload.prefixes import SharedPrefixTree
from planner.workload.traces import read_trace

# Number of draws from which the mean of a formula is estimated.
MEAN_DRAWS = 20_000
# A formula is refused if at most this share of its requests fits the context.
MIN_SHARE = 0.001
# Limits of the coefficient of variation: the gamma distribution overflows beyond them.
MIN_CV, MAX_CV = 1e-3, 1e3
# The name of the kind "" in messages, and how many kinds a message lists at most.
UNNAMED_KIND, MAX_LISTED = "unnamed", 12


class OverlongCount(NamedTuple):
    """How many of `out_of` requests are longer than the context; `drawn` if they were drawn from a formula."""

    longer: int
    out_of: int
    drawn: bool

    def __str__(self) -> str:
        if self.drawn:
            return f"about {self.longer / self.out_of:.1%} of its requests"
        return f"{self.longer:,} of its {self.out_of:,} requests"


def drop_overlong(jobs: Sequence[Job], most: int) -> list[Job]:
    """The jobs with at most `most` tokens of prompt and answer; a server refuses longer ones.

    Raises ConfigError if no job is left.
    """
    kept = [job for job in jobs if job.prompt + job.output <= most]
    if not kept:
        raise _none_fits_error(most)
    return kept


def _none_fits_error(most: int) -> ConfigError:
    """The error for a workload whose requests are all longer than the context."""
    return ConfigError(
        f"no request fits a context of {most:,} tokens",
        "every request of the trace or workload is longer (prompt and answer together)",
        "take a model with a longer context, or shorter requests",
    )


# The mean lengths (input / output tokens: 755.5 / 200.3, 171.3 / 98.2, 1738.3 / 90.7) and the limit of 2,048 tokens
# are those of DistServe, figure 7. The deviations are chosen here; the means of the logarithms were solved for such
# that the mean lengths hold after requests above the limit are dropped.
SYNTHETIC: Mapping[str, LognormalLengths] = {
    "sharegpt": LognormalLengths(6.7429, 0.95, 4.9180, 0.95, -0.1, 2048),
    "humaneval": LognormalLengths(5.0417, 0.45, 4.3022, 0.75, 0.0, 2048),
    "longbench": LognormalLengths(7.6378, 0.18, 4.3675, 1.0, -0.1, 2048),
}


class JobSource(Protocol):
    """A source of jobs: a `Workload` or a `WorkloadMix`."""

    def stream(self, rate: float, seed: int, cv: float = 1.0) -> Iterator[Job]:
        """Yields jobs without end, in order of arrival.

        Args:
            rate: Mean arrivals per second.
            seed: The same seed gives the same lengths, and the same gaps up to scale, at every rate.
            cv: Coefficient of variation of the gaps: 1 is Poisson, 0 is evenly spaced.
        """

    def sample(self, n: int, rate: float, seed: int, cv: float = 1.0) -> list[Job]:
        """The first `n` jobs of `stream`."""

    def mean(self) -> tuple[float, float]:
        """Mean tokens of (prompt, answer)."""


class Workload:
    """One kind of request. `jobs` are the requests of the trace in order of arrival; empty for a formula.

    `shares` says whether prompts name their leading blocks, so that prefixes are shared; None: if those of `jobs` do.
    """

    def __init__(
        self,
        lengths: LengthDistribution,
        kind: str = "",
        jobs: Sequence[Job] = (),
        block_tokens: int = 64,
        shares: bool | None = None,
    ) -> None:
        self.lengths, self.kind, self.jobs, self.block_tokens = lengths, kind, jobs, block_tokens
        self.shares = any(job.prefix for job in jobs[:1000]) if shares is None else shares

    @classmethod
    def of(cls, jobs: Iterable[Job], kind: str = "") -> Workload:
        """The empirical distribution of a trace, with all requests as one kind.

        The name is `kind`, else the kind that all jobs have, else "". Raises ConfigError if there is no job.
        """
        ordered = sorted(jobs, key=lambda job: job.at_s)
        if not ordered:
            raise ConfigError(
                "a workload has no request", "the trace or window is empty", "give a longer one"
            )
        called = {job.kind for job in ordered}
        name = kind or (called.pop() if len(called) == 1 else "")
        return cls(EmpiricalLengths(ordered), name, ordered, ordered[0].block_tokens)

    def fitted(self) -> Workload:
        """The same workload, drawn from a fit to the trace. Raises ConfigError if the workload is a formula."""
        if not self.jobs:
            raise ConfigError(
                f"nothing can be fitted to {self.kind or 'this workload'}",
                "it is a formula, not a trace",
                "leave out --fit, or name a trace's file",
            )
        return Workload(FittedLengths.of(self.jobs), self.kind, (), self.block_tokens, self.shares)

    def kinds(self) -> Counter[str]:
        """Number of the trace's requests by kind; empty for a formula."""
        return Counter(job.kind for job in self.jobs)

    def stream(self, rate: float, seed: int, cv: float = 1.0) -> Iterator[Job]:
        """Yields jobs without end from 0 s on, at `rate` per second; see `JobSource.stream`."""
        tree = SharedPrefixTree()
        arrivals = arrival_gaps(rate, seed, cv)
        chance = random.Random(f"lengths {seed}")
        at_s = 0.0
        for gap_s in arrivals:
            at_s += gap_s
            yield self.job(at_s, chance, tree)

    def job(self, at_s: float, chance: random.Random, tree: SharedPrefixTree) -> Job:
        """Draws one request that arrives at `at_s`, and adds its prompt to `tree`."""
        prompt, output, reuse = self.lengths.draw(chance)
        prefix = tree.grow(prompt // self.block_tokens, reuse) if self.shares else ()
        return Job(at_s, prompt, output, self.kind, prefix, self.block_tokens)

    def sample(self, n: int, rate: float, seed: int, cv: float = 1.0) -> list[Job]:
        """The first `n` jobs of `stream`."""
        return list(islice(self.stream(rate, seed, cv), n))

    def scaled(self, rate: float) -> list[Job]:
        """The trace itself, with its own order and burstiness, at another mean rate (requests per second).

        Raises:
            ConfigError: if the workload is a formula and has no trace.
        """
        if not self.jobs:
            raise ConfigError(
                "a workload cannot be replayed", "it is a formula, not a trace", "sample it instead"
            )
        return rescale_arrivals(self.jobs, rate)

    def shrunk(self, by: float, most: int = 1 << 20) -> Workload:
        """The same workload with all lengths, and the tokens of a block, divided by `by`, for a smaller model."""
        block_tokens = max(1, round(self.block_tokens / by))
        jobs = [shrink_job(job, by, most, block_tokens) for job in self.jobs]
        return Workload(ShrunkLengths(self.lengths, by, most), self.kind, jobs, block_tokens, self.shares)

    def longer(self, most: int, by: float = 1.0) -> OverlongCount:
        """How many requests exceed `most` tokens (prompt and answer) after a division of lengths by `by`."""
        draws = self._draws()
        over = (max(1, round(one.prompt / by)) + max(1, round(one.output / by)) > most for one in draws)
        return OverlongCount(sum(over), len(draws), not self.jobs)

    def within(self, most: int) -> Workload:
        """The same workload without requests longer than `most` tokens, prompt and answer together.

        Raises ConfigError if no request is left.
        """
        found = self.longer(most)
        if not found.longer:
            return self
        if self.jobs:
            return Workload.of(drop_overlong(self.jobs, most), self.kind)
        if found.out_of - found.longer <= MIN_SHARE * found.out_of:
            raise _none_fits_error(most)
        return Workload(
            ContextLimitedLengths(self.lengths, most), self.kind, (), self.block_tokens, self.shares
        )

    def mean(self) -> tuple[float, float]:
        """Mean tokens of (prompt, answer): exact for a trace, estimated from draws for a formula."""
        draws = self._draws()
        return statistics.fmean(one.prompt for one in draws), statistics.fmean(one.output for one in draws)

    def _draws(self) -> Sequence[Job | RequestDraw]:
        """The trace's requests, or a fixed set of draws from the formula."""
        chance = random.Random("mean")
        return self.jobs or [self.lengths.draw(chance) for _ in range(MEAN_DRAWS)]


class WorkloadMix:
    """Several kinds of request at once, each with its share of arrivals and its SLOs."""

    def __init__(self, parts: Sequence[tuple[str, float, Workload, Slo]]) -> None:
        """Each part is (name, share, workload, SLOs).

        Raises ConfigError if there is no part, a share is not positive, or two parts have the same name.
        """
        names = [name for name, _, _, _ in parts]
        whole = sum(share for _, share, _, _ in parts)
        possible = math.isfinite(whole) and all(share > 0.0 for _, share, _, _ in parts)
        if not parts or len(set(names)) < len(names) or not possible:
            why = f"kinds: {', '.join(names) or 'none'}; each needs a unique name and a share above 0"
            raise ConfigError(
                "the kinds of requests cannot be mixed", why, "name each kind once, with its share"
            )
        self.shares = {name: share / whole for name, share, _, _ in parts}
        self.workloads = {name: workload for name, _, workload, _ in parts}
        self.slos: Slos = {name: slo for name, _, _, slo in parts}

    @classmethod
    def of(cls, workload: Workload, slos: Slos, most: int | None = None) -> WorkloadMix:
        """A mix of the kinds of a trace that `slos` names, in the shares of the trace; "" stands for all other kinds.

        Requests of more than `most` tokens (prompt and answer) are dropped and need no SLOs. Raises ConfigError if a
        kind is not in the trace or all its requests are dropped, or if requests have no SLOs.
        """
        counts = workload.kinds()
        for name in slos:
            if name and name not in counts:
                raise _unknown_kind(name, counts)
        jobs: dict[str, list[Job]] = {name: [] for name in slos}
        for job in workload.jobs if most is None else drop_overlong(workload.jobs, most):
            name = job.kind if job.kind in slos else ""
            jobs.setdefault(name, []).append(replace(job, kind=name))
        kinds = {kind if kind in slos else "" for kind in counts}
        for name in slos:
            if most is not None and name in kinds and not jobs[name]:
                raise _emptied_kind(name, most)
        if bool(jobs.get("")) != ("" in slos):
            raise _kind_without_slo(len(jobs.get("", ())), describe_kinds(counts))
        return cls(
            [(name, float(len(some)), Workload.of(some, name), slos[name]) for name, some in jobs.items()]
        )

    def fitted(self) -> WorkloadMix:
        """The same mix with each trace replaced by its fit. Raises ConfigError if all workloads are formulas."""
        none = not any(workload.jobs for workload in self.workloads.values())
        parts = [
            (name, self.shares[name], one.fitted() if one.jobs or none else one, self.slos[name])
            for name, one in self.workloads.items()
        ]
        return WorkloadMix(parts)

    def stream(self, rate: float, seed: int, cv: float = 1.0) -> Iterator[Job]:
        """Yields jobs without end; kinds are drawn by their shares, and prefixes are shared only within a kind."""
        names = list(self.workloads)
        trees = {name: SharedPrefixTree(number, len(names)) for number, name in enumerate(names)}
        kinds = random.Random(f"kinds {seed}")
        chances = {name: random.Random(f"lengths {seed} {name}") for name in names}
        weights = [self.shares[name] for name in names]
        at_s = 0.0
        for gap_s in arrival_gaps(rate, seed, cv):
            at_s += gap_s
            (name,) = kinds.choices(names, weights)
            yield replace(self.workloads[name].job(at_s, chances[name], trees[name]), kind=name)

    def sample(self, n: int, rate: float, seed: int, cv: float = 1.0) -> list[Job]:
        """The first `n` jobs of `stream`."""
        return list(islice(self.stream(rate, seed, cv), n))

    def mean(self) -> tuple[float, float]:
        """Mean tokens of (prompt, answer) over all kinds."""
        means = [(self.shares[name], *workload.mean()) for name, workload in self.workloads.items()]
        return sum(share * prompt for share, prompt, _ in means), sum(share * out for share, _, out in means)


def describe_kinds(counts: Counter[str]) -> str:
    """Kinds with their counts as text, the most frequent first."""
    listed = ", ".join(
        f"{kind or UNNAMED_KIND} ({count:,})" for kind, count in counts.most_common(MAX_LISTED)
    )
    return listed + (f" and {len(counts) - MAX_LISTED} more" if len(counts) > MAX_LISTED else "")


def _unknown_kind(name: str, counts: Counter[str]) -> ConfigError:
    """The error for an SLO whose kind the workload does not have."""
    what = f"the workload has no requests of kind {name!r}"
    if not counts:
        return ConfigError(
            what, "it is a formula, which has no kinds", "give --kind a workload, or name a trace"
        )
    return ConfigError(what, f"it has {describe_kinds(counts)}", "name one of these kinds")


def _emptied_kind(name: str, most: int) -> ConfigError:
    """The error for a kind with SLOs whose requests are all longer than the context; "" is all other kinds."""
    whose = f"of kind {name!r}" if name else "without a --kind of its own"
    flags = f"--kind {name}" if name else "--slo-ttft-ms and --slo-tpot-ms"
    return ConfigError(
        f"no request {whose} fits a context of {most:,} tokens",
        "every such request of the trace is longer (prompt and answer together): none would be served",
        f"take a model with a longer context, or leave out {flags} and plan for the rest",
    )


def _kind_without_slo(rest: int, kinds: str) -> ConfigError:
    """The error for `rest` requests without SLOs; if `rest` is 0, for SLOs of other kinds when there are none."""
    if not rest:
        return ConfigError(
            "--slo-ttft-ms and --slo-tpot-ms apply to no request",
            f"every kind of the trace has its own SLOs: {kinds}",
            "leave them out",
        )
    return ConfigError(
        f"{rest:,} requests of the trace have no SLO",
        f"they are of no kind that --kind names; the trace has {kinds}",
        "give a --kind for each, or --slo-ttft-ms and --slo-tpot-ms for all others",
    )


# ---- arrivals


def arrival_gaps(rate: float, seed: int, cv: float = 1.0) -> Iterator[float]:
    """Yields the seconds before each arrival, with mean 1 / `rate`.

    Gaps are gamma-distributed with shape 1 / cv²: `cv` 1 is Poisson, `cv` 0 is evenly spaced. The first gap is 0, so
    that a run begins with a request.

    Raises:
        ConfigError: if `rate` or `cv` is out of range.
    """
    if not rate > 0.0 or not math.isfinite(rate) or not (cv == 0.0 or MIN_CV <= cv <= MAX_CV):
        raise ConfigError(
            "arrivals cannot be drawn",
            f"rate {rate}, cv {cv}",
            f"give a rate above 0, and a cv of 0 or from {MIN_CV} to {MAX_CV:.0f}",
        )
    chance = random.Random(f"gaps {seed}")
    yield 0.0
    while True:
        if cv == 1.0:
            yield chance.expovariate(1.0) / rate
        elif cv == 0.0:
            yield 1.0 / rate
        else:
            yield chance.gammavariate(cv**-2, cv**2) / rate


def mean_arrival_rate(jobs: Sequence[Job]) -> float:
    """Mean arrivals per second from the first to the last. Raises ConfigError if all arrive at the same time."""
    first, last = min(job.at_s for job in jobs), max(job.at_s for job in jobs)
    if last <= first:
        raise ConfigError(
            "a trace has no arrival times", "all its requests arrive at the same time", "sample it at a rate"
        )
    return (len(jobs) - 1) / (last - first)


def rescale_arrivals(jobs: Sequence[Job], rate: float) -> list[Job]:
    """The same jobs, starting at 0 s, with gaps scaled such that the mean rate is `rate` per second."""
    slower, first = mean_arrival_rate(jobs) / rate, min(job.at_s for job in jobs)
    return [replace(job, at_s=(job.at_s - first) * slower) for job in jobs]


def shrink_job(job: Job, by: float, most: int, block_tokens: int) -> Job:
    """A job with its lengths divided by `by`, at most `most` tokens; its prefix keeps the blocks that remain whole."""
    output = min(max(1, round(job.output / by)), most - 1)
    prompt = min(max(1, round(job.prompt / by)), most - output)
    prefix = job.prefix[: prompt // block_tokens]
    return replace(job, prompt=prompt, output=output, prefix=prefix, block_tokens=block_tokens)


# ---- by name


def synthetic_workload(name: str) -> Workload:
    """A workload with the mean lengths of a data set of the DistServe paper. Raises ConfigError for unknown names."""
    if name not in SYNTHETIC:
        raise ConfigError(
            f"no workload is called {name!r}", f"known: {', '.join(SYNTHETIC)}", "or name a trace's file"
        )
    return Workload(SYNTHETIC[name], name)


def load_workload(path: str, kind: str = "") -> Workload:
    """The workload of a trace file, as one kind. Raises ConfigError as `read_trace` does."""
    return Workload.of(read_trace(path), kind)


def find_workload(name: str) -> Workload:
    """The synthetic workload with this name; any other name is taken as the file of a trace."""
    return synthetic_workload(name) if name in SYNTHETIC else load_workload(name)
