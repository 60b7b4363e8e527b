"""Every sequence ends as met, missed or not counted, and the three add up to what was offered."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import RequestError
from diptych.failure_statuses import RULES, FailureReason, Party, RequestFailure
from diptych.slo import Slo
from services.gateway.batches.line_window import LineWindow, LineWindowSink
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.recent_history import RecentHistory
from services.gateway.outcomes import (
    Ending,
    Outcome,
    RequestOutcomes,
    SequenceRecord,
    check_sequence,
    known_outcomes,
)
from tests.support.metric_values import values
from tests.unit.gateway.outcome_watcher import Watcher

BOTH_SLOS = Slo(ttft_s=1.0, tpot_s=0.1)
MET, MISSED, NOT_COUNTED = Outcome.MET, Outcome.MISSED, Outcome.NOT_COUNTED
# Refusals with 429 for which the service has no room; any other 429 is for a client above its share.
SERVICE_IS_FULL = {
    FailureReason.TOO_MANY_REQUESTS,
    FailureReason.QUEUE_FULL,
    FailureReason.QUEUE_TOO_LONG,
}
# Failures with a 5xx that the client brought about: it asks for too much at once, or for what workers crash on.
CLIENTS_5XX = {FailureReason.ANSWER_MEMORY_FULL, FailureReason.REQUEST_QUARANTINED}


def failure(reason: FailureReason) -> RequestFailure:
    return RequestFailure(reason, "as the test says")


def sequence(
    first_s: float | None = None,
    tokens: int = 0,
    last_s: float | None = None,
    written: bool = True,
    complete: bool = False,
    deadline_s: float | None = None,
) -> SequenceRecord:
    """A sequence that arrived at 0 s."""
    return SequenceRecord(
        "toy", 8, tokens=tokens, first_token_s=first_s, last_token_s=last_s if last_s is not None else first_s,
        first_written_s=first_s if written else None, is_complete=complete, client_deadline_s=deadline_s,
    )  # fmt: skip


# ---- whose fault a failure is


@pytest.mark.parametrize("reason", FailureReason)
def test_every_failure_is_somebody_s_fault_and_it_fits_its_status(reason: FailureReason) -> None:
    rule = RULES[reason]
    if rule.status == 429:
        assert rule.party is (Party.SERVICE if reason in SERVICE_IS_FULL else Party.CLIENT), (
            "a 429 says it itself"
        )
    else:
        assert rule.is_clients_fault == (rule.status < 500 or reason in CLIENTS_5XX)
    assert failure(reason).is_clients_fault == rule.is_clients_fault


# ---- what a sequence counts as


@pytest.mark.parametrize(
    ("record", "ending", "now_s", "outcome", "reason", "slos"),
    [
        # It was answered.
        (sequence(0.5, 11, 1.0), Ending.ANSWERED, 2.0, MET, "answered", {"ttft": True, "tpot": True}),
        (sequence(1.0, 11, 2.0), Ending.ANSWERED, 2.0, MET, "answered", {"ttft": True, "tpot": True}),
        (sequence(1.5, 1), Ending.ANSWERED, 2.0, MISSED, "answered_late", {"ttft": False, "tpot": True}),
        (sequence(0.5, 3, 0.9), Ending.ANSWERED, 2.0, MISSED, "answered_late", {"ttft": True, "tpot": False}),
        # Its client left: before the first token,
        (sequence(), Ending.LEFT, 0.9, NOT_COUNTED, "left_early", {}),
        (sequence(), Ending.LEFT, 1.1, MISSED, "left_late", {"ttft": False}),
        # after a first token that had not been written,
        (sequence(0.9, 1, written=False), Ending.LEFT, 0.95, NOT_COUNTED, "left_early", {}),
        (sequence(1.2, 1, written=False), Ending.LEFT, 1.25, MISSED, "left_late", {"ttft": False, "tpot": True}),
        # while tokens came,
        (sequence(0.5, 5, 0.9), Ending.LEFT, 0.95, NOT_COUNTED, "left_early", {}),
        (sequence(0.5, 5, 1.3), Ending.LEFT, 1.35, MISSED, "left_late", {"ttft": True, "tpot": False}),
        # while the next one did not come,
        (sequence(0.5, 5, 0.9), Ending.LEFT, 9.0, MISSED, "left_late", {"ttft": True, "tpot": False}),
        # and when all were there.
        (sequence(0.5, 5, 0.9, complete=True), Ending.LEFT, 9.0, NOT_COUNTED, "left_early", {}),
        # It read too slowly.
        (sequence(0.5, 5, 0.9, complete=True), Ending.SLOW_READER, 9.0, NOT_COUNTED, "slow_reader", {}),
        (sequence(1.5, 5, 1.6), Ending.SLOW_READER, 1.7, MISSED, "slow_reader", {"ttft": False, "tpot": True}),
    ],
)  # fmt: skip
def test_what_an_end_counts_as(
    record: SequenceRecord, ending: Ending, now_s: float, outcome: Outcome, reason: str, slos: dict[str, bool]
) -> None:
    checked = check_sequence(record, ending, None, BOTH_SLOS, now_s)
    assert (checked.outcome, checked.reason) == (outcome, reason)
    assert checked.slos == ({**slos, "all": all(slos.values())} if slos else {})


@pytest.mark.parametrize(
    ("record", "now_s", "outcome", "reason", "slos"),
    [
        # The client's own deadline: shorter than the SLO, also if it is noticed late.
        (sequence(deadline_s=1e-6), 0.1, NOT_COUNTED, "short_deadline", {}),
        (sequence(deadline_s=0.9), 1.1, NOT_COUNTED, "short_deadline", {}),
        # Longer than the SLO: the limit had passed.
        (sequence(deadline_s=5.0), 5.1, MISSED, "deadline_exceeded", {"ttft": False}),
        # Too short for what was asked, though every token came in time.
        (sequence(0.5, 46, 4.95, deadline_s=5.0), 5.1, NOT_COUNTED, "short_deadline", {}),
        (sequence(0.5, 9, 4.95, deadline_s=5.0), 5.1, MISSED, "deadline_exceeded", {"ttft": True, "tpot": False}),
        # The service's own deadline.
        (sequence(), 600.0, MISSED, "deadline_exceeded", {"ttft": False, "tpot": False}),
        (sequence(0.5, 6000, 599.0), 600.0, MISSED, "deadline_exceeded", {"ttft": False, "tpot": False}),
    ],
)  # fmt: skip
def test_what_a_deadline_counts_as(
    record: SequenceRecord, now_s: float, outcome: Outcome, reason: str, slos: dict[str, bool]
) -> None:
    passed = failure(FailureReason.DEADLINE_EXCEEDED)
    checked = check_sequence(record, Ending.FAILED, passed, BOTH_SLOS, now_s)
    assert (checked.outcome, checked.reason) == (outcome, reason)
    assert checked.slos == ({**slos, "all": all(slos.values())} if slos else {})


def test_a_limit_that_is_not_set_is_neither_met_nor_missed() -> None:
    late = sequence(9.0, 3, 9.1)
    assert check_sequence(late, Ending.ANSWERED, None, Slo(), 10.0).slos == {}
    assert check_sequence(late, Ending.ANSWERED, None, Slo(), 10.0).outcome is MET
    assert check_sequence(late, Ending.ANSWERED, None, Slo(tpot_s=0.1), 10.0).slos == {
        "tpot": True,
        "all": True,
    }
    assert check_sequence(sequence(), Ending.LEFT, None, Slo(tpot_s=0.1), 99.0).outcome is NOT_COUNTED
    lost = failure(FailureReason.WORKER_LOST)
    assert check_sequence(late, Ending.FAILED, lost, Slo(ttft_s=1.0), 10.0).slos == {
        "ttft": False,
        "all": False,
    }


times = st.none() | st.floats(0, 5)


@given(
    first_s=times,
    more_s=st.floats(0, 5),
    tokens=st.integers(1, 50),
    ending=st.sampled_from(Ending),
    reason=st.sampled_from(FailureReason),
    deadline_s=times,
    limits=st.tuples(st.sampled_from([0.5, 2.0, float("inf")]), st.sampled_from([0.05, 0.5, float("inf")])),
    is_complete=st.booleans(),
)
def test_every_end_has_one_known_outcome_that_fits_its_slos(
    first_s: float | None, more_s: float, tokens: int, ending: Ending, reason: FailureReason,
    deadline_s: float | None, limits: tuple[float, float], is_complete: bool,
) -> None:  # fmt: skip
    last_s = None if first_s is None else first_s + more_s
    count = 0 if first_s is None else tokens
    record = sequence(first_s, count, last_s, complete=is_complete, deadline_s=deadline_s)
    why = failure(reason) if ending is Ending.FAILED else None
    checked = check_sequence(record, ending, why, slo := Slo(*limits), 5.0 + more_s)
    assert (checked.outcome, checked.reason) in known_outcomes()
    is_set = slo.limits_s() != {"ttft": None, "tpot": None}
    assert bool(checked.slos) == (is_set and checked.outcome is not NOT_COUNTED)
    if checked.slos:
        assert checked.slos["all"] == (checked.outcome is MET)


# ---- one place, and its readers


@pytest.mark.parametrize("reason", FailureReason)
@pytest.mark.parametrize("is_sequence", [False, True])
def test_all_readers_agree_on_every_failure(reason: FailureReason, is_sequence: bool) -> None:
    metrics, watcher, history = GatewayMetrics(BOTH_SLOS), Watcher(), RecentHistory()
    window = list[bool]()
    sinks = [metrics, watcher, history, LineWindowSink(window.append)]
    outcomes = RequestOutcomes(BOTH_SLOS, sinks, clock=lambda: 2.0)
    record = sequence() if is_sequence else None
    if record is not None:
        outcomes.add_arrival(record)
    outcomes.end_sequence(record, Ending.FAILED, failure(reason))
    found, is_clients = values(metrics), failure(reason).is_clients_fault
    offered = found["diptych:offered_requests_total{}"]
    by_outcome = {
        outcome: sum(
            value
            for name, value in found.items()
            if name.startswith(f"diptych:slo_outcomes_total{{outcome={outcome},")
        )
        for outcome in Outcome
    }
    assert offered == 1 == sum(by_outcome.values())
    assert by_outcome[NOT_COUNTED] == is_clients and by_outcome[MISSED] == (not is_clients)
    assert found["diptych:slo_requests_total{met=false,objective=all}"] == (not is_clients)
    shown = history.report(2.0, 0.9)
    assert sum(shown["not_counted"]) == is_clients
    assert sum(shown["failed"]) + sum(shown["refused"]) == (not is_clients)
    refused = failure(reason).is_overload and (record is None or failure(reason).status == 429)
    assert window == ([] if is_clients or refused or record is None else [False])


def test_a_client_s_deadlines_neither_lower_attainment_nor_stop_lines() -> None:
    """Each costs nothing: two of them beside each good request must not page anybody."""
    metrics, window = GatewayMetrics(BOTH_SLOS), LineWindow(0.9)
    outcomes = RequestOutcomes(BOTH_SLOS, [metrics, LineWindowSink(window.record_outcome)], clock=lambda: 0.1)
    for number in range(60):
        if number % 3:
            short = sequence(deadline_s=1e-6)
            outcomes.add_arrival(short)
            outcomes.end_sequence(short, Ending.FAILED, failure(FailureReason.DEADLINE_EXCEEDED))
        else:
            good = sequence(0.05, 2, 0.1)
            outcomes.add_arrival(good)
            outcomes.end_sequence(good, Ending.ANSWERED)
    found = values(metrics)
    assert found["diptych:slo_attainment{objective=all}"] == 1.0
    assert found["diptych:slo_outcomes_total{outcome=not_counted,reason=short_deadline}"] == 40
    assert window.share == 1.0 and window.cuts == 0


def test_clients_that_gave_up_after_the_limit_were_missed() -> None:
    metrics = GatewayMetrics(BOTH_SLOS)
    outcomes = RequestOutcomes(BOTH_SLOS, [metrics], clock=lambda: 1.5)
    for _ in range(20):
        outcomes.end_sequence(sequence(), Ending.LEFT)
    outcomes.end_sequence(sequence(0.5, 2, 0.55), Ending.ANSWERED)
    found = values(metrics)
    assert found["diptych:slo_attainment{objective=ttft}"] == pytest.approx(1 / 21)
    assert found["diptych:slo_outcomes_total{outcome=missed,reason=left_late}"] == 20


def test_what_never_became_sequences_is_counted_once() -> None:
    watcher = Watcher()
    outcomes = RequestOutcomes(BOTH_SLOS, [watcher])
    raised: list[BaseException] = [
        RequestError(failure(FailureReason.INVALID_JSON)),
        RequestError(failure(FailureReason.PREPARATION_FULL)),
        RuntimeError("a body could not be prepared"),
        asyncio.CancelledError(),
    ]
    for error in raised:
        with pytest.raises(type(error)), outcomes.count_refusals():
            raise error
    with outcomes.count_refusals():
        pass
    assert watcher.counts == Counter(
        {
            ("not_counted", "invalid_json"): 1,
            ("missed", "overloaded"): 1,
            ("missed", "internal_error"): 1,
            ("missed", "server_shutting_down"): 1,
        }
    )
