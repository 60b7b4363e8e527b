"""Reads what a run has left behind (the gateway's request log, the answers that clients got) and tests the invariants.

I2 every token is the oracle's       I7 who is not hit is not touched (I2)  I10 attempts are bounded
I3 exactly one ending each           I8 no KV of another (via I2)           I12 nothing hangs
I4 usage counted once                I9 late words change nothing

I1, that nothing is held at rest, is asked of the workers by `run.py`; I6, that nothing lives beyond its deadline, is a
law of `tests/simulation`; I11, that readiness tells the truth, is for `tests/system`.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.request import LEGAL_MOVES, RequestStage
from tests.faults.client import ClientAnswer
from tests.faults.workload import RequestBook

MAX_ATTEMPTS = 1 + 8 + 2  # the first, those after lost workers, those after other failures
MAX_SETTLE_S = 20.0
STALL_S = 60.0  # a live request is silent for at most so long: far beyond what waiting for a worker takes


@dataclass(slots=True)
class RequestHistory:
    """One request as the log has it."""

    request: str
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def migrated(self) -> bool:
        """Another attempt went on after tokens had been delivered."""
        return any(event.get("delivered", 0) > 0 for event in self.of("retried"))

    @property
    def done(self) -> bool:
        """It ended well."""
        return any(event.get("outcome") == "done" for event in self.of("end"))


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that was cut off by the death of its writer is left out."""
    events = []
    for line in path.read_text("utf-8", "replace").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def histories_by_request(events: Iterable[Mapping[str, Any]]) -> dict[str, RequestHistory]:
    """Events by request, canaries too."""
    found: dict[str, RequestHistory] = {}
    for event in events:
        if request := event.get("request"):
            found.setdefault(request, RequestHistory(request)).events.append(dict(event))
    return found


class LogTail:
    """A log that is still being written; `histories_by_request` are brought up to date by `read`."""

    def __init__(self, path: Path) -> None:
        self.path, self.histories = path, dict[str, RequestHistory]()
        self._at, self._rest = 0, b""

    def read(self) -> dict[str, RequestHistory]:
        """Take what was written since the last time."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._at)
                *lines, self._rest = (self._rest + file.read()).split(b"\n")
                self._at = file.tell()
            for line in lines:
                event = json.loads(line)
                if request := event.get("request"):
                    self.histories.setdefault(request, RequestHistory(request)).events.append(event)
        return self.histories

    def waiting(self) -> set[int]:
        """Prompt lengths of the requests that are in the gateway's queue, and were never anywhere else."""
        return {
            life.events[0]["prompt_tokens"]
            for life in self.read().values()
            if life.events[0]["event"] == "arrive" and not life.of("begin") and not life.of("end")
        }


def check_log(events: list[dict[str, Any]], *, cut: bool = False) -> list[str]:
    """What the log shows that must not be. `cut`: the gateway was killed, so requests may lack their end."""
    wrong: list[str] = []
    for life in histories_by_request(events).values():
        wrong += [f"{life.request}: {what}" for what in _check_life(life, cut)]
    return wrong


def _check_life(life: RequestHistory, cut: bool) -> list[str]:
    wrong = []
    ends, arrivals = life.of("end"), life.of("arrive")
    if len(arrivals) != 1:
        wrong.append(f"I3 it arrived {len(arrivals)} times")
    open_still = not ends and not (arrivals and arrivals[0].get("canary"))  # one of those may be on its way
    if len(ends) > 1 or (open_still and not cut):
        wrong.append(f"I3 it ended {len(ends)} times")
    if ends and life.events[-1]["event"] != "end":
        wrong.append(f"I9 {life.events[-1]['event']} after its end")
    wrong += _check_moves(life)
    wrong += _check_counts(life)
    if (tries := len(life.of("retried"))) >= MAX_ATTEMPTS:
        wrong.append(f"I10 it was tried {tries + 1} times")
    epochs = [event["epoch"] for event in life.of("begin")]
    if epochs != sorted(set(epochs)):
        wrong.append(f"I9 attempts began in the order {epochs}")
    for a, b in zip(life.events, life.events[1:], strict=False):
        if b["t"] - a["t"] > STALL_S:
            wrong.append(f"I12 silent for {b['t'] - a['t']:.0f} s after {a['event']}")
    return wrong


def _check_moves(life: RequestHistory) -> list[str]:
    """Every move is in the table."""
    stage, wrong = RequestStage.ADMITTED, []
    for event in life.of("stage"):
        to = RequestStage(event["stage"])
        if to not in LEGAL_MOVES[stage] and to is not stage:
            wrong.append(f"I9 it went from {stage.name} to {to.name}")
        stage = to
    return wrong


def _check_counts(life: RequestHistory) -> list[str]:
    """Tokens add up, and the end tells the same number."""
    total = 0
    for event in life.of("tokens"):
        total += event["count"]
        if event["total"] != total:
            return [f"I2 {event['total']} tokens in all after {total} were delivered"]
    for end in life.of("end"):
        if end.get("outcome") == "done" and end.get("output_tokens", total) != total:
            return [f"I4 it ended with {end['output_tokens']} tokens, {total} were delivered"]
    return []


@dataclass(slots=True)
class RunSummary:
    """What became of a run's requests."""

    asked: int = 0
    whole: int = 0
    left: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # by code
    broken: list[str] = field(default_factory=list)
    migrated: int = 0  # whole and token-exact, after the worker that wrote it was lost
    retried: int = 0

    def add(self, other: RunSummary) -> None:
        self.asked += other.asked
        self.whole += other.whole
        self.left += other.left
        self.failed += other.failed
        self.broken += other.broken
        self.migrated += other.migrated
        self.retried += other.retried

    @property
    def failures(self) -> int:
        return self.failed.total()


def check_answers(book: RequestBook, answers: Iterable[ClientAnswer]) -> RunSummary:
    """Answers against the oracle, and every one of them with exactly one ending."""
    summary = RunSummary()
    for answer in answers:
        summary.asked += 1
        summary.left += answer.left
        summary.whole += answer.whole
        name = f"request {answer.ask.nonce} ({answer.ask.phase}, {answer.id or 'no id'})"
        if wrong := book.wrong(answer):
            summary.broken.append(f"I2 {name}: {wrong}")
        if answer.left:
            continue
        if "hang" in answer.ends:
            summary.broken.append(f"I12 {name}: no end")
        elif not answer.whole:
            summary.failed[answer.code] += 1
            if answer.ends not in (["status"], ["error"], ["error", "done"], ["cut"], ["refused"]):
                summary.broken.append(f"I3 {name}: endings {answer.ends}")
    return summary


def _read_settled(log: Path, cut: bool) -> list[dict[str, Any]]:
    """The log, once the gateway has written down how all ended; it writes a little later than it acts."""
    ends_s = time.monotonic() + MAX_SETTLE_S
    while True:
        events = read_log(log) if log.exists() else []
        if cut or time.monotonic() > ends_s or not any("ended 0 times" in what for what in check_log(events)):
            return events
        time.sleep(0.1)


def check_run(book: RequestBook, answers: list[ClientAnswer], log: Path, *, cut: bool = False) -> RunSummary:
    """All that can be said of a run."""
    summary = check_answers(book, answers)
    events = _read_settled(log, cut)
    found = histories_by_request(events)
    summary.broken += check_log(events, cut=cut)
    by_id: dict[str, list[RequestHistory]] = defaultdict(list)
    for life in found.values():
        by_id[life.request.rsplit(".", 1)[0]].append(life)
    for answer in answers:
        mine = by_id.get(answer.id, [])
        summary.retried += any(life.of("retried") for life in mine)
        if answer.whole and not book.wrong(answer):
            summary.migrated += any(life.migrated for life in mine)
        if answer.whole and not cut and not any(life.done for life in mine):
            summary.broken.append(
                f"I3 request {answer.ask.nonce} ({answer.id}): the log does not have its end"
            )
    return summary
