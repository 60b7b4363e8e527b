"""The hand-off of one request's KV, as a generator that yields effects; a driver performs them.

    Reserve ─▶ [Ahead ─▶] Pull ─▶ (every digest verified) ─▶ Commit    the slabs belong to the sequence, it may decode
       │          │         │               │                  │
       └─ refused └─────────┴───────────────┴──────────────────┴─▶ Free    exactly what was reserved, exactly once

With a ticket, all missing chunks are pulled. Without a ticket the KV is still being computed: `PullAhead` pulls the
chunks that hints announce, and its answer brings the ticket. Chunks copied ahead are checked against the ticket's
digests like all others; a chunk that does not match (the source has changed it since) is pulled again, once.

Pure: no clock, no memory, no socket. The decode worker drives it with its pool and its transports; the simulator drives
the same code in virtual time. Any exception that is thrown in while an effect is performed (a refusal, a transport's
error, an abort, a bug) leads to exactly one of the two endings, Commit or Free.

Two threads take part: the pool belongs to the engine's thread, pulling to a puller thread. `perform_effects` performs
the effects in its table and returns the first other one, so the generator can be passed from thread to thread:

    # engine thread, when there is room; chunks that are cached here are held from now on, so they are not evicted
    held = dict(enumerate(allocator.attach_prefix(key, chunk_keys)))
    steps = hand_off(ticket, num_slabs, matches, held)
    step = perform_effects(steps, {ReserveSlabs: lambda e: allocator.allocate(key, e.num_slabs)})
    if not isinstance(step, HandoffOutcome): puller_queue.put((steps, step))

    # puller thread; `stop` is a threading.Event that Abort sets, and a pull that sees it raises `HandoffAborted`
    step = perform_effects(steps, {PullChunks: lambda e: links.pull_slabs(e.ticket, e.pairs, stop.is_set)}, step)
    done_queue.put((steps, step))                  # then wake the engine's loop

    # engine thread, for the returned Commit or Free; after an abort `HandoffAborted` is thrown in instead of Commit
    table = {CommitSlabs: lambda e: engine.adopt(...), FreeSlabs: lambda e: allocator.release(key)}
    outcome = perform_effects(steps, table, step, error=HandoffAborted("...") if stop.is_set() else None)

The generator must be driven to its `HandoffOutcome`; closing it early would leak reserved slabs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.errors import CorruptChunk, OutOfSlabs, StaleTicket, TransferError
from kvtransfer.ticket import Ticket


class HandoffAborted(TransferError):
    """The request is over (client gone, deadline, newer epoch): the hand-off ends, and no worker is blamed."""


@dataclass(frozen=True, slots=True)
class ReserveSlabs:
    """Take `num_slabs` slabs; answer with their numbers, or raise `OutOfSlabs` with none taken."""

    num_slabs: int


@dataclass(frozen=True, slots=True)
class PullAhead:
    """Pull the chunks that hints announce into `slabs` (chunk index -> own slab) until the ticket arrives.

    The answer is a `TicketArrived`. After the answer or an error nothing writes to the slabs.
    """

    slabs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class TicketArrived:
    """The answer to `PullAhead`: the ticket, and the payload hash of every copy that was made ahead, by chunk index."""

    ticket: Ticket
    payloads: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class PullChunks:
    """Copy (source slab, own slab) pairs from `ticket.worker`; answer with the payload hash of each copied slab.

    The hash is computed from the copy, not from the source. After the answer or an error nothing writes to the slabs.
    """

    ticket: Ticket
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CommitSlabs:
    """Every chunk is verified: give `slabs`, in token order, to the sequence. If this raises, the slabs are freed."""

    slabs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreeSlabs:
    """Return `slabs` to the pool."""

    slabs: tuple[int, ...]


HandoffEffect = ReserveSlabs | PullAhead | PullChunks | CommitSlabs | FreeSlabs

# The first matching class gives the code in `diptych.messages.Failed`.
FAILURE_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (HandoffAborted, "aborted"),
    (CorruptChunk, "kv_corrupt"),
    (StaleTicket, "stale_ticket"),
    (TransferError, "transfer_failed"),
    (OutOfSlabs, "out_of_memory"),
)


@dataclass(frozen=True, slots=True)
class HandoffOutcome:
    """The result. Without `error` the sequence owns `slabs`; with an error nothing is held."""

    slabs: tuple[int, ...] = ()
    # Number of chunks that were copied and verified.
    num_pulled: int = 0
    # Number of chunks that were copied ahead and did not match their digest.
    num_wasted: int = 0
    error: Exception | None = None

    @property
    def failure_code(self) -> str:
        """Empty after a commit; otherwise the reason, as a code of `diptych.messages.Failed`."""
        if self.error is None:
            return ""
        return next((code for kind, code in FAILURE_CODES if isinstance(self.error, kind)), "internal_error")


HandoffSteps = Generator[HandoffEffect, Any, HandoffOutcome]


def hand_off(
    ticket: Ticket | None,
    num_slabs: int,
    matches: Callable[[int, bytes, bytes], bool],
    held: Mapping[int, int] | None = None,
) -> HandoffSteps:
    """Fetch the KV of `ticket` into `num_slabs` slabs (its chunks first, then room to grow), or leave nothing behind.

    `matches(index, payload, promised)` is `ChunkDigester.matches_chunk`; if `ticket` is None, of the ticket that
    `PullAhead` brings. `held` maps chunk indexes to own slabs that already have verified content: these slabs are
    neither reserved, nor pulled, nor freed.
    """
    have = dict(held or {})
    if (misfit := _check_room(num_slabs, have, ticket)) is not None:
        return HandoffOutcome(error=misfit)
    try:
        reserved: tuple[int, ...] = tuple((yield ReserveSlabs(num_slabs - len(have))))
    except Exception as error:
        return HandoffOutcome(error=error)
    try:
        slabs, early = _order_slabs(num_slabs, have, reserved), TicketArrived(ticket, {}) if ticket else None
        if early is None:
            early = yield PullAhead({index: slab for index, slab in enumerate(slabs) if index not in have})
            if (misfit := _check_room(num_slabs, have, early.ticket)) is not None:
                raise misfit
        chunks = early.ticket.chunks
        good = {i for i, payload in early.payloads.items() if matches(i, payload, chunks[i].digest)}
        missing = [index for index in range(len(chunks)) if index not in have and index not in good]
        pairs = tuple((chunks[index].slab, slabs[index]) for index in missing)
        payloads: Sequence[bytes] = (yield PullChunks(early.ticket, pairs)) if pairs else ()
        _verify_payloads(early.ticket, missing, payloads, matches)
        yield CommitSlabs(slabs)
    except GeneratorExit:
        raise  # the driver closed the generator, so no effect can be performed any more
    except BaseException as error:
        yield FreeSlabs(reserved)
        if not isinstance(error, Exception):
            raise
        return HandoffOutcome(error=error)
    return HandoffOutcome(slabs, len(missing) + len(good), len(early.payloads) - len(good))


def _check_room(num_slabs: int, have: Mapping[int, int], ticket: Ticket | None) -> ValueError | None:
    """An error if `num_slabs` is too small for the held chunks or the ticket's, else None."""
    chunks = len(ticket.chunks) if ticket else 0
    if num_slabs < max(chunks, len(have)):
        return ValueError(f"{num_slabs} slabs cannot hold {chunks} chunks, or the {len(have)} held")
    return None


def _verify_payloads(
    ticket: Ticket,
    indexes: Sequence[int],
    payloads: Sequence[bytes],
    matches: Callable[[int, bytes, bytes], bool],
) -> None:
    """Raises CorruptChunk unless the payload hashes of the pulled chunks match the ticket's digests."""
    for index, payload in zip(indexes, payloads, strict=True):
        if not matches(index, payload, ticket.chunks[index].digest):
            raise CorruptChunk(
                f"KV of request {ticket.context.request} is not what was offered",
                f"chunk {index} of {len(ticket.chunks)}, from {ticket.worker} slab {ticket.chunks[index].slab}",
            )


def perform_effects(
    steps: HandoffSteps,
    do: Mapping[type[Any], Callable[[Any], Any]],
    step: HandoffEffect | HandoffOutcome | None = None,
    error: BaseException | None = None,
) -> HandoffEffect | HandoffOutcome:
    """Perform the effects that `do` has a function for; return the first other one, or the `HandoffOutcome`.

    `step` is the result of the previous call (None: begin). `error` is thrown into the generator instead of performing
    `step`, unless `step` is a `FreeSlabs`. An exception of a function in `do` is thrown into the generator. This call
    raises if a `FreeSlabs` fails, and after the `FreeSlabs` of an exception that is not an `Exception`.
    """
    try:
        if step is None:
            step = next(steps)
        if isinstance(step, HandoffOutcome):
            return step
        if error is not None and not isinstance(step, FreeSlabs):
            step = steps.throw(error)
        while (act := do.get(type(step))) is not None:
            try:
                answer = act(step)
            except BaseException as failure:
                step = steps.throw(failure)
            else:
                step = steps.send(answer)
        return step
    except StopIteration as end:
        outcome: HandoffOutcome = end.value
        return outcome


def _order_slabs(num_slabs: int, have: Mapping[int, int], reserved: Sequence[int]) -> tuple[int, ...]:
    """Slabs in token order: held slabs at their chunk's index, reserved slabs at the other indexes."""
    if len(set(reserved)) != num_slabs - len(have):
        raise ValueError(f"{num_slabs - len(have)} distinct slabs were reserved, {list(reserved)} came")
    fresh = iter(reserved)
    return tuple(have[index] if index in have else next(fresh) for index in range(num_slabs))
