"""The workers that are there, what they last said of themselves, and who can pull from whom (pure).

A worker is a member from its `Hello` until it has been silent for `lost_s`, introduces itself over a new link, its
engine has stood still for `stuck_s` of its own time, or the gateway cannot reach it. A member that was lost must say
`Hello` again; its beats alone do not bring it back, since its requests have moved on. One whose engine stands still is
taken in again when it moves.

Prefill and decode workers are paired only if their fingerprints are equal, and not for a while after KV has come out
corrupt between them again and again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from diptych.messages import Beat, Hello, Linked, Peer, Stats, Unpeer
from router.effects import Down, FleetChange, Send, Unfit, Up

ROLES = ("prefill", "decode")
RELINK_S = 30.0  # between attempts to make a link: what was in its way may have passed
CORRUPT_TIMES, CORRUPT_WITHIN_S = 3, 60.0  # so often within so long, and a link is not used for `RELINK_S`


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

    `troubles` say why a link is not there, `relink_s` when it is tried again. `ended` is how its life before this one
    ended, as far as it is known: "crashed", "killed", "alive" (the process is the same), or "".

    No request begins at one that is `draining`. While it is `expecting`, it has not been told (`router.orders`): those
    that are on their way there may still come.
    """

    hello: Hello
    seen_s: float
    stats: Stats = field(default_factory=Stats)
    ended: str = ""
    draining: bool = False
    expecting: bool = False
    ties: dict[str, Tie] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)
    relink_s: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.hello.worker

    @property
    def role(self) -> str:
        return self.hello.role

    def close(self) -> None:
        """It says itself that it takes nothing new."""
        self.draining, self.expecting = True, False


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

    def __init__(self, lost_s: float = 2.0, stuck_s: float = 6.0) -> None:
        self.lost_s, self.stuck_s = lost_s, stuck_s
        self.members: dict[str, Member] = {}
        self.links_given_up = 0  # for corrupt KV
        self._before: dict[str, Hello] = {}  # of lives that were lost, by name
        self._stuck: dict[str, Hello | None] = {}  # lost for it; their latest Hello since
        self._strangers: dict[str, str] = {}
        self._corrupt_s: dict[tuple[str, str], deque[float]] = {}
        self._ticked_s: float | None = None
        self._overslept = False

    def hear(self, worker: str, message: Hello | Beat | Linked, now_s: float) -> list[FleetChange]:
        """Take in what a worker says of itself; what it says of an earlier life is ignored."""
        if isinstance(message, Hello):
            return self._meet(message, now_s) if message.worker == worker else []
        if isinstance(message, Beat):
            return self._beat(worker, message, now_s)
        if (member := self.members.get(worker)) is not None:
            member.seen_s = now_s
            self._tie(member, message, now_s)
        return []

    def _beat(self, worker: str, beat: Beat, now_s: float) -> list[FleetChange]:
        still_s, member = beat.stats.stuck_s, self.members.get(worker)
        if member is None:
            hello = self._stuck.get(worker)
            if hello is None or hello.incarnation != beat.incarnation or still_s > 0:
                return []
            return self._enter(hello, now_s)
        if beat.incarnation != member.hello.incarnation:
            return []
        member.seen_s, member.stats = now_s, beat.stats
        if beat.stats.draining:
            member.close()
        if still_s < self.stuck_s:
            return []
        self._stuck[worker] = None
        return self.lose(worker, f"its engine has not moved for {still_s:.0f} s")

    def touch(self, worker: str, now_s: float) -> bool:
        """Any message is proof of life; False if the worker is not a member."""
        member = self.members.get(worker)
        if member is not None:
            member.seen_s = now_s
        return member is not None

    def _meet(self, hello: Hello, now_s: float) -> list[FleetChange]:
        if hello.role not in ROLES:
            self._strangers[hello.worker] = f"role {hello.role!r} is not one of {', '.join(ROLES)}"
            return [Unfit(hello.worker, self._strangers[hello.worker])]
        if hello.worker in self._stuck and self._before[hello.worker].incarnation == hello.incarnation:
            self._stuck[hello.worker] = hello  # it speaks, but does not work
            return []
        return self._enter(hello, now_s)

    def _enter(self, hello: Hello, now_s: float) -> list[FleetChange]:
        known = self.members.get(hello.worker)
        changes: list[FleetChange] = []
        if known is not None:
            if (known.hello.incarnation, known.hello.link) == (hello.incarnation, hello.link):
                known.seen_s = now_s
                return []
            again = known.hello.incarnation == hello.incarnation
            changes += self.lose(hello.worker, "its link broke" if again else "it has restarted")
        member = self.members[hello.worker] = Member(hello, now_s, ended=self._ended(hello))
        self._stuck.pop(hello.worker, None)
        self._strangers.pop(hello.worker, None)
        return [*changes, Up(hello.worker, hello.role, hello.incarnation), *self._introduce(member)]

    def _ended(self, hello: Hello) -> str:
        """How the life before this one ended: whoever comes back as the same process has not ended at all."""
        before = self._before.get(hello.worker)
        if before is None:
            return hello.ended
        turned = (before.host, before.pid) == (hello.host, hello.pid) and before.role != hello.role
        return "alive" if turned or before.incarnation == hello.incarnation else hello.ended

    def _introduce(self, member: Member) -> list[FleetChange]:
        """Tell decode workers of prefill workers with the same fingerprint; say so if there are only others."""
        changes: list[FleetChange] = []
        for other in self._others(member):
            if other.hello.fingerprint == member.hello.fingerprint:
                source, target = (member, other) if member.role == "prefill" else (other, member)
                changes.append(_peer(source, target))
        text = self._misfit(member)
        return changes if text is None else [Unfit(member.name, text)]

    def _others(self, member: Member) -> list[Member]:
        return self.role("decode" if member.role == "prefill" else "prefill")

    def _misfit(self, member: Member) -> str | None:
        others = self._others(member)
        if not others or any(other.hello.fingerprint == member.hello.fingerprint for other in others):
            return None
        return compare(others[0].hello, member.hello)

    def misfits(self) -> dict[str, str]:
        """Workers that can serve with nobody who is there, and why."""
        told = {name: self._misfit(self.members[name]) for name in sorted(self.members)}
        return self._strangers | {name: text for name, text in told.items() if text is not None}

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
        self._before[worker] = member.hello
        for way in [way for way in self._corrupt_s if worker in way]:
            del self._corrupt_s[way]
        changes: list[FleetChange] = [Down(worker, member.hello.incarnation, reason)]
        if member.role == "prefill":
            for decode in self.role("decode"):
                _untie(decode, worker)
                if decode.hello.fingerprint == member.hello.fingerprint:
                    changes.append(Send(decode.name, Unpeer(worker, member.hello.incarnation)))
        return changes

    def corrupt(self, source: str, target: str, now_s: float) -> None:
        """KV that `target` pulled from `source` was not what was offered; too often, and the link is not used."""
        decode = self.members.get(target)
        if decode is None or source not in decode.ties:
            return
        times_s = self._corrupt_s.setdefault((source, target), deque(maxlen=CORRUPT_TIMES))
        times_s.append(now_s)
        if len(times_s) == CORRUPT_TIMES and now_s - times_s[0] <= CORRUPT_WITHIN_S:
            times_s.clear()
            self.links_given_up += 1
            _untie(decode, source)
            decode.troubles[source] = (
                f"KV came out corrupt {CORRUPT_TIMES} times; not used for {RELINK_S:g} s"
            )
            decode.relink_s[source] = now_s + RELINK_S

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
        members = self.members
        return [member for name in sorted(members) if (member := members[name]).hello.role == role]

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
