"""Pulling ahead, on a lane of bytes: what is copied when, and that nothing but the digest decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import ticket as tickets
from kvtransfer.cooperative import UNTIL_WOKEN, CoopTask, run_to_end
from kvtransfer.digests import HASH_FUNCTIONS, ChunkDigester, DigestContext
from kvtransfer.handoff import (
    CommitSlabs,
    FreeSlabs,
    HandoffOutcome,
    PullAhead,
    PullChunks,
    ReserveSlabs,
    TicketArrived,
    hand_off,
    perform_effects,
)
from kvtransfer.layer_progress import (
    COMPLETE_MARK,
    ENTRY_BYTES,
    LayerProgress,
    ProgressEntries,
    view_entries,
)
from kvtransfer.pipelined_pull import MAX_POLL_S, MIN_POLL_S, LayerCopy, PipelinedPull
from kvtransfer.ticket import StagingHint, Ticket

KEY = b"k" * 32
LAYERS, LAYER_BYTES, NUM_SLABS = 3, 16, 12


def never() -> bool:
    return False


class ByteConnection:
    """A source's pool and board, an own pool, and every copy that was made."""

    layers, num_slabs = LAYERS, NUM_SLABS

    def __init__(self, *, board: bool = True) -> None:
        self.memory = memoryview(bytearray(NUM_SLABS * ENTRY_BYTES))
        self.board = LayerProgress(NUM_SLABS, self.memory)
        self._has_board = board
        self.source = [bytearray(LAYERS * LAYER_BYTES) for _ in range(NUM_SLABS)]
        self.own = [bytearray(LAYERS * LAYER_BYTES) for _ in range(NUM_SLABS)]
        self.copies: list[tuple[int, int, int, int]] = []
        self.looks = 0

    def read_progress(self, slabs: Sequence[int]) -> CoopTask[ProgressEntries | None]:
        self.looks += 1
        yield 0.0
        return view_entries(self.memory)[list(slabs)] if self._has_board else None

    def copy_layers(self, copies: Sequence[LayerCopy], stop: Callable[[], bool]) -> CoopTask[None]:
        for one in copies:
            self.copies.append((one.far, one.own, one.first, one.end))
            here = slice(one.first * LAYER_BYTES, one.end * LAYER_BYTES)
            self.own[one.own][here] = self.source[one.far][here]
            one.payload.update(bytes(self.own[one.own][here]))
            yield 0.0

    def compute(self, slab: int, layer: int, value: int) -> None:
        self.source[slab][layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES] = bytes([value]) * LAYER_BYTES


def early_of(*own: int) -> PipelinedPull:
    return PipelinedPull(dict(enumerate(own)), xxhash.xxh3_128)


def hint(start: int, slabs: Sequence[int], mark: int, worker: str = "p") -> StagingHint:
    return StagingHint("r", 1, worker, "life", start, tuple(slabs), mark)


def ticket_of(lane: ByteConnection, slabs: Sequence[int], worker: str = "p") -> Ticket:
    terms = DigestContext(
        "r",
        1,
        64 * len(slabs) - 3,
        (0, LAYERS),
        "float32",
        (LAYERS, 1, 2, 64, 2),
        "f" * 64,
        LAYERS * 2 * 64 * 2 * 4,
    )
    return tickets.issue_ticket(
        KEY, terms, worker, "life", slabs, lambda slab, name: HASH_FUNCTIONS[name](bytes(lane.source[slab]))
    )


def advance(early: PipelinedPull, lane: ByteConnection) -> float:
    return run_to_end(early.copy_ready(lane, never))


def test_each_layer_is_copied_once_when_it_is_done() -> None:
    lane, early = ByteConnection(), early_of(0, 1)
    mark = lane.board.next_mark()
    lane.board.stage_slabs([7, 4], mark)
    early.add_hint(hint(0, [7, 4], mark))
    assert advance(early, lane) == 2 * MIN_POLL_S and lane.copies == []
    lane.board.advance_layers([7], 1)
    assert advance(early, lane) == 0.0
    lane.board.advance_layers([7, 4], 2)
    assert advance(early, lane) == 0.0
    assert lane.copies == [(7, 0, 0, 1), (7, 0, 1, 2), (4, 1, 0, 2)]
    payloads = run_to_end(early.finish_with_ticket(lane, ticket_of(lane, [7, 4]), never))
    assert lane.copies[3:] == [(7, 0, 2, 3), (4, 1, 2, 3)]
    assert payloads == {i: HASH_FUNCTIONS["xxh3"](bytes(lane.own[i])) for i in (0, 1)}


def test_complete_chunks_need_no_board() -> None:
    lane, early = ByteConnection(board=False), early_of(0, 1)
    early.add_hint(hint(0, [3], COMPLETE_MARK))
    early.add_hint(hint(1, [4], 9))
    assert advance(early, lane) == 0.0
    assert lane.copies == [(3, 0, 0, LAYERS)]


def test_looking_is_rarer_while_nothing_happens_and_over_when_nothing_is_left() -> None:
    lane, early = ByteConnection(), early_of(0)
    assert advance(early, lane) == UNTIL_WOKEN and lane.looks == 0
    mark = lane.board.next_mark()
    lane.board.stage_slabs([1], mark)
    early.add_hint(hint(0, [1], mark))
    pauses = [advance(early, lane) for _ in range(8)]
    assert pauses == sorted(pauses) and pauses[-1] == MAX_POLL_S
    lane.board.advance_layers([1], LAYERS)
    assert advance(early, lane) == 0.0
    assert advance(early, lane) == UNTIL_WOKEN


def test_another_mark_drops_the_chunk_until_a_hint_says_otherwise() -> None:
    lane, early = ByteConnection(), early_of(0)
    first, second = lane.board.next_mark(), lane.board.next_mark()
    lane.board.stage_slabs([1], second)
    early.add_hint(hint(0, [1], first))
    assert advance(early, lane) == UNTIL_WOKEN
    early.add_hint(hint(0, [1], second))
    lane.board.advance_layers([1], 2)
    assert advance(early, lane) == 0.0
    early.add_hint(hint(0, [1], second))  # said twice: nothing is begun anew
    lane.board.advance_layers([1], 3)
    assert advance(early, lane) == 0.0
    assert lane.copies == [(1, 0, 0, 2), (1, 0, 2, 3)]


def test_chunks_that_nobody_wants_or_that_do_not_exist_are_passed_over() -> None:
    lane, early = ByteConnection(), PipelinedPull({1: 5}, xxhash.xxh3_128)
    early.add_hint(hint(0, [2, 3, 4], COMPLETE_MARK))
    early.add_hint(hint(1, [NUM_SLABS], COMPLETE_MARK))
    assert advance(early, lane) == UNTIL_WOKEN
    early.add_hint(hint(0, [2, 3, 4], COMPLETE_MARK))
    assert advance(early, lane) == 0.0
    assert lane.copies == [(3, 5, 0, LAYERS)]


def test_the_ticket_counts_also_when_it_names_another_slab_or_worker() -> None:
    lane, early = ByteConnection(), early_of(0, 1, 2)
    mark = lane.board.next_mark()
    lane.board.stage_slabs([7, 4, 5], mark)
    lane.board.advance_layers([7, 4], LAYERS)
    lane.board.advance_layers([5], 1)
    early.add_hint(hint(0, [7, 4, 5], mark))
    advance(early, lane)
    assert run_to_end(early.finish_with_ticket(lane, ticket_of(lane, [7, 8, 6]), never)).keys() == {
        0,
        1,
    }  # chunk 2 is elsewhere
    assert run_to_end(early.finish_with_ticket(lane, ticket_of(lane, [7, 4, 5], "q"), never)).keys() == {0, 1}
    assert run_to_end(early.finish_with_ticket(lane, ticket_of(lane, [7, 4, 5]), never)).keys() == {0, 1, 2}
    early.add_hint(hint(0, [1], mark, "q"))
    assert run_to_end(early.finish_with_ticket(lane, ticket_of(lane, [7, 4, 5]), never)) == {}


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("stage"), st.integers(0, 1), st.integers(0, NUM_SLABS - 1)),
        st.tuples(st.just("compute"), st.integers(0, 1), st.integers(1, 255)),
        st.tuples(st.just("lie"), st.integers(0, 1), st.integers(1, 255)),
        st.tuples(st.just("steal"), st.integers(0, 1), st.integers(1, 255)),
        st.tuples(st.just("pull"), st.just(0), st.just(0)),
    ),
    min_size=8,
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(1, 2))
def test_whatever_the_source_does_only_what_the_ticket_says_is_decoded(
    events: list[tuple[str, int, int]], num_chunks: int
) -> None:
    lane = ByteConnection()
    own = list(range(num_chunks))
    seal: list[ChunkDigester] = []
    steps = hand_off(
        None, num_chunks, lambda i, payload, promised: seal[0].matches_chunk(i, payload, promised)
    )
    reached = perform_effects(steps, {ReserveSlabs: lambda effect: own})
    assert isinstance(reached, PullAhead) and reached.slabs == dict(enumerate(own))
    early = PipelinedPull(reached.slabs, xxhash.xxh3_128)
    place = {chunk: chunk for chunk in own}  # the source's slab of each chunk
    done = dict.fromkeys(own, 0)
    for kind, chunk, value in events:
        if kind == "pull":
            advance(early, lane)
        if chunk not in place:
            continue
        slab = place[chunk]
        if kind == "stage" and value not in {far for one, far in place.items() if one != chunk}:
            place[chunk], done[chunk], mark = value, 0, lane.board.next_mark()
            lane.board.stage_slabs([value], mark)
            early.add_hint(hint(chunk, [value], mark))
        elif kind == "compute" and done[chunk] < LAYERS:
            lane.compute(slab, done[chunk], value)
            done[chunk] += 1
            lane.board.advance_layers([slab], done[chunk])
        elif kind == "lie":
            lane.board.advance_layers([slab], LAYERS)
        elif kind == "steal":
            lane.compute(slab, value % LAYERS, value)
    ticket = ticket_of(lane, [place[chunk] for chunk in own])
    seal.append(ChunkDigester(KEY, ticket.context))
    answer = TicketArrived(ticket, run_to_end(early.finish_with_ticket(lane, ticket, never)))

    def pull(effect: PullChunks) -> list[bytes]:
        for far, here in effect.pairs:
            lane.own[here][:] = lane.source[far]
        return [HASH_FUNCTIONS["xxh3"](bytes(lane.own[here])) for _, here in effect.pairs]

    table = {PullChunks: pull, CommitSlabs: lambda effect: None}
    outcome = perform_effects(steps, {PullAhead: lambda effect: answer, **table}, reached)
    assert isinstance(outcome, HandoffOutcome) and outcome.error is None and outcome.num_pulled == num_chunks
    for chunk in own:
        assert lane.own[chunk] == lane.source[place[chunk]]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_an_error_while_it_waits_for_its_ticket_frees(error: BaseException) -> None:
    freed: list[tuple[int, ...]] = []
    steps = hand_off(None, 2, lambda *_: True)
    reached = perform_effects(steps, {ReserveSlabs: lambda effect: [4, 5]})
    table = {FreeSlabs: lambda effect: freed.append(effect.slabs)}
    if isinstance(error, Exception):
        outcome = perform_effects(steps, table, reached, error)
        assert isinstance(outcome, HandoffOutcome) and outcome.failure_code == "internal_error"
    else:
        with pytest.raises(KeyboardInterrupt):
            perform_effects(steps, table, reached, error)
    assert freed == [(4, 5)]


def test_a_ticket_of_more_chunks_than_there_is_room_for_frees() -> None:
    lane, freed = ByteConnection(), []
    steps = hand_off(None, 2, lambda *_: True)
    table = {
        ReserveSlabs: lambda effect: [4, 5],
        PullAhead: lambda effect: TicketArrived(ticket_of(lane, [1, 2, 3]), {}),
        FreeSlabs: lambda effect: freed.append(effect.slabs),
    }
    outcome = perform_effects(steps, table)
    assert (
        isinstance(outcome, HandoffOutcome) and outcome.failure_code == "internal_error" and freed == [(4, 5)]
    )
