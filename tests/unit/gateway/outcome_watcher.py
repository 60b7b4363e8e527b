"""A sink of outcomes that records them."""

from __future__ import annotations

from collections import Counter

from services.gateway.outcomes import (
    EndedSequence,
    OutcomeSink,
    SequenceRecord,
)


class Watcher(OutcomeSink):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.arrived, self.ended = list[SequenceRecord](), list[EndedSequence]()

    def on_arrived(self, record: SequenceRecord, now_s: float) -> None:
        self.arrived.append(record)

    def on_ended(self, ended: EndedSequence) -> None:
        self.ended.append(ended)

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        return Counter((one.checked.outcome.value, one.checked.reason) for one in self.ended)
