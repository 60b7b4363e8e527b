"""A feeder that has nothing to do, for what only reads its figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from services.gateway.batches.feeder import BatchFeeder
from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.store import BatchStore


class EmptyStore:
    """The figures of a store without files."""

    def __init__(self) -> None:
        self.by_status: dict[str, int] = {}
        self.held_bytes, self.trouble = 0, ""
        self.folder = SimpleNamespace(path="")


def idle_feeder() -> BatchFeeder:
    return BatchFeeder(cast(BatchStore, EmptyStore()), cast(LineRunner, None), "toy", 1 << 20)
