"""What is read from a store is what was stored there, or nothing; and its bound holds."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from kvcache.tiers.chunk_index import INDEX_BYTES, INDEX_VERSION, ROW_BYTES, ChunkIndex
from kvcache.tiers.chunk_store import ChunkStore, NewChunk, file_bytes
from kvcache.tiers.store_folder import INDEX_FILE, check_unused, remove_leftovers
from tests.unit.kvcache.tiers.injured_chunks import INJURIES, check_injury
from tests.unit.kvcache.tiers.stored_chunks import (
    CHUNK_BYTES,
    address_of,
    bytes_in,
    content_of,
    new_chunk,
    open_store,
    read_number,
    room_for,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    opened = open_store(tmp_path / "kv")
    yield opened
    opened.close()


def test_what_was_stored_is_read_whatever_its_parts(store: ChunkStore) -> None:
    assert store.store([new_chunk(n) for n in range(5)]) == [address_of(n) for n in range(5)]
    assert store.store([new_chunk(3)]) == [], "it is there already"
    assert [read_number(store, n) for n in range(5)] == [content_of(n) for n in range(5)]
    assert store.find([address_of(n) for n in (7, 2, 4)]) == {address_of(2), address_of(4)}
    with pytest.raises(KeyError):
        read_number(store, 7)
    assert store.count()[0] == 5 and store.num_corrupt == 0


def test_a_chunk_whose_slab_was_given_away_meanwhile_is_not_stored(store: ChunkStore) -> None:
    lost = new_chunk(1)
    late = NewChunk(lost.address, 0, lost.views, lambda: False)
    assert store.store([new_chunk(0), late, new_chunk(2)]) == [address_of(0), address_of(2)]
    assert store.find([address_of(1)]) == set() and not list((store.claim.folder / "partial").iterdir())
    assert store.count()[1] == 2 * (room_for(1) - room_for(0))


def test_the_deepest_of_those_used_longest_ago_go_first(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv", 6)
    store.store([new_chunk(n, depth=n) for n in range(3)])
    store.store([new_chunk(n, depth=n - 10) for n in range(10, 13)])
    store.touch([address_of(n) for n in range(3)])
    store.store([new_chunk(20)])
    assert store.find([address_of(n) for n in range(30)]) == {address_of(n) for n in (0, 1, 2, 10, 11, 20)}
    store.store([new_chunk(21), new_chunk(22)])
    assert store.find([address_of(n) for n in range(30)]) == {address_of(n) for n in (0, 1, 2, 20, 21, 22)}
    store.close()


def test_what_is_larger_than_the_store_displaces_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv", 3)
    store.store([new_chunk(0)])
    huge = NewChunk(address_of(9), 0, [memoryview(bytearray(1 << 20))])
    assert store.store([huge, new_chunk(1)]) == [address_of(1)]
    assert [read_number(store, n) for n in (0, 1)] == [content_of(0), content_of(1)]
    store.close()


def test_the_bound_holds_whatever_is_stored(tmp_path: Path) -> None:
    store, rng = open_store(tmp_path / "kv", 12), random.Random(1)
    for _ in range(60):
        store.store([new_chunk(rng.randrange(40)) for _ in range(rng.randrange(1, 8))])
        chunks = bytes_in(tmp_path / "kv" / "chunks") + bytes_in(tmp_path / "kv" / "partial")
        assert chunks <= 12 * file_bytes(CHUNK_BYTES)
        assert bytes_in(tmp_path / "kv") - chunks <= INDEX_BYTES + 12 * ROW_BYTES
        assert store.count()[1] <= store.capacity_bytes
    assert store.count()[0] == 12
    store.close()
    smaller = open_store(tmp_path / "kv", 4)
    assert smaller.count()[0] == 4
    smaller.close()


def test_a_chunk_that_is_read_is_not_removed_meanwhile(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv", 2)
    store.store([new_chunk(0), new_chunk(1)])
    reader = os.open(store.claim.path_of(address_of(0)), os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    store.store([new_chunk(2), new_chunk(3)])
    assert store.find([address_of(n) for n in range(4)]) == {address_of(0), address_of(2)}
    os.close(reader)
    store.close()


@pytest.mark.parametrize("injury", INJURIES)
def test_files_that_are_not_what_their_names_say_are_found(store: ChunkStore, injury: str) -> None:
    rng = random.Random(injury)
    for start in range(0, 40, 2):
        check_injury(store, injury, start, rng)
    assert store.num_corrupt >= 20


def test_files_that_are_gone_are_misses_and_can_be_stored_again(store: ChunkStore) -> None:
    store.store([new_chunk(0)])
    store.claim.path_of(address_of(0)).unlink()
    with pytest.raises(KeyError):
        read_number(store, 0)
    assert store.count() == (0, 0) and store.num_corrupt == 0
    assert store.store([new_chunk(0)]) == [address_of(0)]


@pytest.mark.parametrize("injury", ["text", "cut", "gone", "no table", "no total"])
def test_a_damaged_index_is_made_anew_from_the_files(tmp_path: Path, injury: str) -> None:
    store = open_store(tmp_path / "kv")
    store.store([new_chunk(n) for n in range(20)])
    store.close()
    index = tmp_path / "kv" / INDEX_FILE
    match injury:
        case "text":
            index.write_bytes(b"no database" * 1000)
        case "cut":
            os.truncate(index, index.stat().st_size // 2 + 7)
        case "gone":
            index.unlink()
        case _:
            with sqlite3.connect(index) as base:
                base.execute("DROP TABLE chunks" if injury == "no table" else "DELETE FROM total")
            base.close()
    (tmp_path / "kv" / "chunks" / "notes.txt").write_text("no chunk")
    again = open_store(tmp_path / "kv", 15)
    assert again.count() == (15, 15 * (room_for(1) - room_for(0)))
    assert sum(read_number(again, n) == content_of(n) for n in range(20) if again.find([address_of(n)])) == 15
    assert len(list((tmp_path / "kv" / "chunks").iterdir())) == 15
    again.close()


def test_an_index_that_is_made_anew_is_seen_by_all(tmp_path: Path) -> None:
    first, second = open_store(tmp_path / "kv"), open_store(tmp_path / "kv")
    first.store([new_chunk(0)])
    second.store([new_chunk(1)])
    for name in (INDEX_FILE, f"{INDEX_FILE}-wal", f"{INDEX_FILE}-shm"):
        (tmp_path / "kv" / name).unlink(missing_ok=True)
    second.store([new_chunk(2)])
    first.store([new_chunk(3)])
    assert first.count() == second.count() and first.count()[0] == 4
    first.close()
    second.close()


def test_an_index_of_a_later_version_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path / "kv").close()
    with sqlite3.connect(tmp_path / "kv" / INDEX_FILE) as base:
        base.execute(f"PRAGMA user_version = {INDEX_VERSION + 1}")
    base.close()
    with pytest.raises(ConfigError, match="later version") as refused:
        open_store(tmp_path / "kv")
    assert len(refused.value.lines()) <= 6


def test_an_index_that_another_program_has_locked_fails_and_is_left_alone(store: ChunkStore) -> None:
    store.store([new_chunk(0)])
    other = sqlite3.connect(store.claim.folder / INDEX_FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        store.store([new_chunk(1)])
    other.execute("ROLLBACK")
    other.close()
    assert store.store([new_chunk(1)]) == [address_of(1)] and read_number(store, 0) == content_of(0)


def test_a_folder_is_private_and_of_one_deployment(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    modes = {path.stat().st_mode & 0o77 for path in (tmp_path / "kv").rglob("*") if path.is_file()}
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700 and modes == {0}
    second = open_store(tmp_path / "kv")
    with pytest.raises(ConfigError, match="another deployment"):
        open_store(tmp_path / "kv", deployment="b")
    store.store([new_chunk(0)])
    store.close()
    for refuse in (
        lambda: open_store(tmp_path / "kv", deployment="b"),
        lambda: check_unused(tmp_path / "kv"),
    ):
        with pytest.raises(ConfigError, match="another deployment"):
            refuse()
    second.close()
    check_unused(tmp_path / "kv")
    check_unused(tmp_path / "absent")
    next_deployment = open_store(tmp_path / "kv", deployment="b")
    assert read_number(next_deployment, 0) == content_of(0)
    next_deployment.close()


@pytest.mark.parametrize("kind", ["file", "open", "other things", "link"])
def test_folders_that_are_no_stores_are_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "kv"
    if kind == "file":
        folder.write_text("")
    elif kind == "link":
        (tmp_path / "there").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "there")
    else:
        folder.mkdir(mode=0o755 if kind == "open" else 0o700)
    if kind == "other things":
        (folder / "thesis.tex").write_text("")
    with pytest.raises(ConfigError) as refused:
        open_store(folder)
    assert refused.value.fix and len(refused.value.lines()) <= 6


@pytest.mark.parametrize("part", ["chunks", "partial", "owners", "deployment", "lock", INDEX_FILE])
@pytest.mark.parametrize("kind", ["link", "open", "other kind"])
def test_folders_whose_parts_are_elsewhere_or_open_are_refused(tmp_path: Path, part: str, kind: str) -> None:
    folder, theirs = tmp_path / "kv", tmp_path / "theirs"
    open_store(folder).close()
    there = folder / part
    if kind == "open":
        there.chmod(0o755 if there.is_dir() else 0o640)
    elif kind == "link":
        there.rename(theirs)
        there.symlink_to(theirs)
    elif there.is_dir():
        there.rmdir()
        there.touch(0o600)
    else:
        there.unlink()
        there.mkdir(0o700)
    if theirs.is_dir():
        (theirs / "thesis.tex").write_text("mine")
        (folder / INDEX_FILE).unlink()
    with pytest.raises(ConfigError) as refused:
        open_store(folder)
    assert str(there) in refused.value.what and len(refused.value.lines()) <= 6
    assert not theirs.is_dir() or (theirs / "thesis.tex").read_text() == "mine"


def test_the_last_one_takes_the_folder_away_and_leftovers_go(tmp_path: Path) -> None:
    first, second = (open_store(tmp_path / "kv-a", removes=True) for _ in range(2))
    first.close()
    assert remove_leftovers(tmp_path, "kv-") == 0 and (tmp_path / "kv-a").exists()
    second.close()
    second.close()
    assert not (tmp_path / "kv-a").exists()
    open_store(tmp_path / "kv-b").close()
    (tmp_path / "other").mkdir()
    assert remove_leftovers(tmp_path, "kv-", keep="kv-b") == 0
    assert remove_leftovers(tmp_path, "kv-") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_full_disk_stores_nothing_and_leaves_nothing(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.store([new_chunk(0)])
    before = store.count()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvcache.tiers.chunk_file.os.pwritev", full)
    with pytest.raises(OSError, match="No space"):
        store.store([new_chunk(1), new_chunk(2)])
    assert store.count() == before and not list((store.claim.folder / "partial").iterdir())
    assert read_number(store, 0) == content_of(0)


@pytest.mark.parametrize("fails", ["complete", "cancel"])
def test_what_a_locked_index_could_not_settle_is_settled_later(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def locked(*_: object) -> list[bytes]:
        raise sqlite3.OperationalError("database is locked")

    lost = NewChunk(address_of(1), 0, new_chunk(1).views, lambda: False)
    monkeypatch.setattr(ChunkIndex, fails, locked)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        store.store([new_chunk(0), lost])
    monkeypatch.undo()
    assert store.find([address_of(n) for n in range(2)]) == {address_of(0)}
    assert store.count() == (1, room_for(1) - room_for(0)) and read_number(store, 0) == content_of(0)
    assert store.store([new_chunk(1)]) == [address_of(1)]


def test_reservations_of_a_process_without_a_file_are_cleared_away(store: ChunkStore) -> None:
    store._with_index(
        lambda index: index.reserve([(address_of(0), 0, 100)], 1 << 20, "1-gone", lambda _: True)
    )
    store.reclaim_dead()
    assert store.count() == (0, 0) and store.store([new_chunk(0)]) == [address_of(0)]


def test_the_file_of_a_process_that_was_found_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = fcntl.flock, list[str]()

    def remove_first(fd: int, kind: int) -> None:
        for path in (tmp_path / "kv" / "owners").glob("*"):
            if not removed and os.fstat(fd).st_ino == path.stat().st_ino:
                path.unlink()
                removed.append(path.name)
        lock(fd, kind)

    monkeypatch.setattr("kvcache.tiers.store_folder.fcntl.flock", remove_first)
    store = open_store(tmp_path / "kv")
    assert removed == [store.claim.owner] and store.claim.owners() == {store.claim.owner}
    store.close()


def test_a_folder_that_goes_can_be_claimed_at_once_and_no_descriptor_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, after = shutil.rmtree, list[ChunkStore]()

    def claim_meanwhile(path: Path) -> None:
        after.append(open_store(tmp_path / "kv"))
        remove(path)

    before = len(os.listdir("/proc/self/fd"))
    store = open_store(tmp_path / "kv", removes=True)
    monkeypatch.setattr("kvcache.tiers.store_folder.shutil.rmtree", claim_meanwhile)
    store.close()
    assert after[0].store([new_chunk(0)]) == [address_of(0)] and os.listdir(tmp_path) == ["kv"]
    after[0].close()
    assert len(os.listdir("/proc/self/fd")) == before
