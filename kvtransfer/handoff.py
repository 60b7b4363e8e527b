"""The hand-off of one request's KV, as a conversation: it asks for effects, a driver performs them.

    Reserve ─▶ Pull ─▶ (every digest verified) ─▶ Commit        the slabs belong to the sequence, decoding may begin
       │         │                │                 │
       └─ refused└────────────────┴─────────────────┴─▶ Free    exactly what was reserved, exactly once

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


Effect = Reserve | Pull | Commit | Free

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
    error: Exception | None = None

    @property
    def code(self) -> str:
        """Empty when committed; else why not, as in `diptych.messages.Failed`."""
        if self.error is None:
            return ""
        return next((code for kind, code in CODES if isinstance(self.error, kind)), "internal_error")


Steps = Generator[Effect, Any, Outcome]


def hand_off(
    ticket: Ticket,
    num_slabs: int,
    matches: Callable[[int, bytes, bytes], bool],
    held: Mapping[int, int] | None = None,
) -> Steps:
    """Fetch what `ticket` offers into `num_slabs` slabs (its chunks first, then room to grow), or leave nothing behind.

    `matches(index, payload, promised)` is `Seal.matches`. `held` maps chunk indexes to slabs that already have verified
    content here: they are neither reserved, pulled nor freed.
    """
    have = dict(held or {})
    if num_slabs < max(len(ticket.chunks), len(have)):
        return Outcome(error=ValueError(f"{num_slabs} slabs cannot hold {len(ticket.chunks)} chunks"))
    missing = [index for index in range(len(ticket.chunks)) if index not in have]
    try:
        reserved: tuple[int, ...] = tuple((yield Reserve(num_slabs - len(have))))
    except Exception as error:
        return Outcome(error=error)
    try:
        slabs = _place(num_slabs, have, reserved)
        pairs = tuple((ticket.chunks[index].slab, slabs[index]) for index in missing)
        payloads: Sequence[bytes] = (yield Pull(ticket, pairs)) if pairs else ()
        for index, payload in zip(missing, payloads, strict=True):
            if not matches(index, payload, ticket.chunks[index].digest):
                raise CorruptChunk(
                    f"KV of request {ticket.terms.request} is not what was offered",
                    f"chunk {index} of {len(ticket.chunks)}, from {ticket.worker} slab {ticket.chunks[index].slab}",
                )
        yield Commit(slabs)
    except GeneratorExit:
        raise  # the driver dropped the conversation, and nobody is left to ask
    except BaseException as error:
        yield Free(reserved)
        if not isinstance(error, Exception):
            raise
        return Outcome(error=error)
    return Outcome(slabs, len(missing))


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
