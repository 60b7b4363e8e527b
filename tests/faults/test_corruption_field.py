"""Ten thousand corruptions on real transports: of chunks pulled late and early, of hints, of tickets. None is decoded.

Every injury proves that it changed the bytes that are read. What each comes to is counted and compared with how many
there were to be; `test_control_runs` does the same with the digests switched off, and must find what is found nowhere
here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from diptych.errors import StaleTicket
from kvtransfer import ticket as tickets
from kvtransfer.board import DONE
from kvtransfer.early import Early
from tests.engine.transport_source import KEY, LAYOUT, Remote
from tests.faults.corrupt import (
    CHUNKS,
    LAYERS,
    SLABS,
    TOKENS,
    Offered,
    Target,
    compute,
    hinted,
    injured,
    mend,
    offer,
    opened,
    promised,
    refused,
    spoil,
)

LATE, EARLY, FOREIGN = {"shm": 300, "nixl": 150}, {"shm": 150, "nixl": 80}, 50
SIGNED = 700  # of each kind, of tickets and of hints
KINDS = ("flip", "truncate", "swap", "replay")
TRANSPORTS = ("shm", "nixl")
done: Counter[str] = Counter()  # corruptions that were made and not decoded, by what was corrupted


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, Remote, Target]]:
    """A transport, the source, and the target."""
    with opened(request.param) as target:
        yield request.param, target.source, target


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_chunk_that_was_spoilt_before_it_was_pulled(kind: str, pair: tuple[str, Remote, Target]) -> None:
    transport, source, target = pair
    rng, times = random.Random(kind), LATE[transport]
    for number in range(1, times + 1):
        # Half of the replays are of an earlier attempt of the same request, half of another request.
        offered = offer(source, number, "same" if number % 2 else "")
        spoil(source, kind, rng, number - 1)
        assert target.late(offered) == "caught", f"{kind} number {number}"
    done["late"] += times


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_copy_that_was_made_ahead_and_is_wrong_is_made_again(
    kind: str, pair: tuple[str, Remote, Target]
) -> None:
    """The bytes were bad when they were copied, and good when the ticket came: what is decoded is what was offered."""
    transport, source, target = pair
    rng, times = random.Random(kind), EARLY[transport]
    for number in range(1, times + 1):

        def script(early: Early, number: int = number) -> Offered:
            early.hint(hinted(source, number))
            compute(source, number, 0, LAYERS)
            spoil(source, kind, rng, number - 1)
            target.advance(early)
            mend(source, number)
            return promised(source, number)

        verdict, wasted = target.early(script)
        assert verdict == "exact" and wasted >= 1, f"{kind} number {number}"
    done["early"] += times


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_chunk_that_was_spoilt_between_its_layers(kind: str, pair: tuple[str, Remote, Target]) -> None:
    """The first layer was copied ahead; then the ticket was written, and then the source was spoilt for good."""
    transport, source, target = pair
    rng, times, verdicts = random.Random(kind), EARLY[transport], Counter[str]()
    for number in range(1, times + 1):

        def script(early: Early, number: int = number) -> Offered:
            early.hint(hinted(source, number))
            compute(source, number, 0, 1)
            target.advance(early)
            compute(source, number, 1, LAYERS)
            offered = promised(source, number)
            spoil(source, kind, rng, number - 1)
            return offered

        verdicts[target.early(script)[0]] += 1
    # What was copied before it was spoilt is as good as ever.
    assert verdicts["wrong"] == 0 and verdicts["caught"] > times // 4, (kind, verdicts)
    done["between"] += times


@pytest.mark.parametrize("what", ["slabs", "order", "mark", "complete"])
def test_a_hint_that_tells_of_something_else_costs_a_copy_and_nothing_more(
    what: str, pair: tuple[str, Remote, Target]
) -> None:
    """Signed as it should be, and wrong: another request's slabs, a wrong order, an old mark, "complete" too early."""
    _, source, target = pair
    for number in range(1, FOREIGN + 1):

        def script(early: Early, number: int = number) -> Offered:
            offer(source, number + 1000)  # what lies there before
            match what:
                case "slabs":
                    hint = hinted(source, number, (1, 3, 5), DONE)
                case "order":
                    hint = hinted(source, number, (2, 4, 9), DONE)
                case "mark":
                    hint = hinted(source, number)
                    source("stage", slabs=list(SLABS))
                case _:
                    hint = hinted(source, number, SLABS, DONE)
            early.hint(hint)
            target.advance(early)
            compute(source, number, 0, LAYERS)
            return promised(source, number)

        verdict, wasted = target.early(script)
        assert verdict == "exact" and (wasted > 0) == (what != "mark"), f"{what} number {number}"
    done["foreign"] += FOREIGN


@pytest.mark.parametrize("kind", KINDS)
def test_tickets_and_hints_that_were_altered_are_refused(kind: str, pair: tuple[str, Remote, Target]) -> None:
    transport, source, _ = pair
    if transport != TRANSPORTS[0]:
        return  # these bytes travel over the channel
    rng = random.Random(kind)
    older, newer = offer(source, 1).ticket, offer(source, 2).ticket
    raws = [tickets.encode(ticket, KEY) for ticket in (older, newer)]
    hints = [tickets.encode_hint(hinted(source, number), KEY) for number in (1, 2)]
    for _ in range(SIGNED):
        assert refused(tickets.decode, injured(raws[1], kind, rng, raws[0]))
        assert refused(tickets.decode_hint, injured(hints[1], kind, rng, hints[0]))
    assert refused(tickets.decode_hint, raws[1]) and refused(tickets.decode, hints[1])
    assert not refused(tickets.decode, raws[1]) and not refused(tickets.decode_hint, hints[1])
    done["signed"] += 2 * SIGNED


def test_a_whole_ticket_of_another_attempt_is_refused(pair: tuple[str, Remote, Target]) -> None:
    """Rightly signed: another request's, an earlier attempt's, or one whose slabs hold something else by now."""
    _, source, target = pair
    for number in range(1, FOREIGN + 1):
        old, new = offer(source, number, "same"), offer(source, number + 1, "same")
        assert target.late(old) == "caught" and target.late(new) == "exact"
        for request, epoch in (("other", new.ticket.terms.epoch), ("same", number)):
            with pytest.raises(StaleTicket):
                tickets.expect(
                    new.ticket,
                    request=request,
                    epoch=epoch,
                    num_tokens=TOKENS,
                    dtype=LAYOUT.dtype,
                    shape=LAYOUT.chunk_shape,
                    fingerprint=new.ticket.terms.fingerprint,
                )
    done["replayed tickets"] += FOREIGN


def test_without_an_injury_everything_is_exact(pair: tuple[str, Remote, Target]) -> None:
    """The detector does not cry for nothing."""
    _, source, target = pair
    for number in range(1, 51):

        def script(early: Early, number: int = number) -> Offered:
            early.hint(hinted(source, number))
            for layer in range(LAYERS):
                compute(source, number, layer, layer + 1)
                target.advance(early)
            return promised(source, number)

        assert target.late(offer(source, number)) == "exact"
        assert target.early(script) == ("exact", 0)


def test_ten_thousand_were_made() -> None:
    """Together, in this module; and each was counted only when it had not been decoded."""
    print(f"corruptions: {sum(done.values())}, {dict(done)}")
    assert sum(done.values()) >= 10_000, done
