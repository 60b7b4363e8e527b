"""Bounds the memory of all answers that wait to be written to their clients."""

from __future__ import annotations

from collections import Counter

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure


class AnswerMemory:
    """Counts the bytes of waiting answers by tenant. A tenant may hold at most as many bytes as are free for all.

    So one tenant alone can fill half of `max_bytes`, and there is always room for another tenant.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._by_tenant: Counter[str] = Counter()

    def hold_bytes(self, tenant: str, num_bytes: int) -> None:
        """Count `num_bytes` more; negative to release them.

        Raises:
            RequestError: 503, this tenant holds too many bytes. They are counted nevertheless.
        """
        self.held_bytes += num_bytes
        self._by_tenant[tenant] += num_bytes
        held_bytes = self._by_tenant[tenant]
        if not held_bytes:
            del self._by_tenant[tenant]
        if num_bytes > 0 and held_bytes > self.max_bytes - self.held_bytes:
            problem = (
                "answers that are not yet complete fill the memory that the gateway has for them; ask for fewer "
                "log-probabilities, for fewer sequences at once, or for a stream"
            )
            raise RequestError(RequestFailure(FailureReason.ANSWER_MEMORY_FULL, problem))
