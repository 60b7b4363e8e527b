"""The tables in SQLite, what keeps their totals, and how a database of an older version becomes one of this version.

    files      what was uploaded, and the results of batches; content lies beside the database
    batches    every batch, from its creation until 30 days after its end
    lines      the lines of batches that have not ended; a line is `done` when its result is committed
    tenants    what each tenant holds, and `statuses` how many batches have each status: kept by triggers, so that
               nothing is ever counted again
    probes     one row, written to find out whether the disk takes anything again
    clocks     one row, the time that was trusted last

Rows of `lines` name their batch by its number, `batches.n`.
"""

from __future__ import annotations

from services.gateway.batches.records import BatchRecord, FileRecord
from services.gateway.openai.schemas.batch_schema import ALL_STATUSES, ENDED_STATUSES

VERSION = 3
# What counts for a file beside its content: its row, its inode, and the last block of it. For the row of a removed
# file. For the row of a batch beside its texts. For the row of a line.
FILE_BYTES, GONE_FILE_BYTES, BATCH_BYTES, LINE_BYTES = 4096, 256, 1024, 32
# Problems of batches of older versions that are longer are not kept: they had no bound.
MAX_ERRORS_CHARS = 256 << 10
FILE_FIELDS = FileRecord.__struct_fields__
BATCH_FIELDS = BatchRecord.__struct_fields__
# Columns of batches that hold texts; the others hold numbers.
BATCH_TEXTS = frozenset({
    "id", "tenant", "endpoint", "window", "status", "input_file", "output_file", "error_file", "outcome", "model",
    "metadata", "errors",
})  # fmt: skip
ENDED = ", ".join(f"'{status}'" for status in sorted(ENDED_STATUSES))
IS_OPEN = f"status NOT IN ({ENDED})"
# What the table `tenants` keeps: bytes of contents; bytes that count against the share; files, open batches and
# their lines. A tenant's sum of these expressions over its files and batches; {row} is the row.
TENANT_SUMS = ("content", "bytes", "files", "open_batches", "lines")
FILE_SUMS = {
    "content": "iif({row}.removed, 0, {row}.bytes)",
    "bytes": f"iif({{row}}.removed, {GONE_FILE_BYTES}, {{row}}.bytes + {FILE_BYTES})",
    "files": "NOT {row}.removed",
}
BATCH_SUMS = {
    "content": f"iif({{row}}.{IS_OPEN}, {{row}}.output_bytes + {{row}}.error_bytes, 0)",
    # An open batch counts two files for its results, and at least as much as was reserved for them.
    "bytes": f"{BATCH_BYTES} + coalesce(length(CAST({{row}}.metadata AS BLOB)), 0)"
    " + coalesce(length(CAST({row}.errors AS BLOB)), 0)"
    f" + iif({{row}}.{IS_OPEN}, max({{row}}.output_bytes + {{row}}.error_bytes, {{row}}.reserved)"
    f" + {LINE_BYTES} * {{row}}.total + {2 * FILE_BYTES}, 0)",
    "files": f"iif({{row}}.{IS_OPEN}, 2, 0)",
    "open_batches": f"{{row}}.{IS_OPEN}",
    "lines": f"iif({{row}}.{IS_OPEN}, {{row}}.total, 0)",
}


def _sum_trigger(table: str, event: str, sums: dict[str, str], columns: str = "") -> str:
    """The trigger that keeps `tenants` true when a row of `table` is added, changed or removed."""
    row = "OLD" if event == "DELETE" else "NEW"

    def growth(expression: str) -> str:
        new, old = expression.format(row="NEW"), expression.format(row="OLD")
        return {"INSERT": f"+ ({new})", "DELETE": f"- ({old})"}.get(event, f"+ ({new}) - ({old})")

    changes = ", ".join(f"{name} = {name} {growth(expression)}" for name, expression in sums.items())
    return f"""
CREATE TRIGGER {table}_{event.lower()} AFTER {event} {columns} ON {table} BEGIN
    INSERT OR IGNORE INTO tenants (tenant) VALUES ({row}.tenant);
    UPDATE tenants SET {changes} WHERE tenant = {row}.tenant;
END;"""


def _status_trigger(event: str, columns: str = "") -> str:
    """The trigger that keeps `statuses` true."""
    less = "UPDATE statuses SET batches = batches - 1 WHERE status = OLD.status;"
    more = "UPDATE statuses SET batches = batches + 1 WHERE status = NEW.status;"
    body = {"INSERT": more, "DELETE": less}.get(event, f"{less} {more}")
    return f"""
CREATE TRIGGER statuses_{event.lower()} AFTER {event} {columns} ON batches BEGIN {body} END;"""


# What versions 1 and 2 do not have, but for columns of tables that they have.
TOTALS = f"""
CREATE TABLE lines (
    batch INTEGER NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    done INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY, {", ".join(f"{name} INTEGER NOT NULL DEFAULT 0" for name in TENANT_SUMS)}
) WITHOUT ROWID;
CREATE TABLE statuses (status TEXT PRIMARY KEY, batches INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
INSERT INTO statuses (status) VALUES {", ".join(f"('{status}')" for status in ALL_STATUSES)};
CREATE TABLE clocks (id INTEGER PRIMARY KEY, settled_s REAL NOT NULL);
CREATE INDEX files_of_tenants ON files (tenant, n) WHERE NOT deleted;
CREATE INDEX files_by_expiry ON files (expires_at) WHERE NOT deleted;
CREATE INDEX files_by_removal ON files (removed_at) WHERE removed;
CREATE INDEX open_batches ON batches (n) WHERE {IS_OPEN};
CREATE INDEX open_inputs ON batches (input_file) WHERE {IS_OPEN};
CREATE INDEX batches_by_end ON batches (ended_at) WHERE ended_at IS NOT NULL;
{_sum_trigger("files", "INSERT", FILE_SUMS)}
{_sum_trigger("files", "UPDATE", FILE_SUMS, "OF removed, bytes")}
{_sum_trigger("files", "DELETE", FILE_SUMS)}
{_sum_trigger("batches", "INSERT", BATCH_SUMS)}
{
    _sum_trigger(
        "batches",
        "UPDATE",
        BATCH_SUMS,
        "OF status, output_bytes, error_bytes, metadata, errors, total, reserved",
    )
}
{_sum_trigger("batches", "DELETE", BATCH_SUMS)}
{_status_trigger("INSERT")}
{_status_trigger("UPDATE", "OF status")}
{_status_trigger("DELETE")}
"""
SCHEMA = f"""
CREATE TABLE files (
    n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    name TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER,
    deleted INTEGER NOT NULL DEFAULT 0, removed INTEGER NOT NULL DEFAULT 0, removed_at INTEGER
);
CREATE TABLE batches (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    {", ".join(f'"{name}" {"TEXT" if name in BATCH_TEXTS else "INTEGER"}' for name in BATCH_FIELDS)},
    checks INTEGER NOT NULL DEFAULT 0, reserved INTEGER NOT NULL DEFAULT 0, ended_at INTEGER
);
CREATE UNIQUE INDEX batch_ids ON batches (id);
CREATE INDEX batches_of_tenants ON batches (tenant, n);
CREATE TABLE probes (id INTEGER PRIMARY KEY, time INTEGER NOT NULL);
{TOTALS}
PRAGMA user_version = {VERSION};
"""


def _counted_rows(table: str, sums: dict[str, str]) -> str:
    columns = (f"({sums[name].format(row=table)})" if name in sums else "0" for name in TENANT_SUMS)
    return f"SELECT {table}.tenant AS tenant, {', '.join(columns)} FROM {table}"


# The table `tenants` as it must be, counted row by row: to fill it once, and for tests.
COUNT_TENANTS = f"""
WITH counted (tenant, {", ".join(TENANT_SUMS)}) AS (
    {_counted_rows("files", FILE_SUMS)} UNION ALL {_counted_rows("batches", BATCH_SUMS)}
)
SELECT tenant, {", ".join(f"sum({name})" for name in TENANT_SUMS)} FROM counted GROUP BY tenant
"""
# What brings a database of an older version to the next one, by its version.
MIGRATIONS = {
    1: """
ALTER TABLE batches ADD COLUMN checks INTEGER NOT NULL DEFAULT 0;
PRAGMA user_version = 2;
""",
    2: f"""
ALTER TABLE batches ADD COLUMN reserved INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN ended_at INTEGER;
ALTER TABLE files ADD COLUMN removed_at INTEGER;
ALTER TABLE lines RENAME TO named_lines;
DROP INDEX files_of_tenants;
{TOTALS}
UPDATE files SET deleted = 1, removed_at = created_at, name = '' WHERE removed;
UPDATE batches SET errors = '[{{"code": "more_errors", "message": "the problems were too long to be kept"}}]'
    WHERE length(errors) > {MAX_ERRORS_CHARS};
UPDATE batches SET ended_at = coalesce(completed_at, failed_at, expired_at, cancelled_at, created_at)
    WHERE NOT {IS_OPEN};
INSERT INTO lines SELECT batches.n, number, start, length, done FROM named_lines JOIN batches ON batch = batches.id;
DROP TABLE named_lines;
DELETE FROM tenants;
INSERT INTO tenants {COUNT_TENANTS};
UPDATE statuses SET batches = (SELECT count(*) FROM batches WHERE batches.status = statuses.status);
PRAGMA user_version = 3;
""",
}
