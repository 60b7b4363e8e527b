"""The workers that are there, what they last said of themselves, and who can pull from whom (pure).

A worker is a member from its `Hello` until it has been silent for `lost_s`, introduces itself over a new link, or the
gateway cannot reach it. A member that was lost must say `Hello` again; its beats alone do not bring it back, since its
requests have moved on. Prefill and decode workers are paired only if their fingerprints are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.messages import Beat, Hello, Linked, Peer, Stats, Unpeer
from router.effects import Down, FleetChange, Send, Unfit, Up

ROLES = ("prefill", "decode")
RELINK_S = 30.0  # between attempts to make a link: what was in its way may have passed


@dataclass(frozen=True, slots=True)
class Tie:
    """A decode worker's measured link to one life of a prefill worker."""

    incarnation: str
    transport: str
    gb_per_s: float
    latency_us: float


@dataclass(slots=True)
class Member:
    """One living worker. `ties` (decode only) are by prefill worker.

    `troubles` say why a link is not there, `relink_s` when it is tried again.
    """

    hello: Hello
    seen_s: float
    stats: Stats = field(default_factory=Stats)
    draining: bool = False
    ties: dict[str, Tie] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)
    relink_s: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.hello.worker

    @property
    def role(self) -> str:
        return self.hello.role


def compare(left: Hello, right: Hello) -> str:
    """Why two workers cannot be paired: the differing fields of both identities side by side."""
    names = sorted(left.identity.keys() | right.identity.keys())
    rows = [(name, left.identity.get(name, "-"), right.identity.get(name, "-")) for name in names]
    rows = [row for row in rows if row[1] != row[2]] or [("fingerprint", left.fingerprint, right.fingerprint)]
    rows = [("", left.worker, right.worker), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".strip() for a, b, c in rows)


class Fleet:
    """All living workers by name."""

    def __init__(self, lost_s: float = 2.0) -> None:
        self.lost_s = lost_s
        self.members: dict[str, Member] = {}
        self._ticked_s: float | None = None
        self._overslept = False

    def hear(self, worker: str, message: Hello | Beat | Linked, now_s: float) -> list[FleetChange]:
        """Take in what a worker says of itself; what it says of an earlier life is ignored."""
        if isinstance(message, Hello):
            return self._meet(message, now_s) if message.worker == worker else []
        member = self.members.get(worker)
        if member is None:
            return []
        if isinstance(message, Beat):
            if message.incarnation == member.hello.incarnation:
                member.seen_s, member.stats = now_s, message.stats
            return []
        member.seen_s = now_s
        self._tie(member, message, now_s)
        return []

    def touch(self, worker: str, now_s: float) -> bool:
        """Any message is proof of life; False if the worker is not a member."""
        member = self.members.get(worker)
        if member is not None:
            member.seen_s = now_s
        return member is not None

    def _meet(self, hello: Hello, now_s: float) -> list[FleetChange]:
        if hello.role not in ROLES:
            return [Unfit(hello.worker, f"role {hello.role!r} is not one of {', '.join(ROLES)}")]
        known = self.members.get(hello.worker)
        changes: list[FleetChange] = []
        if known is not None:
            if (known.hello.incarnation, known.hello.link) == (hello.incarnation, hello.link):
                known.seen_s = now_s
                return []
            again = known.hello.incarnation == hello.incarnation
            changes += self.lose(hello.worker, "its link broke" if again else "it has restarted")
        member = self.members[hello.worker] = Member(hello, now_s)
        return [*changes, Up(hello.worker, hello.role, hello.incarnation), *self._introduce(member)]

    def _introduce(self, member: Member) -> list[FleetChange]:
        """Tell decode workers of prefill workers with the same fingerprint; say where fingerprints differ."""
        changes: list[FleetChange] = []
        for other in self.role("decode" if member.role == "prefill" else "prefill"):
            if other.hello.fingerprint != member.hello.fingerprint:
                changes.append(Unfit(member.name, compare(other.hello, member.hello)))
                continue
            source, target = (member, other) if member.role == "prefill" else (other, member)
            changes.append(_peer(source, target))
        return changes

    def _tie(self, decode: Member, linked: Linked, now_s: float) -> None:
        source = self.members.get(linked.peer)
        if source is None or source.hello.incarnation != linked.incarnation or source.role != "prefill":
            return
        _untie(decode, linked.peer)
        if linked.error or not linked.transport:
            decode.troubles[linked.peer] = linked.error or "no transport reaches it"
            decode.relink_s[linked.peer] = now_s + RELINK_S
        else:
            tie = Tie(linked.incarnation, linked.transport, linked.gb_per_s, linked.latency_us)
            decode.ties[linked.peer] = tie

    def lose(self, worker: str, reason: str, incarnation: str | None = None) -> list[FleetChange]:
        """This worker (only this life of it, if given) is gone; decode workers drop their links to it."""
        member = self.members.get(worker)
        if member is None or incarnation not in (None, member.hello.incarnation):
            return []
        del self.members[worker]
        changes: list[FleetChange] = [Down(worker, member.hello.incarnation, reason)]
        if member.role == "prefill":
            for decode in self.role("decode"):
                _untie(decode, worker)
                if decode.hello.fingerprint == member.hello.fingerprint:
                    changes.append(Send(decode.name, Unpeer(worker, member.hello.incarnation)))
        return changes

    def tick(self, now_s: float) -> list[FleetChange]:
        """Lose the workers that have been silent for `lost_s`; try again the links that could not be made.

        Who slept cannot accuse others of silence: the first tick after a long pause of the caller (a stopped process, a
        blocked loop) accuses nobody, so that beats which arrived meanwhile are heard before the next.
        """
        pause_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        self._ticked_s = now_s
        self._overslept = pause_s > self.lost_s / 2 and not self._overslept
        if self._overslept:
            return []
        silent = [name for name, member in self.members.items() if now_s - member.seen_s > self.lost_s]
        lost = [change for name in silent for change in self.lose(name, f"silent for {self.lost_s:g} s")]
        return lost + self._relink(now_s)

    def _relink(self, now_s: float) -> list[FleetChange]:
        changes: list[FleetChange] = []
        for decode in self.role("decode"):
            for name in sorted(name for name, due_s in decode.relink_s.items() if due_s <= now_s):
                decode.relink_s[name] = now_s + RELINK_S
                changes.append(_peer(self.members[name], decode))
        return changes

    def role(self, role: str) -> list[Member]:
        """Living members of a role, by name."""
        return [self.members[name] for name in sorted(self.members) if self.members[name].role == role]

    def alive(self, now_s: float) -> list[Member]:
        """Members heard within `lost_s`, by name."""
        members = (self.members[name] for name in sorted(self.members))
        return [member for member in members if now_s - member.seen_s <= self.lost_s]

    def pairs(self) -> list[tuple[str, str]]:
        """Linked (prefill, decode) pairs of equal fingerprints, drained ones left out, by name."""
        open_prefill = {member.name for member in self.role("prefill") if not member.draining}
        decode = [member for member in self.role("decode") if not member.draining]
        return sorted(
            (source, member.name) for member in decode for source in member.ties if source in open_prefill
        )


def _peer(source: Member, target: Member) -> Send:
    hello = source.hello
    return Send(target.name, Peer(hello.worker, hello.incarnation, hello.endpoints))


def _untie(decode: Member, source: str) -> None:
    for book in (decode.ties, decode.troubles, decode.relink_s):
        book.pop(source, None)
