"""Whether a read gets on, seen by the memory that it writes to; in numbers, without a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import TransferError
from kvtransfer.transports.nixl_agent import address_of
from kvtransfer.transports.stall_watchdog import (
    CHECKS_PER_STALL,
    MAX_GAP_RATIO,
    WORD_BYTES,
    WORD_SPACING_BYTES,
    ConnectionPulse,
    StallWatchdog,
    WrittenWords,
)

STALL_S = 2.0


def watch(pulse: ConnectionPulse | None = None) -> StallWatchdog:
    return StallWatchdog(lambda: STALL_S, 0.0, pulse or ConnectionPulse())


@given(st.lists(st.integers(1, 5 * WORD_SPACING_BYTES), min_size=1, max_size=4), st.data())
def test_bytes_that_arrive_are_noticed_and_no_others(sizes: list[int], data: st.DataObject) -> None:
    memory = memoryview(bytearray(b"\x07" * (sum(sizes) + 64)))
    starts = [sum(sizes[:place]) + 8 * place for place in range(len(sizes))]
    segments = [(0, address_of(memory) + at, size) for at, size in zip(starts, sizes, strict=True)]
    wire = WrittenWords(segments)
    assert wire.count_reached() == 0
    for place, (at, size) in enumerate(zip(starts, sizes, strict=True)):
        gap = memory[at + size : starts[place + 1] if place + 1 < len(sizes) else at + size + 8]
        assert bytes(gap) == b"\x07" * len(gap), "a word was set outside of what is read"
    here = data.draw(st.integers(0, len(sizes) - 1))
    at, size = starts[here], sizes[here]
    before = wire.count_reached()
    memory[at : at + size] = bytes(size)
    assert (wire.count_reached() > before) == (size >= WORD_BYTES)


def test_one_word_is_set_in_every_four_kilobytes() -> None:
    memory = memoryview(bytearray(16 * WORD_SPACING_BYTES))
    wire = WrittenWords([(0, address_of(memory), len(memory))])
    for number in range(16):
        memory[number * WORD_SPACING_BYTES : (number + 1) * WORD_SPACING_BYTES] = bytes(WORD_SPACING_BYTES)
        assert wire.count_reached() == number + 1


def test_what_stands_still_is_given_up() -> None:
    one = watch()
    one.check_progress(0, STALL_S - 0.01)
    with pytest.raises(TransferError, match="stalled"):
        one.check_progress(0, STALL_S + 0.01)


def test_what_moves_however_slowly_is_left_alone() -> None:
    one, now_s = watch(), 0.0
    for reached in range(1, 1000):  # a word in every 4 KiB, half a second each: 64 kbit/s
        now_s += 0.5
        one.check_progress(reached, now_s)
    one.check_progress(999, now_s + STALL_S)  # and it may stand still for longer than one that is fast
    with pytest.raises(TransferError):
        one.check_progress(999, now_s + STALL_S * 2)


def test_one_that_is_slow_from_the_first_byte_has_more_patience_than_its_gaps() -> None:
    one, now_s = watch(), 0.0
    for reached in range(1, 50):
        now_s += 1.9
        one.check_progress(reached, now_s)
    one.check_progress(49, now_s + 0.9 * MAX_GAP_RATIO * 1.9)
    with pytest.raises(TransferError):
        one.check_progress(49, now_s + 1.1 * MAX_GAP_RATIO * 1.9)


def test_what_is_complete_counts_as_movement_and_begins_anew() -> None:
    one = watch()
    one.check_progress(5, 1.0)
    one.record_progress(2.0)
    one.check_progress(1, 3.9)  # of other memory, so fewer words than before are more than none
    one.check_progress(1, 5.8)
    with pytest.raises(TransferError):
        one.check_progress(1, 20.0)


def test_memory_is_only_looked_at_now_and_then() -> None:
    one = watch()
    assert not one.is_check_due(STALL_S / CHECKS_PER_STALL / 2) and one.is_check_due(
        STALL_S / CHECKS_PER_STALL
    )
    one.check_progress(0, 1.0)
    assert not one.is_check_due(1.0 + STALL_S / CHECKS_PER_STALL / 2) and one.is_check_due(
        1.0 + STALL_S / CHECKS_PER_STALL
    )


def test_reads_over_one_connection_wait_and_stall_together() -> None:
    pulse = ConnectionPulse()
    busy, waiting = (watch(pulse) for _ in range(2))
    for beat in range(1, 5 * CHECKS_PER_STALL):
        now_s = beat * STALL_S / 2
        busy.check_progress(beat, now_s)
        waiting.check_progress(0, now_s)
    later_s = now_s + (MAX_GAP_RATIO + 1) * STALL_S
    for each in (busy, waiting):
        with pytest.raises(TransferError, match="stalled"):
            each.check_progress(0, later_s)


def test_a_read_that_waits_behind_a_slow_one_has_the_patience_of_their_connection() -> None:
    """As over 64 kbit/s, where UCX brings 8 KiB a second: after a pause one was given up, and with it all others."""
    pulse = ConnectionPulse()
    busy, waiting = watch(pulse), watch(pulse)
    for now_s in range(1, 11):
        busy.check_progress(2 * now_s, float(now_s))
        waiting.check_progress(0, now_s + 0.1)
    waiting.check_progress(0, 10.0 + 2 * STALL_S)
    with pytest.raises(TransferError, match="stalled"):
        waiting.check_progress(0, 10.0 + MAX_GAP_RATIO + 0.1)


def test_many_reads_that_one_packet_ends_do_not_make_a_slow_connection_a_fast_one() -> None:
    pulse = ConnectionPulse()
    reads = [watch(pulse) for _ in range(20)]
    for now_s in range(1, 11):
        for number, read in enumerate(reads):
            read.record_progress(now_s + number / 1e4)
    reads[0].check_progress(0, 10.0 + 2 * STALL_S)


def test_a_fast_connection_forgets_that_it_was_slow() -> None:
    pulse = ConnectionPulse()
    with pulse.watch_read(lambda: STALL_S, 0.0) as one:
        for now_s in range(1, 11):
            one.record_progress(float(now_s))
        with pulse.watch_read(lambda: STALL_S, 10.0) as other:
            other.check_progress(0, 10.0 + 2 * STALL_S)
        for beat in range(5000):
            one.record_progress(10.0 + beat / 1e3)
        with pytest.raises(TransferError, match="stalled"):
            one.check_progress(0, 15.0 + 1.1 * STALL_S)


def test_a_connection_without_reads_forgets_that_it_was_slow() -> None:
    pulse = ConnectionPulse()
    with pulse.watch_read(lambda: STALL_S, 0.0) as one:
        for now_s in range(1, 11):
            one.record_progress(float(now_s))
    with (
        pulse.watch_read(lambda: STALL_S, 11.0) as one,
        pytest.raises(TransferError, match="stalled"),
    ):
        one.check_progress(0, 11.0 + 1.1 * STALL_S)
