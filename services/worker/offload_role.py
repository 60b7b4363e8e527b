"""The role of a worker that only does bulk work, in blocks: it prefills and decodes lines, and hands nothing over.

Its engine is `engine.offload.engine.OffloadEngine`. To the gateway it is a decode worker without prefill workers.
"""

from __future__ import annotations

from diptych.messages import Generate, ToWorker, WorkerStats
from engine.offload.engine import OffloadEngine
from engine.sequence import Sequence, SequenceRefused
from worker.loop import WorkOrder


class OffloadRole:
    """Gives lines to the engine of a block. All that a line holds, the engine holds."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine

    @property
    def is_busy(self) -> bool:
        """Never: the engine counts what is in it."""
        return False

    def begin_attempt(self, order: WorkOrder, seq: Sequence, now_s: float) -> None:
        """Queue a line. Raises SequenceRefused if it can never run here, or the queue is full."""
        if not isinstance(order, Generate) or order.sampling.pooling is not None:
            raise SequenceRefused("internal_error", f"a bulk worker cannot serve {type(order).__name__}")
        self._engine.add(seq, now_s)

    def take_message(self, message: ToWorker, now_s: float) -> None:
        """Nothing: a worker without links has no use for other messages."""

    def take_over(self, seq: Sequence, now_s: float) -> None:
        """Never called: no line is held after its prompt."""
        raise AssertionError(f"{seq.key} was held by a bulk worker")

    def tend_held(self, now_s: float) -> float | None:
        """Nothing is held beside the engine."""
        return None

    def abort_attempts(self, request: str, epoch: int) -> None:
        """Nothing is held beside the engine, which the loop asks, too."""

    def abandon_all(self) -> list[tuple[str, int]]:
        """Nothing is held beside the engine."""
        return []

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """Those of the engine are complete."""
        return stats
