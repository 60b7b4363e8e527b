"""Bounds the memory of all answers that wait to be written to their clients.

An answer that waits only for its client to read it does not keep others from theirs: when there is no room for another
answer of the same tenant, it is dropped and its client disconnected, the one that has waited longest first. Without
API keys all clients are one tenant, so this holds between any two of them.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure

# Seconds for which an answer may wait for its client before it is dropped for another one.
MIN_READ_S = 5.0


class AnswerMemory:
    """Counts the bytes of waiting answers by tenant. A tenant may hold at most as many bytes as are free for all.

    So one tenant alone can fill half of `max_bytes`, and there is always room for another tenant.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self._clock = max_bytes, clock
        self.held_bytes = 0
        self._by_tenant: Counter[str] = Counter()
        # Per tenant the functions that drop an answer, each with the time since which it waits, the earliest first.
        self._readers: dict[str, OrderedDict[Callable[[], None], float]] = {}

    def hold_bytes(self, tenant: str, num_bytes: int) -> None:
        """Count `num_bytes` more; negative to release them.

        Raises:
            RequestError: 503, this tenant holds too many bytes. They are counted nevertheless.
        """
        self.held_bytes += num_bytes
        self._by_tenant[tenant] += num_bytes
        if num_bytes > 0 and self._is_full(tenant):
            self._drop_read_answers(tenant)
            if self._is_full(tenant):
                problem = (
                    "answers that are not yet complete fill the memory that the gateway has for them; ask for fewer "
                    "log-probabilities, for fewer sequences at once, or for a stream"
                )
                raise RequestError(RequestFailure(FailureReason.ANSWER_MEMORY_FULL, problem))
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    @contextmanager
    def wait_for_reader(self, tenant: str, drop: Callable[[], None]) -> Iterator[None]:
        """While the body runs, an answer waits only for its client. `drop` disconnects it and releases its bytes.

        `drop` is called at most once, and not within the first `MIN_READ_S`.
        """
        readers = self._readers.setdefault(tenant, OrderedDict())
        readers[drop] = self._clock()
        try:
            yield
        finally:
            readers.pop(drop, None)
            if not readers and self._readers.get(tenant) is readers:
                del self._readers[tenant]

    def _is_full(self, tenant: str) -> bool:
        return self._by_tenant[tenant] > self.max_bytes - self.held_bytes

    def _drop_read_answers(self, tenant: str) -> None:
        """Drop answers that wait for their clients until the tenant has room, or none is left that may be dropped."""
        readers, latest_s = self._readers.get(tenant, OrderedDict()), self._clock() - MIN_READ_S
        for drop, since_s in list(readers.items()):
            if since_s > latest_s or not self._is_full(tenant):
                return
            del readers[drop]
            drop()
