"""What is asked of a deployment: lengths, shared prefixes and arrivals, drawn again and again from what was seen.

A `Workload` is the joint distribution of one kind of request: (input, output, reused prefix) of a trace resampled
together, or drawn from what fits it, or correlated lognormals (`planner.lengths`). A `Mix` has several kinds, each with
its promise. Arrivals are Poisson, gamma with a given coefficient of variation, or the trace's own. The same seed gives
the same lengths and the same gaps, scaled, at every rate, so that a search over rates compares like with like. Without
numpy.
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
from planner.lengths import Draw, Empirical, Fitted, Fitting, Lengths, Lognormals, Shrunk, fit
from planner.prefixes import Tree
from planner.terms import Job, Slo
from planner.traces import read_trace, write_trace

__all__ = [
    "SYNTHETIC", "Draw", "Empirical", "Fitted", "Lengths", "Lognormals", "Long", "Mix", "Slos", "Workload",
    "fit", "listed", "load", "named", "read_trace", "scaled", "short_enough", "synthetic", "write_trace",
]  # fmt: skip

Slos = Mapping[str, Slo]  # by kind; "" is for kinds that have none of their own

MEAN_DRAWS = 20_000
LEAST_SHARE = 0.001  # of a formula's requests that fit a context, or none does
LEAST_CV, MOST_CV = 1e-3, 1e3  # of gaps that are drawn: beyond these a gamma's numbers fit no float
UNNAMED, MOST_TOLD = "unnamed", 12  # kinds that a message names at most


class Long(NamedTuple):
    """How many of `out_of` requests are longer than a context; of a formula, of so many draws."""

    longer: int
    out_of: int
    drawn: bool

    def __str__(self) -> str:
        if self.drawn:
            return f"about {self.longer / self.out_of:.1%} of its requests"
        return f"{self.longer:,} of its {self.out_of:,} requests"


def short_enough(jobs: Sequence[Job], most: int) -> list[Job]:
    """Those of at most `most` tokens, prompt and answer together: a server takes no others.

    Raises ConfigError: there is none.
    """
    kept = [job for job in jobs if job.prompt + job.output <= most]
    if not kept:
        raise _none_fits(most)
    return kept


def _none_fits(most: int) -> ConfigError:
    return ConfigError(
        f"no request fits a context of {most:,} tokens",
        "prompt and answer together are longer, of all that the trace or workload has",
        "take a model with a longer context, or shorter requests",
    )


# Means of figure 7 of DistServe (input / output tokens: 755.5 / 200.3, 171.3 / 98.2, 1738.3 / 90.7), requests of at
# most 2,048 tokens. The shapes are our own; means of the logarithms were solved so that the means fit after the cut.
SYNTHETIC: Mapping[str, Lognormals] = {
    "sharegpt": Lognormals(6.7429, 0.95, 4.9180, 0.95, -0.1, 2048),
    "humaneval": Lognormals(5.0417, 0.45, 4.3022, 0.75, 0.0, 2048),
    "longbench": Lognormals(7.6378, 0.18, 4.3675, 1.0, -0.1, 2048),
}


class Source(Protocol):
    """Anything that jobs can be drawn from: a `Workload` or a `Mix`."""

    def stream(self, rate: float, seed: int, cv: float = 1.0) -> Iterator[Job]: ...

    def sample(self, n: int, rate: float, seed: int, cv: float = 1.0) -> list[Job]: ...

    def mean(self) -> tuple[float, float]: ...


class Workload:
    """One kind of request. `jobs` are those of the trace, in order of arrival, if it is of one.

    `shares` is whether prompts name the blocks that they begin with: as `jobs` do, if it is not said.
    """

    def __init__(
        self,
        lengths: Lengths,
        kind: str = "",
        jobs: Sequence[Job] = (),
        block_tokens: int = 64,
        shares: bool | None = None,
    ) -> None:
        self.lengths, self.kind, self.jobs, self.block_tokens = lengths, kind, jobs, block_tokens
        self.shares = any(job.prefix for job in jobs[:1000]) if shares is None else shares

    @classmethod
    def of(cls, jobs: Iterable[Job], kind: str = "") -> Workload:
        """The empirical distribution of a trace, all as one kind: `kind`, or what all jobs are called, or unnamed.

        Raises ConfigError if it is empty.
        """
        ordered = sorted(jobs, key=lambda job: job.at_s)
        if not ordered:
            raise ConfigError(
                "a workload has no request", "the trace or window is empty", "give a longer one"
            )
        called = {job.kind for job in ordered}
        name = kind or (called.pop() if len(called) == 1 else "")
        return cls(Empirical(ordered), name, ordered, ordered[0].block_tokens)

    def fitted(self) -> Workload:
        """The same drawn from what fits the trace, not from its requests. Raises ConfigError for a formula."""
        if not self.jobs:
            raise ConfigError(
                f"nothing can be fitted to {self.kind or 'this workload'}",
                "it is a formula, not a trace",
                "leave out --fit, or name a trace's file",
            )
        return Workload(Fitted.of(self.jobs), self.kind, (), self.block_tokens, self.shares)

    def kinds(self) -> Counter[str]:
        """How many requests of the trace are of each kind; none of a formula."""
        return Counter(job.kind for job in self.jobs)

    def stream(self, rate: float, seed: int, cv: float = 1.0) -> Iterator[Job]:
        """Jobs without end, at `rate` a second, from 0 s. `cv` is the gaps' deviation over their mean: 1 is Poisson."""
        tree = Tree()
        arrivals = gaps(rate, seed, cv)
        chance = random.Random(f"lengths {seed}")
        at_s = 0.0
        for gap_s in arrivals:
            at_s += gap_s
            yield self.job(at_s, chance, tree)

    def job(self, at_s: float, chance: random.Random, tree: Tree) -> Job:
        prompt, output, reuse = self.lengths.draw(chance)
        prefix = tree.grow(prompt // self.block_tokens, reuse) if self.shares else ()
        return Job(at_s, prompt, output, self.kind, prefix, self.block_tokens)

    def sample(self, n: int, rate: float, seed: int, cv: float = 1.0) -> list[Job]:
        """The first `n` of `stream`."""
        return list(islice(self.stream(rate, seed, cv), n))

    def scaled(self, rate: float) -> list[Job]:
        """The trace itself, with its own order and burstiness, at another mean rate."""
        if not self.jobs:
            raise ConfigError(
                "a workload cannot be replayed", "it is a formula, not a trace", "sample it instead"
            )
        return scaled(self.jobs, rate)

    def shrunk(self, by: float, most: int = 1 << 20) -> Workload:
        """The same with lengths (and the tokens of a shared block) divided, for a smaller model."""
        block_tokens = max(1, round(self.block_tokens / by))
        jobs = [shrink(job, by, most, block_tokens) for job in self.jobs]
        return Workload(Shrunk(self.lengths, by, most), self.kind, jobs, block_tokens, self.shares)

    def longer(self, most: int, by: float = 1.0) -> Long:
        """How many requests are of more than `most` tokens after their lengths were divided by `by`."""
        draws = self._draws()
        over = (max(1, round(one.prompt / by)) + max(1, round(one.output / by)) > most for one in draws)
        return Long(sum(over), len(draws), not self.jobs)

    def within(self, most: int) -> Workload:
        """The same without the requests that are longer than `most` tokens, prompt and answer together.

        Raises ConfigError: there is no other.
        """
        found = self.longer(most)
        if not found.longer:
            return self
        if self.jobs:
            return Workload.of(short_enough(self.jobs, most), self.kind)
        if found.out_of - found.longer <= LEAST_SHARE * found.out_of:
            raise _none_fits(most)
        return Workload(Fitting(self.lengths, most), self.kind, (), self.block_tokens, self.shares)

    def mean(self) -> tuple[float, float]:
        """Mean tokens of (prompt, answer): the trace's, or of so many draws of a formula."""
        draws = self._draws()
        return statistics.fmean(one.prompt for one in draws), statistics.fmean(one.output for one in draws)

    def _draws(self) -> Sequence[Job | Draw]:
        chance = random.Random("mean")
        return self.jobs or [self.lengths.draw(chance) for _ in range(MEAN_DRAWS)]


class Mix:
    """Several kinds of request at once, each with its share of arrivals and its promise."""

    def __init__(self, parts: Sequence[tuple[str, float, Workload, Slo]]) -> None:
        """Raises ConfigError: no parts, a share that is not positive, or two of one name."""
        names = [name for name, _, _, _ in parts]
        whole = sum(share for _, share, _, _ in parts)
        possible = math.isfinite(whole) and all(share > 0.0 for _, share, _, _ in parts)
        if not parts or len(set(names)) < len(names) or not possible:
            why = f"kinds: {', '.join(names) or 'none'}; each needs a name of its own and a share above 0"
            raise ConfigError(
                "the kinds of requests cannot be mixed", why, "name each kind once, with its share"
            )
        self.shares = {name: share / whole for name, share, _, _ in parts}
        self.workloads = {name: workload for name, _, workload, _ in parts}
        self.slos: Slos = {name: slo for name, _, _, slo in parts}

    @classmethod
    def of(cls, trace: Workload, slos: Slos, most: int | None = None) -> Mix:
        """The kinds of a trace that `slos` names, each as often as it comes there, and under "" all others.

        Requests of more than `most` tokens, prompt and answer together, are left out, and need no promise. Raises
        ConfigError: a kind is not in the trace or all of it is longer, or requests are under no promise.
        """
        counts = trace.kinds()
        for name in slos:
            if name and name not in counts:
                raise _unknown(name, counts)
        jobs: dict[str, list[Job]] = {name: [] for name in slos}
        for job in trace.jobs if most is None else short_enough(trace.jobs, most):
            name = job.kind if job.kind in slos else ""
            jobs.setdefault(name, []).append(replace(job, kind=name))
        seen = {kind if kind in slos else "" for kind in counts}
        for name in slos:
            if most is not None and name in seen and not jobs[name]:
                raise _emptied(name, most)
        if bool(jobs.get("")) != ("" in slos):
            raise _unpromised(len(jobs.get("", ())), listed(counts))
        return cls(
            [(name, float(len(some)), Workload.of(some, name), slos[name]) for name, some in jobs.items()]
        )

    def fitted(self) -> Mix:
        """The same with each trace drawn from what fits it, and formulas as they are. Raises ConfigError if all are."""
        none = not any(workload.jobs for workload in self.workloads.values())
        parts = [
            (name, self.shares[name], one.fitted() if one.jobs or none else one, self.slos[name])
            for name, one in self.workloads.items()
        ]
        return Mix(parts)

    def stream(self, rate: float, seed: int, cv: float = 1.0) -> Iterator[Job]:
        """Jobs without end; kinds are drawn by their shares, and share no prefix with each other."""
        names = list(self.workloads)
        trees = {name: Tree(number, len(names)) for number, name in enumerate(names)}
        kinds = random.Random(f"kinds {seed}")
        chances = {name: random.Random(f"lengths {seed} {name}") for name in names}
        weights = [self.shares[name] for name in names]
        at_s = 0.0
        for gap_s in gaps(rate, seed, cv):
            at_s += gap_s
            (name,) = kinds.choices(names, weights)
            yield replace(self.workloads[name].job(at_s, chances[name], trees[name]), kind=name)

    def sample(self, n: int, rate: float, seed: int, cv: float = 1.0) -> list[Job]:
        """The first `n` of `stream`."""
        return list(islice(self.stream(rate, seed, cv), n))

    def mean(self) -> tuple[float, float]:
        """Mean tokens of (prompt, answer) over all kinds."""
        means = [(self.shares[name], *workload.mean()) for name, workload in self.workloads.items()]
        return sum(share * prompt for share, prompt, _ in means), sum(share * out for share, _, out in means)


def listed(counts: Counter[str]) -> str:
    """Kinds with their numbers, the most frequent first."""
    told = ", ".join(f"{kind or UNNAMED} ({count:,})" for kind, count in counts.most_common(MOST_TOLD))
    return told + (f" and {len(counts) - MOST_TOLD} more" if len(counts) > MOST_TOLD else "")


def _unknown(name: str, counts: Counter[str]) -> ConfigError:
    what = f"the workload has no requests of kind {name!r}"
    if not counts:
        return ConfigError(
            what, "it is a formula, and has no kinds", "give --kind a workload, or name a trace"
        )
    return ConfigError(what, f"it has {listed(counts)}", "name kinds that it has")


def _emptied(name: str, most: int) -> ConfigError:
    """The context leaves nothing of a kind that has an objective, or of all others, which are called ""."""
    whose = f"of kind {name!r}" if name else "without a --kind of its own"
    flags = f"--kind {name}" if name else "--slo-ttft-ms and --slo-tpot-ms"
    return ConfigError(
        f"no request {whose} fits a context of {most:,} tokens",
        "prompt and answer together are longer, of all that the trace has: none would be served",
        f"take a model with a longer context, or leave out {flags} and go on with the rest",
    )


def _unpromised(rest: int, told: str) -> ConfigError:
    """`rest` requests are of no kind that has an objective, or none is, and there is one for them."""
    if not rest:
        return ConfigError(
            "--slo-ttft-ms and --slo-tpot-ms would be for no request",
            f"every kind of the trace has an objective of its own: {told}",
            "leave them out",
        )
    return ConfigError(
        f"{rest:,} requests of the trace have no objective",
        f"they are of no kind that --kind names; the trace has {told}",
        "a --kind for each, or --slo-ttft-ms and --slo-tpot-ms for all others",
    )


# ---- arrivals


def gaps(rate: float, seed: int, cv: float = 1.0) -> Iterator[float]:
    """Seconds before each arrival, of mean 1 / rate: gamma of shape 1 / cv², so 1 is Poisson and 0 a clock's tick.

    The first is 0: a run begins with a request.
    """
    if not rate > 0.0 or not math.isfinite(rate) or not (cv == 0.0 or LEAST_CV <= cv <= MOST_CV):
        raise ConfigError(
            "arrivals cannot be drawn",
            f"rate {rate}, cv {cv}",
            f"give a rate above 0, and a cv of 0 or from {LEAST_CV} to {MOST_CV:.0f}",
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


def rate_of(jobs: Sequence[Job]) -> float:
    """Arrivals a second, first to last. Raises ConfigError if they all come at once."""
    first, last = min(job.at_s for job in jobs), max(job.at_s for job in jobs)
    if last <= first:
        raise ConfigError(
            "a trace has no arrival times", "all its requests come at once", "sample it at a rate"
        )
    return (len(jobs) - 1) / (last - first)


def scaled(jobs: Sequence[Job], rate: float) -> list[Job]:
    """The same jobs from 0 s on, faster or slower."""
    slower, first = rate_of(jobs) / rate, min(job.at_s for job in jobs)
    return [replace(job, at_s=(job.at_s - first) * slower) for job in jobs]


def shrink(job: Job, by: float, most: int, block_tokens: int) -> Job:
    """A job with its lengths divided, within `most` tokens; its prefix keeps the blocks that are still whole."""
    output = min(max(1, round(job.output / by)), most - 1)
    prompt = min(max(1, round(job.prompt / by)), most - output)
    prefix = job.prefix[: prompt // block_tokens]
    return replace(job, prompt=prompt, output=output, prefix=prefix, block_tokens=block_tokens)


# ---- by name


def synthetic(name: str) -> Workload:
    """A workload with the mean lengths of one of the paper's data sets. Raises ConfigError for another name."""
    if name not in SYNTHETIC:
        raise ConfigError(
            f"no workload is called {name!r}", f"known: {', '.join(SYNTHETIC)}", "or name a trace's file"
        )
    return Workload(SYNTHETIC[name], name)


def load(path: str, kind: str = "") -> Workload:
    """The workload of a trace's file. Raises ConfigError as `read_trace` does."""
    return Workload.of(read_trace(path), kind)


def named(name: str) -> Workload:
    """`synthetic`, or a file's."""
    return synthetic(name) if name in SYNTHETIC else load(name)
