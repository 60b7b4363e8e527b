"""Whether a read gets on, seen by the memory that it writes to; in numbers, without a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import TransferError
from kvtransfer.transports.nixl import address
from kvtransfer.transports.watch import APART_BYTES, LOOKS, PATIENCE, WORD_BYTES, Pulse, Tripwire, Watch

STALL_S = 2.0


def watch() -> Watch:
    return Watch(lambda: STALL_S, 0.0)


@given(st.lists(st.integers(1, 5 * APART_BYTES), min_size=1, max_size=4), st.data())
def test_bytes_that_arrive_are_noticed_and_no_others(sizes: list[int], data: st.DataObject) -> None:
    memory = memoryview(bytearray(b"\x07" * (sum(sizes) + 64)))
    starts = [sum(sizes[:place]) + 8 * place for place in range(len(sizes))]
    segments = [(0, address(memory) + at, size) for at, size in zip(starts, sizes, strict=True)]
    wire = Tripwire(segments)
    assert wire.reached() == 0
    for place, (at, size) in enumerate(zip(starts, sizes, strict=True)):
        gap = memory[at + size : starts[place + 1] if place + 1 < len(sizes) else at + size + 8]
        assert bytes(gap) == b"\x07" * len(gap), "a word was set outside of what is read"
    here = data.draw(st.integers(0, len(sizes) - 1))
    at, size = starts[here], sizes[here]
    before = wire.reached()
    memory[at : at + size] = bytes(size)
    assert (wire.reached() > before) == (size >= WORD_BYTES)


def test_one_word_is_set_in_every_four_kilobytes() -> None:
    memory = memoryview(bytearray(16 * APART_BYTES))
    wire = Tripwire([(0, address(memory), len(memory))])
    for number in range(16):
        memory[number * APART_BYTES : (number + 1) * APART_BYTES] = bytes(APART_BYTES)
        assert wire.reached() == number + 1


def test_what_stands_still_is_given_up() -> None:
    one = watch()
    one.look(0, STALL_S - 0.01)
    with pytest.raises(TransferError, match="stalled"):
        one.look(0, STALL_S + 0.01)


def test_what_moves_however_slowly_is_left_alone() -> None:
    one, now_s = watch(), 0.0
    for reached in range(1, 1000):  # a word in every 4 KiB, half a second each: 64 kbit/s
        now_s += 0.5
        one.look(reached, now_s)
    one.look(999, now_s + STALL_S)  # and it may stand still for longer than one that is fast
    with pytest.raises(TransferError):
        one.look(999, now_s + STALL_S * 2)


def test_one_that_is_slow_from_the_first_byte_has_more_patience_than_its_gaps() -> None:
    one, now_s = watch(), 0.0
    for reached in range(1, 50):
        now_s += 1.9
        one.look(reached, now_s)
    one.look(49, now_s + 0.9 * PATIENCE * 1.9)
    with pytest.raises(TransferError):
        one.look(49, now_s + 1.1 * PATIENCE * 1.9)


def test_what_is_complete_counts_as_movement_and_begins_anew() -> None:
    one = watch()
    one.look(5, 1.0)
    one.moved(2.0)
    one.look(1, 3.9)  # of other memory, so fewer words than before are more than none
    one.look(1, 5.8)
    with pytest.raises(TransferError):
        one.look(1, 20.0)


def test_memory_is_only_looked_at_now_and_then() -> None:
    one = watch()
    assert not one.due(STALL_S / LOOKS / 2) and one.due(STALL_S / LOOKS)
    one.look(0, 1.0)
    assert not one.due(1.0 + STALL_S / LOOKS / 2) and one.due(1.0 + STALL_S / LOOKS)


def test_reads_over_one_connection_wait_for_their_turn_and_stand_still_together() -> None:
    pulse = Pulse()
    busy, waiting = (Watch(lambda: STALL_S, 0.0, pulse) for _ in range(2))
    for beat in range(1, 5 * LOOKS):
        now_s = beat * STALL_S / 2
        busy.look(beat, now_s)
        waiting.look(0, now_s)
    later_s = now_s + (PATIENCE + 1) * STALL_S
    for each in (busy, waiting):
        with pytest.raises(TransferError, match="stalled"):
            each.look(0, later_s)
