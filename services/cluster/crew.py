"""Who works in a deployment, as a replanner sees it, and how far orders are (pure: told everything, does nothing).

start ─▶ STARTING ──up and linked──▶ READY ──flip──▶ TURNING ──up and linked in the new role──▶ READY
             │                         │                ├── in the old role, in another life: failed
          failed                     stop               ├── up, but nobody links to it: undo, and it turns back
             ▼                         ▼                └── not in time: failed, and it is left as it is
           gone ◀──retired── DRAINING
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.decide import DRAINING, READY, STARTING, TURNING, Worker
from planner.terms import BOTH

FLIP, START, STOP, UNDO = "flip", "start", "stop", "undo"
DONE, FAILED, GONE = "done", "failed", "gone"
ENDED = ("retired", "stopped", "failed")  # states of a supervisor that starts its child no more


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker as the gateway knows it. `role` is the gateway's; `life` its incarnation; `linked`: it can serve."""

    worker: str
    role: str
    state: str
    life: str
    linked: bool
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an order: done or failed.

    `undo`: the caller is to turn the worker back to `role`; `gone`: nothing is left of it but its place.
    """

    worker: str
    action: str
    outcome: str
    why: str = ""
    role: str = ""


@dataclass(slots=True)
class _Hand:
    role: str  # that it has, or will have when the order is done
    state: str = STARTING
    order: str = START
    since_s: float = 0.0  # of the order
    was: str = ""  # the role before a flip
    life: str = ""  # in which it was told to flip
    seen_life: str = ""
    up_s: float | None = None  # since when it is up in the role that was ordered
    load: float = 0.0


class Crew:
    """All workers by name."""

    def __init__(self, split: bool, flip_s: float, start_s: float, trial_s: float) -> None:
        """After `flip_s` and `start_s` an order has failed; after `trial_s` a worker that turned must be linked."""
        self._split, self._flip_s, self._start_s, self._trial_s = split, flip_s, start_s, trial_s
        self._hands: dict[str, _Hand] = {}

    def found(self, name: str, role: str) -> None:
        """A worker was there from the beginning."""
        self._hands[name] = _Hand(role, order="")

    def joined(self, name: str, role: str, now_s: float) -> None:
        """A worker has been started in a role."""
        self._hands[name] = _Hand(role, since_s=now_s)

    def flipped(self, name: str, role: str, now_s: float, order: str = FLIP) -> None:
        """A worker has been told to change to `role`, or (order UNDO) to go back to it."""
        hand = self._hands[name]
        hand.was, hand.role, hand.state, hand.order = hand.role, role, TURNING, order
        hand.since_s, hand.life, hand.up_s = now_s, hand.seen_life, None

    def stopped(self, name: str, now_s: float) -> None:
        """A worker has been told to end."""
        hand = self._hands[name]
        hand.state, hand.order, hand.since_s = DRAINING, STOP, now_s

    def knows(self, name: str) -> bool:
        return name in self._hands

    def starting(self, name: str) -> bool:
        """Whether it has not served yet: nobody has to wait for it to end."""
        return self._hands[name].order == START

    def role(self, name: str) -> str:
        return self._hands[name].role

    def workers(self) -> tuple[Worker, ...]:
        """As a replanner wants them."""
        return tuple(
            Worker(name, hand.role if self._split else BOTH, hand.state, hand.load)
            for name, hand in sorted(self._hands.items())
        )

    def look(self, seen: Iterable[Seen], statuses: Mapping[str, str], now_s: float) -> list[Outcome]:
        """Take in who is there, and the states of supervisors; tells what has come to an end."""
        there = {one.worker: one for one in seen}
        found: list[Outcome] = []
        for name, hand in list(self._hands.items()):
            if statuses.get(name, "") in ENDED:
                found += self._ended(name, hand, statuses[name])
            elif hand.order in (FLIP, UNDO):
                found += self._turning(name, hand, there.get(name), now_s)
            else:
                found += self._plain(name, hand, there.get(name), now_s)
            if (one := there.get(name)) is not None:
                hand.seen_life, hand.load = one.life, one.load
        return found

    def _ended(self, name: str, hand: _Hand, status: str) -> Iterable[Outcome]:
        del self._hands[name]
        if hand.order in (START, FLIP):
            yield Outcome(name, hand.order, FAILED, f"it has {status}")
        elif hand.order == STOP:
            yield Outcome(name, STOP, DONE)
        yield Outcome(name, "", GONE)

    def _plain(self, name: str, hand: _Hand, one: Seen | None, now_s: float) -> Iterable[Outcome]:
        if (
            hand.order == STOP
            and one is not None
            and one.state == "up"
            and now_s - hand.since_s > self._flip_s
        ):
            hand.state, hand.order = READY, ""  # the order was lost, with the gateway that had taken it
            yield Outcome(name, STOP, FAILED, f"it was still up after {self._flip_s:.0f} s")
        elif hand.order == STOP:
            hand.state = DRAINING
        elif one is None or one.state == "unfit":
            hand.state = STARTING  # its supervisor is at work
        elif one.state == "draining":
            hand.state, hand.role = DRAINING, one.role  # somebody else's order
        elif one.linked or hand.state == READY:
            hand.state, hand.role = READY, one.role
        if hand.order == START and hand.state == READY:
            hand.order = ""
            yield Outcome(name, START, DONE)
        elif hand.order == START and now_s - hand.since_s > self._start_s:
            del self._hands[name]
            yield Outcome(name, START, FAILED, f"it was not up after {self._start_s:.0f} s")
            yield Outcome(name, "", GONE)

    def _turning(self, name: str, hand: _Hand, one: Seen | None, now_s: float) -> Iterable[Outcome]:
        late = now_s - hand.since_s > self._flip_s
        if one is not None and one.role == hand.role and one.state != "draining":
            hand.up_s = now_s if hand.up_s is None else hand.up_s
            if one.state == "up" and one.linked:
                yield self._turned(name, hand)
            elif now_s - hand.up_s > self._trial_s and hand.order == FLIP:
                why = f"as a {hand.role} worker it was not linked after {self._trial_s:.0f} s"
                yield Outcome(name, FLIP, UNDO, why, hand.was)
            elif late and hand.order == UNDO:
                yield self._failed(name, hand, f"it was not linked after {self._flip_s:.0f} s")
        elif one is not None and one.role == hand.was and one.life != hand.life and one.state == "up":
            yield self._failed(name, hand, "it came back in its old role")
        elif late:
            yield self._failed(name, hand, f"it had not turned after {self._flip_s:.0f} s")

    @staticmethod
    def _turned(name: str, hand: _Hand) -> Outcome:
        order, hand.state, hand.order = hand.order, READY, ""
        return Outcome(name, order, DONE)

    @staticmethod
    def _failed(name: str, hand: _Hand, why: str) -> Outcome:
        order, hand.role, hand.state, hand.order = hand.order, hand.was, STARTING, ""
        return Outcome(name, order, FAILED, why)
