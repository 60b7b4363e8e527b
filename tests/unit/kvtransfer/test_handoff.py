"""The hand-off conversation under every failure at every step: exactly one ending, and no slab without an owner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import CorruptChunk, OutOfSlabs, StaleTicket, TransferError
from kvtransfer import ticket as tickets
from kvtransfer.digests import HASH_FUNCTIONS, ChunkDigester, DigestContext
from kvtransfer.handoff import (
    CommitSlabs,
    FreeSlabs,
    HandoffAborted,
    HandoffEffect,
    HandoffOutcome,
    PullChunks,
    ReserveSlabs,
    hand_off,
    perform_effects,
)
from kvtransfer.ticket import Ticket

KEY = b"k" * 32
SHAPE = (1, 1, 2, 64, 2)
SLAB_BYTES = 1 * 1 * 2 * 64 * 2 * 4


class HandoffBench:
    """A source's slabs, an own pool of slab numbers, and a record of what was asked for."""

    def __init__(self, num_chunks: int, free: int = 32) -> None:
        self.source = [memoryview(bytes([slab + 1]) * SLAB_BYTES) for slab in range(num_chunks)]
        terms = DigestContext("r", 1, 64 * num_chunks - 3, (0, 1), "float32", SHAPE, "f" * 64, SLAB_BYTES)
        slabs = range(num_chunks - 1, -1, -1)
        self.ticket: Ticket = tickets.issue_ticket(
            KEY, terms, "p", "life", slabs, lambda slab, name: HASH_FUNCTIONS[name](self.source[slab])
        )
        self.seal = ChunkDigester(KEY, terms)
        self.free = set(range(100, 100 + free))
        self.reserved: set[int] = set()
        self.decoding: tuple[int, ...] | None = None
        self.asked: list[str] = []
        self.spoil: Callable[[int, bytes], bytes] = lambda source, data: data

    def table(self) -> dict[type[Any], Callable[[Any], Any]]:
        return {
            ReserveSlabs: self.reserve,
            PullChunks: self.pull,
            CommitSlabs: self.commit,
            FreeSlabs: self.give,
        }

    def reserve(self, effect: ReserveSlabs) -> list[int]:
        self.asked.append("reserve")
        if effect.num_slabs > len(self.free):
            raise OutOfSlabs("full")
        taken = sorted(self.free)[: effect.num_slabs]
        self.free -= set(taken)
        self.reserved |= set(taken)
        return taken

    def pull(self, effect: PullChunks) -> list[bytes]:
        self.asked.append("pull")
        assert {own for _, own in effect.pairs} <= self.reserved, "pulled into what was not reserved"
        return [HASH_FUNCTIONS["xxh3"](self.spoil(far, bytes(self.source[far]))) for far, _ in effect.pairs]

    def commit(self, effect: CommitSlabs) -> None:
        self.asked.append("commit")
        assert self.decoding is None
        self.decoding = effect.slabs
        self.reserved -= set(effect.slabs)

    def give(self, effect: FreeSlabs) -> None:
        self.asked.append("free")
        assert set(effect.slabs) <= self.reserved
        self.reserved -= set(effect.slabs)
        self.free |= set(effect.slabs)

    def run(self, num_slabs: int, **kwargs: Any) -> HandoffOutcome:
        outcome = perform_effects(
            hand_off(self.ticket, num_slabs, self.seal.matches_chunk, **kwargs), self.table()
        )
        assert isinstance(outcome, HandoffOutcome)
        return outcome

    def settled(self, outcome: HandoffOutcome, free: int = 32) -> None:
        """One ending, and every slab accounted for."""
        assert not self.reserved
        assert (self.decoding is None) == (outcome.error is not None)
        assert len(self.free) + len(self.decoding or ()) == free
        assert self.asked.count("free") + self.asked.count("commit") <= 2


def test_what_was_offered_is_decoded() -> None:
    bench = HandoffBench(3)
    outcome = bench.run(5)
    assert bench.asked == ["reserve", "pull", "commit"]
    assert outcome.error is None and outcome.failure_code == "" and outcome.num_pulled == 3
    assert bench.decoding == outcome.slabs and len(outcome.slabs) == 5
    bench.settled(outcome)


def test_a_refused_reservation_moves_nothing() -> None:
    bench = HandoffBench(3, free=2)
    outcome = bench.run(4)
    assert bench.asked == ["reserve"] and outcome.failure_code == "out_of_memory"
    bench.settled(outcome, free=2)


@pytest.mark.parametrize("chunk", range(3))
def test_one_wrong_byte_is_never_decoded(chunk: int) -> None:
    bench = HandoffBench(3)
    bench.spoil = lambda far, data: data[:-1] + b"\0" if far == chunk else data
    outcome = bench.run(3)
    assert bench.asked == ["reserve", "pull", "free"]
    assert isinstance(outcome.error, CorruptChunk) and outcome.failure_code == "kv_corrupt"
    bench.settled(outcome)


def test_equal_chunks_at_other_places_do_not_verify() -> None:
    bench = HandoffBench(2)
    bench.spoil = lambda far, data: bytes(bench.source[1 - far])
    assert bench.run(2).failure_code == "kv_corrupt"


def test_held_chunks_are_not_pulled_nor_freed() -> None:
    bench = HandoffBench(3)
    pulled: list[PullChunks] = []
    pull = bench.pull

    def noted(effect: PullChunks) -> list[bytes]:
        pulled.append(effect)
        return pull(effect)

    bench.pull = noted  # type: ignore[method-assign]
    outcome = bench.run(4, held={0: 7, 2: 8})
    assert outcome.slabs[0] == 7 and outcome.slabs[2] == 8 and outcome.num_pulled == 1
    assert [far for far, _ in pulled[0].pairs] == [bench.ticket.chunks[1].slab]

    bench = HandoffBench(3)
    bench.spoil = lambda far, data: b""
    assert bench.run(4, held={0: 7, 2: 8}).failure_code == "kv_corrupt"
    assert not bench.reserved and len(bench.free) == 32


def test_everything_held_needs_no_pull() -> None:
    bench = HandoffBench(2)
    assert bench.run(2, held={0: 7, 1: 8}).slabs == (7, 8)
    assert bench.asked == ["reserve", "commit"]


def test_too_little_room_is_said_before_anything_is_taken() -> None:
    bench = HandoffBench(3)
    assert bench.run(2).failure_code == "internal_error"
    assert bench.asked == []


ERRORS = [
    TransferError("x"),
    HandoffAborted("x"),
    StaleTicket("x"),
    OutOfSlabs("x"),
    ValueError("x"),
    RuntimeError("x"),
]


@given(
    st.sampled_from(["reserve", "pull", "commit"]),
    st.sampled_from(ERRORS),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_any_error_at_any_step(step: str, error: Exception, chunks: int, extra: int) -> None:
    bench = HandoffBench(chunks)
    table = bench.table()
    kind = {"reserve": ReserveSlabs, "pull": PullChunks, "commit": CommitSlabs}[step]

    def fail(effect: HandoffEffect) -> None:
        raise error

    table[kind] = fail
    outcome = perform_effects(hand_off(bench.ticket, chunks + extra, bench.seal.matches_chunk), table)
    assert isinstance(outcome, HandoffOutcome) and outcome.error is error
    bench.settled(outcome)


@given(st.integers(0, 3), st.sampled_from(ERRORS), st.booleans())
def test_an_abort_between_any_two_steps(abort_at: int, error: Exception, spoilt: bool) -> None:
    """The conversation goes from hand to hand, one effect at a time, and is aborted before effect number `abort_at`."""
    bench = HandoffBench(2)
    if spoilt:
        bench.spoil = lambda far, data: b"other"
    steps = hand_off(bench.ticket, 3, bench.seal.matches_chunk)
    reached: HandoffEffect | HandoffOutcome = perform_effects(steps, {})
    for number in range(10):
        if isinstance(reached, HandoffOutcome):
            break
        kind = type(reached)
        reached = perform_effects(
            steps, {kind: bench.table()[kind]}, reached, error if number == abort_at else None
        )
    assert isinstance(reached, HandoffOutcome)
    bench.settled(reached)
    if abort_at < 2:
        assert reached.error is error


@pytest.mark.parametrize("answer", [[], [100], [100, 100], [100, 101, 102]])
def test_a_pool_that_answers_wrongly_is_a_bug_and_leaks_nothing(answer: list[int]) -> None:
    bench = HandoffBench(2)
    freed: list[int] = []
    table = bench.table() | {ReserveSlabs: lambda e: answer, FreeSlabs: lambda e: freed.extend(e.slabs)}
    outcome = perform_effects(hand_off(bench.ticket, 2, bench.seal.matches_chunk), table)
    assert isinstance(outcome, HandoffOutcome) and outcome.failure_code == "internal_error"
    assert freed == answer and bench.decoding is None


@pytest.mark.parametrize("answer", [[], [b"x" * 16] * 1, [b"x" * 16] * 3])
def test_too_few_or_too_many_payloads_are_never_decoded(answer: list[bytes]) -> None:
    bench = HandoffBench(2)
    outcome = perform_effects(
        hand_off(bench.ticket, 2, bench.seal.matches_chunk), bench.table() | {PullChunks: lambda e: answer}
    )
    assert isinstance(outcome, HandoffOutcome) and outcome.error is not None
    bench.settled(outcome)


def test_an_interrupt_frees_and_goes_up() -> None:
    bench = HandoffBench(2)

    def interrupt(effect: HandoffEffect) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perform_effects(
            hand_off(bench.ticket, 2, bench.seal.matches_chunk), bench.table() | {PullChunks: interrupt}
        )
    assert bench.asked == ["reserve", "free"] and not bench.reserved


def test_a_failed_free_is_not_silent() -> None:
    bench = HandoffBench(2)

    def broken(effect: HandoffEffect) -> None:
        raise ValueError("not yours")

    bench.spoil = lambda far, data: b""
    with pytest.raises(ValueError, match="not yours"):
        perform_effects(
            hand_off(bench.ticket, 2, bench.seal.matches_chunk), bench.table() | {FreeSlabs: broken}
        )


def test_the_conversation_needs_no_torch() -> None:
    code = "import sys, kvtransfer.handoff, kvtransfer.leases; sys.exit(bool({'torch', 'numba'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
