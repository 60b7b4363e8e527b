"""A small file with the lines in flight, so that a line that ends the gateway does not end each next one too.

    started ─▶ RUNNING ─ ended, or waits again ─▶ free
                  └─ the process ended ─▶ SUSPECT, with one crash more ─ started ─▶ RUNNING ─▶ ...

A record is written into the page cache, which outlives this process, though not the machine. Nothing waits for a disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from services.gateway.batches.data_dir import NEW_FILE_FLAGS

FREE, RUNNING, SUSPECT = range(3)
# State, crashes, number and batch of a line.
RECORD = struct.Struct("<BBxxI40s")
# Lines in flight beyond so many are not written down.
MAX_RECORDS = 8192
MAX_CRASHES = 255

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Place:
    """Where a line is written down, and how often the gateway ended while it ran."""

    slot: int
    crashes: int


class RunningLines:
    """The lines in flight, and those that were in flight when a gateway ended without saying so."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], _Place] = {}
        self._free = list(range(MAX_RECORDS))
        self._descriptor = -1

    def open(self, path: Path) -> None:
        """Take what an earlier process left in `path`. If that fails, nothing is written down."""
        try:
            self._descriptor = os.open(path, NEW_FILE_FLAGS, 0o600)
            self._read_records()
        except OSError as error:
            log.warning("lines in flight are not written down: %s", error)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def keep_batches(self, open_batches: Container[str]) -> None:
        """Forget the lines of all batches but these."""
        for batch, number in [line for line in self._places if line[0] not in open_batches]:
            self._forget(batch, number)

    def forget_batch(self, batch: str) -> None:
        """A batch has ended."""
        for line in [line for line in self._places if line[0] == batch]:
            self._forget(*line)

    def count_crashes(self, batch: str, number: int) -> int:
        """How often a gateway ended while this line ran."""
        place = self._places.get((batch, number))
        return 0 if place is None else place.crashes

    def add_line(self, batch: str, number: int) -> None:
        """A line begins to run."""
        place = self._places.get((batch, number))
        if place is None:
            if not self._free:
                return
            place = self._places[batch, number] = _Place(self._free.pop(), 0)
        self._write(place.slot, RUNNING, place.crashes, batch, number)

    def end_line(self, batch: str, number: int, waits: bool) -> None:
        """A line runs no more; if it `waits` to run again, its crashes are kept."""
        place = self._places.get((batch, number))
        if place is not None and waits and place.crashes:
            self._write(place.slot, SUSPECT, place.crashes, batch, number)
        elif place is not None:
            self._forget(batch, number)

    def _forget(self, batch: str, number: int) -> None:
        slot = self._places.pop((batch, number)).slot
        self._free.append(slot)
        self._write(slot, FREE, 0, "", 0)

    def _read_records(self) -> None:
        """Take what is in the file: what ran has crashed, which is written down for good."""
        content = os.pread(self._descriptor, MAX_RECORDS * RECORD.size, 0)
        whole = content[: len(content) // RECORD.size * RECORD.size]
        used = set[int]()
        for slot, (state, crashes, number, name) in enumerate(RECORD.iter_unpack(whole)):
            if state in (RUNNING, SUSPECT):
                batch = name.rstrip(b"\0").decode("ascii", "replace")
                crashes = min(MAX_CRASHES, crashes + (state == RUNNING))
                self._places[batch, number] = _Place(slot, crashes)
                self._write(slot, SUSPECT, crashes, batch, number)
                used.add(slot)
        self._free = [slot for slot in reversed(range(MAX_RECORDS)) if slot not in used]
        os.fsync(self._descriptor)

    def _write(self, slot: int, state: int, crashes: int, batch: str, number: int) -> None:
        record = RECORD.pack(state, crashes, number, batch.encode())
        # A disk that is full or fails takes no lines anyhow.
        with contextlib.suppress(OSError):
            if self._descriptor >= 0:
                os.pwrite(self._descriptor, record, slot * RECORD.size)
