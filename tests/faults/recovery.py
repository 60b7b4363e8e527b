"""How long streams wait for a fault: those at the very worker that was struck, and all that were waiting just then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.faults.client import ClientAnswer
from tests.faults.invariants import RequestHistory

HIT_S = 0.25  # a stream that a fault does not touch is not silent for longer


@dataclass(frozen=True, slots=True)
class FaultStrike:
    """A fault began: when, and at which worker."""

    at_s: float
    target: str


def stream_waits(
    answers: Iterable[ClientAnswer], struck: Iterable[FaultStrike]
) -> Iterator[tuple[ClientAnswer, FaultStrike, float]]:
    """Of every stream that was silent for long when a fault began: from the fault to its next token, or its end."""
    strikes = list(struck)
    for answer in answers:
        moments = [answer.began_s, *answer.received_s, answer.ended_s]
        for before_s, after_s in zip(moments, moments[1:], strict=False):
            for strike in strikes:
                if before_s <= strike.at_s < after_s and after_s - strike.at_s > HIT_S:
                    yield answer, strike, after_s - strike.at_s


def recovery_waits(
    answers: Sequence[ClientAnswer], struck: Iterable[FaultStrike], histories: Mapping[str, RequestHistory]
) -> Iterator[float]:
    """The waits of those that needed the worker that was struck: its answer was written there, or its prompt read.

    A request that waits in a queue anyhow, or is read somewhere else, is not one that recovers.
    """
    by_id = {life.request.rsplit(".", 1)[0]: life for life in histories.values()}
    moments = [(a.began_s, by_id[a.id].events[0]["t"]) for a in answers if a.id in by_id]
    opened_s = max((ours_s - t for ours_s, t in moments), default=0.0)  # nothing is logged before it is asked
    for answer, strike, wait_s in stream_waits(answers, struck):
        life = by_id.get(answer.id)
        if life is not None and strike.target in workers_needed(life, strike.at_s - opened_s):
            yield wait_s


def workers_needed(life: RequestHistory, t: float) -> set[str]:
    """The workers that a request hangs on at that moment of its log."""
    workers, way = set[str](), ("", "")
    for event in life.events:
        if event["t"] > t:
            break
        match event["event"]:
            case "begin":
                way = event["prefill"] or "", event["decode"]
                workers = {*way} - {""}
            case "stage" if event["stage"] == "decoding":
                workers = {way[1]}
            case "retried" | "end":
                workers = set()
    return workers
