"""Fencing on the worker's side: remembers the newest epoch of every recent request, and drops late messages (pure).

Each attempt of a request has a higher epoch. A message for an older epoch is late: it is dropped and counted. An
attempt begins once, so a second order to begin it (a duplicate, or one that arrives after its own abort) is late as
well.
"""

from __future__ import annotations

from collections import OrderedDict


class EpochFence:
    """Newest epoch by request. Beyond `limit` requests the least recently mentioned one is forgotten."""

    def __init__(self, limit: int = 16384) -> None:
        self.limit = limit
        # Number of messages that were dropped.
        self.late_messages = 0
        self._newest: OrderedDict[str, int] = OrderedDict()

    def begin_attempt(self, request: str, epoch: int) -> bool:
        """Whether work on this attempt may begin. False (and counted) if it, or a newer one, was already mentioned."""
        if epoch <= self._newest.get(request, -1):
            self.late_messages += 1
            return False
        self._note_epoch(request, epoch)
        return True

    def is_current(self, request: str, epoch: int) -> bool:
        """Whether an order for `epoch` (abort, release) still applies.

        False (and counted) if a newer attempt is known.
        """
        if epoch < self._newest.get(request, -1):
            self.late_messages += 1
            return False
        self._note_epoch(request, epoch)
        return True

    def _note_epoch(self, request: str, epoch: int) -> None:
        """Remember an epoch; forget the least recent request beyond the limit."""
        self._newest[request] = epoch
        self._newest.move_to_end(request)
        if len(self._newest) > self.limit:
            self._newest.popitem(last=False)

    def __len__(self) -> int:
        return len(self._newest)
