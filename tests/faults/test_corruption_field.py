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
from kvtransfer.layer_progress import COMPLETE_MARK
from kvtransfer.pipelined_pull import PipelinedPull
from tests.engine.transport.transport_source import CODED_LAYOUT, KEY, LAYOUT, RemoteSource
from tests.faults.corruption import (
    CHUNKS,
    LAYERS,
    SLABS,
    TOKENS,
    OfferedKv,
    PullTarget,
    compute_layers,
    injure_signed,
    is_refused,
    make_hint,
    make_ticket,
    offer_kv,
    opened_transport,
    restore_source,
    spoil_source,
)

LATE = {"shm": 300, "nixl": 150, "coded": 60}
EARLY, FOREIGN = {"shm": 150, "nixl": 80, "coded": 40}, 50
SIGNED = 700  # of each kind, of tickets and of hints
KINDS = ("flip", "truncate", "swap", "replay")
# "coded" is coded KV over shared memory.
TRANSPORTS = ("shm", "nixl", "coded")
done: Counter[str] = Counter()  # corruptions that were made and not decoded, by what was corrupted


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, RemoteSource, PullTarget]]:
    """A transport, the source, and the target."""
    coded = request.param == "coded"
    with opened_transport(
        "shm" if coded else request.param, layout=CODED_LAYOUT if coded else LAYOUT
    ) as target:
        yield request.param, target.source, target


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_chunk_that_was_spoilt_before_it_was_pulled(
    kind: str, pair: tuple[str, RemoteSource, PullTarget]
) -> None:
    transport, source, target = pair
    rng, times = random.Random(kind), LATE[transport]
    for number in range(1, times + 1):
        # Half of the replays are of an earlier attempt of the same request, half of another request.
        offered = offer_kv(source, number, "same" if number % 2 else "")
        spoil_source(source, kind, rng, number - 1)
        assert target.pull_late(offered) == "caught", f"{kind} number {number}"
    done["late"] += times


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_copy_that_was_made_ahead_and_is_wrong_is_made_again(
    kind: str, pair: tuple[str, RemoteSource, PullTarget]
) -> None:
    """The bytes were bad when they were copied, and good when the ticket came: what is decoded is what was offered."""
    transport, source, target = pair
    rng, times = random.Random(kind), EARLY[transport]
    for number in range(1, times + 1):

        def script(early: PipelinedPull, number: int = number) -> OfferedKv:
            early.add_hint(make_hint(source, number))
            compute_layers(source, number, 0, LAYERS)
            spoil_source(source, kind, rng, number - 1)
            target.advance(early)
            restore_source(source, number)
            return make_ticket(source, number)

        ending, wasted = target.pull_early(script)
        assert ending == "exact" and wasted >= 1, f"{kind} number {number}"
    done["early"] += times


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_chunk_that_was_spoilt_between_its_layers(
    kind: str, pair: tuple[str, RemoteSource, PullTarget]
) -> None:
    """The first layer was copied ahead; then the ticket was written, and then the source was spoilt for good."""
    transport, source, target = pair
    rng, times, endings = random.Random(kind), EARLY[transport], Counter[str]()
    for number in range(1, times + 1):

        def script(early: PipelinedPull, number: int = number) -> OfferedKv:
            early.add_hint(make_hint(source, number))
            compute_layers(source, number, 0, 1)
            target.advance(early)
            compute_layers(source, number, 1, LAYERS)
            offered = make_ticket(source, number)
            spoil_source(source, kind, rng, number - 1)
            return offered

        endings[target.pull_early(script)[0]] += 1
    # What was copied before it was spoilt is as good as ever.
    assert endings["wrong"] == 0 and endings["caught"] > times // 4, (kind, endings)
    done["between"] += times


@pytest.mark.parametrize("what", ["slabs", "order", "mark", "complete"])
def test_a_hint_that_tells_of_something_else_costs_a_copy_and_nothing_more(
    what: str, pair: tuple[str, RemoteSource, PullTarget]
) -> None:
    """Signed as it should be, and wrong: another request's slabs, a wrong order, an old mark, "complete" too early."""
    _, source, target = pair
    for number in range(1, FOREIGN + 1):

        def script(early: PipelinedPull, number: int = number) -> OfferedKv:
            offer_kv(source, number + 1000)  # what lies there before
            match what:
                case "slabs":
                    hint = make_hint(source, number, (1, 3, 5), COMPLETE_MARK)
                case "order":
                    hint = make_hint(source, number, (2, 4, 9), COMPLETE_MARK)
                case "mark":
                    hint = make_hint(source, number)
                    source("stage", slabs=list(SLABS))
                case _:
                    hint = make_hint(source, number, SLABS, COMPLETE_MARK)
            early.add_hint(hint)
            target.advance(early)
            compute_layers(source, number, 0, LAYERS)
            return make_ticket(source, number)

        ending, wasted = target.pull_early(script)
        assert ending == "exact" and (wasted > 0) == (what != "mark"), f"{what} number {number}"
    done["foreign"] += FOREIGN


@pytest.mark.parametrize("kind", KINDS)
def test_tickets_and_hints_that_were_altered_are_refused(
    kind: str, pair: tuple[str, RemoteSource, PullTarget]
) -> None:
    transport, source, _ = pair
    if transport != TRANSPORTS[0]:
        return  # these bytes travel over the channel
    rng = random.Random(kind)
    older, newer = offer_kv(source, 1).ticket, offer_kv(source, 2).ticket
    raws = [tickets.encode_ticket(ticket, KEY) for ticket in (older, newer)]
    hints = [tickets.encode_hint(make_hint(source, number), KEY) for number in (1, 2)]
    for _ in range(SIGNED):
        assert is_refused(tickets.decode_ticket, injure_signed(raws[1], kind, rng, raws[0]))
        assert is_refused(tickets.decode_hint, injure_signed(hints[1], kind, rng, hints[0]))
    assert is_refused(tickets.decode_hint, raws[1]) and is_refused(tickets.decode_ticket, hints[1])
    assert not is_refused(tickets.decode_ticket, raws[1]) and not is_refused(tickets.decode_hint, hints[1])
    done["signed"] += 2 * SIGNED


def test_a_whole_ticket_of_another_attempt_is_refused(pair: tuple[str, RemoteSource, PullTarget]) -> None:
    """Rightly signed: another request's, an earlier attempt's, or one whose slabs hold something else by now."""
    _, source, target = pair
    for number in range(1, FOREIGN + 1):
        old, new = offer_kv(source, number, "same"), offer_kv(source, number + 1, "same")
        assert target.pull_late(old) == "caught" and target.pull_late(new) == "exact"
        for request, epoch in (("other", new.ticket.context.epoch), ("same", number)):
            with pytest.raises(StaleTicket):
                tickets.check_ticket(
                    new.ticket,
                    request=request,
                    epoch=epoch,
                    num_tokens=TOKENS,
                    layout=source.layout,
                    fingerprint=new.ticket.context.fingerprint,
                )
    done["replayed tickets"] += FOREIGN


def test_without_an_injury_everything_is_exact(pair: tuple[str, RemoteSource, PullTarget]) -> None:
    """The detector does not cry for nothing."""
    _, source, target = pair
    for number in range(1, 51):

        def script(early: PipelinedPull, number: int = number) -> OfferedKv:
            early.add_hint(make_hint(source, number))
            for layer in range(LAYERS):
                compute_layers(source, number, layer, layer + 1)
                target.advance(early)
            return make_ticket(source, number)

        assert target.pull_late(offer_kv(source, number)) == "exact"
        assert target.pull_early(script) == ("exact", 0)


def test_ten_thousand_were_made() -> None:
    """Together, in this module; and each was counted only when it had not been decoded."""
    print(f"corruptions: {sum(done.values())}, {dict(done)}")
    assert sum(done.values()) >= 10_000, done
