"""Keeps the body of a line's answer while it comes, and until it is copied to the file of results.

    parts ─ escape ─▶ memory, up to `MAX_MEMORY_BYTES` ─▶ a file without a name ─ in pieces ─▶ the file of results

The file has no name, so the kernel removes it when it is closed, also after a crash. While the disk takes nothing, the
writer waits: the rest of the answer stays where it is made, and counts there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.gateway.batches.data_dir import write_whole

# Bytes of an answer that are kept in memory. Most answers have fewer, and need no file.
MAX_MEMORY_BYTES = 64 << 10
# Bytes that are copied at a time.
PIECE_BYTES = 256 << 10
# Seconds before a disk that took nothing is tried again.
MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0

# Some programs take these for ends of lines; JSON has them in strings alone, where they may be escaped.
LINE_ENDS = {b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029", b"\xc2\x85": b"\\u0085"}
# The beginnings of their bytes, the longest first.
BEGINNINGS = (b"\xe2\x80", b"\xe2", b"\xc2")

log = logging.getLogger(__name__)


def escape_line_ends(text: bytes) -> bytes:
    """JSON without characters that programs take for ends of lines."""
    for char, escaped in LINE_ENDS.items():
        if char in text:
            text = text.replace(char, escaped)
    return text


class _TemporaryFile:
    """The descriptor of a file without a name, closed with the last reference: a thread may still be writing."""

    def __init__(self, folder: Path) -> None:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            self.descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class AnswerSpool:
    """The body of one answer, without ends of lines. `folder` is where files are made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: _TemporaryFile | None = None
        self._file_bytes = 0
        self._memory = bytearray()
        # The first bytes of a character whose other bytes have not come yet.
        self._begun = b""

    def __len__(self) -> int:
        return self._file_bytes + len(self._memory)

    @property
    def memory_bytes(self) -> int:
        """The bytes that are in memory."""
        return len(self._memory)

    async def write(self, part: bytes) -> None:
        """Append a part of the body. Waits as long as the disk takes nothing."""
        text = self._begun + part
        self._begun = next((begun for begun in BEGINNINGS if text.endswith(begun)), b"")
        self._memory += escape_line_ends(text[: len(text) - len(self._begun)])
        if len(self._memory) <= MAX_MEMORY_BYTES:
            return
        pause_s = MIN_PAUSE_S
        while True:
            try:
                await asyncio.to_thread(self._write_file, bytes(self._memory), self._file_bytes)
            except OSError as error:
                log.error("an answer of a batch cannot be written; it is tried again: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
            else:
                self._file_bytes += len(self._memory)
                self._memory.clear()
                return

    def iter_pieces(self) -> Iterator[bytes]:
        """The body in pieces, from its beginning. Raises OSError if it cannot be read any more."""
        for offset in range(0, self._file_bytes, PIECE_BYTES):
            assert self._file is not None
            num_bytes = min(PIECE_BYTES, self._file_bytes - offset)
            piece = os.pread(self._file.descriptor, num_bytes, offset)
            if len(piece) < num_bytes:
                raise OSError("an answer of a batch is shorter than what was written")
            yield piece
        yield bytes(self._memory)

    def _write_file(self, data: bytes, offset: int) -> None:
        """Write to the file; called in a thread. Raises OSError."""
        if self._file is None:
            self._file = _TemporaryFile(self._folder)
        file = self._file
        write_whole(file.descriptor, data, offset)


@dataclass(frozen=True, slots=True)
class SpooledResult:
    """The line of a result in its file: what stands before the body of the answer, the body, and what follows."""

    before: bytes
    body: AnswerSpool
    after: bytes

    def __len__(self) -> int:
        return len(self.before) + len(self.body) + len(self.after)

    def iter_pieces(self) -> Iterator[bytes]:
        """The line in pieces. Raises OSError if it cannot be read any more."""
        yield self.before
        yield from self.body.iter_pieces()
        yield self.after
