"""What is done with the rows of the tables. Every function runs within a transaction of its caller.

A line in flight is not marked: after a crash it waits again, by itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.batches.records import BATCH_PURPOSE, BatchRecord, FileRecord, InputLine, LineEnd
from services.gateway.batches.storage.schema import BATCH_FIELDS, FILE_FIELDS, IS_OPEN, TENANT_SUMS
from services.gateway.batches.storage.tenant_shares import TenantUse

# Seconds for which the row of a removed file is kept.
KEPT_PLACE_S = 3600
# Seconds after its end for which a batch is kept.
KEPT_BATCH_S = 30 * 86400
# What grows with the results of a batch.
RESULT_COUNTS = (
    "output_bytes", "error_bytes", "completed", "failed", "input_tokens", "cached_tokens", "output_tokens"
)  # fmt: skip
FILE_COLUMNS, BATCH_COLUMNS = ", ".join(FILE_FIELDS), ", ".join(f'"{name}"' for name in BATCH_FIELDS)
OPEN_READER = f"EXISTS (SELECT 1 FROM batches WHERE input_file = files.id AND {IS_OPEN})"

# ---- files


def add_file(db: sqlite3.Connection, record: FileRecord) -> None:
    """Add a file whose content is in its place."""
    marks = ", ".join("?" * len(FILE_FIELDS))
    db.execute(f"INSERT INTO files ({FILE_COLUMNS}) VALUES ({marks})", msgspec.structs.astuple(record))


def find_file(db: sqlite3.Connection, tenant: str | None, file_id: str, now: int) -> FileRecord | None:
    """A file of this tenant (None: of any) that is neither deleted nor expired."""
    row = db.execute(
        f"SELECT {FILE_COLUMNS} FROM files WHERE id = ? AND NOT deleted AND (expires_at IS NULL OR expires_at > ?)",
        (file_id, now),
    ).fetchone()
    record = None if row is None else _file_of_row(row)
    return record if record is not None and tenant in (None, record.tenant) else None


def list_files(
    db: sqlite3.Connection,
    tenant: str | None,
    purpose: str | None,
    after: str | None,
    limit: int,
    order: str,
    now: int,
) -> list[FileRecord] | None:
    """At most `limit` files of a tenant (None: of all), newest first if `order` is "desc", behind the file `after`.

    None if there is no file `after`.
    """
    terms, values = ["NOT deleted", "(expires_at IS NULL OR expires_at > ?)"], list[str | int]([now])
    for name, wanted in (("tenant", tenant), ("purpose", purpose)):
        if wanted is not None:
            terms, values = [*terms, f"{name} = ?"], [*values, wanted]
    if after is not None:
        place = _place_of(db, "files", tenant, after)
        if place is None:
            return None
        terms, values = [*terms, f"n {'<' if order == 'desc' else '>'} ?"], [*values, place]
    rows = db.execute(
        f"SELECT {FILE_COLUMNS} FROM files WHERE {' AND '.join(terms)} "
        f"ORDER BY n {'DESC' if order == 'desc' else 'ASC'} LIMIT ?",
        [*values, limit],
    )
    return [_file_of_row(row) for row in rows]


def delete_file(db: sqlite3.Connection, file_id: str, now: int) -> bool:
    """Hide a file from its owner. Returns whether its content is to be removed now: no open batch reads it."""
    db.execute("UPDATE files SET deleted = 1 WHERE id = ?", (file_id,))
    return release_file(db, file_id, now)


def release_file(db: sqlite3.Connection, file_id: str, now: int) -> bool:
    """Mark a deleted file as removed, if no open batch reads it; returns whether its content is to be removed.

    Its row stays a while, as a place in lists: a client may delete what it lists, page by page.
    """
    removed = db.execute(
        "UPDATE files SET removed = 1, removed_at = ?, name = '' "
        f"WHERE id = ? AND deleted AND NOT removed AND NOT {OPEN_READER}",
        (now, file_id),
    )
    return bool(removed.rowcount)


def take_expired(db: sqlite3.Connection, now: int, limit: int) -> list[str]:
    """Delete at most `limit` files that have expired; returns the ids of those whose content is to be removed."""
    rows = db.execute(
        "UPDATE files SET deleted = 1 WHERE n IN (SELECT n FROM files WHERE NOT deleted AND expires_at <= ? "
        "ORDER BY expires_at LIMIT ?) RETURNING id",
        (now, limit),
    ).fetchall()
    return [file_id for (file_id,) in rows if release_file(db, file_id, now)]


def release_deleted(db: sqlite3.Connection, now: int) -> None:
    """Mark all deleted files as removed that no open batch reads."""
    db.execute(
        "UPDATE files SET removed = 1, removed_at = ?, name = '' "
        f"WHERE deleted AND NOT removed AND NOT {OPEN_READER}",
        (now,),
    )


def forget_rows(db: sqlite3.Connection, now: int, limit: int) -> int:
    """Remove at most `limit` rows of files that were removed, and of batches that ended, long ago; returns how many."""
    files = db.execute(
        "DELETE FROM files WHERE n IN (SELECT n FROM files WHERE removed AND removed_at <= ? "
        "ORDER BY removed_at LIMIT ?)",
        (now - KEPT_PLACE_S, limit),
    ).rowcount
    batches = db.execute(
        "DELETE FROM batches WHERE n IN (SELECT n FROM batches WHERE ended_at <= ? ORDER BY ended_at LIMIT ?)",
        (now - KEPT_BATCH_S, limit),
    ).rowcount
    return files + batches


def next_expiry(db: sqlite3.Connection) -> int | None:
    """When the next file expires."""
    found: int | None = db.execute("SELECT min(expires_at) FROM files WHERE NOT deleted").fetchone()[0]
    return found


def known_contents(db: sqlite3.Connection) -> set[str]:
    """The ids of all files whose content is needed: files, and results of batches that have not ended."""
    found = db.execute(
        f"SELECT id FROM files WHERE NOT removed UNION SELECT output_file FROM batches WHERE {IS_OPEN} "
        f"UNION SELECT error_file FROM batches WHERE {IS_OPEN}"
    )
    return {file_id for (file_id,) in found}


# ---- batches


def add_batch(db: sqlite3.Connection, record: BatchRecord, reserved: int) -> None:
    """Add a new batch. `reserved` bytes count for its results until it has more of them."""
    marks = ", ".join("?" * (len(BATCH_FIELDS) + 1))
    db.execute(
        f"INSERT INTO batches ({BATCH_COLUMNS}, reserved) VALUES ({marks})",
        (*msgspec.structs.astuple(record), reserved),
    )


def find_batch(db: sqlite3.Connection, batch_id: str, tenant: str | None = None) -> BatchRecord | None:
    """A batch, of this tenant if one is given."""
    row = db.execute(f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ?", (batch_id,)).fetchone()
    record = None if row is None else _batch_of_row(row)
    return record if record is not None and tenant in (None, record.tenant) else None


def list_batches(
    db: sqlite3.Connection, tenant: str | None, after: str | None, limit: int
) -> list[BatchRecord] | None:
    """At most `limit` batches of a tenant (None: of all), newest first, behind the batch `after`.

    None if there is no such batch.
    """
    terms, values = ["TRUE"], list[str | int]()
    if tenant is not None:
        terms, values = [*terms, "tenant = ?"], [*values, tenant]
    if after is not None:
        place = _place_of(db, "batches", tenant, after)
        if place is None:
            return None
        terms, values = [*terms, "n < ?"], [*values, place]
    rows = db.execute(
        f"SELECT {BATCH_COLUMNS} FROM batches WHERE {' AND '.join(terms)} ORDER BY n DESC LIMIT ?",
        [*values, limit],
    )
    return [_batch_of_row(row) for row in rows]


def open_batches(db: sqlite3.Connection) -> list[BatchRecord]:
    """All batches that have not ended, oldest first."""
    rows = db.execute(f"SELECT {BATCH_COLUMNS} FROM batches WHERE {IS_OPEN} ORDER BY n")
    return [_batch_of_row(row) for row in rows]


def count_check(db: sqlite3.Connection, batch_id: str) -> int:
    """Count that the input file of a batch is about to be checked; returns how often that has begun."""
    checks: int = db.execute(
        "UPDATE batches SET checks = checks + 1 WHERE id = ? RETURNING checks", (batch_id,)
    ).fetchone()[0]
    return checks


def update_batch(db: sqlite3.Connection, batch_id: str, **values: Any) -> BatchRecord:
    """Set columns of a batch; returns the whole row."""
    names = ", ".join(f'"{name}" = ?' for name in values)
    db.execute(f"UPDATE batches SET {names} WHERE id = ?", [*values.values(), batch_id])
    record = find_batch(db, batch_id)
    assert record is not None
    return record


def cancel_batch(db: sqlite3.Connection, batch_id: str, now: int) -> BatchRecord:
    """Have an open batch end as cancelled."""
    return update_batch(db, batch_id, status="cancelling", outcome="cancelled", cancelling_at=now)


def end_batch(db: sqlite3.Connection, batch_id: str, status: str, now: int, **values: Any) -> BatchRecord:
    """End a batch, and set other columns of it."""
    return update_batch(db, batch_id, status=status, ended_at=now, **{f"{status}_at": now}, **values)


def restart_batch(db: sqlite3.Connection, record: BatchRecord) -> BatchRecord:
    """Forget all results of a batch that has not ended: its lines have none."""
    db.execute("UPDATE lines SET done = 0 WHERE batch = ?", (number_of(db, record.id),))
    values: dict[str, Any] = dict.fromkeys(RESULT_COUNTS, 0)
    if record.outcome == "completed":
        values |= {"status": "in_progress", "outcome": "", "finalizing_at": None}
    return update_batch(db, record.id, **values)


def number_of(db: sqlite3.Connection, batch_id: str) -> int:
    """The number of a batch, which its lines have in their rows."""
    found: int = db.execute("SELECT n FROM batches WHERE id = ?", (batch_id,)).fetchone()[0]
    return found


def add_lines(db: sqlite3.Connection, batch_id: str, lines: Sequence[InputLine]) -> None:
    """Add lines to a batch."""
    number = number_of(db, batch_id)
    db.executemany(
        "INSERT INTO lines (batch, number, start, length) VALUES (?, ?, ?, ?)",
        [(number, line.number, line.offset, line.num_bytes) for line in lines],
    )


def drop_lines(db: sqlite3.Connection, batch: int, limit: int) -> int:
    """Forget at most `limit` lines of the batch with this number; returns how many were forgotten."""
    return db.execute(
        "DELETE FROM lines WHERE batch = ? AND number IN "
        "(SELECT number FROM lines WHERE batch = ? ORDER BY number LIMIT ?)",
        (batch, batch, limit),
    ).rowcount


def batches_with_lines(db: sqlite3.Connection) -> list[int]:
    """The numbers of all batches that have lines. It takes a step for each batch, not for each line."""
    rows = db.execute(
        "WITH RECURSIVE found (batch) AS (SELECT min(batch) FROM lines UNION ALL "
        "SELECT (SELECT min(batch) FROM lines WHERE batch > found.batch) FROM found WHERE batch IS NOT NULL) "
        "SELECT batch FROM found WHERE batch IS NOT NULL"
    )
    return [batch for (batch,) in rows]


def waiting_lines(db: sqlite3.Connection, batch_id: str, behind: int, limit: int) -> list[InputLine]:
    """At most `limit` lines without a result, with numbers above `behind`."""
    rows = db.execute(
        "SELECT number, start, length FROM lines WHERE batch = ? AND number > ? AND NOT done "
        "ORDER BY number LIMIT ?",
        (number_of(db, batch_id), behind, limit),
    )
    return [InputLine(*row) for row in rows]


def mark_done(db: sqlite3.Connection, batch_id: str, ends: Sequence[LineEnd]) -> list[LineEnd]:
    """Mark lines as done; returns those that were not done before, which are the ones to write."""
    batch = number_of(db, batch_id)
    return [
        end
        for end in ends
        if db.execute(
            "UPDATE lines SET done = 1 WHERE batch = ? AND number = ? AND NOT done", (batch, end.number)
        ).rowcount
    ]


# ---- totals


def count_batches(db: sqlite3.Connection) -> dict[str, int]:
    """How many batches there are, by status."""
    return dict(db.execute("SELECT status, batches FROM statuses WHERE batches").fetchall())


def sum_bytes(db: sqlite3.Connection) -> int:
    """The bytes of all contents that are held."""
    found: int = db.execute("SELECT coalesce(sum(content), 0) FROM tenants").fetchone()[0]
    return found


def tenant_use(db: sqlite3.Connection, tenant: str) -> TenantUse:
    """What a tenant keeps."""
    row = db.execute(f"SELECT {', '.join(TENANT_SUMS)} FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
    return TenantUse() if row is None else TenantUse(*row)


def tenant_uses(db: sqlite3.Connection) -> dict[str, TenantUse]:
    """What all tenants keep."""
    rows = db.execute(f"SELECT tenant, {', '.join(TENANT_SUMS)} FROM tenants ORDER BY bytes DESC")
    return {tenant: TenantUse(*sums) for tenant, *sums in rows}


def read_clock(db: sqlite3.Connection) -> float | None:
    """The time that was settled last."""
    row = db.execute("SELECT settled_s FROM clocks").fetchone()
    return None if row is None else float(row[0])


def write_clock(db: sqlite3.Connection, settled_s: float) -> None:
    """Keep the settled time for the next process."""
    db.execute("INSERT OR REPLACE INTO clocks (id, settled_s) VALUES (0, ?)", (settled_s,))


def give_back(db: sqlite3.Connection, most_pages: int) -> int:
    """Give at most so many free pages back to the disk; returns how many more could be given back.

    A database of an older version that was not rewritten gives none back.
    """

    def count_free() -> int:
        found: int = db.execute("PRAGMA freelist_count").fetchone()[0]
        return found

    before = count_free()
    # The pragma frees a page for each row that is fetched.
    db.execute(f"PRAGMA incremental_vacuum({most_pages})").fetchall()
    left = count_free()
    return left if left < before else 0


def write_probe(db: sqlite3.Connection, now: int) -> None:
    """Write something, to find out whether the disk takes it."""
    db.execute("INSERT OR REPLACE INTO probes (id, time) VALUES (0, ?)", (now,))


def input_in_use(db: sqlite3.Connection, tenant: str, file_id: str, now: int) -> FileRecord | None:
    """The file that a new batch may read: uploaded by this tenant for batches."""
    record = find_file(db, tenant, file_id, now)
    return record if record is not None and record.purpose == BATCH_PURPOSE else None


def _place_of(db: sqlite3.Connection, table: str, tenant: str | None, row_id: str) -> int | None:
    row = db.execute(f"SELECT n, tenant FROM {table} WHERE id = ?", (row_id,)).fetchone()
    return int(row[0]) if row is not None and tenant in (None, row[1]) else None


def _file_of_row(row: tuple[Any, ...]) -> FileRecord:
    return FileRecord(**dict(zip(FILE_FIELDS, row, strict=True)))


def _batch_of_row(row: tuple[Any, ...]) -> BatchRecord:
    return BatchRecord(**dict(zip(BATCH_FIELDS, row, strict=True)))
