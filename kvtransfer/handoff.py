"""The hand-off of one request's KV, as a conversation: it asks for effects, a driver performs them.

    Reserve ─▶ [Ahead ─▶] Pull ─▶ (every digest verified) ─▶ Commit    the slabs belong to the sequence, it may decode
       │          │         │               │                  │
       └─ refused └─────────┴───────────────┴──────────────────┴─▶ Free    exactly what was reserved, exactly once

With a ticket, all chunks that are missing are pulled. Without one the KV is still being computed: `Ahead` pulls what
hints tell of and answers when the ticket is there; what came early is held against its digests like everything else,
and what does not match (the source has changed it since) is pulled again, once.

Pure: no clock, no memory, no socket. The decode worker drives it with its pool and its transports; the simulator drives
the same code in virtual time. Whatever is thrown in while an effect is under way (a refusal, a transport's error, an
abort, a bug), exactly one of the two endings follows.

Two threads. The pool belongs to the engine's thread, pulling to a puller thread. `perform` answers the effects in its
table and gives back the first one that is not in it, so the conversation is passed from hand to hand:

    # engine thread, when there is room; what it has already it holds from now on, so that nothing evicts it meanwhile
    held = dict(enumerate(holdings.attach(key, chunk_keys)))
    steps = hand_off(ticket, num_slabs, matches, held)
    turn = perform(steps, {Reserve: lambda e: holdings.take(key, e.num_slabs)})
    if not isinstance(turn, Outcome): puller_queue.put((steps, turn))

    # puller thread; `stop` is a threading.Event that Abort sets, and a pull that sees it raises `Aborted`
    turn = perform(steps, {Pull: lambda e: links.pull(e.ticket, e.pairs, stop.is_set)}, turn)
    done_queue.put((steps, turn))                  # then wake the engine's loop

    # engine thread, on what comes back (Commit or Free); an abort that came meanwhile is thrown in instead of Commit
    table = {Commit: lambda e: engine.adopt(...), Free: lambda e: holdings.end(key)}
    outcome = perform(steps, table, turn, error=Aborted("...") if stop.is_set() else None)

A conversation must be driven to its `Outcome`; closing the generator early would leave reserved slabs with nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.errors import CorruptChunk, OutOfBlocks, StaleTicket, TransferError
from kvtransfer.ticket import Ticket


class Aborted(TransferError):
    """The request is over (client gone, deadline, newer epoch); the hand-off ends without blame."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take `num_slabs` slabs; answer with their numbers, or raise `OutOfBlocks` having taken none."""

    num_slabs: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """Pull what hints tell of into `slabs` (own slab by index of the chunk) until the ticket is there: an `Arrived`.

    When the answer or the error comes, nothing writes to the slabs.
    """

    slabs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Arrived:
    """The answer to `Ahead`: the ticket, and the payload hash of every chunk that was copied already, of the copy."""

    ticket: Ticket
    payloads: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Pull:
    """Copy (source slab, own slab) pairs from `ticket.worker`; answer with the payload hash of each copied slab.

    The hash is of the copy, not of the source. When the answer or the error comes, nothing writes to the slabs.
    """

    ticket: Ticket
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Every chunk is verified: give `slabs`, in token order, to the sequence. Raising means that it did not happen."""

    slabs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """Give `slabs` back to the pool."""

    slabs: tuple[int, ...]


Effect = Reserve | Ahead | Pull | Commit | Free

# The first match names the reason, in the codes of `diptych.messages.Failed`.
CODES: tuple[tuple[type[BaseException], str], ...] = (
    (Aborted, "aborted"),
    (CorruptChunk, "kv_corrupt"),
    (StaleTicket, "stale_ticket"),
    (TransferError, "transfer_failed"),
    (OutOfBlocks, "out_of_memory"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: with `error` None `slabs` belong to the sequence, otherwise nothing is held."""

    slabs: tuple[int, ...] = ()
    pulled: int = 0  # chunks that were copied and verified
    wasted: int = 0  # copies that were made ahead and did not match
    error: Exception | None = None

    @property
    def code(self) -> str:
        """Empty when committed; else why not, as in `diptych.messages.Failed`."""
        if self.error is None:
            return ""
        return next((code for kind, code in CODES if isinstance(self.error, kind)), "internal_error")


Steps = Generator[Effect, Any, Outcome]


def hand_off(
    ticket: Ticket | None,
    num_slabs: int,
    matches: Callable[[int, bytes, bytes], bool],
    held: Mapping[int, int] | None = None,
) -> Steps:
    """Fetch what `ticket` offers into `num_slabs` slabs (its chunks first, then room to grow), or leave nothing behind.

    `matches(index, payload, promised)` is `Seal.matches`, of the ticket that `Ahead` brings if `ticket` is None. `held`
    maps chunk indexes to slabs that already have verified content here: they are neither reserved, pulled nor freed.
    """
    have = dict(held or {})
    if (room := _room(num_slabs, have, ticket)) is not None:
        return Outcome(error=room)
    try:
        reserved: tuple[int, ...] = tuple((yield Reserve(num_slabs - len(have))))
    except Exception as error:
        return Outcome(error=error)
    try:
        slabs, early = _place(num_slabs, have, reserved), Arrived(ticket, {}) if ticket else None
        if early is None:
            early = yield Ahead({index: slab for index, slab in enumerate(slabs) if index not in have})
            if (room := _room(num_slabs, have, early.ticket)) is not None:
                raise room
        chunks = early.ticket.chunks
        good = {i for i, payload in early.payloads.items() if matches(i, payload, chunks[i].digest)}
        missing = [index for index in range(len(chunks)) if index not in have and index not in good]
        pairs = tuple((chunks[index].slab, slabs[index]) for index in missing)
        payloads: Sequence[bytes] = (yield Pull(early.ticket, pairs)) if pairs else ()
        _verify(early.ticket, missing, payloads, matches)
        yield Commit(slabs)
    except GeneratorExit:
        raise  # the driver dropped the conversation, and nobody is left to ask
    except BaseException as error:
        yield Free(reserved)
        if not isinstance(error, Exception):
            raise
        return Outcome(error=error)
    return Outcome(slabs, len(missing) + len(good), len(early.payloads) - len(good))


def _room(num_slabs: int, have: Mapping[int, int], ticket: Ticket | None) -> ValueError | None:
    """What is wrong with that number of slabs, if anything is."""
    chunks = len(ticket.chunks) if ticket else 0
    if num_slabs < max(chunks, len(have)):
        return ValueError(f"{num_slabs} slabs cannot hold {chunks} chunks, or the {len(have)} held")
    return None


def _verify(
    ticket: Ticket,
    indexes: Sequence[int],
    payloads: Sequence[bytes],
    matches: Callable[[int, bytes, bytes], bool],
) -> None:
    for index, payload in zip(indexes, payloads, strict=True):
        if not matches(index, payload, ticket.chunks[index].digest):
            raise CorruptChunk(
                f"KV of request {ticket.terms.request} is not what was offered",
                f"chunk {index} of {len(ticket.chunks)}, from {ticket.worker} slab {ticket.chunks[index].slab}",
            )


def perform(
    steps: Steps,
    do: Mapping[type[Any], Callable[[Any], Any]],
    turn: Effect | Outcome | None = None,
    error: BaseException | None = None,
) -> Effect | Outcome:
    """Perform the effects that `do` has a function for; return the first other one, or the `Outcome`.

    `turn` is what an earlier call returned (None: begin). `error` is thrown in instead of performing `turn`, unless
    that is already a `Free`. What `do`'s functions raise goes into the conversation; what leaves it goes up: a `Free`
    that failed, or an exception that is not an `Exception`, after its `Free`.
    """
    try:
        if turn is None:
            turn = next(steps)
        if isinstance(turn, Outcome):
            return turn
        if error is not None and not isinstance(turn, Free):
            turn = steps.throw(error)
        while (act := do.get(type(turn))) is not None:
            try:
                answer = act(turn)
            except BaseException as failure:
                turn = steps.throw(failure)
            else:
                turn = steps.send(answer)
        return turn
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


def _place(num_slabs: int, have: Mapping[int, int], reserved: Sequence[int]) -> tuple[int, ...]:
    """Slabs in token order: those held keep their place, the reserved ones fill the others."""
    if len(set(reserved)) != num_slabs - len(have):
        raise ValueError(f"{num_slabs - len(have)} distinct slabs were reserved, {list(reserved)} came")
    fresh = iter(reserved)
    return tuple(have[index] if index in have else next(fresh) for index in range(num_slabs))
