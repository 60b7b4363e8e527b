"""The replanner's log: every look at the traffic with its inputs, one JSON object per line, so that it can be replayed.

    {"type": "head", "version": 1, "policy": {…}, "judge": {…}}
    {"type": "look", "at_s": 310.0, "buckets": […], "workers": […]}
    {"type": "look", …, "shift": {…}, "situation": {…}, "judged": […], "decision": {…}}

A look has a decision only where something led to one. It holds counts of lengths and names of workers, never a text.
A head begins the life of a replanner: a deployment that is started again with the same file appends, and each life is
replayed for itself (`lives`).
`replay` feeds the inputs to a new replanner, which has the same policy and hears the judge's answers from the log (or
asks another judge), and compares what it decides.
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
from planner.decide import Decision, Policy, Situation, Worker
from planner.detect import Shift
from planner.known import Fleet, Judged
from planner.windows import Bucket, Mix

VERSION = 1
MOST_HEAD = 1 << 20  # bytes of a first line
BEGUN = b'{"type":"head"'
PIECE = 1 << 16  # bytes that are read at once, from the end of a log


class Head(msgspec.Struct, frozen=True, tag="head"):
    """A replanner begins. What stays the same: the policy, and a word about the judge (model, device, objectives)."""

    policy: Policy
    judge: dict[str, Any] = {}
    start_s: float = 0.0
    version: int = VERSION


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An action could not be done to a worker."""

    at_s: float
    worker: str
    why: str = ""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """The buckets that had closed, the workers if they had changed, and what came of it."""

    at_s: float
    buckets: tuple[Bucket, ...] = ()
    workers: tuple[Worker, ...] | None = None
    shift: Shift | None = None
    situation: Situation | None = None
    judged: tuple[Judged, ...] = ()
    decision: Decision | None = None


Line = Head | Look | Failed


class Journal:
    """Appends lines to a file, or writes nowhere if there is no path."""

    def __init__(self, path: str | Path | None = None) -> None:
        """A line that a crash had cut off is taken away, so that what follows can be read.

        Raises ConfigError: the file cannot be written, another deployment writes it, or there is one that is no
        decision log of this version.
        """
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by close()
            if Path(path).is_file():
                _claim(self._file)
            whole = _whole(Path(path))
            if whole is not None and whole < self._file.tell():
                self._file.truncate(whole)
        except ConfigError:
            self.close()
            raise
        except OSError as error:
            self.close()
            fix = "name a file in a folder that can be written to"
            raise ConfigError("the decision log cannot be opened", f"{path}: {error.strerror}", fix) from None

    def write(self, line: Line) -> None:
        """Raises OSError when the disk is full or gone."""
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _claim(file: IO[bytes]) -> None:
    """Lines of two deployments in one log could not be told apart. Raises ConfigError: another one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        why = f"{file.name} is being written already, by another deployment"
        raise ConfigError(
            "the decision log cannot be opened", why, "name another file for this one"
        ) from None
    except OSError:
        return  # a file system without locks


def _whole(path: Path) -> int | None:
    """Bytes of whole lines in a log that is there; None where there is none yet, or it is no regular file.

    Raises ConfigError: something else is there.
    """
    if not path.is_file() or not path.stat().st_size:
        return None
    with open(path, "rb") as file:
        first = file.readline(MOST_HEAD)
        try:
            head = msgspec.json.decode(first, type=Head)
        except msgspec.DecodeError:
            head = None
        if head is None and not first.endswith(b"\n") and first.startswith(BEGUN[: len(first)]):
            return 0  # cut off in its first line
        if head is None or head.version != VERSION:
            why = f"{path} is not a decision log of this version, and would be appended to"
            raise ConfigError("the decision log cannot be opened", why, "name another file, or move this one")
        end = size = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - PIECE)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return size


def lives(lines: Iterable[Line]) -> Iterator[Iterator[Line]]:
    """The lines of each replanner that wrote a log, one after the other; each begins with its head."""
    number = 0

    def life(line: Line) -> int:
        nonlocal number
        number += isinstance(line, Head)
        return number

    return (group for _, group in groupby(lines, life))


def read(path: str | Path) -> Iterator[Line]:
    """The lines of a log. Raises ConfigError, with the number of the line, where one is not what it should be."""
    decoder, number = msgspec.json.Decoder(Line), 0
    try:
        with open(path, "rb") as file:
            for text in file:
                number += 1
                line = decoder.decode(text)
                if isinstance(line, Head) and (fault := _fault(line)):
                    raise msgspec.ValidationError(fault)
                yield line
    except OSError as error:
        fix = "name a file that --replan-journal wrote"
        raise ConfigError("there is no such decision log", f"{path}: {error.strerror}", fix) from None
    except msgspec.DecodeError as error:
        fix = "a line that was cut off by a crash may be deleted; others are as they were written"
        raise ConfigError("the decision log cannot be read", f"{path}, line {number}: {error}", fix) from None


def _fault(head: Head) -> str:
    """What keeps a log from being replayed."""
    if head.version != VERSION:
        return f"it is of version {head.version}, and this program reads version {VERSION}"
    policy = head.policy
    if min(policy.bucket_s, policy.window_s, policy.horizon_s, policy.false_alarms_per_day) <= 0.0:
        return "its policy has a time or a number of alarms that is not above 0"
    return ""


class Heard:
    """A judge that answers as it did in the log."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Fleet, float], float] = {}

    def hear(self, judged: tuple[Judged, ...]) -> None:
        """What it will be asked next."""
        self._answers = {(answer.fleet, answer.rate): answer.attainment for answer in judged}

    def attainment(self, fleet: Fleet, mix: Mix, rate: float, cv: float) -> float:
        """Raises KeyError where the log has no answer: the decision was made in another way."""
        return self._answers[fleet, rate]
