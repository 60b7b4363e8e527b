"""Rooms of equal size in a file, of which one at a time is in memory: the KV and activations of a block on disk.

    visit i     window 0   entered: its bytes are there; left: what changed is written back
    visit i+1   window 1   read meanwhile by a thread

A step says beforehand which rooms it will visit, in order, and which ranges of each it reads and changes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.cpu.offload.disk_file import DirectFile, allocate_memory

# First byte within the room and the number of bytes, both whole disk blocks.
ByteRange = tuple[int, int]
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class RoomVisit:
    """A visit to a room: what has to be read before it, and what is written back after it."""

    room: int
    reads: Sequence[ByteRange]
    writes: Sequence[ByteRange]


def merge_ranges(places: Sequence[int], size: int) -> list[ByteRange]:
    """The ranges of the pieces `places` of `size` bytes each; adjacent pieces are one range."""
    ranges: list[ByteRange] = []
    for place in sorted(set(places)):
        if ranges and sum(ranges[-1]) == place * size:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + size
        else:
            ranges.append((place * size, size))
    return ranges


class DiskRooms:
    """`count` rooms of `room_bytes` (whole disk blocks) in a file.

    With `overlap` there are two windows and a thread that reads and writes; otherwise one, and everything is done at
    once.
    """

    def __init__(self, file: DirectFile, room_bytes: int, overlap: bool) -> None:
        self.file, self._room_bytes = file, room_bytes
        self.windows = [allocate_memory(room_bytes) for _ in range(2 if overlap else 1)]
        self._thread = ThreadPoolExecutor(1, "rooms") if overlap else None
        self._visits: Sequence[RoomVisit] = ()
        self._at = 0
        # The read of the next visit, and writes that are not known to have ended.
        self._read: Future[None] | None = None
        self._writes: list[Future[None]] = []

    def begin_step(self, visits: Sequence[RoomVisit]) -> None:
        """A step will visit these rooms, in this order."""
        self._visits, self._at = visits, 0
        self._read = self._submit_read(0) if visits and self._thread is not None else None

    def enter(self) -> int:
        """Enter the next room; returns the number of the window that has it. Raises OSError if the disk failed."""
        at = self._at
        if self._thread is None:
            self._read_room(at)
            return 0
        assert self._read is not None
        self._read.result()
        # A room that comes twice in a row is read again after it was written.
        if at + 1 < len(self._visits) and self._visits[at + 1].room != self._visits[at].room:
            self._read = self._submit_read(at + 1)
        else:
            self._read = None
        return at % 2

    def leave(self) -> None:
        """Leave the room that was entered last: what it said it would change is written. Raises OSError."""
        at = self._at
        self._at += 1
        if self._thread is None:
            self._write_room(at)
            return
        self._writes = [one for one in self._writes if not one.done() or one.exception() is not None]
        for one in self._writes:
            if one.done():
                one.result()
        self._writes.append(self._thread.submit(self._write_room, at))
        if self._read is None and self._at < len(self._visits):
            self._read = self._submit_read(self._at)

    def end_step(self) -> None:
        """Wait until all that was changed is written. Raises OSError if the disk failed."""
        waiting, self._writes = self._writes, []
        for one in waiting:
            one.result()

    def abandon_step(self) -> None:
        """Wait until nothing is read or written any more, whatever comes of it."""
        for one in (self._read, *self._writes):
            if one is not None:
                one.exception()
        self._read, self._writes, self._visits = None, [], ()

    def close(self) -> None:
        """End the thread, and close the file."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self.file.close()

    def _submit_read(self, at: int) -> Future[None]:
        assert self._thread is not None
        return self._thread.submit(self._read_room, at)

    def _read_room(self, at: int) -> None:
        visit, window = self._visits[at], self.windows[at % len(self.windows)]
        for start, size in visit.reads:
            self.file.read_into(window[start : start + size], visit.room * self._room_bytes + start)

    def _write_room(self, at: int) -> None:
        visit, window = self._visits[at], self.windows[at % len(self.windows)]
        for start, size in visit.writes:
            self.file.write_from(window[start : start + size], visit.room * self._room_bytes + start)


class PlacedRooms(Generic[Key]):
    """A room of `room_bytes` for each of `keys`: in memory for those in `here`, for all others in `file`.

    `file` is None if there are no others.
    """

    def __init__(
        self,
        keys: Iterable[Key],
        here: Container[Key],
        room_bytes: int,
        file: DirectFile | None,
        overlap: bool,
    ) -> None:
        self._memory: dict[Key, memoryview] = {}
        # The number of its room in the file.
        self._rooms: dict[Key, int] = {}
        for key in keys:
            if key in here:
                self._memory[key] = allocate_memory(room_bytes)
            else:
                self._rooms[key] = len(self._rooms)
        self._disk = None if file is None else DiskRooms(file, room_bytes, overlap)

    def leave(self, key: Key) -> None:
        """What has this room is computed. Raises OSError."""
        if self._disk is not None and key in self._rooms:
            self._disk.leave()

    def end_step(self) -> None:
        """Wait until everything is on disk that has to be. Raises OSError."""
        if self._disk is not None:
            self._disk.end_step()

    def abandon_step(self) -> None:
        """Wait until nothing is moved any more."""
        if self._disk is not None:
            self._disk.abandon_step()

    @property
    def num_moves(self) -> int:
        """Reads and writes of rooms so far (`DirectFile.num_moves`)."""
        return 0 if self._disk is None else self._disk.file.num_moves

    def close(self) -> None:
        """Close the file."""
        if self._disk is not None:
            self._disk.close()
