"""The courier's thread: many pieces of work side by side, and what happens to them when it ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from decode_worker.rounds import Rounds
from kvtransfer.turns import AT_ONCE, UNTIL_STIRRED, Turns, finish

LONG_S = 60.0


@pytest.fixture
def rounds() -> Iterator[Rounds]:
    made = Rounds("test", deaths.put)
    made.open()
    yield made
    made.close()


deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()


def waiting(gate: threading.Event, over: threading.Event) -> Turns[None]:
    while not gate.is_set():
        yield UNTIL_STIRRED
    over.set()


def test_one_that_waits_delays_no_other_and_is_woken_by_a_stir(rounds: Rounds) -> None:
    gate, first, second = (threading.Event() for _ in range(3))
    opened = threading.Event()
    opened.set()
    rounds.add(waiting(gate, first))
    rounds.add(waiting(opened, second))
    assert second.wait(LONG_S) and not first.is_set()
    gate.set()
    rounds.stir()
    assert first.wait(LONG_S)


def test_two_that_have_much_to_do_take_turns(rounds: Rounds) -> None:
    told: list[str] = []
    over = queue.SimpleQueue[str]()
    gate = threading.Event()

    def busy(name: str) -> Turns[None]:
        while not gate.is_set():
            yield UNTIL_STIRRED
        for _ in range(5):
            told.append(name)
            yield AT_ONCE
        over.put(name)

    rounds.add(busy("a"))
    rounds.add(busy("b"))
    gate.set()
    rounds.stir()
    assert {over.get(timeout=LONG_S), over.get(timeout=LONG_S)} == {"a", "b"}
    assert abs(told[:6].count("a") - told[:6].count("b")) <= 1


def test_a_pause_that_is_over_is_enough(rounds: Rounds) -> None:
    over = threading.Event()

    def resting() -> Turns[None]:
        yield 0.001
        over.set()

    rounds.add(resting())
    assert over.wait(LONG_S)


def test_closing_waits_for_what_was_added() -> None:
    made, done = Rounds("test", deaths.put), []

    def work() -> Turns[None]:
        for _ in range(20):
            yield AT_ONCE
        done.append(True)

    for _ in range(5):
        made.add(work())
    made.open()
    made.close()
    assert len(done) == 5


def test_a_piece_of_work_that_lets_an_exception_out_is_told_of() -> None:
    def broken() -> Turns[None]:
        yield AT_ONCE
        raise MemoryError("out of it")

    made = Rounds("test", deaths.put)
    made.open()
    made.add(broken())
    assert isinstance(deaths.get(timeout=LONG_S), MemoryError)


def test_work_can_be_done_on_the_calling_thread() -> None:
    rests: list[float] = []

    def work() -> Turns[int]:
        yield AT_ONCE
        yield 5.0
        yield UNTIL_STIRRED
        return 7

    assert finish(work(), rests.append) == 7
    assert len(rests) == 2 and max(rests) < 0.01
