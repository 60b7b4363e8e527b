"""A bounded queue that is fair between tenants. No I/O.

Tenants are served round-robin, and no tenant may keep all workers busy.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueueFull(Exception):
    """This tenant has too many items, or too many bytes, in the queue."""


@dataclass(slots=True)
class _TenantLine(Generic[T]):
    """One tenant's waiting items with their sizes, in order of arrival, and the number of its running items."""

    items: deque[tuple[T, int]] = field(default_factory=deque)
    num_bytes: int = 0
    running: int = 0


class TenantQueue(Generic[T]):
    """An item that `pop` returns counts as running for its tenant until `mark_done`.

    `max_items` and `max_bytes` bound what waits per tenant; `max_running` bounds what runs per tenant.
    """

    def __init__(self, max_items: int, max_bytes: int, max_running: int) -> None:
        self.max_items, self.max_bytes, self.max_running = max_items, max_bytes, max_running
        # The lines of all tenants. The tenant that is served next comes first.
        self._lines: OrderedDict[str, _TenantLine[T]] = OrderedDict()

    def push(self, tenant: str, item: T, num_bytes: int) -> None:
        """Append an item of `num_bytes` bytes.

        Raises:
            TenantQueueFull: the tenant has too much in the queue.
        """
        line = self._lines.setdefault(tenant, _TenantLine())
        if line.items and (len(line.items) >= self.max_items or line.num_bytes + num_bytes > self.max_bytes):
            raise TenantQueueFull
        line.items.append((item, num_bytes))
        line.num_bytes += num_bytes

    def pop(self) -> tuple[str, T] | None:
        """Remove the next item, and return it with its tenant. None if no item may run now."""
        for tenant, line in self._lines.items():
            if line.items and line.running < self.max_running:
                item, num_bytes = line.items.popleft()
                line.num_bytes -= num_bytes
                line.running += 1
                self._lines.move_to_end(tenant)
                return tenant, item
        return None

    def mark_done(self, tenant: str) -> None:
        """An item of `tenant` that `pop` returned no longer runs."""
        line = self._lines[tenant]
        line.running -= 1
        if not line.items and not line.running:
            del self._lines[tenant]

    def remove_item(self, tenant: str, item: T) -> bool:
        """Remove a waiting item. Returns False if it does not wait."""
        line = self._lines.get(tenant)
        found = next((entry for entry in line.items if entry[0] is item), None) if line else None
        if line is None or found is None:
            return False
        line.items.remove(found)
        line.num_bytes -= found[1]
        if not line.items and not line.running:
            del self._lines[tenant]
        return True

    def __len__(self) -> int:
        return sum(len(line.items) for line in self._lines.values())
