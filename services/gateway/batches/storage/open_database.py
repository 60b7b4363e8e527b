"""Opens the database of a data directory: makes it, or brings one of an older version to this one."""

from __future__ import annotations

import logging
import os
import sqlite3

from diptych.errors import StartError
from services.gateway.batches.data_dir import (
    DATABASE_NAME,
    NEW_FILE_FLAGS,
    DataDir,
    is_disk_full,
    sync_folder,
)
from services.gateway.batches.storage.schema import MIGRATIONS, SCHEMA, VERSION

# The log of changes is cut to this size once its changes are in the database.
MAX_LOG_BYTES = 16 << 20
INCREMENTAL = 2  # the value of `auto_vacuum`

log = logging.getLogger(__name__)


def open_database(data_dir: DataDir) -> sqlite3.Connection:
    """The database with its tables. Raises StartError if it is not ours, of another version, or cannot be read."""
    db: sqlite3.Connection | None = None
    try:
        os.close(os.open(data_dir.database, NEW_FILE_FLAGS, 0o600))
        # Transactions are begun and ended by hand; the thread is the only user after this function.
        db = sqlite3.connect(data_dir.database, isolation_level=None, check_same_thread=False)
        # One connection alone needs no index in a file, so the database can be opened while the disk is full.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        tables: int = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        is_new = not version and not tables
        if is_new or version == VERSION or version in MIGRATIONS:
            _prepare(db, data_dir, version, is_new)
            return db
    except (OSError, sqlite3.Error) as error:
        if db is not None:
            db.close()
        if is_disk_full(error):
            raise StartError(
                "the disk of the data directory is full",
                f"{data_dir.database}: {error}",
                "make room on it; nothing is lost",
            ) from error
        raise StartError(
            "the data directory cannot be read",
            f"{data_dir.database}: {error}",
            f"move {DATABASE_NAME} away to begin anew, or restore it from a copy",
        ) from error
    db.close()
    raise StartError(
        "the data directory is of another version of Diptych",
        f"{data_dir.database} has version {version}, and this gateway reads versions 1 to {VERSION}",
        "start the version that wrote it, or give --data-dir an empty folder",
    )


def _prepare(db: sqlite3.Connection, data_dir: DataDir, version: int, is_new: bool) -> None:
    """Set the modes of the database, and make or bring up its tables. Raises OSError and sqlite3.Error."""
    if is_new:
        # Rows that are removed give their room back to the disk (`tables.give_back`). It must be set before tables.
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL")
    # A commit is on disk when it returns.
    db.execute("PRAGMA synchronous = FULL")
    db.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")
    if is_new:
        db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        sync_folder(data_dir.path)
    while version in MIGRATIONS:
        log.warning(
            "the database of files and batches is brought from version %d to %d", version, version + 1
        )
        db.executescript(f"BEGIN; {MIGRATIONS[version]} COMMIT;")
        version += 1
    if db.execute("PRAGMA auto_vacuum").fetchone()[0] != INCREMENTAL:
        _rewrite(db, data_dir)


def _rewrite(db: sqlite3.Connection, data_dir: DataDir) -> None:
    """Rewrite a database of an older version, so that it can give room back, if the disk has room for two copies."""
    if data_dir.free_bytes() < 3 * data_dir.database.stat().st_size:
        log.warning(
            "the database of files and batches gives no room back: the disk is too full to rewrite it"
        )
        return
    try:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("VACUUM")
    except sqlite3.Error as error:
        log.warning("the database of files and batches gives no room back: it cannot be rewritten: %s", error)
