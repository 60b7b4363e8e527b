"""Jobs on the input files of batches, for the one preparer that does them: check a slice, or read lines."""

from __future__ import annotations

import contextlib
import os
import time
from array import array

import msgspec

from services.gateway.preparation.line_check import (
    SLICE_CPU_S,
    CheckedSlice,
    CheckState,
    FileRules,
    check_slice,
    parse_line,
)


class CheckFileJob(msgspec.Struct, frozen=True, tag=True):
    """Check the file at `path` from `state` on. The result is a `CheckedSlice`."""

    path: str
    rules: FileRules
    state: CheckState


class ReadLinesJob(msgspec.Struct, frozen=True, tag=True):
    """Read lines of the file at `path`, with their bodies or without. The result is `ReadLines`.

    `lines` are the offset and the length of each line, as 64-bit integers.
    """

    path: str
    lines: bytes
    with_bodies: bool


class ReadLines(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The custom_id of each of the first lines, as many as there was time for; None if it is no such line any more.

    `bodies` are their bodies, if these were asked for.
    """

    custom_ids: list[str | None]
    bodies: list[bytes]


class FileUnreadable(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The file cannot be read, or a line of it needs more memory than there is."""

    error: str
    no_memory: bool = False


FileJob = CheckFileJob | ReadLinesJob
FileJobResult = CheckedSlice | ReadLines | FileUnreadable


def run_file_job(job: FileJob) -> FileJobResult:
    """The result of a job on a file."""
    try:
        with open(job.path, "rb") as content:
            if isinstance(job, CheckFileJob):
                return check_slice(content, job.rules, job.state)
            return _read_lines(content.fileno(), job.lines, job.with_bodies)
    except OSError as error:
        return FileUnreadable(str(error)[:200])
    except MemoryError:
        return FileUnreadable("a line needs too much memory", no_memory=True)


def _read_lines(descriptor: int, packed: bytes, with_bodies: bool) -> ReadLines:
    """Read lines for some CPU time; at least one is read."""
    end_s, spans = time.process_time() + SLICE_CPU_S, array("q", packed)
    custom_ids, bodies = list[str | None](), list[bytes]()
    for place in range(0, len(spans), 2):
        offset, num_bytes = spans[place : place + 2]
        custom_id, body = None, b""
        # The file may have changed since it was checked.
        with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            line = parse_line(os.pread(descriptor, num_bytes, offset))
            custom_id, body = line.custom_id, bytes(line.body)
        custom_ids.append(custom_id)
        if with_bodies:
            bodies.append(body)
        if time.process_time() >= end_s:
            break
    return ReadLines(custom_ids, bodies)
