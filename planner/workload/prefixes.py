"""Models shared prompt prefixes as a random process: how many blocks a request reuses, and from how far back.

The process is fitted to a trace whose prompts name their leading blocks, and makes new traces of any length with the
same sharing. A request reuses its first `reused` blocks from a request about `lag` requests earlier, and adds new
blocks after them. Both numbers are drawn together with the lengths of the request. An unlimited cache therefore hits as
often as on the trace, and a limited cache nearly as often, since blocks recur after as many requests as in the trace.
Two things are not modelled: that several requests come from one client, and cold misses at the start of the trace.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from planner.types import Job

# Number of the latest requests from which blocks can be reused.
MAX_PATHS = 65_536
# Number of requests that are examined on either side of the wanted one.
MAX_COMPARED = 64


class PrefixReuse(NamedTuple):
    """The number of leading blocks that an earlier request had too, and how many requests ago the last one came."""

    blocks: int = 0
    lag: int = 0


def prefix_reuses(jobs: Sequence[Job]) -> list[PrefixReuse]:
    """The prefix that each job reuses from earlier jobs; `jobs` are in order of arrival."""
    last: dict[int, int] = {}
    found = []
    for number, job in enumerate(jobs):
        blocks = 0
        for name in job.prefix:
            if name not in last:
                break
            blocks += 1
        found.append(PrefixReuse(blocks, number - last[job.prefix[blocks - 1]]) if blocks else PrefixReuse())
        for name in job.prefix:
            last[name] = number
    return found


class SharedPrefixTree:
    """The tree of prefixes, which grows by one path per request. New blocks are named `first`, `first + stride`, …"""

    def __init__(self, first: int = 0, stride: int = 1) -> None:
        self._next, self._stride = first, stride
        self._count = 0
        # Block names of the latest requests.
        self._paths: deque[tuple[int, ...]] = deque()
        # Numbers of requests, grouped by log2 of the length of their paths.
        self._deep: list[list[int]] = []
        # The latest request that has each block.
        self._last: dict[int, int] = {}

    def grow(self, blocks: int, reuse: PrefixReuse) -> tuple[int, ...]:
        """Adds a request of `blocks` blocks that reuses what `reuse` says, and returns the names of its blocks."""
        head = self._nearest_path(min(reuse.blocks, blocks), reuse.lag)
        fresh = blocks - len(head)
        path = (*head, *range(self._next, self._next + fresh * self._stride, self._stride))
        self._next += fresh * self._stride
        self._remember_path(path)
        return path

    def _nearest_path(self, blocks: int, lag: int) -> tuple[int, ...]:
        """The first blocks of the request that is nearest to `lag` requests ago and has not been reused since.

        The request must have at least `blocks` blocks, and no later request may share them: else the lag would be
        shorter than drawn.
        """
        if not blocks:
            return ()
        wanted, found = self._count - lag, list[int]()
        for numbers in self._deep[blocks.bit_length() - 1 :]:
            at = bisect_left(numbers, wanted)
            after = (
                number for number in islice(numbers, at, at + MAX_COMPARED) if self._path_fits(number, blocks)
            )
            before = (numbers[i] for i in range(at - 1, max(-1, at - MAX_COMPARED), -1))
            found += islice(after, 1)
            found += islice((number for number in before if self._path_fits(number, blocks)), 1)
        if not found:
            return ()
        return self._at(min(found, key=lambda number: abs(math.log((self._count - number) / lag))))[:blocks]

    def _path_fits(self, number: int, blocks: int) -> bool:
        """Whether the request has at least `blocks` blocks and is the latest with the last of these."""
        path = self._at(number)
        return len(path) >= blocks and self._last[path[blocks - 1]] == number

    def _at(self, number: int) -> tuple[int, ...]:
        """The block names of the request with this number."""
        return self._paths[number - self._count]

    def _remember_path(self, path: tuple[int, ...]) -> None:
        """Indexes the request's path; the oldest half is dropped when there are too many."""
        while len(self._deep) < len(path).bit_length():
            self._deep.append([])
        if path:
            self._deep[len(path).bit_length() - 1].append(self._count)
        for name in path:
            self._last[name] = self._count
        self._paths.append(path)
        self._count += 1
        if len(self._paths) > MAX_PATHS:
            self._forget_oldest(MAX_PATHS // 2)

    def _forget_oldest(self, count: int) -> None:
        """Drops the `count` oldest requests."""
        oldest = self._count - len(self._paths)
        for number in range(oldest, oldest + count):
            for name in self._paths.popleft():
                if self._last.get(name) == number:
                    del self._last[name]
        self._deep = [numbers[bisect_left(numbers, oldest + count) :] for numbers in self._deep]
