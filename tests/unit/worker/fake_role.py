"""A role and a link to the gateway that record what a worker's loop does with them."""

from __future__ import annotations

from diptych.messages import (
    ToGateway,
    ToWorker,
    WorkerStats,
)
from engine.sequence import Sequence
from worker.loop import WorkOrder


class FakeGatewayLink:
    """A gateway that says what is listed, round by round, and moves the clock as far as the worker would wait."""

    def __init__(self) -> None:
        self.gateway_lost = self.is_congested = False
        self.said: list[ToGateway] = []
        self.orders: list[list[ToWorker]] = []
        self.now_s = 0.0

    def send(self, message: ToGateway) -> None:
        self.said.append(message)

    def poll_messages(self, timeout_s: float) -> list[ToWorker]:
        if self.orders:
            return self.orders.pop(0)
        self.now_s += timeout_s
        return []

    def wake_poll(self) -> None:
        pass


class FakeRole:
    """Holds the names of what it was given until they are taken away from it."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self.begun: list[Sequence] = []
        self.lands = True  # whether what was abandoned is let go of at the next `tend`
        self.abandoned = False

    def begin_attempt(self, order: WorkOrder, seq: Sequence, now_s: float) -> None:
        self.kept[order.request] = order.epoch
        self.begun.append(seq)

    def take_message(self, message: ToWorker, now_s: float) -> None: ...

    def take_over(self, seq: Sequence, now_s: float) -> None: ...

    def tend_held(self, now_s: float) -> float | None:
        if self.abandoned and self.lands:
            self.kept.clear()
        return None

    def abort_attempts(self, request: str, epoch: int) -> None:
        if self.kept.get(request, epoch + 1) <= epoch:
            del self.kept[request]

    def abandon_all(self) -> list[tuple[str, int]]:
        ended, self.abandoned = list(self.kept.items()), True
        return ended

    @property
    def is_busy(self) -> bool:
        return bool(self.kept)

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        return stats
