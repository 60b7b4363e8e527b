"""The tree of shared prefixes, as a process: how much of its prompt a request takes over, and from how far back.

Fitted from a trace in which prompts name their leading blocks, it makes new traces of any length in which as much is
shared: a request takes its first `reused` blocks from the one that came about `lag` requests before, and writes new
blocks after them. Both numbers are resampled together with the request's lengths, so an unbounded cache hits as often
as on the trace, and a bounded one nearly so, since blocks return after as many requests as they did.

Not kept: that several requests come from one client, and the share of cold misses at the trace's beginning.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from planner.terms import Job

MOST_PATHS = 65_536  # requests that can still be taken over from
LOOKED_AT = 64  # of those of like length, on either side of the one meant


class Reuse(NamedTuple):
    """Blocks at a prompt's head that an earlier one began with, and how many requests before the last such one came."""

    blocks: int = 0
    lag: int = 0


def reuses(jobs: Sequence[Job]) -> list[Reuse]:
    """What each job shares with those before it; jobs in order of arrival."""
    last: dict[int, int] = {}
    found = []
    for number, job in enumerate(jobs):
        blocks = 0
        for name in job.prefix:
            if name not in last:
                break
            blocks += 1
        found.append(Reuse(blocks, number - last[job.prefix[blocks - 1]]) if blocks else Reuse())
        for name in job.prefix:
            last[name] = number
    return found


def hit_rate(jobs: Sequence[Job]) -> float:
    """The share of named blocks that a cache without bounds would hold, of jobs in order of arrival."""
    named = sum(len(job.prefix) for job in jobs)
    return sum(reuse.blocks for reuse in reuses(jobs)) / named if named else 0.0


class Tree:
    """Grows by one path per request. Names of blocks are numbers from `first`, `stride` apart."""

    def __init__(self, first: int = 0, stride: int = 1) -> None:
        self._next, self._stride = first, stride
        self._count = 0
        self._paths: deque[tuple[int, ...]] = deque()  # of the latest requests
        self._deep: list[list[int]] = []  # [bit length of the path - 1]: numbers of requests, ascending
        self._last: dict[int, int] = {}  # the latest request that begins with a block

    def grow(self, blocks: int, reuse: Reuse) -> tuple[int, ...]:
        """The names of a request's leading `blocks`."""
        head = self._path(min(reuse.blocks, blocks), reuse.lag)
        fresh = blocks - len(head)
        path = (*head, *range(self._next, self._next + fresh * self._stride, self._stride))
        self._next += fresh * self._stride
        self._remember(path)
        return path

    def _path(self, blocks: int, lag: int) -> tuple[int, ...]:
        """The first blocks of the request nearest to `lag` before the next, of those that could be the ones meant.

        Such a request has so many blocks, and nobody after it has used the last of them: else its lag would be shorter.
        """
        if not blocks:
            return ()
        wanted, found = self._count - lag, list[int]()
        for numbers in self._deep[blocks.bit_length() - 1 :]:
            at = bisect_left(numbers, wanted)
            after = (number for number in islice(numbers, at, at + LOOKED_AT) if self._fits(number, blocks))
            before = (numbers[i] for i in range(at - 1, max(-1, at - LOOKED_AT), -1))
            found += islice(after, 1)
            found += islice((number for number in before if self._fits(number, blocks)), 1)
        if not found:
            return ()
        return self._at(min(found, key=lambda number: abs(math.log((self._count - number) / lag))))[:blocks]

    def _fits(self, number: int, blocks: int) -> bool:
        path = self._at(number)
        return len(path) >= blocks and self._last[path[blocks - 1]] == number

    def _at(self, number: int) -> tuple[int, ...]:
        return self._paths[number - self._count]

    def _remember(self, path: tuple[int, ...]) -> None:
        while len(self._deep) < len(path).bit_length():
            self._deep.append([])
        if path:
            self._deep[len(path).bit_length() - 1].append(self._count)
        for name in path:
            self._last[name] = self._count
        self._paths.append(path)
        self._count += 1
        if len(self._paths) > MOST_PATHS:
            self._forget(MOST_PATHS // 2)

    def _forget(self, count: int) -> None:
        oldest = self._count - len(self._paths)
        for number in range(oldest, oldest + count):
            for name in self._paths.popleft():
                if self._last.get(name) == number:
                    del self._last[name]
        self._deep = [numbers[bisect_left(numbers, oldest + count) :] for numbers in self._deep]
