"""The replanner's journal: one JSON line per review of the traffic, with all inputs, so that it can be replayed.

    {"type": "head", "version": 1, "policy": {…}, "judge": {…}}
    {"type": "look", "at_s": 310.0, "buckets": […], "workers": […]}
    {"type": "look", …, "shift": {…}, "situation": {…}, "judged": […], "decision": {…}}

A review ("look") has a decision only if something triggered one. The journal holds counts of lengths and names of
workers, never the text of requests. A head line begins each run of a replanner. A deployment that restarts with the
same file appends to it, and each run is replayed separately (`split_runs`).
`replay_decisions` feeds the inputs to a new replanner with the same policy, takes the evaluator's answers from the
journal (or asks another evaluator), and compares the decisions.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import msgspec

from diptych.errors import ConfigError
from diptych.logs.log_files import MAX_RECORD_BYTES, rotate_record
from planner.replan.attainment_cache import EvaluatedFleet, FleetSize
from planner.replan.change_detection import TrafficShift
from planner.replan.decide import FleetDecision, FleetSituation, FleetWorker, ReplanPolicy
from planner.replan.traffic_windows import LengthMix, TrafficBucket

VERSION = 1
# Most bytes of the first line.
MAX_HEAD_BYTES = 1 << 20
HEAD_START = b'{"type":"head"'
# Size of the blocks, in bytes, in which the last line is searched from the end of the file.
READ_BYTES = 1 << 16


class JournalHead(msgspec.Struct, frozen=True, tag="head"):
    """The first line of a run: its policy, and a description of the evaluator (model, device, SLOs)."""

    policy: ReplanPolicy
    evaluator: dict[str, Any] = msgspec.field(name="judge", default_factory=dict)
    start_s: float = 0.0
    version: int = VERSION


class FailedAction(msgspec.Struct, frozen=True, tag="failed"):
    """An action on a worker that could not be carried out."""

    at_s: float
    worker: str
    why: str = ""


class TrafficReview(msgspec.Struct, frozen=True, tag="look"):
    """One review: the buckets that have closed, the workers if they have changed, and the result."""

    at_s: float
    buckets: tuple[TrafficBucket, ...] = ()
    workers: tuple[FleetWorker, ...] | None = None
    shift: TrafficShift | None = None
    situation: FleetSituation | None = None
    checked: tuple[EvaluatedFleet, ...] = msgspec.field(name="judged", default=())
    decision: FleetDecision | None = None


JournalLine = JournalHead | TrafficReview | FailedAction


class Journal:
    """Appends lines to a journal file; without a path it discards them."""

    def __init__(self, path: str | Path | None = None) -> None:
        """Opens the journal and removes a last line that a crash has cut off.

        A file larger than `MAX_RECORD_BYTES` is renamed to `NAME.old`, which replaces an older one.

        Raises ConfigError if the file cannot be written, another deployment writes it, or it is not a journal of this
        version.
        """
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by close()
            if Path(path).is_file():
                _lock_file(self._file)
            whole = _complete_bytes(Path(path))
            if whole is not None and whole < self._file.tell():
                self._file.truncate(whole)
            if rotate_record(os.path.realpath(path), self._file.fileno(), MAX_RECORD_BYTES):
                self._file.close()
                self._file = open(path, "ab", buffering=0)  # noqa: SIM115
                _lock_file(self._file)
        except ConfigError:
            self.close()
            raise
        except OSError as error:
            self.close()
            fix = "name a file in a folder that can be written to"
            raise ConfigError("the decision log cannot be opened", f"{path}: {error.strerror}", fix) from None

    def write(self, line: JournalLine) -> None:
        """Appends one line. Raises OSError if the disk is full or missing."""
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Closes the file; later lines are dropped. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _lock_file(file: IO[bytes]) -> None:
    """Locks the journal, since two deployments must not share one. Raises ConfigError if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        why = f"another deployment is already writing to {file.name}"
        raise ConfigError(
            "the decision log cannot be opened", why, "name another file for this one"
        ) from None
    except OSError:
        # The file system does not support locks.
        return


def _complete_bytes(path: Path) -> int | None:
    """Length in bytes of the complete lines of a journal; None if the file is empty, missing or not a regular file.

    Raises ConfigError if the file is something other than a journal.
    """
    if not path.is_file() or not path.stat().st_size:
        return None
    with open(path, "rb") as file:
        first = file.readline(MAX_HEAD_BYTES)
        try:
            head = msgspec.json.decode(first, type=JournalHead)
        except msgspec.DecodeError:
            head = None
        if head is None and not first.endswith(b"\n") and first.startswith(HEAD_START[: len(first)]):
            # A crash has cut off the first line.
            return 0
        if head is None or head.version != VERSION:
            why = f"{path} is not a decision log of this version, and would be appended to"
            raise ConfigError("the decision log cannot be opened", why, "name another file, or move this one")
        end = size = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - READ_BYTES)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return size


def split_runs(lines: Iterable[JournalLine]) -> Iterator[Iterator[JournalLine]]:
    """Splits a journal into the lines of each replanner run; each part begins with its head."""
    number = 0

    def life(line: JournalLine) -> int:
        nonlocal number
        number += isinstance(line, JournalHead)
        return number

    return (group for _, group in groupby(lines, life))


def read_journal(path: str | Path) -> Iterator[JournalLine]:
    """Yields the lines of a journal. Raises ConfigError, with the line number, if a line is malformed."""
    decoder, number = msgspec.json.Decoder(JournalLine), 0
    try:
        with open(path, "rb") as file:
            for text in file:
                number += 1
                line = decoder.decode(text)
                if isinstance(line, JournalHead) and (fault := _head_fault(line)):
                    raise msgspec.ValidationError(fault)
                yield line
    except OSError as error:
        fix = "name a file that --replan-journal wrote"
        raise ConfigError("there is no such decision log", f"{path}: {error.strerror}", fix) from None
    except msgspec.DecodeError as error:
        fix = "a line that was cut off by a crash may be deleted; others are as they were written"
        raise ConfigError("the decision log cannot be read", f"{path}, line {number}: {error}", fix) from None


def _head_fault(head: JournalHead) -> str:
    """The reason why a journal cannot be replayed; "" if it can."""
    if head.version != VERSION:
        return f"it is of version {head.version}, and this program reads version {VERSION}"
    policy = head.policy
    if min(policy.bucket_s, policy.window_s, policy.horizon_s, policy.false_alarms_per_day) <= 0.0:
        return "its policy has a time or a number of alarms that is not above 0"
    return ""


class RecordedEvaluator:
    """An evaluator that returns the answers stored in the journal."""

    def __init__(self) -> None:
        self._answers: dict[tuple[FleetSize, float], float] = {}

    def load_answers(self, fleets: tuple[EvaluatedFleet, ...]) -> None:
        """Sets the answers of the next review."""
        self._answers = {(fleet.fleet, fleet.rate): fleet.attainment for fleet in fleets}

    def attainment(self, fleet: FleetSize, mix: LengthMix, rate: float, cv: float) -> float:
        """The stored answer. Raises KeyError if there is none: today's code asks something else than the run did."""
        return self._answers[fleet, rate]
