"""Fencing on the worker's side: the newest epoch known of every recent request (pure).

Whatever an earlier attempt of a request still says is late: it is dropped and counted. An attempt begins
once, so a second order to begin it (a duplicate, or one that comes after its own abort) is late as well.
"""

from __future__ import annotations

from collections import OrderedDict


class Epochs:
    """Newest epoch by request, bounded: the least recently heard of is forgotten beyond `limit` requests."""

    def __init__(self, limit: int = 16384) -> None:
        self.limit = limit
        self.late = 0  # messages dropped
        self._newest: OrderedDict[str, int] = OrderedDict()

    def begin(self, request: str, epoch: int) -> bool:
        """May work on this attempt begin? False (and counted) if it, or a newer one, was already heard of."""
        if epoch <= self._newest.get(request, -1):
            self.late += 1
            return False
        self._note(request, epoch)
        return True

    def holds(self, request: str, epoch: int) -> bool:
        """Does an order for `epoch` (abort, release) count? Not (counted) if a newer attempt is known."""
        if epoch < self._newest.get(request, -1):
            self.late += 1
            return False
        self._note(request, epoch)
        return True

    def _note(self, request: str, epoch: int) -> None:
        self._newest[request] = epoch
        self._newest.move_to_end(request)
        if len(self._newest) > self.limit:
            self._newest.popitem(last=False)

    def __len__(self) -> int:
        return len(self._newest)
