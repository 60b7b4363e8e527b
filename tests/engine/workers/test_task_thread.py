"""The courier's thread: many pieces of work side by side, and what happens to them when it ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from kvtransfer.cooperative import RUN_NOW, UNTIL_WOKEN, CoopTask, run_to_end
from worker.task_thread import TaskThread

LONG_S = 60.0


@pytest.fixture
def rounds() -> Iterator[TaskThread]:
    made = TaskThread("test", deaths.put)
    made.open()
    yield made
    made.close()


deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()


def waiting(gate: threading.Event, over: threading.Event) -> CoopTask[None]:
    while not gate.is_set():
        yield UNTIL_WOKEN
    over.set()


def test_one_that_waits_delays_no_other_and_is_woken_by_a_stir(rounds: TaskThread) -> None:
    gate, first, second = (threading.Event() for _ in range(3))
    opened = threading.Event()
    opened.set()
    rounds.add_task(waiting(gate, first))
    rounds.add_task(waiting(opened, second))
    assert second.wait(LONG_S) and not first.is_set()
    gate.set()
    rounds.wake_tasks()
    assert first.wait(LONG_S)


def test_two_busy_tasks_alternate(rounds: TaskThread) -> None:
    steps: list[str] = []
    over = queue.SimpleQueue[str]()
    gate = threading.Event()

    def busy(name: str) -> CoopTask[None]:
        while not gate.is_set():
            yield UNTIL_WOKEN
        for _ in range(5):
            steps.append(name)
            yield RUN_NOW
        over.put(name)

    rounds.add_task(busy("a"))
    rounds.add_task(busy("b"))
    gate.set()
    rounds.wake_tasks()
    assert {over.get(timeout=LONG_S), over.get(timeout=LONG_S)} == {"a", "b"}
    assert abs(steps[:6].count("a") - steps[:6].count("b")) <= 1


def test_a_pause_that_is_over_is_enough(rounds: TaskThread) -> None:
    over = threading.Event()

    def resting() -> CoopTask[None]:
        yield 0.001
        over.set()

    rounds.add_task(resting())
    assert over.wait(LONG_S)


def test_closing_waits_for_what_was_added() -> None:
    made, done = TaskThread("test", deaths.put), []

    def work() -> CoopTask[None]:
        for _ in range(20):
            yield RUN_NOW
        done.append(True)

    for _ in range(5):
        made.add_task(work())
    made.open()
    made.close()
    assert len(done) == 5


def test_a_task_that_raises_is_reported() -> None:
    def broken() -> CoopTask[None]:
        yield RUN_NOW
        raise MemoryError("out of it")

    made = TaskThread("test", deaths.put)
    made.open()
    made.add_task(broken())
    assert isinstance(deaths.get(timeout=LONG_S), MemoryError)


def test_work_can_be_done_on_the_calling_thread() -> None:
    rests: list[float] = []

    def work() -> CoopTask[int]:
        yield RUN_NOW
        yield 5.0
        yield UNTIL_WOKEN
        return 7

    assert run_to_end(work(), rests.append) == 7
    assert len(rests) == 2 and max(rests) < 0.01
