"""Keeps the packed weights of models on disk, so that the workers of a host share one copy, and start faster.

    <folder>/weights/<key>.packed      a prepared file (`engine.cpu.weights.prepared_file`)
    <folder>/weights/<key>.lock        held by the process that makes it

`folder` is the kernels' folder, one per CPU, which only its owner may write to (`diptych.kernels.cache`). `key` stands
for the weights and their kind, the model's dimensions, the rank's share of them, and the sizes of panels. The first
process packs the weights into a file of another name and renames it when it is whole; the others wait, and then map it.
The lock says how many sections are packed, so that they wait as long as it goes on. What a process that was killed has
left of its file is removed before the next one packs the same weights. All of them share the file's pages, which the
system may also drop and read again, as it does with programs.

Nothing here prevents a start. Without a folder, without room on the disk, or after an error, weights are packed into
memory of the process. A file that is truncated or of other weights is made anew. Files that no worker opened for
`MAX_UNUSED_S` are removed, and the least recently used ones sooner, if there are `MAX_FILES` or the disk has no room.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.cpu.weights.decoder_weights import DecoderWeights, SectionReader, build_weights, read_weights
from engine.cpu.weights.prepared_file import PreparedWriter, map_sections
from engine.cpu.weights.prepared_name import FRESH_SUFFIX, prepared_key, prepared_path

MAX_FILES = 24
MAX_UNUSED_S = 30 * 86400.0
# Share of the disk that stays free.
MIN_FREE_SHARE = 0.1
# Seconds without progress after which a process no longer waits for another one that packs the same weights.
MAX_WAIT_S = 600.0
# Seconds between two attempts to get the lock, since flock has no timeout.
LOCK_POLL_S = 0.05
# A file's time is set at most this often.
USED_EVERY_S = 3600.0
# Bytes of a lock that are read: a number of sections.
NUMBER_BYTES = 20

log = logging.getLogger(__name__)


class PreparedFolder:
    """The prepared files below `folder`, of weights whose digest is `identity` (`Checkpoint.packing_identity`)."""

    def __init__(self, folder: Path, identity: str) -> None:
        self._kernels, self._folder, self._identity = folder, folder / "weights", identity

    def load_weights(self, reader: SectionReader) -> DecoderWeights:
        """The weights of a rank: mapped from their prepared file, which is made first if need be, or else private.

        Raises:
            ModelError: the checkpoint does not match its config.
        """
        path = self._path(reader)
        try:
            found = _map_weights(path, reader)
            if found is None:
                with self._lock_path(path, reader) as lock:
                    found = _map_weights(path, reader) or self._make_file(path, reader, lock)
        except OSError as error:
            log.warning("the weights are not shared with other workers: %s", error)
            return read_weights(reader)
        return found

    def prepare_file(self, reader: SectionReader) -> Path:
        """The prepared file of a rank's weights, which is made first if there is none that is whole. Its key is the
        path's stem.

        Raises:
            ModelError: the checkpoint does not match its config.
            OSError: the file cannot be written.
        """
        path = self._path(reader)
        if _map_weights(path, reader) is None:
            with self._lock_path(path, reader) as lock:
                if _map_weights(path, reader) is None:
                    self._make_file(path, reader, lock)
        return path

    def _path(self, reader: SectionReader) -> Path:
        return prepared_path(self._kernels, self._key(reader))

    @contextlib.contextmanager
    def _lock_path(self, path: Path, reader: SectionReader) -> Iterator[int]:
        """Hold the lock of a file that is to be made; gives the open lock. Raises OSError."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with _lock_file(path.with_suffix(".lock"), reader.note_packed) as lock:
            yield lock

    def _key(self, reader: SectionReader) -> str:
        """The name of the file of a rank's weights."""
        placement, ends = reader.placement, (reader.placement.first, reader.placement.last)
        lane = (placement.lane, placement.tp)
        return prepared_key(self._identity, reader.config, reader.shard, lane, ends, reader.layer_kind)

    def _make_file(self, path: Path, reader: SectionReader, lock: int) -> DecoderWeights:
        """Pack the weights into the file `path`, and map it. Raises OSError if it cannot be written.

        Those who wait for the open `lock` see how many sections are written.
        """
        # Only who has the lock writes them: those that are here were left by processes that were killed.
        for left in self._folder.glob(f"{path.stem}.*{FRESH_SUFFIX}"):
            left.unlink(missing_ok=True)
        self._make_room(path, 0)
        fresh = path.with_name(f"{path.stem}.{uuid.uuid4().hex}{FRESH_SUFFIX}")
        try:
            file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                writer = PreparedWriter(file)
                for number, (name, section) in enumerate(reader.read_sections(), 1):
                    self._make_room(path, section.num_bytes)
                    writer.write_section(name, section)
                    os.pwrite(lock, b"%d\n" % number, 0)
                writer.finish(path.stem)
            finally:
                os.close(file)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
        log.info("packed the weights into %s", path)
        found = _map_weights(path, reader)
        if found is None:
            raise OSError(errno.EIO, "the file is not what was written", str(path))
        return found

    def _make_room(self, path: Path, num_bytes: int) -> None:
        """Remove files that are not needed, until `num_bytes` more fit. Raises OSError if they do not fit at all.

        A process that has mapped a removed file keeps its pages.
        """
        others = sorted(
            (one.stat().st_mtime, one)
            for one in self._folder.iterdir()
            if one.suffix in (".packed", FRESH_SUFFIX) and not one.stem.startswith(path.stem)
        )
        while others and (
            len(others) >= MAX_FILES
            or time.time() - others[0][0] > MAX_UNUSED_S
            or not _has_room(self._folder, num_bytes)
        ):
            _, oldest = others.pop(0)
            oldest.unlink(missing_ok=True)
            oldest.with_suffix(".lock").unlink(missing_ok=True)
        if not _has_room(self._folder, num_bytes):
            raise OSError(
                errno.ENOSPC, f"less than {MIN_FREE_SHARE:.0%} of the disk is free", str(self._folder)
            )


def _has_room(folder: Path, num_bytes: int) -> bool:
    disk = shutil.disk_usage(folder)
    return disk.free - num_bytes >= MIN_FREE_SHARE * disk.total


def _map_weights(path: Path, reader: SectionReader) -> DecoderWeights | None:
    """The weights in the file `path`; None if there is none, or (logged) if it has to be made anew."""
    try:
        found = build_weights(map_sections(path, path.stem), reader.config, reader.shard)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is made anew: %s", path, error)
        return None
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > USED_EVERY_S:
            os.utime(path)
    return found


@contextlib.contextmanager
def _lock_file(path: Path, note: Callable[[int], None]) -> Iterator[int]:
    """Hold the lock `path`, which is released when the process ends; gives the open file, which is empty.

    While another process has it, `note` is called with the number of sections that it has packed, whenever there are
    more. Raises OSError after `MAX_WAIT_S` without that.
    """
    end_s, seen = time.monotonic() + MAX_WAIT_S, b""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if (found := os.pread(file, NUMBER_BYTES, 0)) != seen:
                    end_s, seen = time.monotonic() + MAX_WAIT_S, found
                    with contextlib.suppress(ValueError):
                        note(int(found))
                if time.monotonic() > end_s:
                    raise OSError(
                        errno.ETIMEDOUT, "another process has been packing them", str(path)
                    ) from None
                time.sleep(LOCK_POLL_S)
        os.ftruncate(file, 0)
        yield file
    finally:
        os.close(file)
