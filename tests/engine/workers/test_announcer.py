"""What a prefill worker says of KV while it computes it, and what it hashes: hints, marks, and no byte twice."""

from __future__ import annotations

import pytest

from diptych.messages import Abort, Prefill, Release, Staged, Step
from kvtransfer import ticket as tickets
from kvtransfer.digests import HASH_FUNCTIONS, ChunkDigester
from kvtransfer.layer_progress import COMPLETE_MARK, view_entries
from tests.engine.workers.worker_bench import KEY, LAYOUT, VOCAB, BenchWorker, WorkerBench, sampling

PROMPT = [(7 * place) % VOCAB for place in range(300)]  # 5 slabs; steps are of 128 tokens
OTHER = [(11 * place + 1) % VOCAB for place in range(300)]


def hints(half: BenchWorker, name: str = "a") -> list[tickets.StagingHint]:
    staged = [
        message for message in half.line.said if isinstance(message, Staged) and message.request == name
    ]
    return [tickets.decode_hint(message.hint, KEY) for message in staged]


def read(
    bench: WorkerBench, name: str, prompt: list[int], epoch: int = 0, stage: bool = True
) -> tickets.Ticket:
    """Let the prefill worker read a prompt to its end; the ticket it offers."""
    bench.prefill.tell(Prefill(name, epoch, prompt, [], sampling(5), 60.0, stage=stage))
    bench.prefill.work()
    return tickets.decode_ticket(bench.prefill.offers(name)[-1].ticket, KEY)


def verify(bench: WorkerBench, ticket: tickets.Ticket) -> None:
    """Every digest is that of what lies in its slab."""
    seal, content = ChunkDigester(KEY, ticket.context), bench.prefill.pool.slab_bytes
    for place, chunk in enumerate(ticket.chunks):
        assert seal.matches_chunk(place, HASH_FUNCTIONS["xxh3"](content(chunk.slab)), chunk.digest)


def test_chunks_are_announced_before_the_step_that_completes_them() -> None:
    bench = WorkerBench()
    bench.prefill.line.inbox.append(Prefill("a", 0, PROMPT, [], sampling(5), 60.0, stage=True))
    board, announced = view_entries(bench.board), []
    while not bench.prefill.offers("a"):
        bench.prefill.shell.run_once()
        announced.append([(hint.start, len(hint.slabs)) for hint in hints(bench.prefill)])
        for hint in hints(bench.prefill):
            assert set(board[list(hint.slabs)].tolist()) == {hint.mark << 16 | LAYOUT.layers}
    assert announced == [[(0, 2)], [(0, 2), (2, 2)], [(0, 2), (2, 2), (4, 1)]]
    ticket = tickets.decode_ticket(bench.prefill.offers("a")[0].ticket, KEY)
    assert [slab for hint in hints(bench.prefill) for slab in hint.slabs] == [c.slab for c in ticket.chunks]
    kinds = [type(message) for message in bench.prefill.line.said]
    assert kinds.index(Step) > max(place for place, kind in enumerate(kinds) if kind is Staged)
    assert {(h.request, h.epoch, h.worker, h.incarnation) for h in hints(bench.prefill)} == {
        ("a", 0, "prefill-0", "life")
    }


def test_a_chunk_is_not_announced_while_a_later_step_still_writes_to_it() -> None:
    bench = WorkerBench()
    bench.prefill.tell(
        Prefill("b", 0, OTHER[:100], [], sampling(5), 60.0),  # so that the steps of "a" end within chunks
        Prefill("a", 0, PROMPT, [], sampling(5), 60.0, stage=True),
    )
    spans = [(hint.start, hint.start + len(hint.slabs)) for hint in hints(bench.prefill)]
    (seq,) = bench.prefill.engine.scheduler.sequences()
    assert seq.computed % 64 and (spans[-1][1] if spans else 0) == seq.computed // 64
    bench.prefill.work()
    spans = [(hint.start, hint.start + len(hint.slabs)) for hint in hints(bench.prefill)]
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])] and spans[-1][1] == 5


def test_what_is_not_to_be_staged_is_not_announced() -> None:
    bench = WorkerBench()
    read(bench, "a", PROMPT, stage=False)
    assert hints(bench.prefill) == []


def test_chunks_that_are_known_are_announced_as_complete_at_once() -> None:
    bench = WorkerBench()
    first = read(bench, "a", PROMPT)
    bench.prefill.line.said.clear()
    bench.prefill.line.inbox.append(Prefill("b", 0, PROMPT[:256] + OTHER, [], sampling(5), 60.0, stage=True))
    bench.prefill.shell.run_once()
    complete, *coming = hints(bench.prefill, "b")
    assert (complete.start, complete.mark) == (0, COMPLETE_MARK)
    assert list(complete.slabs) == [chunk.slab for chunk in first.chunks[:4]]
    assert [hint.start for hint in coming] == [4] and all(hint.mark != COMPLETE_MARK for hint in coming)


@pytest.mark.parametrize("caching", [True, False])
def test_no_chunk_is_hashed_twice(caching: bool) -> None:
    bench = WorkerBench(caching=caching)
    payloads = bench.prefill.role.announcer._hashes  # type: ignore[attr-defined]
    first = read(bench, "a", PROMPT)
    assert payloads.num_hashed == 5
    second = read(bench, "b", PROMPT)  # four of its five chunks are those of "a"
    assert payloads.num_hashed == (6 if caching else 10)
    for ticket in (first, second):
        verify(bench, ticket)


def test_most_is_hashed_before_the_last_step() -> None:
    bench = WorkerBench()
    payloads = bench.prefill.role.announcer._hashes  # type: ignore[attr-defined]
    bench.prefill.line.inbox.append(Prefill("a", 0, PROMPT, [], sampling(5), 60.0))
    seen = []
    while not bench.prefill.offers("a"):
        bench.prefill.shell.run_once()
        seen.append(payloads.num_hashed)
    assert seen == [2, 4, 5]


def test_a_hash_is_forgotten_with_its_chunk() -> None:
    """In a pool of six slabs the second prompt evicts the first: same slabs, other bytes, other digests."""
    bench = WorkerBench(prefill_slabs=6)
    first = read(bench, "a", PROMPT)
    bench.prefill.tell(Release("a", 0))
    second = read(bench, "b", OTHER)
    assert {chunk.slab for chunk in first.chunks} & {chunk.slab for chunk in second.chunks}
    verify(bench, second)
    bench.prefill.tell(Release("b", 0))
    verify(bench, read(bench, "c", PROMPT))


def test_marks_of_an_aborted_attempt_are_over_before_its_slabs_are_written_again() -> None:
    bench = WorkerBench(prefill_slabs=6)
    bench.prefill.line.inbox.append(Prefill("a", 0, PROMPT, [], sampling(5), 60.0, stage=True))
    bench.prefill.shell.run_once()
    (old,) = hints(bench.prefill)
    bench.prefill.tell(Abort("a", 0))
    content = bytes(bench.prefill.pool.slab_bytes(old.slabs[-1]))
    bench.prefill.line.inbox.append(Prefill("b", 0, OTHER, [], sampling(5), 60.0))
    changed = False
    while not bench.prefill.offers("b"):
        bench.prefill.shell.run_once()
        if bytes(bench.prefill.pool.slab_bytes(old.slabs[-1])) != content:
            changed = True
            assert int(view_entries(bench.board)[old.slabs[-1]]) >> 16 != old.mark
    assert changed


def test_a_role_that_is_closed_follows_no_more() -> None:
    bench = WorkerBench()
    bench.prefill.role.close()  # type: ignore[attr-defined]
    assert bench.prefill.engine.kv_observer is None
