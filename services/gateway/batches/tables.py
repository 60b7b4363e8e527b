"""The tables in SQLite, and what is done with their rows. Every function runs within a transaction of its caller.

    files     what was uploaded, and the results of batches; content lies beside the database
    batches   every batch, from its creation on
    lines     the lines of batches that have not ended; a line is `done` when its result is committed
    probes    one row, written to find out whether the disk takes anything again

A line in flight is not marked: after a crash it waits again, by itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from services.gateway.batches.records import BATCH_PURPOSE, BatchRecord, FileRecord, InputLine, LineEnd
from services.gateway.openai.batch_schema import ENDED_STATUSES

VERSION = 2
# Seconds after its expiry for which the row of a removed file is kept.
KEPT_PLACE_S = 86400
# What grows with the results of a batch.
RESULT_COUNTS = (
    "output_bytes", "error_bytes", "completed", "failed", "input_tokens", "cached_tokens", "output_tokens"
)  # fmt: skip
FILE_FIELDS = FileRecord.__struct_fields__
BATCH_FIELDS = BatchRecord.__struct_fields__
FILE_COLUMNS, BATCH_COLUMNS = ", ".join(FILE_FIELDS), ", ".join(f'"{name}"' for name in BATCH_FIELDS)
ENDED = ", ".join(f"'{status}'" for status in sorted(ENDED_STATUSES))
# Columns of batches that hold texts; the others hold numbers.
BATCH_TEXTS = frozenset({
    "id", "tenant", "endpoint", "window", "status", "input_file", "output_file", "error_file", "outcome", "model",
    "metadata", "errors",
})  # fmt: skip
SCHEMA = f"""
CREATE TABLE files (
    n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    name TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER,
    deleted INTEGER NOT NULL DEFAULT 0, removed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX files_of_tenants ON files (tenant, n);
CREATE TABLE batches (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    {", ".join(f'"{name}" {"TEXT" if name in BATCH_TEXTS else "INTEGER"}' for name in BATCH_FIELDS)},
    checks INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX batch_ids ON batches (id);
CREATE INDEX batches_of_tenants ON batches (tenant, n);
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL,
    length INTEGER NOT NULL, done INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE TABLE probes (id INTEGER PRIMARY KEY, time INTEGER NOT NULL);
PRAGMA user_version = {VERSION};
"""
# What brings a database of an older version to the next one, by its version.
MIGRATIONS = {
    1: """
    ALTER TABLE batches ADD COLUMN checks INTEGER NOT NULL DEFAULT 0;
    PRAGMA user_version = 2;
    """,
}

# ---- files


def add_file(db: sqlite3.Connection, record: FileRecord) -> None:
    """Add a file whose content is in its place."""
    marks = ", ".join("?" * len(FILE_FIELDS))
    db.execute(f"INSERT INTO files ({FILE_COLUMNS}) VALUES ({marks})", msgspec.structs.astuple(record))


def find_file(db: sqlite3.Connection, tenant: str, file_id: str, now: int) -> FileRecord | None:
    """A file of this tenant that is neither deleted nor expired."""
    row = db.execute(
        f"SELECT {FILE_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND NOT deleted "
        "AND (expires_at IS NULL OR expires_at > ?)",
        (file_id, tenant, now),
    ).fetchone()
    return None if row is None else _file_of_row(row)


def list_files(
    db: sqlite3.Connection,
    tenant: str,
    purpose: str | None,
    after: str | None,
    limit: int,
    order: str,
    now: int,
) -> list[FileRecord] | None:
    """At most `limit` files of a tenant, newest first if `order` is "desc", behind the file `after`.

    None if there is no file `after`.
    """
    where = "tenant = ? AND NOT deleted AND (expires_at IS NULL OR expires_at > ?)"
    values: list[str | int] = [tenant, now]
    if purpose is not None:
        where, values = f"{where} AND purpose = ?", [*values, purpose]
    if after is not None:
        place = _place_of(db, "files", tenant, after)
        if place is None:
            return None
        where, values = f"{where} AND n {'<' if order == 'desc' else '>'} ?", [*values, place]
    rows = db.execute(
        f"SELECT {FILE_COLUMNS} FROM files WHERE {where} ORDER BY n {'DESC' if order == 'desc' else 'ASC'} LIMIT ?",
        [*values, limit],
    )
    return [_file_of_row(row) for row in rows]


def mark_deleted(db: sqlite3.Connection, file_id: str) -> None:
    """Hide a file from its owner. Its content goes when no batch needs it any more (`take_unused`)."""
    db.execute("UPDATE files SET deleted = 1 WHERE id = ?", (file_id,))


def take_unused(db: sqlite3.Connection, now: int) -> list[str]:
    """Mark files as removed that are deleted or expired, and that no open batch reads; returns their ids.

    Their rows stay a while, as places in lists: a client may delete what it lists, page by page.
    """
    db.execute("DELETE FROM files WHERE removed AND expires_at <= ?", (now - KEPT_PLACE_S,))
    rows = db.execute(
        "UPDATE files SET removed = 1, deleted = 1 WHERE NOT removed AND (deleted OR expires_at <= ?) "
        f"AND id NOT IN (SELECT input_file FROM batches WHERE status NOT IN ({ENDED})) RETURNING id",
        (now,),
    )
    return [file_id for (file_id,) in rows.fetchall()]


def next_expiry(db: sqlite3.Connection) -> int | None:
    """When the next file expires."""
    found: int | None = db.execute("SELECT min(expires_at) FROM files WHERE NOT removed").fetchone()[0]
    return found


def known_contents(db: sqlite3.Connection) -> set[str]:
    """The ids of all files whose content is needed: files, and results of batches that have not ended."""
    found = db.execute(
        f"SELECT id FROM files WHERE NOT removed UNION SELECT output_file FROM batches WHERE status NOT IN ({ENDED}) "
        f"UNION SELECT error_file FROM batches WHERE status NOT IN ({ENDED})"
    )
    return {file_id for (file_id,) in found}


# ---- batches


def add_batch(db: sqlite3.Connection, record: BatchRecord) -> None:
    """Add a new batch."""
    marks = ", ".join("?" * len(BATCH_FIELDS))
    db.execute(f"INSERT INTO batches ({BATCH_COLUMNS}) VALUES ({marks})", msgspec.structs.astuple(record))


def find_batch(db: sqlite3.Connection, batch_id: str, tenant: str | None = None) -> BatchRecord | None:
    """A batch, of this tenant if one is given."""
    row = db.execute(f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ?", (batch_id,)).fetchone()
    record = None if row is None else _batch_of_row(row)
    return record if record is not None and tenant in (None, record.tenant) else None


def list_batches(
    db: sqlite3.Connection, tenant: str, after: str | None, limit: int
) -> list[BatchRecord] | None:
    """At most `limit` batches of a tenant, newest first, behind the batch `after`; None if there is no such batch."""
    where = "tenant = ?"
    values: list[str | int] = [tenant]
    if after is not None:
        place = _place_of(db, "batches", tenant, after)
        if place is None:
            return None
        where, values = f"{where} AND n < ?", [*values, place]
    rows = db.execute(
        f"SELECT {BATCH_COLUMNS} FROM batches WHERE {where} ORDER BY n DESC LIMIT ?", [*values, limit]
    )
    return [_batch_of_row(row) for row in rows]


def open_batches(db: sqlite3.Connection) -> list[BatchRecord]:
    """All batches that have not ended, oldest first."""
    rows = db.execute(f"SELECT {BATCH_COLUMNS} FROM batches WHERE status NOT IN ({ENDED}) ORDER BY n")
    return [_batch_of_row(row) for row in rows]


def count_open(db: sqlite3.Connection, tenant: str) -> int:
    """How many batches of a tenant have not ended."""
    found: int = db.execute(
        f"SELECT count(*) FROM batches WHERE tenant = ? AND status NOT IN ({ENDED})", (tenant,)
    ).fetchone()[0]
    return found


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


def restart_batch(db: sqlite3.Connection, record: BatchRecord) -> BatchRecord:
    """Forget all results of a batch that has not ended: its lines have none."""
    db.execute("UPDATE lines SET done = 0 WHERE batch = ?", (record.id,))
    values: dict[str, Any] = dict.fromkeys(RESULT_COUNTS, 0)
    if record.outcome == "completed":
        values |= {"status": "in_progress", "outcome": "", "finalizing_at": None}
    return update_batch(db, record.id, **values)


def add_lines(db: sqlite3.Connection, batch_id: str, lines: Iterable[InputLine]) -> None:
    """Replace the lines of a batch."""
    drop_lines(db, batch_id)
    db.executemany(
        "INSERT INTO lines (batch, number, custom_id, start, length) VALUES (?, ?, ?, ?, ?)",
        ((batch_id, line.number, line.custom_id, line.offset, line.num_bytes) for line in lines),
    )


def drop_lines(db: sqlite3.Connection, batch_id: str) -> None:
    """Forget the lines of a batch."""
    db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))


def waiting_lines(db: sqlite3.Connection, batch_id: str, behind: int, limit: int) -> list[InputLine]:
    """At most `limit` lines without a result, with numbers above `behind`."""
    rows = db.execute(
        "SELECT number, custom_id, start, length FROM lines WHERE batch = ? AND number > ? AND NOT done "
        "ORDER BY number LIMIT ?",
        (batch_id, behind, limit),
    )
    return [InputLine(*row) for row in rows]


def count_waiting(db: sqlite3.Connection, batch_id: str) -> int:
    """How many lines of a batch have no result."""
    found: int = db.execute(
        "SELECT count(*) FROM lines WHERE batch = ? AND NOT done", (batch_id,)
    ).fetchone()[0]
    return found


def mark_done(db: sqlite3.Connection, batch_id: str, ends: Sequence[LineEnd]) -> list[LineEnd]:
    """Mark lines as done; returns those that were not done before, which are the ones to write."""
    return [
        end
        for end in ends
        if db.execute(
            "UPDATE lines SET done = 1 WHERE batch = ? AND number = ? AND NOT done", (batch_id, end.number)
        ).rowcount
    ]


# ---- totals


def count_batches(db: sqlite3.Connection) -> dict[str, int]:
    """How many batches there are, by status."""
    return dict(db.execute("SELECT status, count(*) FROM batches GROUP BY status").fetchall())


def sum_bytes(db: sqlite3.Connection) -> int:
    """The bytes of all contents that are held."""
    files: int = db.execute("SELECT coalesce(sum(bytes), 0) FROM files WHERE NOT removed").fetchone()[0]
    results: int = db.execute(
        f"SELECT coalesce(sum(output_bytes + error_bytes), 0) FROM batches WHERE status NOT IN ({ENDED})"
    ).fetchone()[0]
    return files + results


def write_probe(db: sqlite3.Connection, now: int) -> None:
    """Write something, to find out whether the disk takes it."""
    db.execute("INSERT OR REPLACE INTO probes (id, time) VALUES (0, ?)", (now,))


def input_in_use(db: sqlite3.Connection, tenant: str, file_id: str, now: int) -> FileRecord | None:
    """The file that a new batch may read: uploaded by this tenant for batches."""
    record = find_file(db, tenant, file_id, now)
    return record if record is not None and record.purpose == BATCH_PURPOSE else None


def _place_of(db: sqlite3.Connection, table: str, tenant: str, row_id: str) -> int | None:
    row = db.execute(f"SELECT n FROM {table} WHERE id = ? AND tenant = ?", (row_id, tenant)).fetchone()
    return None if row is None else int(row[0])


def _file_of_row(row: tuple[Any, ...]) -> FileRecord:
    return FileRecord(**dict(zip(FILE_FIELDS, row, strict=True)))


def _batch_of_row(row: tuple[Any, ...]) -> BatchRecord:
    return BatchRecord(**dict(zip(BATCH_FIELDS, row, strict=True)))
