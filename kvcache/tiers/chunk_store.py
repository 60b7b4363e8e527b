"""Stores KV chunks in a folder that all workers of a host share: on tmpfs (the host tier), or on a disk.

    store: room is reserved ─▶ a partial file ─▶ renamed to the chunk's address ─▶ complete in the index
    read:  open, lock ─▶ into the slab ─▶ header, size and hash are right? else the file goes, and it is a miss

The bytes of all files, those being written included, never exceed the bound, over all processes: room is reserved
before anything is written, and what goes is gone before its room is given away. Nothing is forced to the disk: what a
loss of power leaves fails its hash. A process that is killed leaves a partial file and a reservation, which the next
process that opens the store clears away.

Failures are OSError or sqlite3.Error (`STORE_ERRORS`): to the caller, who goes on without the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import TypeVar

from diptych.errors import ConfigError, CorruptChunk
from kvcache.tiers.chunk_file import (
    HEADER_BYTES,
    build_header,
    hash_views,
    read_chunk,
    read_header,
    write_views,
)
from kvcache.tiers.chunk_index import INDEX_BYTES, ROW_BYTES, ChunkIndex, NewerIndex
from kvcache.tiers.store_folder import CHUNKS, INDEX_FILE, LOCK_FILE, PARTIAL, FolderClaim

STORE_ERRORS = (OSError, sqlite3.Error)
BLOCK_BYTES = 4096
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
T = TypeVar("T")


def file_bytes(num_bytes: int) -> int:
    """What the file of a chunk with a payload of `num_bytes` takes."""
    return -(-(HEADER_BYTES + num_bytes) // BLOCK_BYTES) * BLOCK_BYTES


def min_store_bytes(num_bytes: int) -> int:
    """The least bound of a store that can hold a chunk with a payload of `num_bytes`."""
    return INDEX_BYTES + file_bytes(num_bytes) + ROW_BYTES


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A chunk to store: `views` are its bytes in the order of its pages, `depth` the number of chunks before it.

    `is_intact` says, after the bytes were read, whether they were that chunk's all the while.
    """

    address: bytes
    depth: int
    views: Sequence[memoryview]
    is_intact: Callable[[], bool] = lambda: True


class ChunkStore:
    """The store in `folder`, with at most `capacity_bytes`, for one process of `deployment` and all its threads.

    `removes`: the last process that closes the store removes the folder.

    Raises:
        ConfigError: the folder is not private, is another deployment's, or has an index of a later version.
        OSError, sqlite3.Error: it cannot be written, or its index stays locked.
    """

    def __init__(self, folder: Path, capacity_bytes: int, deployment: str, removes: bool = False) -> None:
        self.capacity_bytes, self._removes = capacity_bytes, removes
        self._limit = capacity_bytes - INDEX_BYTES
        self.claim = FolderClaim(folder, deployment)
        self.num_corrupt = 0
        self._mutex = threading.Lock()
        self._index: ChunkIndex | None = None
        self._inode, self._lock_fd = 0, -1
        # Reserved chunks that the index is to complete (True), or to cancel, once it can be changed.
        self._unsettled: dict[bytes, bool] = {}
        self._settling = threading.Lock()
        try:
            self._lock_fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            self.reclaim_dead()
            self._with_index(lambda index: index.shrink(self._limit, self._drop_file))
        except NewerIndex as error:
            self.close()
            raise ConfigError(
                f"the KV in {folder} was stored by a later version of Diptych",
                f"its index has {error}",
                "use that version, or name another folder",
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        with self._mutex:
            self._close_index()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1
        self.claim.release(self._removes)

    # ---- chunks

    def count(self) -> tuple[int, int]:
        """Complete chunks, and the bytes that all take."""
        chunks, num_bytes = self._with_index(lambda index: index.count())
        return chunks, num_bytes

    def find(self, addresses: Sequence[bytes]) -> set[bytes]:
        """Those of `addresses` whose chunks are here."""
        with contextlib.suppress(*STORE_ERRORS):
            self._settle()
        return self._with_index(lambda index: index.find(addresses))

    def touch(self, addresses: Sequence[bytes]) -> None:
        """These chunks were used just now."""
        self._with_index(lambda index: index.touch(addresses))

    def read(self, address: bytes, views: Sequence[memoryview]) -> None:
        """Fill `views` with a chunk.

        Raises:
            KeyError: it is not here, or is just going.
            CorruptChunk: what is here is not that chunk; it is removed. `views` then hold anything.
        """
        try:
            fd = os.open(self.claim.path_of(address), _READ)
        except FileNotFoundError:
            self._forget(address)
            raise KeyError(address) from None
        except OSError as error:
            if not self.claim.path_of(address).is_symlink():
                raise
            self._discard(address)
            raise CorruptChunk("a stored chunk is a link", address.hex()) from error
        try:
            try:
                # While it is locked its room is not given away.
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise KeyError(address) from None
            state = os.fstat(fd)
            if not state.st_nlink:
                raise KeyError(address)
            if not stat.S_ISREG(state.st_mode):
                raise CorruptChunk("a stored chunk is no file", address.hex())
            read_chunk(fd, address, views)
        except CorruptChunk:
            os.close(fd)
            fd = -1
            self._discard(address)
            raise
        finally:
            if fd >= 0:
                os.close(fd)

    def store(self, chunks: Sequence[NewChunk]) -> list[bytes]:
        """Store chunks, as far as room can be made; returns the addresses of those that are new here.

        Those that are here already count as used. Raises OSError if one cannot be written; those before it are stored.
        """
        wanted = [
            (one.address, one.depth, file_bytes(sum(view.nbytes for view in one.views))) for one in chunks
        ]
        owner = self.claim.owner
        self._settle()
        granted = self._with_index(lambda index: index.reserve(wanted, self._limit, owner, self._drop_file))
        done: list[bytes] = []
        try:
            for one in chunks:
                if one.address in granted and one.address not in done and self._write(one):
                    done.append(one.address)
        finally:
            with self._settling:
                self._unsettled.update({address: address in done for address in granted})
            self._settle()
        return done

    def _settle(self) -> None:
        """Complete and cancel in the index what was reserved, that of earlier batches too if it was locked then."""
        if not self._unsettled:
            return
        owner = self.claim.owner
        with self._settling:
            done = [address for address, is_written in self._unsettled.items() if is_written]
            for address in self._with_index(lambda index: index.complete(done, owner)):
                self.claim.path_of(address).unlink(missing_ok=True)
            for address in done:
                del self._unsettled[address]
            self._with_index(lambda index: index.cancel(sorted(self._unsettled), owner))
            self._unsettled.clear()

    def _write(self, chunk: NewChunk) -> bool:
        """Write one chunk, for which room is reserved. Returns whether it is in its place."""
        partial = self.claim.partial_of(chunk.address)
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                write_views(fd, chunk.views, HEADER_BYTES)
                payload = hash_views(chunk.views)
                if not chunk.is_intact():
                    partial.unlink(missing_ok=True)
                    return False
                header = build_header(chunk.address, sum(view.nbytes for view in chunk.views), payload)
                write_views(fd, [memoryview(header)], 0)
            finally:
                os.close(fd)
            os.rename(partial, self.claim.path_of(chunk.address))
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        return True

    def read_bytes(self, address: bytes) -> memoryview:
        """The bytes of a chunk whose size is not known. Raises as `read`."""
        try:
            num_bytes = os.stat(self.claim.path_of(address)).st_size - HEADER_BYTES
        except FileNotFoundError:
            self._forget(address)
            raise KeyError(address) from None
        view = memoryview(bytearray(max(0, num_bytes)))
        self.read(address, [view])
        return view

    # ---- what goes

    def remove(self, addresses: Sequence[bytes]) -> set[bytes]:
        """Remove chunks; returns those that are here still, since somebody reads them."""
        self._with_index(lambda index: index.remove(addresses, self._drop_file))
        return self.find(addresses)

    def _drop_file(self, address: bytes) -> bool:
        """Remove the file of a chunk; False while somebody reads it."""
        return _drop_unread(self.claim.path_of(address))

    def _discard(self, address: bytes) -> None:
        """Remove what is in the place of a chunk and is not that chunk."""
        self.num_corrupt += 1
        self._forget(address)

    def _forget(self, address: bytes) -> None:
        with contextlib.suppress(*STORE_ERRORS):
            self._with_index(lambda index: index.remove([address], self._drop_file))

    def reclaim_dead(self) -> None:
        """Clear away what processes that died were writing."""
        writers = self._with_index(lambda index: index.writers())
        for owner in self.claim.dead_owners():
            self._reclaim(owner)
        # A process has its file before it reserves anything.
        for owner in writers.difference(self.claim.owners()):
            self._reclaim(owner)

    def _reclaim(self, owner: str) -> None:
        """Complete or clear away what one process was writing, which has died."""
        left = self._with_index(methodcaller("written_by", owner))
        done = [address for address in left if self._is_complete(address)]
        self._with_index(methodcaller("complete", done, owner))
        for path in (self.claim.folder / PARTIAL).glob(f"{owner}.*"):
            path.unlink(missing_ok=True)
        self._with_index(methodcaller("cancel", left, owner))

    def _is_complete(self, address: bytes) -> bool:
        """Whether the file of a chunk is in its place, with a header of its own. Its payload is checked when read."""
        try:
            fd = os.open(self.claim.path_of(address), _READ)
        except OSError:
            return False
        try:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode):
                return False
            num_bytes, _ = read_header(os.pread(fd, HEADER_BYTES, 0), address)
            return state.st_size == HEADER_BYTES + num_bytes
        except (OSError, CorruptChunk):
            return False
        finally:
            os.close(fd)

    # ---- the index

    def _with_index(self, act: Callable[[ChunkIndex], T]) -> T:
        """Do something with the index, which is made anew first if it is damaged."""
        with self._mutex:
            try:
                return self._act_shared(act)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                self._rebuild()
                return self._act_shared(act)

    def _act_shared(self, act: Callable[[ChunkIndex], T]) -> T:
        with self._locked(fcntl.LOCK_SH):
            return act(self._open_index())

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Hold the folder's lock: shared, so that nobody makes the index anew meanwhile, or alone, to do that."""
        fcntl.flock(self._lock_fd, kind)
        try:
            yield
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _open_index(self) -> ChunkIndex:
        """The index that is there now, which another process may have made anew."""
        path = self.claim.folder / INDEX_FILE
        with contextlib.suppress(FileNotFoundError):
            if self._index is not None and os.stat(path).st_ino == self._inode:
                return self._index
        self._close_index()
        if not path.exists():
            raise sqlite3.DatabaseError("there is no index")
        self._index, self._inode = ChunkIndex(path), os.stat(path).st_ino
        return self._index

    def _close_index(self) -> None:
        if self._index is not None:
            with contextlib.suppress(sqlite3.Error):
                self._index.close()
            self._index = None

    def _rebuild(self) -> None:
        """Make the index from the files, and put it in its place at once. What is no chunk is removed."""
        with self._locked(fcntl.LOCK_EX):
            path, fresh = self.claim.folder / INDEX_FILE, self.claim.folder / f"{INDEX_FILE}.new"
            if path.exists() and os.stat(path).st_ino != self._inode and self._inode:
                # Another process was faster.
                return
            self._close_index()
            for name in (path, fresh):
                for end in ("", "-wal", "-shm"):
                    Path(f"{name}{end}").unlink(missing_ok=True)
            index = ChunkIndex(fresh)
            try:
                index.add_found(self._scan_files())
                index.shrink(self._limit, self._drop_file)
            finally:
                index.close()
            os.rename(fresh, path)

    def _scan_files(self) -> list[tuple[bytes, int]]:
        """(address, bytes) of all files that are chunks, the oldest first. What is none is removed."""
        found = []
        for entry in os.scandir(self.claim.folder / CHUNKS):
            try:
                address = bytes.fromhex(entry.name)
                state = entry.stat(follow_symlinks=False)
                if len(address) == 32 and self._is_complete(address):
                    found.append((state.st_mtime_ns, address, file_bytes(state.st_size - HEADER_BYTES)))
                    continue
            except (ValueError, OSError):
                pass
            with contextlib.suppress(OSError):
                _remove_path(Path(entry.path))
        return [(address, num_bytes) for _, address, num_bytes in sorted(found)]


def _remove_path(path: Path) -> None:
    """Remove what is at a chunk's place, whatever it is. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _drop_unread(path: Path) -> bool:
    """Remove a file; False while somebody reads it."""
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return True
    except OSError:
        fd = -1
    try:
        if fd >= 0:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_path(path)
    except OSError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)
    return True
