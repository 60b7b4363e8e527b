"""Which batch may run its next line: a pure function.

Tenants share the lines in flight evenly, and among the batches of a tenant the one that expires first goes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchClaim:
    """An open batch that may have lines to run. `order` grows with its creation, `running` are its lines in flight."""

    batch: str
    tenant: str
    expires_at: int
    order: int
    running: int
    has_lines: bool


def choose_batch(claims: Sequence[BatchClaim], served_tokens: Mapping[str, int]) -> str | None:
    """The batch whose line runs next; None if no batch has lines.

    The tenant with the fewest lines in flight comes first, of equal ones the tenant that was served fewest tokens
    (`served_tokens`, by tenant), and of these the one with the nearest expiry. Within a tenant the nearest expiry comes
    first, then the oldest batch.
    """
    running: Counter[str] = Counter()
    for claim in claims:
        running[claim.tenant] += claim.running
    waiting = [claim for claim in claims if claim.has_lines]
    if not waiting:
        return None

    def rank(claim: BatchClaim) -> tuple[int, int, int, int, str]:
        served = served_tokens.get(claim.tenant, 0)
        return running[claim.tenant], served, claim.expires_at, claim.order, claim.batch

    return min(waiting, key=rank).batch
