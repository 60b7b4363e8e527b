"""Who kills workers is found out after two crashes, and nobody else is harmed."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.request import Request, Sampling
from router.docket import CLEAR_TOKENS, MAX_QUARANTINED, Docket, Verdicts

NOTHING = Verdicts()


class Floor:
    """Workers and the requests at them, as the docket asks for them."""

    def __init__(self) -> None:
        self.at: dict[str, list[str]] = defaultdict(list)
        self.docket = Docket(lambda worker: self.at[worker], recovery_s=15.0, salt=b"salt")

    def put(self, worker: str, *requests: str) -> None:
        self.at[worker] += requests

    def crash(self, worker: str, now_s: float = 0.0, delivered: int = 0) -> Verdicts:
        """It dies with all that is there."""
        there = self.at.pop(worker, [])
        return self.docket.crash(worker, dict.fromkeys(there, delivered), now_s)


@pytest.fixture
def floor() -> Floor:
    return Floor()


def test_suspects_run_one_at_a_time_per_worker_and_others_freely(floor: Floor) -> None:
    floor.put("d0", "a", "b")
    assert floor.crash("d0") == NOTHING
    assert floor.docket.suspected("a") and floor.docket.may_run("a", "d1")
    floor.put("d1", "a", "innocent")
    assert not floor.docket.may_run("b", "d1") and floor.docket.may_run("b", "d2")
    assert floor.docket.may_run("innocent", "d1") and floor.docket.may_run("a", "d1")


def test_a_few_tokens_more_clear_a_suspect(floor: Floor) -> None:
    floor.put("d0", "a", "b")
    floor.crash("d0", delivered=7)
    assert not floor.docket.ran("a", 7 + CLEAR_TOKENS - 1)
    assert floor.docket.ran("a", 7 + CLEAR_TOKENS) and not floor.docket.ran("a", 99)
    assert not floor.docket.suspected("a") and len(floor.docket) == 1


def twice(floor: Floor, first: str | None = "crashed") -> None:
    """A request and two innocents meet a crash; then it crashes another worker, beside a third."""
    floor.put("d0", "poison", "a", "b")
    floor.crash("d0")
    if first is not None:
        assert floor.docket.cause("d0", first).quarantined == ()
    floor.put("d1", "poison", "c")
    assert floor.crash("d1", 1.0) == NOTHING


def test_the_second_crash_alone_under_suspicion_is_one_too_many(floor: Floor) -> None:
    twice(floor)
    assert floor.docket.held("poison") and not floor.docket.may_run("poison", "d2")
    assert floor.docket.may_run("c", "d2"), "nobody waits for it"
    verdicts = floor.docket.cause("d1", "crashed")
    assert verdicts == Verdicts(("a", "b", "c"), ("poison",)), "who was beside it is cleared"
    assert len(floor.docket) == 0 and floor.docket.num_quarantined == 1


def test_the_only_request_at_both_crashes_needs_no_company_to_be_found(floor: Floor) -> None:
    for worker in ("d0", "d1"):
        floor.put(worker, "poison")
        floor.crash(worker)
    assert floor.docket.cause("d0", "crashed") == NOTHING and floor.docket.held("poison")
    assert floor.docket.cause("d1", "crashed").quarantined == ("poison",)


@pytest.mark.parametrize("ended", ["killed", "alive"])
def test_a_worker_that_was_killed_from_outside_accuses_nobody(floor: Floor, ended: str) -> None:
    twice(floor)
    verdicts = floor.docket.cause("d1", ended)
    assert verdicts == Verdicts(("c", "poison"), ())
    assert floor.docket.suspected("poison") and not floor.docket.held("poison"), "there is the first crash"
    assert floor.docket.may_run("poison", "d2")


def test_a_first_crash_that_was_none_leaves_the_second_as_the_first(floor: Floor) -> None:
    twice(floor, first=None)
    assert floor.docket.cause("d1", "crashed") == NOTHING
    assert floor.docket.held("poison"), "word of the first worker may come yet"
    assert floor.docket.cause("d0", "killed").released == ("a", "b", "poison")
    assert floor.docket.suspected("poison") and not floor.docket.held("poison")


def test_without_word_for_a_while_it_goes_on_and_the_next_time_is_the_last(floor: Floor) -> None:
    twice(floor, first=None)
    assert floor.docket.tick(14.0) == NOTHING
    floor.docket.tick(15.0)
    assert floor.docket.tick(16.0) == Verdicts(("poison",), ())
    floor.put("d2", "poison", "e")
    assert floor.crash("d2", 20.0) == Verdicts(("a", "b", "c", "e"), ("poison",))


def test_no_word_is_no_acquittal(floor: Floor) -> None:
    twice(floor)
    assert floor.docket.cause("d1", "") == NOTHING and floor.docket.held("poison")


def test_a_worker_that_never_comes_back_speaks_against_nobody_twice(floor: Floor) -> None:
    twice(floor, first=None)
    floor.docket.tick(15.0)
    assert floor.docket.cause("d1", "crashed").quarantined == ("poison",)


def test_two_suspects_at_one_worker_are_told_apart_later(floor: Floor) -> None:
    floor.put("d0", "a", "b")
    floor.crash("d0")
    floor.docket.cause("d0", "crashed")
    floor.put("d1", "a", "b")
    floor.crash("d1")
    assert not floor.docket.held("a") and not floor.docket.held("b")
    assert floor.docket.cause("d1", "crashed") == NOTHING


def test_who_ends_is_forgotten_with_its_deaths(floor: Floor) -> None:
    twice(floor)
    for name in ("poison", "a", "b", "c"):
        floor.docket.forget(name)
        floor.docket.forget(name)
    assert len(floor.docket) == 0 and floor.docket.cause("d1", "crashed") == NOTHING
    assert floor.docket.tick(100.0) == NOTHING


def asked(prompt: list[int], **sampling: float) -> Request:
    return Request("r", prompt, Sampling(max_tokens=4, **{"seed": 0, **sampling}), 0.0)  # type: ignore[arg-type]


def test_a_fingerprint_is_of_the_question_and_of_this_gateway() -> None:
    docket, other = Floor().docket, Docket(lambda worker: [])
    name = docket.fingerprint(asked([1, 2, 3]))
    assert name == docket.fingerprint(asked([1, 2, 3], seed=9)), "a seed may be drawn anew"
    assert name != docket.fingerprint(asked([1, 2, 4]))
    assert name != docket.fingerprint(asked([1, 2, 3], temperature=0.5))
    assert name != other.fingerprint(asked([1, 2, 3]))


def test_a_question_is_refused_for_a_while_and_the_table_is_bounded(floor: Floor) -> None:
    docket, names = floor.docket, [bytes([i % 256, i // 256]) for i in range(MAX_QUARANTINED + 1)]
    for name in names:
        docket.ban(name, 0.0)
    assert not docket.refuses(names[0], 1.0) and docket.refuses(names[1], 599.0)
    assert not docket.refuses(names[1], 600.0) and not docket.refuses(b"other", 1.0)


@settings(max_examples=100)
@given(st.data())
def test_poison_is_found_after_two_crashes_and_innocents_go_free(data: st.DataObject) -> None:
    """Requests run wherever they may; the poison crashes whatever it runs at, at once. Others end some time."""
    floor, workers = Floor(), ["d0", "d1", "d2"]
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
        lanes_broken |= sum(floor.docket.suspected(one) for one in floor.at[worker]) > 1
        if name == "poison":
            crashes += 1
            there = floor.at.pop(worker)
            floor.docket.crash(worker, {one: delivered[one] for one in there}, float(step))
            verdicts = floor.docket.cause(worker, "crashed")
            waiting += [one for one in there if one not in verdicts.quarantined]
            assert set(verdicts.quarantined) <= {"poison"}
        elif name != "poison":
            delivered[name] += CLEAR_TOKENS
            floor.docket.ran(name, delivered[name])
    assert crashes == 2 and not lanes_broken
    assert len(floor.docket) == 0
