"""How much each request loads each worker, as the relay has booked it (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diptych.request import BULK_PRIORITY


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker: prompt tokens it has yet to prefill, number of requests, and tokens of KV they need.

    `credit_tokens` are the tokens to prefill with each prompt counted as
    `router.routing.credits.CREDIT_TOKENS_PER_PROMPT` at most. `moving_tokens` are those whose KV has yet to be moved
    from or to the worker. `overdrawn_tokens` are those of `room_tokens` at a prefill worker whose requests began before
    there was room at their decode worker.
    """

    queued_tokens: int = 0
    running: int = 0
    room_tokens: int = 0
    credit_tokens: int = 0
    moving_tokens: int = 0
    overdrawn_tokens: int = 0

    def combined_with(self, other: WorkerLoad, sign: int = 1) -> WorkerLoad:
        """The sum of both loads, or their difference (`sign` -1)."""
        return WorkerLoad(
            self.queued_tokens + sign * other.queued_tokens,
            self.running + sign * other.running,
            self.room_tokens + sign * other.room_tokens,
            self.credit_tokens + sign * other.credit_tokens,
            self.moving_tokens + sign * other.moving_tokens,
            self.overdrawn_tokens + sign * other.overdrawn_tokens,
        )


IDLE_LOAD = WorkerLoad()


# A priority, and the KV class of a request's attempt; None if it has none yet, which counts for every class.
LoadLevel = tuple[int, str | None]


class LoadLedger:
    """The load that each request puts on each worker. A new entry replaces the request's earlier one.

    The load of bulk work is kept apart, since a worker does bulk work only when online requests leave it time.
    """

    def __init__(self) -> None:
        # The load that each request puts on each worker: worker -> request -> load.
        self._shares: dict[str, dict[str, WorkerLoad]] = {}
        # The total load of each worker, and the part of it that is bulk work.
        self._totals: dict[str, WorkerLoad] = {}
        self._bulk: dict[str, WorkerLoad] = {}
        # The load by priority and class: worker -> level -> load. Levels without load are left out.
        self._by_level: dict[str, dict[LoadLevel, WorkerLoad]] = {}
        # The level of each request, and the workers that it loads.
        self._workers: dict[str, tuple[LoadLevel, tuple[str, ...]]] = {}

    def book_shares(
        self,
        request: str,
        shares: Mapping[str, WorkerLoad],
        priority: int = 0,
        kv_class: str | None = None,
    ) -> None:
        """Record the load of a request on each worker, in place of its earlier entry. Empty `shares` remove it.

        `kv_class` is the class of its KV, whose pool it takes room in.
        """
        before, workers = self._workers.pop(request, ((0, None), ()))
        for worker in workers:
            self._add_share(worker, before, self._shares[worker].pop(request), -1)
            if not self._shares[worker]:
                del self._shares[worker], self._totals[worker], self._by_level[worker]
                self._bulk.pop(worker, None)
        for worker, share in shares.items():
            self._shares.setdefault(worker, {})[request] = share
            self._add_share(worker, (priority, kv_class), share, 1)
        if shares:
            self._workers[request] = (priority, kv_class), tuple(shares)

    def _add_share(self, worker: str, level: LoadLevel, load: WorkerLoad, sign: int) -> None:
        """Add a share to a worker's totals, or subtract it (`sign` -1)."""
        self._totals[worker] = self._totals.get(worker, IDLE_LOAD).combined_with(load, sign)
        if level[0] >= BULK_PRIORITY:
            self._bulk[worker] = self._bulk.get(worker, IDLE_LOAD).combined_with(load, sign)
        levels = self._by_level.setdefault(worker, {})
        levels[level] = levels.get(level, IDLE_LOAD).combined_with(load, sign)
        if levels[level] == IDLE_LOAD:
            del levels[level]

    def load_of(self, worker: str, with_bulk: bool = False) -> WorkerLoad:
        """The total load of a worker from online requests, or from all requests."""
        total, bulk = self._totals.get(worker, IDLE_LOAD), self._bulk.get(worker)
        return total if bulk is None or with_bulk else total.combined_with(bulk, -1)

    def load_up_to(self, worker: str, priority: int | None, kv_class: str | None = None) -> WorkerLoad:
        """The load of a worker from requests of this priority and better (lower) ones; None: of all online requests.

        With a `kv_class`, only from requests whose KV is in its pool.
        """
        load: WorkerLoad | None = None
        for (level, name), share in self._by_level.get(worker, {}).items():
            counts = level < BULK_PRIORITY if priority is None else level <= priority
            if counts and (kv_class is None or name in (None, kv_class)):
                load = share if load is None else load.combined_with(share)
        return IDLE_LOAD if load is None else load

    def requests_at(self, worker: str) -> list[str]:
        """The requests that are part of a worker's load."""
        return list(self._shares.get(worker, ()))

    def __len__(self) -> int:
        return len(self._workers)
