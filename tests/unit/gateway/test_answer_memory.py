"""Answers that wait only for their clients make room for others, the one that has waited longest first."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from diptych.errors import RequestError
from services.gateway.generation.answer_memory import MIN_READ_S, AnswerMemory

MIB = 1 << 20


class Reader:
    """A client whose answer is complete, and who does not read it."""

    def __init__(self, memory: AnswerMemory, stack: ExitStack, tenant: str, num_bytes: int) -> None:
        self.memory, self.tenant, self.held_bytes = memory, tenant, num_bytes
        memory.hold_bytes(tenant, num_bytes)
        stack.enter_context(memory.wait_for_reader(tenant, self.drop))

    def drop(self) -> None:
        assert self.held_bytes, "only once"
        self.memory.hold_bytes(self.tenant, -self.held_bytes)
        self.held_bytes = 0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_complete_answers_that_nobody_reads_make_room_for_another_client(clock: Clock) -> None:
    memory = AnswerMemory(256 * MIB, clock)
    with ExitStack() as stack:
        slow = [Reader(memory, stack, "", 8 * MIB) for _ in range(16)]
        assert memory.held_bytes == 128 * MIB
        clock.now_s = MIN_READ_S
        memory.hold_bytes("", 100)
        assert [reader.held_bytes for reader in slow] == [0, *[8 * MIB] * 15], "no more than needed"
        memory.hold_bytes("", 20 * MIB)
        assert [reader.held_bytes for reader in slow].count(0) == 3
    memory.hold_bytes("", -100 - 20 * MIB - 13 * 8 * MIB)
    assert memory.held_bytes == 0


def test_an_answer_has_a_time_to_be_read(clock: Clock) -> None:
    memory = AnswerMemory(256 * MIB, clock)
    with ExitStack() as stack:
        reader = Reader(memory, stack, "", 128 * MIB)
        clock.now_s = MIN_READ_S - 0.1
        with pytest.raises(RequestError):
            memory.hold_bytes("", 100)
        assert reader.held_bytes


def test_one_tenant_does_not_make_room_for_another(clock: Clock) -> None:
    memory = AnswerMemory(256 * MIB, clock)
    with ExitStack() as stack:
        reader = Reader(memory, stack, "slow", 100 * MIB)
        clock.now_s = MIN_READ_S
        with pytest.raises(RequestError):
            memory.hold_bytes("greedy", 100 * MIB)
        assert reader.held_bytes, "the other tenant has a share of its own, and has used it up"


def test_an_answer_that_was_read_is_not_dropped(clock: Clock) -> None:
    memory = AnswerMemory(256 * MIB, clock)
    with ExitStack() as stack:
        reader = Reader(memory, stack, "", 128 * MIB)
    clock.now_s = MIN_READ_S
    with pytest.raises(RequestError):
        memory.hold_bytes("", 100)
    assert reader.held_bytes
