"""Files and batches in a store, and a clock that tests move."""

from __future__ import annotations

import json
from itertools import accumulate

from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.records import (
    BatchRecord,
    FileRecord,
    InputLine,
    LineEnd,
    new_batch_id,
    new_file_id,
)
from services.gateway.batches.store import BatchStore

CHAT = "/v1/chat/completions"


class Clock:
    """A clock that never jumps: both kinds of time pass together."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def reopen(store: BatchStore, clock: Clock) -> BatchStore:
    store.close()
    return BatchStore(DataDir(str(store.data_dir.path)), clock, clock)


async def add_file(
    store: BatchStore, tenant: str = "", content: bytes = b"x\n", **changed: int
) -> FileRecord:
    record = FileRecord(
        id=new_file_id(),
        tenant=tenant,
        purpose="batch",
        name="in.jsonl",
        bytes=len(content),
        created_at=store.now,
        **changed,
    )
    store.content_path(record.id).write_bytes(content)
    await store.add_file(record)
    return record


async def add_batch(store: BatchStore, num_lines: int = 3, tenant: str = "") -> BatchRecord:
    """A batch in progress."""
    names = range(1, num_lines + 1)
    rows = [
        json.dumps({"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": {}}) + "\n" for n in names
    ]
    source = await add_file(store, tenant, "".join(rows).encode())
    record = BatchRecord(
        id=new_batch_id(),
        tenant=tenant,
        urgent=0,
        endpoint=CHAT,
        window="24h",
        status="validating",
        input_file=source.id,
        output_file=new_file_id(),
        error_file=new_file_id(),
        created_at=store.now,
        expires_at=store.now + 100,
        output_expiry_s=3600,
    )
    await store.add_batch(record)
    offsets = accumulate(map(len, rows), initial=0)
    lines = [InputLine(n, at, len(row)) for n, at, row in zip(names, offsets, rows, strict=False)]
    return await store.begin_batch(record.id, lines, "toy")


def end(number: int, succeeded: bool = True, size: int = 10) -> LineEnd:
    text = json.dumps({"custom_id": f"c{number}", "pad": "p" * size}).encode() + b"\n"
    return LineEnd(number=number, succeeded=succeeded, text=text, input_tokens=2, output_tokens=3)


def results(store: BatchStore, file_id: str | None) -> list[str]:
    assert file_id is not None
    text = store.content_path(file_id).read_bytes()
    assert text.endswith(b"\n")
    return [json.loads(row)["custom_id"] for row in text.splitlines()]
