"""What batches cost because of the batches that were there before.

    python -m benchmarks.batch_scale [--json] [--short] [--ended 60000] [--open 1000] [--rounds 5]

Two data directories, one with 100 ended and 100 open batches, the other with `--ended` and `--open`. In each, batches
are added and begun, listed, and ended, files are deleted, what has expired is looked for, and lines are started by
the feeder, beside all of them. Figures are the CPU time of the event loop's thread and of the database's thread, so
another program does not change them much; of each kind of work the median of all rounds counts.

    batch_scale          the worst of the ratios of adding, listing and starting lines, of many batches to few
    NAME_ratio           the ratio of a kind of work, and NAME_us: its microseconds beside many
    database_mb          the size of the database, with many batches
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sqlite3
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from statistics import median
from typing import Any, cast

from msgspec import structs

import benchmarks.script_path  # noqa: F401
from services.gateway.batches import tables
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.database_thread import ResultFiles
from services.gateway.batches.feeder import LINES_PER_WORKER, BatchFeeder
from services.gateway.batches.line_runner import LineAnswer, LineRunner
from services.gateway.batches.records import (
    BatchRecord,
    FileRecord,
    InputLine,
    LineEnd,
    new_batch_id,
    new_file_id,
)
from services.gateway.batches.store import BatchStore
from services.gateway.preparation.file_checker import FileChecker
from services.gateway.preparation.preparer_pool import PreparerPool

FEW = 100
# Workers, each with its lines in flight, and tenants among whom the batches are.
NUM_WORKERS, NUM_TENANTS = 4, 20
# Batches that are added in a round, and lines of each open batch.
PER_ROUND, NUM_LINES = 20, 8
ENDPOINT, NAMED = "/v1/completions", ("add", "list", "start")
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
# Rows that are filled in at a time.
FILLED = 500


class HeldRunner:
    """Lines that it is given never end."""

    async def run_line(self, *_: object) -> LineAnswer:
        """Wait until the line is aborted."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class Meter:
    """CPU time of the event loop's thread and of the database's thread."""

    def __init__(self, store: BatchStore) -> None:
        self._clock = time.pthread_getcpuclockid(store.database.thread_id)

    def read_s(self) -> float:
        """The seconds of both so far."""
        return time.thread_time() + time.clock_gettime(self._clock)


def make_record(tenant: str, source: str, now: int) -> BatchRecord:
    """A new batch, with as much metadata as a client may give in two of its pairs."""
    return BatchRecord(
        id=new_batch_id(), tenant=tenant, urgent=0, endpoint=ENDPOINT, window="24h", status="validating",
        input_file=source, output_file=new_file_id(), error_file=new_file_id(), created_at=now,
        expires_at=now + 86400, output_expiry_s=86400, metadata=json.dumps({"a": "x" * 512, "b": "y" * 512}),
    )  # fmt: skip


async def add_source(store: BatchStore, tenant: str) -> FileRecord:
    """An input file of a tenant."""
    record = FileRecord(
        id=new_file_id(),
        tenant=tenant,
        purpose="batch",
        name="in.jsonl",
        bytes=NUM_LINES * len(LINE),
        created_at=store.now,
        expires_at=store.now + 30 * 86400,
    )
    store.content_path(record.id).write_bytes(LINE * NUM_LINES)
    await store.add_file(record)
    return record


async def begin(store: BatchStore, record: BatchRecord) -> None:
    """Have the lines of a batch run."""
    lines = [InputLine(number + 1, number * len(LINE), len(LINE)) for number in range(NUM_LINES)]
    await store.begin_batch(record.id, lines, "toy")


async def fill(store: BatchStore, num_ended: int, num_open: int) -> list[FileRecord]:
    """Ended batches, straight into the tables, and open ones; returns an input file of each tenant."""
    sources = [await add_source(store, f"tenant-{number}") for number in range(NUM_TENANTS)]
    now = store.now

    def add_ended(db: sqlite3.Connection, files: ResultFiles) -> None:
        for number in range(FILLED):
            source = sources[number % NUM_TENANTS]
            record = make_record(source.tenant, source.id, now)
            tables.add_batch(db, structs.replace(record, status="completed", completed_at=now), 0)
            tables.update_batch(db, record.id, ended_at=now)

    for _ in range(-(-num_ended // FILLED)):
        await store.database.run_job(add_ended)
    for number in range(num_open):
        source = sources[number % NUM_TENANTS]
        record = make_record(source.tenant, source.id, now)
        await store.add_batch(record)
        await begin(store, record)
    return sources


async def measure_store(store: BatchStore, sources: list[FileRecord], rounds: int) -> dict[str, float]:
    """Microseconds of each kind of work of the store."""
    meter, costs = Meter(store), defaultdict[str, list[float]](list)

    async def measure(name: str, *work: Awaitable[Any]) -> None:
        begun_s = meter.read_s()
        for one in work:
            await one
        costs[name].append(1e6 * (meter.read_s() - begun_s) / len(work))

    for _ in range(rounds):
        used = [await add_source(store, source.tenant) for source in sources]
        picked = [used[number % NUM_TENANTS] for number in range(PER_ROUND)]
        records = [make_record(source.tenant, source.id, store.now) for source in picked]
        ends = [LineEnd(number=n + 1, succeeded=True, text=b"{}\n") for n in range(NUM_LINES)]
        gc.collect()
        await measure("add", *(store.add_batch(one) for one in records))
        await measure("begin", *(begin(store, one) for one in records))
        await measure("list", *(store.list_batches(one.tenant, None, 20) for one in records))
        await measure("end_lines", *(store.end_lines(one.id, ends) for one in records))
        for one in records:
            await store.finalize_batch(one.id, "completed")
        await measure("end", *(store.end_batch(one.id) for one in records))
        await measure("delete", *(store.delete_file(one.tenant, one.id) for one in used))
        await measure("purge", *(store.remove_unused() for _ in records))
    return {name: median(values) for name, values in costs.items()}


async def measure_start(store: BatchStore, rounds: int) -> float:
    """Microseconds that it takes to start a line, beside all open batches."""
    meter, costs, num_lines = Meter(store), list[float](), NUM_WORKERS * LINES_PER_WORKER
    for _ in range(rounds):
        held = True
        feeder = BatchFeeder(
            store,
            cast(LineRunner, HeldRunner()),
            FileChecker(cast(PreparerPool, None)),
            "toy",
            1 << 20,
            lambda: NUM_WORKERS,
            lambda: held,  # noqa: B023
        )
        running = asyncio.create_task(feeder.run_forever())
        # All batches are known, and what was to be done for them is done.
        while len(feeder.open) < store.by_status.get("in_progress", 0) or feeder.batches.any_touched:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        gc.collect()
        begun_s, held = meter.read_s(), False
        feeder.wake()
        while feeder.num_running < num_lines:
            await asyncio.sleep(0.002)
        costs.append(1e6 * (meter.read_s() - begun_s) / num_lines)
        running.cancel()
        await asyncio.wait([running])
    return median(costs)


async def measure_folder(path: Path, num_ended: int, num_open: int, rounds: int) -> dict[str, float]:
    """Microseconds of each kind of work beside so many batches, and the megabytes of the database."""
    store = BatchStore(DataDir(str(path)))
    try:
        costs = await measure_store(store, await fill(store, num_ended, num_open), rounds)
        return costs | {
            "start": await measure_start(store, rounds),
            "database_mb": store.data_dir.database.stat().st_size / 1e6,
        }
    finally:
        store.close()


def measure_scale(num_ended: int, num_open: int, rounds: int) -> dict[str, float]:
    """The figures of this benchmark."""
    with tempfile.TemporaryDirectory(prefix="batch-scale-") as folder:
        few = asyncio.run(measure_folder(Path(folder, "few"), FEW, FEW, rounds))
        many = asyncio.run(measure_folder(Path(folder, "many"), num_ended, num_open, rounds))
    size = many.pop("database_mb")
    ratios = {name: cost / few[name] for name, cost in many.items()}
    return {
        "batch_scale": round(max(ratios[name] for name in NAMED), 2),
        **{f"{name}_ratio": round(ratio, 2) for name, ratio in ratios.items()},
        **{f"{name}_us": round(cost, 1) for name, cost in many.items()},
        "database_mb": round(size, 1),
    }


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--short", action="store_true", help="fewer rounds")
    parser.add_argument("--ended", type=int, default=60_000)
    parser.add_argument("--open", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    found = measure_scale(asked.ended, asked.open, 3 if asked.short else asked.rounds)
    if asked.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
