"""Says which request asks for which class of KV: a share of the requests for each class, or what a trace says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from planner.types import Job
from planner.workload.workload import JobSource


def draw_classes(jobs: Iterable[Job], shares: Mapping[str, float], seed: int) -> Iterator[Job]:
    """The jobs, each with a class that is drawn by `shares`. The same seed gives the nth job the same class."""
    chance, names, weights = random.Random(f"kv {seed}"), list(shares), list(shares.values())
    for job in jobs:
        (name,) = chance.choices(names, weights)
        yield replace(job, kv_class=name)


def class_shares(jobs: Iterable[Job]) -> dict[str, float]:
    """The share of the jobs that ask for each class; "" stands for those that ask for none."""
    counts = Counter(job.kv_class for job in jobs)
    return {name: count / counts.total() for name, count in counts.items()}


class KvMixedSource:
    """The jobs of another source, with classes of KV by `shares` (a `planner.workload.workload.JobSource`).

    Lengths and classes are drawn apart from each other.
    """

    def __init__(self, source: JobSource, shares: Mapping[str, float]) -> None:
        self.source, self.kv_shares = source, dict(shares)

    def stream(self, rate: float, seed: int, cv: float = 1.0) -> Iterator[Job]:
        """See `planner.workload.workload.JobSource.stream`."""
        return draw_classes(self.source.stream(rate, seed, cv), self.kv_shares, seed)

    def sample(self, n: int, rate: float, seed: int, cv: float = 1.0) -> list[Job]:
        """The first `n` jobs of `stream`."""
        return list(islice(self.stream(rate, seed, cv), n))

    def mean(self) -> tuple[float, float]:
        """Mean tokens of (prompt, answer)."""
        return self.source.mean()
