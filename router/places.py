"""Where requests may go at this moment, with all that the answer depends on (pure).

A way is a linked pair of workers, or one that does both. Credits say whether there is room on it, suspicion whether a
request may go it now, and the predicted wait which one is best.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.request import Stage
from router.credits import open_ways
from router.docket import Docket
from router.effects import Choice
from router.fleet import Fleet
from router.live import Live
from router.policy import (
    NO_LINK,
    NO_PREFILL,
    SOONER,
    Answers,
    Ledger,
    Need,
    View,
    Way,
    choose,
    move_s,
    nearby,
    rebind,
    ways,
)
from router.prefix_index import Chunks, PrefixIndex
from router.recovery import Recovery

ANYONE = Need(0, 0)


@dataclass(slots=True)
class Places:
    """`split`: the deployment has prefill workers of its own; `local`: others may read while none of them can; `auto`:
    and whenever it is predicted to be better, in steps within `tpot_s`.
    """

    fleet: Fleet
    index: PrefixIndex
    recovery: Recovery
    split: bool
    local: bool
    auto: bool = False
    tpot_s: float | None = None
    ledger: Ledger = field(default_factory=Ledger)
    answers: Answers = field(default_factory=Answers)
    view: View = field(init=False)

    def __post_init__(self) -> None:
        self.view = View(self.fleet, self.ledger, self.split, self.index, self.local, self.auto, self.tpot_s)

    def ways(self, need: Need = ANYONE) -> list[Way]:
        """All ways that a request may go now, whatever there is room for."""
        return ways(need, self.view)

    def look(self, now_s: float) -> None:
        """Note for which requests there are ways now."""
        members = self.fleet.members
        self.recovery.seen({members[target].hello.fingerprint for _, target in self.ways()}, now_s)

    def pick(self, live: Live, found: list[Way], docket: Docket, closed: set[str]) -> Choice | None:
        """The best of the ways `found` with room for a request that waits, or None.

        If there is a way but no room, nobody behind it may take that away: its workers are `closed` from now on.
        """
        name, need, view = live.request.id, live.need, self.view
        lanes = found = found + nearby(found) if self.auto else found
        if live.avoid:
            least = min((len(live.avoid & named(way)) for way in found), default=0)
            lanes = [way for way in found if len(live.avoid & named(way)) == least]
        if len(docket):
            lanes = [way for way in lanes if all(docket.may_run(name, worker) for worker in named(way))]
        free = [way for way in lanes if not closed & named(way)] if closed else lanes
        best = choose(need, view, open_ways(free, need, view))
        if best is None:
            closed.update(*map(named, lanes))
        return best

    def pinned(self, pin: Choice) -> bool:
        """Whether a canary can go the way it is told."""
        if pin.prefill is None:
            return any(
                member.name == pin.decode and not member.draining for member in self.fleet.role("decode")
            )
        return (pin.prefill, pin.decode) in self.fleet.pairs()

    def rebind(self, live: Live, docket: Docket) -> str | None:
        """The best decode worker for what `live.source` reads or holds: loads change while a prompt is read.

        Rather not one that failed the request before: the nearest would fail it again each time.
        Not one that has heard of this attempt, since it would take that for an old message. The request is off the
        books after this.
        """
        members = self.fleet.members
        self.ledger.book(live.request.id, {})  # its own plan is no reason to go elsewhere
        if live.source is None:
            return None
        barred = {name for name, member in members.items() if member.hello.incarnation in live.heard}
        if live.pin is not None:
            decode = members.get(live.pin.decode)
            if decode is None or live.source not in decode.ties or decode.name in barred:
                return None
            return None if decode.draining and not decode.expecting else decode.name
        barred |= {name for name in members if not docket.may_run(live.request.id, name)} - {live.source}
        others = rebind(live.source, live.need, self.view, barred | live.avoid)
        return others or rebind(live.source, live.need, self.view, barred)

    def move_s(self, choice: Choice, need: Need) -> float:
        """How long moving the KV to the decode worker is predicted to take; 0 where nothing is moved."""
        return move_s(choice.prefill, choice.decode, need, self.view) if choice.prefill is not None else 0.0

    def begin(self, live: Live, choice: Choice) -> None:
        """Reckon what an attempt on these workers will take."""
        first = choice.prefill or choice.decode
        live.unread_tokens = live.need.prompt_tokens - self.view.shared(first, live.need)
        live.spared_tokens = self.view.shared(choice.decode, live.need)
        self.expect(first, live.chunks)

    def admit(self, live: Live, decode: str) -> None:
        """Reckon what the request will take at the decode worker that is told of it now."""
        live.spared_tokens = self.view.shared(decode, live.need)
        self.expect(decode, live.chunks)

    def expect(self, worker: str, chunks: Chunks) -> None:
        """From now on the worker is thought to have these chunks."""
        if (member := self.fleet.members.get(worker)) is not None:
            self.index.sent(worker, chunks, member.hello.num_slabs)

    def remember(self, live: Live) -> None:
        """Whoever goes on with this text later finds prompt and answer where it was written."""
        request, choice = live.request, live.choice
        self.answers.ended(len(request.output))
        if request.stage is Stage.DECODING and choice is not None:
            text = request.prompt + request.output[:-1]  # the last token has no KV
            self.expect(choice.decode, self.index.cut(text, request.origin.scope, live.chunks))

    def book(self, live: Live) -> None:
        """What the request asks of workers now, and of no others."""
        live.booked_tokens = live.room_tokens
        self.ledger.book(live.request.id, live.shares)

    def missing(self) -> str:
        """Why there is no way."""
        roles = ("prefill", "decode") if self.split else ("decode",)
        absent = [role for role in roles if not self.fleet.role(role)]
        return f"no {' and no '.join(absent)} worker is up" if absent else "no two workers are linked"

    def why_local(self) -> str:
        """Why a decode worker reads a prompt in a split deployment."""
        if self.auto and self.fleet.pairs():
            return SOONER
        up = [member for member in self.fleet.role("prefill") if not member.draining]
        return NO_LINK if up else NO_PREFILL


def named(way: Way) -> set[str]:
    """The workers of a way."""
    return {name for name in way if name is not None}
