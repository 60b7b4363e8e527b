"""The index of a chunk store: which chunks it has, how many bytes they take, and which go first. Shared by processes.

SQLite keeps it (in WAL mode, without waiting for the disk): a process that is killed within a transaction changes
nothing. The files of the chunks are the truth: a chunk in the index whose file is missing is a miss, and an index that
is damaged is made anew from the files.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# The format of the index, which SQLite keeps as `user_version`.
INDEX_VERSION = 1
# For how long a process waits for another one's transaction, in seconds.
LOCK_WAIT_S = 1.0
# Chunks that are looked at together when room is made, and most chunks of one question.
BATCH_CHUNKS = 64
# A chunk that is being written, and one that is complete.
WRITING, COMPLETE = 0, 1
# What the index itself may take, which is part of a store's bound: for each chunk, and beside them.
ROW_BYTES = 512
INDEX_BYTES = 1 << 20

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS chunks (
    address BLOB PRIMARY KEY, bytes INTEGER NOT NULL, used INTEGER NOT NULL, depth INTEGER NOT NULL,
    state INTEGER NOT NULL, owner TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON chunks (used, depth DESC);
CREATE INDEX IF NOT EXISTS by_state ON chunks (state, owner);
CREATE TABLE IF NOT EXISTS total (one INTEGER PRIMARY KEY CHECK (one = 0), bytes INTEGER NOT NULL);
INSERT OR IGNORE INTO total VALUES (0, 0);
PRAGMA user_version = {INDEX_VERSION};
"""


class NewerIndex(Exception):
    """The index was written by a later version of this program."""


class ChunkIndex:
    """The index in one file, for one process. Every method is one transaction, and may raise sqlite3.Error.

    Raises:
        NewerIndex: a later version of this program wrote it.
        sqlite3.DatabaseError: it is damaged.
        sqlite3.OperationalError: another program has locked it.
    """

    def __init__(self, path: Path) -> None:
        # SQLite gives the files beside it the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        self._db = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > INDEX_VERSION:
                raise NewerIndex(f"version {version}, and this program knows {INDEX_VERSION}")
            for pragma in ("journal_mode = WAL", "synchronous = OFF", "wal_autocheckpoint = 64"):
                self._db.execute(f"PRAGMA {pragma}").fetchone()
            self._db.execute(f"PRAGMA journal_size_limit = {INDEX_BYTES // 4}").fetchone()
            if version != INDEX_VERSION:
                self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            self._db.execute("SELECT address, owner FROM chunks LIMIT 1").fetchone()
            if self._db.execute("SELECT bytes FROM total").fetchone() is None:
                raise sqlite3.DatabaseError("the index has no total")
        except BaseException as error:
            self._db.close()
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:
                raise sqlite3.DatabaseError(f"the index lacks a table: {error}") from error
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process writes beside; an exception undoes it."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def count(self) -> tuple[int, int]:
        """The complete chunks, and the bytes of all chunks, those that are being written included."""
        chunks = self._db.execute("SELECT count(*) FROM chunks WHERE state = ?", (COMPLETE,)).fetchone()[0]
        return chunks, self._db.execute("SELECT bytes FROM total").fetchone()[0]

    def find(self, addresses: Sequence[bytes]) -> set[bytes]:
        """Those of `addresses` whose chunks are complete."""
        found: set[bytes] = set()
        for start in range(0, len(addresses), BATCH_CHUNKS):
            part = addresses[start : start + BATCH_CHUNKS]
            marks = ",".join("?" * len(part))
            query = f"SELECT address FROM chunks WHERE state = ? AND address IN ({marks})"
            found.update(row[0] for row in self._db.execute(query, (COMPLETE, *part)))
        return found

    def touch(self, addresses: Sequence[bytes]) -> None:
        """These chunks were used just now, all at once."""
        with self._transaction() as db:
            tick = _next_tick(db)
            db.executemany(
                "UPDATE chunks SET used = ? WHERE address = ?", [(tick, address) for address in addresses]
            )

    def reserve(
        self,
        wanted: Sequence[tuple[bytes, int, int]],
        capacity: int,
        owner: str,
        drop_file: Callable[[bytes], bool],
    ) -> set[bytes]:
        """Reserve room for chunks (address, depth, bytes) that `owner` will write; returns their addresses.

        Those that are there already count as used now, all at once. The least recently used others go, the deepest
        first, each after `drop_file(address)` has removed its file, or returned False since somebody reads it. Chunks
        for which no room can be made are left out.
        """
        with self._transaction() as db:
            tick, granted = _next_tick(db), set[bytes]()
            fresh = []
            for address, depth, num_bytes in wanted:
                row = db.execute("UPDATE chunks SET used = ? WHERE address = ?", (tick, address))
                if not row.rowcount:
                    fresh.append((address, depth, num_bytes + ROW_BYTES))
            used = db.execute("SELECT bytes FROM total").fetchone()[0]
            for address, depth, num_bytes in fresh:
                if num_bytes > capacity or address in granted:
                    continue
                if used + num_bytes > capacity:
                    used -= _make_room(db, used + num_bytes - capacity, tick, drop_file)
                if used + num_bytes > capacity:
                    break
                db.execute(
                    "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)",
                    (address, num_bytes, tick, depth, WRITING, owner),
                )
                used += num_bytes
                granted.add(address)
            db.execute("UPDATE total SET bytes = ?", (used,))
            return granted

    def shrink(self, capacity: int, drop_file: Callable[[bytes], bool]) -> None:
        """Let chunks go until the others fit into `capacity`."""
        with self._transaction() as db:
            used = db.execute("SELECT bytes FROM total").fetchone()[0]
            if used > capacity:
                used -= _make_room(db, used - capacity, _next_tick(db), drop_file)
                db.execute("UPDATE total SET bytes = ?", (used,))

    def complete(self, addresses: Sequence[bytes], owner: str) -> list[bytes]:
        """The files of these chunks, which `owner` has reserved, are in their places.

        Returns those that are not reserved any more, since the index was made anew: their files have to go.
        """
        with self._transaction() as db:
            query = "UPDATE chunks SET state = ?, owner = '' WHERE address = ? AND state = ? AND owner = ?"
            return [
                address
                for address in addresses
                if not db.execute(query, (COMPLETE, address, WRITING, owner)).rowcount
            ]

    def cancel(self, addresses: Sequence[bytes], owner: str) -> None:
        """These chunks, which `owner` has reserved, will not be written."""
        self._delete(addresses, WRITING, owner, None)

    def remove(self, addresses: Sequence[bytes], drop_file: Callable[[bytes], bool]) -> None:
        """Forget complete chunks, with their files."""
        self._delete(addresses, COMPLETE, "", drop_file)

    def _delete(
        self, addresses: Sequence[bytes], state: int, owner: str, drop_file: Callable[[bytes], bool] | None
    ) -> None:
        """Delete the rows of these chunks, if they have this state and owner."""
        with self._transaction() as db:
            gone, where = 0, (state, owner)
            for address in addresses:
                query = "SELECT bytes FROM chunks WHERE address = ? AND state = ? AND owner = ?"
                row = db.execute(query, (address, *where)).fetchone()
                if row is not None and (drop_file is None or drop_file(address)):
                    gone += row[0]
                    db.execute("DELETE FROM chunks WHERE address = ?", (address,))
            db.execute("UPDATE total SET bytes = bytes - ?", (gone,))

    def written_by(self, owner: str) -> list[bytes]:
        """The chunks that `owner` has reserved and not completed."""
        query = "SELECT address FROM chunks WHERE state = ? AND owner = ?"
        return [row[0] for row in self._db.execute(query, (WRITING, owner))]

    def writers(self) -> set[str]:
        """Those that have reserved chunks and not completed them."""
        return {row[0] for row in self._db.execute("SELECT owner FROM chunks WHERE state = ?", (WRITING,))}

    def add_found(self, chunks: Sequence[tuple[bytes, int]]) -> None:
        """Enter chunks (address, bytes) that were found as files, those to go first in front."""
        with self._transaction() as db:
            tick = _next_tick(db)
            for place, (address, num_bytes) in enumerate(chunks):
                db.execute(
                    "INSERT OR IGNORE INTO chunks VALUES (?, ?, ?, 0, ?, '')",
                    (address, num_bytes + ROW_BYTES, tick + place, COMPLETE),
                )
            db.execute("UPDATE total SET bytes = (SELECT coalesce(sum(bytes), 0) FROM chunks)")


def _next_tick(db: sqlite3.Connection) -> int:
    """A number above those of all earlier uses."""
    return int(db.execute("SELECT coalesce(max(used), 0) + 1 FROM chunks").fetchone()[0])


def _make_room(db: sqlite3.Connection, num_bytes: int, tick: int, drop_file: Callable[[bytes], bool]) -> int:
    """Let chunks go that were last used before `tick`, until `num_bytes` are free; returns the bytes."""
    freed, passed = 0, 0
    while freed < num_bytes:
        query = (
            "SELECT address, bytes FROM chunks WHERE state = ? AND used < ? ORDER BY used, depth DESC"
            " LIMIT ? OFFSET ?"
        )
        rows = db.execute(query, (COMPLETE, tick, BATCH_CHUNKS, passed)).fetchall()
        if not rows:
            break
        for address, size in rows:
            if freed >= num_bytes:
                break
            if drop_file(address):
                db.execute("DELETE FROM chunks WHERE address = ?", (address,))
                freed += size
            else:
                # Somebody reads it, so it was used lately.
                passed += 1
    return freed
