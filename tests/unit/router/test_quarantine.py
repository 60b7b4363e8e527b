"""Who kills workers is found out after two crashes, and nobody else is harmed."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.request import Request, SamplingParams
from router.requests.quarantine import (
    CLEAR_TOKENS,
    MAX_EXCUSED_KILLS,
    MAX_QUARANTINED,
    CrashQuarantine,
    QuarantineFindings,
)

NOTHING = QuarantineFindings()


class WorkerFloor:
    """Workers and the requests at them, as the docket asks for them."""

    def __init__(self) -> None:
        self.at: dict[str, list[str]] = defaultdict(list)
        self.docket = CrashQuarantine(lambda worker: self.at[worker], recovery_s=15.0, salt=b"salt")

    def put(self, worker: str, *requests: str) -> None:
        self.at[worker] += requests

    def crash(self, worker: str, now_s: float = 0.0, delivered: int = 0) -> QuarantineFindings:
        """It dies with all that is there."""
        there = self.at.pop(worker, [])
        return self.docket.record_crash(worker, dict.fromkeys(there, delivered), now_s)


@pytest.fixture
def floor() -> WorkerFloor:
    return WorkerFloor()


def test_suspects_run_one_at_a_time_per_worker_and_others_freely(floor: WorkerFloor) -> None:
    floor.put("d0", "a", "b")
    assert floor.crash("d0") == NOTHING
    assert floor.docket.is_suspected("a") and floor.docket.may_run("a", "d1")
    floor.put("d1", "a", "innocent")
    assert not floor.docket.may_run("b", "d1") and floor.docket.may_run("b", "d2")
    assert floor.docket.may_run("innocent", "d1") and floor.docket.may_run("a", "d1")


def test_a_few_tokens_more_clear_a_suspect(floor: WorkerFloor) -> None:
    floor.put("d0", "a", "b")
    floor.crash("d0", delivered=7)
    assert not floor.docket.record_progress("a", 7 + CLEAR_TOKENS - 1)
    assert floor.docket.record_progress("a", 7 + CLEAR_TOKENS) and not floor.docket.record_progress("a", 99)
    assert not floor.docket.is_suspected("a") and len(floor.docket) == 1


def twice(floor: WorkerFloor, first: str | None = "crashed") -> None:
    """A request and two innocents meet a crash; then it crashes another worker, beside a third."""
    floor.put("d0", "poison", "a", "b")
    floor.crash("d0")
    if first is not None:
        assert floor.docket.record_cause("d0", first).quarantined == ()
    floor.put("d1", "poison", "c")
    assert floor.crash("d1", 1.0) == NOTHING


def test_the_second_crash_alone_under_suspicion_is_one_too_many(floor: WorkerFloor) -> None:
    twice(floor)
    assert floor.docket.is_held("poison") and not floor.docket.may_run("poison", "d2")
    assert floor.docket.may_run("c", "d2"), "nobody waits for it"
    findings = floor.docket.record_cause("d1", "crashed")
    assert findings == QuarantineFindings(("a", "b", "c"), ("poison",)), "who was beside it is cleared"
    assert len(floor.docket) == 0 and floor.docket.num_quarantined == 1


def test_the_only_request_at_both_crashes_needs_no_company_to_be_found(floor: WorkerFloor) -> None:
    for worker in ("d0", "d1"):
        floor.put(worker, "poison")
        floor.crash(worker)
    assert floor.docket.record_cause("d0", "crashed") == NOTHING and floor.docket.is_held("poison")
    assert floor.docket.record_cause("d1", "crashed").quarantined == ("poison",)


@pytest.mark.parametrize("ended", ["killed", "alive"])
def test_a_worker_that_was_killed_from_outside_accuses_nobody(floor: WorkerFloor, ended: str) -> None:
    twice(floor)
    findings = floor.docket.record_cause("d1", ended)
    assert findings == QuarantineFindings(("c", "poison"), ())
    assert floor.docket.is_suspected("poison") and not floor.docket.is_held("poison"), (
        "there is the first crash"
    )
    assert floor.docket.may_run("poison", "d2")


def test_a_first_crash_that_was_none_leaves_the_second_as_the_first(floor: WorkerFloor) -> None:
    twice(floor, first=None)
    assert floor.docket.record_cause("d1", "crashed") == NOTHING
    assert floor.docket.is_held("poison"), "word of the first worker may come yet"
    assert floor.docket.record_cause("d0", "killed").released == ("a", "b", "poison")
    assert floor.docket.is_suspected("poison") and not floor.docket.is_held("poison")


def test_without_word_for_a_while_it_goes_on_and_the_next_time_is_the_last(floor: WorkerFloor) -> None:
    twice(floor, first=None)
    assert floor.docket.expire_waits(14.0) == NOTHING
    floor.docket.expire_waits(15.0)
    assert floor.docket.expire_waits(16.0) == QuarantineFindings(("poison",), ())
    floor.put("d2", "poison", "e")
    assert floor.crash("d2", 20.0) == QuarantineFindings(("a", "b", "c", "e"), ("poison",))


def killed(floor: WorkerFloor, times: int, delivered: int = 0, step: int = 0) -> list[QuarantineFindings]:
    """A request meets so many kills, each beside another innocent, and delivers `step` tokens from one to the next."""
    found = []
    for number in range(times):
        worker = f"k{number}"
        floor.put(worker, "a", f"beside{number}")
        floor.crash(worker, float(number), delivered + number * step)
        found.append(floor.docket.record_cause(worker, "killed"))
    return found


def test_kills_again_and_again_without_progress_are_taken_for_crashes(floor: WorkerFloor) -> None:
    """As by a program that kills for memory, which nobody here can tell from an operator."""
    findings = killed(floor, MAX_EXCUSED_KILLS + 2)
    for number, finding in enumerate(findings[:MAX_EXCUSED_KILLS]):
        assert finding == QuarantineFindings(("a", f"beside{number}"), ()), "unlucky, so far"
    assert findings[MAX_EXCUSED_KILLS] == QuarantineFindings((f"beside{MAX_EXCUSED_KILLS}",), ()), (
        "suspected, and not yet held guilty"
    )
    assert findings[-1] == QuarantineFindings((f"beside{MAX_EXCUSED_KILLS + 1}",), ("a",))
    assert len(floor.docket) == 0 and floor.docket.num_quarantined == 1


def test_kills_with_progress_between_them_accuse_nobody(floor: WorkerFloor) -> None:
    findings = killed(floor, 4 * MAX_EXCUSED_KILLS, step=CLEAR_TOKENS)
    assert [one.quarantined for one in findings] == [()] * len(findings) and len(floor.docket) == 0


def test_of_two_that_meet_the_same_kills_the_one_that_gets_workers_killed_alone_is_found(
    floor: WorkerFloor,
) -> None:
    for number in range(MAX_EXCUSED_KILLS + 1):
        floor.put(f"k{number}", "poison", "a")
        floor.crash(f"k{number}")
        assert floor.docket.record_cause(f"k{number}", "killed").quarantined == ()
    floor.put("d1", "a")
    assert not floor.docket.may_run("poison", "d1"), "they run apart from now on"
    floor.put("d2", "poison")
    floor.crash("d2")
    assert floor.docket.record_cause("d2", "killed") == QuarantineFindings(("a",), ("poison",))


def test_who_has_ended_is_not_remembered_for_its_kills(floor: WorkerFloor) -> None:
    killed(floor, MAX_EXCUSED_KILLS)
    floor.docket.forget_request("a")
    assert killed(floor, MAX_EXCUSED_KILLS)[-1].released[0] == "a" and floor.docket._kills.keys() >= {"a"}
    for name in ("a", *(f"beside{number}" for number in range(MAX_EXCUSED_KILLS))):
        floor.docket.forget_request(name)
    assert floor.docket._kills == {}


def test_no_word_is_no_acquittal(floor: WorkerFloor) -> None:
    twice(floor)
    assert floor.docket.record_cause("d1", "") == NOTHING and floor.docket.is_held("poison")


def test_a_worker_that_never_comes_back_speaks_against_nobody_twice(floor: WorkerFloor) -> None:
    twice(floor, first=None)
    floor.docket.expire_waits(15.0)
    assert floor.docket.record_cause("d1", "crashed").quarantined == ("poison",)


def test_two_suspects_at_one_worker_are_separated_later(floor: WorkerFloor) -> None:
    floor.put("d0", "a", "b")
    floor.crash("d0")
    floor.docket.record_cause("d0", "crashed")
    floor.put("d1", "a", "b")
    floor.crash("d1")
    assert not floor.docket.is_held("a") and not floor.docket.is_held("b")
    assert floor.docket.record_cause("d1", "crashed") == NOTHING


def test_who_ends_is_forgotten_with_its_deaths(floor: WorkerFloor) -> None:
    twice(floor)
    for name in ("poison", "a", "b", "c"):
        floor.docket.forget_request(name)
        floor.docket.forget_request(name)
    assert len(floor.docket) == 0 and floor.docket.record_cause("d1", "crashed") == NOTHING
    assert floor.docket.expire_waits(100.0) == NOTHING


def asked(prompt: list[int], **sampling: float) -> Request:
    return Request("r", prompt, SamplingParams(max_tokens=4, **{"seed": 0, **sampling}), 0.0)  # type: ignore[arg-type]


def test_a_fingerprint_is_of_the_question_and_of_this_gateway() -> None:
    docket, other = WorkerFloor().docket, CrashQuarantine(lambda worker: [])
    name = docket.fingerprint_question(asked([1, 2, 3]))
    assert name == docket.fingerprint_question(asked([1, 2, 3], seed=9)), "a seed may be drawn anew"
    assert name != docket.fingerprint_question(asked([1, 2, 4]))
    assert name != docket.fingerprint_question(asked([1, 2, 3], temperature=0.5))
    assert name != other.fingerprint_question(asked([1, 2, 3]))


def test_a_question_is_refused_for_a_while_and_the_table_is_bounded(floor: WorkerFloor) -> None:
    docket, names = floor.docket, [bytes([i % 256, i // 256]) for i in range(MAX_QUARANTINED + 1)]
    for name in names:
        docket.ban_question(name, 0.0)
    assert not docket.is_banned(names[0], 1.0) and docket.is_banned(names[1], 599.0)
    assert not docket.is_banned(names[1], 600.0) and not docket.is_banned(b"other", 1.0)


@settings(max_examples=100)
@given(st.data())
def test_poison_is_found_after_two_crashes_and_innocents_go_free(data: st.DataObject) -> None:
    """Requests run wherever they may; the poison crashes whatever it runs at, at once. Others end some time."""
    floor, workers = WorkerFloor(), ["d0", "d1", "d2"]
    waiting = ["poison", *(f"r{i}" for i in range(data.draw(st.integers(0, 5))))]
    crashes, delivered = 0, dict.fromkeys(waiting, 0)
    lanes_broken = False
    for step in range(200):
        if "poison" not in waiting and not any("poison" in there for there in floor.at.values()):
            break
        movable = [
            (name, worker) for name in waiting for worker in workers if floor.docket.may_run(name, worker)
        ]
        assert movable, "somebody may always go: nobody but the poison is ever held"
        name, worker = data.draw(st.sampled_from(movable))
        waiting.remove(name)
        floor.put(worker, name)
        lanes_broken |= sum(floor.docket.is_suspected(one) for one in floor.at[worker]) > 1
        if name == "poison":
            crashes += 1
            there = floor.at.pop(worker)
            floor.docket.record_crash(worker, {one: delivered[one] for one in there}, float(step))
            findings = floor.docket.record_cause(worker, "crashed")
            waiting += [one for one in there if one not in findings.quarantined]
            assert set(findings.quarantined) <= {"poison"}
        elif name != "poison":
            delivered[name] += CLEAR_TOKENS
            floor.docket.record_progress(name, delivered[name])
    assert crashes == 2 and not lanes_broken
    assert len(floor.docket) == 0
