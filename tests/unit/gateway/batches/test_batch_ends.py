"""Each batch ends once, as what it is, and leaves nothing behind: also where two things happen at the same time."""

from __future__ import annotations

from pathlib import Path

from diptych.specs import TenantShares
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.store import BatchStore
from tests.unit.gateway.batches.idle_feeder import InlineChecker
from tests.unit.gateway.batches.test_file_checks import (
    add_lines,
    feeder_of,
    feeding,
    until,
)


async def test_a_batch_above_the_share_of_lines_has_failed_for_good(tmp_path: Path) -> None:
    store = BatchStore(DataDir(str(tmp_path / "data")), shares=TenantShares(max_lines=3))
    record = await add_lines(store, 4)
    feeder = feeder_of(store, InlineChecker())
    async with feeding(store, feeder):
        await until(lambda: store.by_status == {"failed": 1})
        await until(lambda: not feeder.open)
        found = await store.find_batch("", record.id)
        assert found.errors is not None and "line_share_full" in found.errors
