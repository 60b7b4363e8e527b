"""A database of an older version is brought to this one, with everything in it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from msgspec import json

from diptych.errors import StartError
from services.gateway.batches.data_dir import DATABASE_NAME, DataDir
from services.gateway.batches.storage import open_database
from services.gateway.batches.storage.schema import MIGRATIONS, VERSION
from services.gateway.batches.store import BatchStore

# The tables of version 1, with an open batch of two lines, of which one is done.
VERSION_1 = """
CREATE TABLE files (
    n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    name TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER,
    deleted INTEGER NOT NULL DEFAULT 0, removed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX files_of_tenants ON files (tenant, n);
CREATE TABLE batches (
    n INTEGER PRIMARY KEY AUTOINCREMENT, "id" TEXT, "tenant" TEXT, "urgent" INTEGER, "endpoint" TEXT,
    "window" TEXT, "status" TEXT, "input_file" TEXT, "output_file" TEXT, "error_file" TEXT,
    "created_at" INTEGER, "expires_at" INTEGER, "output_expiry_s" INTEGER, "outcome" TEXT,
    "output_bytes" INTEGER, "error_bytes" INTEGER, "in_progress_at" INTEGER, "finalizing_at" INTEGER,
    "completed_at" INTEGER, "failed_at" INTEGER, "expired_at" INTEGER, "cancelling_at" INTEGER,
    "cancelled_at" INTEGER, "total" INTEGER, "completed" INTEGER, "failed" INTEGER, "input_tokens" INTEGER,
    "cached_tokens" INTEGER, "output_tokens" INTEGER, "model" TEXT, "metadata" TEXT, "errors" TEXT
);
CREATE UNIQUE INDEX batch_ids ON batches (id);
CREATE INDEX batches_of_tenants ON batches (tenant, n);
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL,
    length INTEGER NOT NULL, done INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE TABLE probes (id INTEGER PRIMARY KEY, time INTEGER NOT NULL);
PRAGMA user_version = 1;
INSERT INTO files (id, tenant, purpose, name, bytes, created_at) VALUES ('file-1', 'a', 'batch', 'in', 20, 900);
INSERT INTO batches (id, tenant, urgent, endpoint, window, status, input_file, output_file, error_file,
    created_at, expires_at, output_expiry_s, outcome, output_bytes, error_bytes, total, completed, failed,
    input_tokens, cached_tokens, output_tokens) VALUES
    ('batch_1', 'a', 0, '/v1/completions', '24h', 'in_progress', 'file-1', 'file-2', 'file-3',
    900, 90000, 3600, '', 4, 0, 2, 1, 0, 5, 0, 5),
    ('batch_0', 'a', 0, '/v1/completions', '24h', 'failed', 'file-0', 'file-4', 'file-5',
    800, 90000, 3600, '', 0, 0, 0, 0, 0, 0, 0, 0);
UPDATE batches SET failed_at = 850, errors = '[{"code": "x", "message": "' || hex(zeroblob(1 << 20)) || '"}]'
    WHERE id = 'batch_0';
UPDATE batches SET in_progress_at = 910 WHERE id = 'batch_1';
INSERT INTO lines VALUES ('batch_1', 1, 'one', 0, 10, 1), ('batch_1', 2, 'two', 10, 10, 0);
"""


def make_version_1(tmp_path: Path) -> DataDir:
    folder = DataDir(str(tmp_path / "data"))
    db = sqlite3.connect(folder.path / DATABASE_NAME)
    db.executescript(VERSION_1)
    db.close()
    folder.content_path("file-1").write_bytes(b"0123456789" * 2)
    folder.content_path("file-2").write_bytes(b"one\n")
    return folder


async def test_a_batch_of_version_1_goes_on(tmp_path: Path) -> None:
    store = BatchStore(make_version_1(tmp_path), lambda: 1000.0)
    assert (store.by_status, store.held_bytes) == ({}, 0), "nothing is read before the start"
    found = await store.recover()
    assert [(record.id, record.completed, record.total) for record in found] == [("batch_1", 1, 2)]
    assert [line.number for line in await store.waiting_lines("batch_1", -1, 9)] == [2]
    assert store.by_status == {"in_progress": 1, "failed": 1} and store.held_bytes == 24
    assert (await store.tenant_use("a")).open_batches == 1
    failed = (await store.find_batch("a", "batch_0")).to_object()
    assert b"more_errors" in json.encode(failed.errors) and len(json.encode(failed)) < 2000
    assert await store.count_check("batch_1") == 1
    path = str(store.data_dir.path)
    store.close()
    store = BatchStore(DataDir(path), lambda: 1000.0)
    assert await store.count_check("batch_1") == 2
    store.close()


async def test_a_database_of_version_1_gives_room_back_too(tmp_path: Path) -> None:
    store = BatchStore(make_version_1(tmp_path), lambda: 1000.0)
    store.close()
    db = sqlite3.connect(store.data_dir.database)
    assert db.execute("PRAGMA auto_vacuum").fetchone()[0] == 2
    assert db.execute("PRAGMA user_version").fetchone()[0] == VERSION
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    db.close()
    fresh = DataDir(str(tmp_path / "fresh"))
    BatchStore(fresh).close()
    db = sqlite3.connect(fresh.database)
    assert {name for (name,) in db.execute("SELECT name FROM sqlite_master")} == tables
    db.close()


def test_a_disk_without_room_for_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_version_1(tmp_path)
    monkeypatch.setitem(MIGRATIONS, 2, "INSERT INTO files SELECT * FROM nothing;")
    with pytest.raises(StartError, match="cannot be read") as refused:
        BatchStore(folder)
    assert len(refused.value.lines()) <= 6
    monkeypatch.undo()

    def full(db: sqlite3.Connection, *_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(open_database, "_prepare", full)
    with pytest.raises(StartError, match="is full") as refused:
        BatchStore(folder)
    assert len(refused.value.lines()) <= 6 and "nothing is lost" in refused.value.lines()[-1]
    monkeypatch.undo()
    BatchStore(folder).close()
