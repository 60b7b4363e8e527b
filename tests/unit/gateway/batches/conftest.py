"""A store in a folder of its own, and its clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.store import BatchStore
from tests.unit.gateway.batches.stored_batches import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[BatchStore]:
    opened = BatchStore(DataDir(str(tmp_path / "data")), clock, clock)
    yield opened
    opened.close()
