"""Tracks the workers of a deployment for the replanner, and the progress of orders to them. Pure: it only decides.

start ─▶ STARTING ──up and linked──▶ READY ──flip──▶ TURNING ──up and linked in the new role──▶ READY
             │                         │                ├── in the old role, with a new incarnation: failed
          failed                     stop               ├── up, but without a link in time: undo, it changes back
             ▼                         ▼                └── not in the new role in time: failed, it stays as it is
           gone ◀──retired── DRAINING
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.replan.decide import DRAINING, READY, STARTING, SWITCHING, FleetWorker
from planner.types import BOTH

FLIP, START, STOP, UNDO = "flip", "start", "stop", "undo"
DONE, FAILED, GONE = "done", "failed", "gone"
# States of a supervisor in which its worker is not restarted.
ENDED_STATES = ("retired", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A worker as the gateway sees it. `incarnation` identifies its current life; `linked` means that it can serve."""

    worker: str
    role: str
    state: str
    incarnation: str
    linked: bool
    num_requests: float = 0.0


@dataclass(frozen=True, slots=True)
class OrderOutcome:
    """The result of an order to a worker: done or failed.

    UNDO means that the caller must change the worker back to `role`; GONE that only its devices are left to release.
    """

    worker: str
    action: str
    outcome: str
    why: str = ""
    role: str = ""


@dataclass(slots=True)
class _RosterEntry:
    """A worker, and the order in progress for it ("" for none)."""

    # The present role, or the role that the order in progress leads to.
    role: str
    state: str = STARTING
    order: str = START
    # The time at which the order was given.
    ordered_s: float = 0.0
    # The worker's role before a flip.
    previous_role: str = ""
    # The worker's incarnation when the flip was ordered.
    flip_incarnation: str = ""
    incarnation: str = ""
    # The time since which the worker is up in the ordered role; None while it is not.
    up_since_s: float | None = None
    load: float = 0.0


class Roster:
    """The workers of a deployment by name, with their orders."""

    def __init__(self, split: bool, flip_s: float, start_s: float, trial_s: float) -> None:
        """Time limits in seconds: `flip_s` and `start_s` for orders, `trial_s` for links after a change of role.

        `split` means that there are separate prefill and decode workers.
        """
        self._split, self._flip_s, self._start_s, self._trial_s = split, flip_s, start_s, trial_s
        self._entries: dict[str, _RosterEntry] = {}

    def add_found(self, name: str, role: str) -> None:
        """Add a worker that was there when the replanner started."""
        self._entries[name] = _RosterEntry(role, order="")

    def add_started(self, name: str, role: str, now_s: float) -> None:
        """Add a worker that was just started."""
        self._entries[name] = _RosterEntry(role, ordered_s=now_s)

    def record_flip(self, name: str, role: str, now_s: float, order: str = FLIP) -> None:
        """Record that a worker was ordered to change to `role`; with order UNDO, back to it."""
        entry = self._entries[name]
        entry.previous_role, entry.role, entry.state, entry.order = entry.role, role, SWITCHING, order
        entry.ordered_s, entry.flip_incarnation, entry.up_since_s = now_s, entry.incarnation, None

    def record_stop(self, name: str, now_s: float) -> None:
        """Record that a worker was ordered to stop."""
        entry = self._entries[name]
        entry.state, entry.order, entry.ordered_s = DRAINING, STOP, now_s

    def knows(self, name: str) -> bool:
        """Whether there is a worker of this name."""
        return name in self._entries

    def is_starting(self, name: str) -> bool:
        """Whether the worker has not served yet, so that it can be stopped without draining."""
        return self._entries[name].order == START

    def role_of(self, name: str) -> str:
        """The role of worker `name`, or the one it is changing to."""
        return self._entries[name].role

    def workers(self) -> tuple[FleetWorker, ...]:
        """The workers in the form that the replanner expects."""
        return tuple(
            FleetWorker(name, entry.role if self._split else BOTH, entry.state, entry.load)
            for name, entry in sorted(self._entries.items())
        )

    def update_workers(
        self, observed: Iterable[ObservedWorker], statuses: Mapping[str, str], now_s: float
    ) -> list[OrderOutcome]:
        """Update the roster from the workers that the gateway sees and the states that supervisors report.

        Returns the outcomes of orders that were carried out or have failed.
        """
        there = {worker.worker: worker for worker in observed}
        outcomes: list[OrderOutcome] = []
        for name, entry in list(self._entries.items()):
            if statuses.get(name, "") in ENDED_STATES:
                outcomes += self._on_worker_ended(name, entry, statuses[name])
            elif entry.order in (FLIP, UNDO):
                outcomes += self._check_flip(name, entry, there.get(name), now_s)
            else:
                outcomes += self._check_worker(name, entry, there.get(name), now_s)
            if (one := there.get(name)) is not None:
                entry.incarnation, entry.load = one.incarnation, one.num_requests
        return outcomes

    def _on_worker_ended(self, name: str, entry: _RosterEntry, status: str) -> Iterable[OrderOutcome]:
        """A worker has ended for good: fulfils a stop, and fails a start or flip."""
        del self._entries[name]
        if entry.order in (START, FLIP):
            yield OrderOutcome(name, entry.order, FAILED, f"it has {status}")
        elif entry.order == STOP:
            yield OrderOutcome(name, STOP, DONE)
        yield OrderOutcome(name, "", GONE)

    def _check_worker(
        self, name: str, entry: _RosterEntry, worker: ObservedWorker | None, now_s: float
    ) -> Iterable[OrderOutcome]:
        """Update a worker that is not changing its role; `worker` is the gateway's view, None if it is unknown."""
        if (
            entry.order == STOP
            and worker is not None
            and worker.state == "up"
            and now_s - entry.ordered_s > self._flip_s
        ):
            # The gateway that took the order has restarted and has lost the order.
            entry.state, entry.order = READY, ""
            yield OrderOutcome(name, STOP, FAILED, f"it was still up after {self._flip_s:.0f} s")
        elif entry.order == STOP:
            entry.state = DRAINING
        elif worker is None or worker.state == "unfit":
            # The worker's supervisor is restarting it.
            entry.state = STARTING
        elif worker.state == "draining":
            # The replanner ordered no drain, so an operator did.
            entry.state, entry.role = DRAINING, worker.role
        elif worker.linked or entry.state == READY:
            entry.state, entry.role = READY, worker.role
        if entry.order == START and entry.state == READY:
            entry.order = ""
            yield OrderOutcome(name, START, DONE)
        elif entry.order == START and now_s - entry.ordered_s > self._start_s:
            del self._entries[name]
            yield OrderOutcome(name, START, FAILED, f"it was not up after {self._start_s:.0f} s")
            yield OrderOutcome(name, "", GONE)

    def _check_flip(
        self, name: str, entry: _RosterEntry, worker: ObservedWorker | None, now_s: float
    ) -> Iterable[OrderOutcome]:
        """Update a worker that changes its role, or goes back to it."""
        late = now_s - entry.ordered_s > self._flip_s
        if worker is not None and worker.role == entry.role and worker.state != "draining":
            entry.up_since_s = now_s if entry.up_since_s is None else entry.up_since_s
            if worker.state == "up" and worker.linked:
                yield self._flip_done(name, entry)
            elif now_s - entry.up_since_s > self._trial_s and entry.order == FLIP:
                why = f"as a {entry.role} worker it was not linked after {self._trial_s:.0f} s"
                yield OrderOutcome(name, FLIP, UNDO, why, entry.previous_role)
            elif late and entry.order == UNDO:
                yield self._order_failed(name, entry, f"it was not linked after {self._flip_s:.0f} s")
        elif (
            worker is not None
            and worker.role == entry.previous_role
            and worker.incarnation != entry.flip_incarnation
            and worker.state == "up"
        ):
            yield self._order_failed(name, entry, "it came back in its old role")
        elif late:
            yield self._order_failed(name, entry, f"it had not changed its role after {self._flip_s:.0f} s")

    @staticmethod
    def _flip_done(name: str, entry: _RosterEntry) -> OrderOutcome:
        """The worker is in service in its new role."""
        order, entry.state, entry.order = entry.order, READY, ""
        return OrderOutcome(name, order, DONE)

    @staticmethod
    def _order_failed(name: str, entry: _RosterEntry, why: str) -> OrderOutcome:
        """The worker counts as starting in its former role again."""
        order, entry.role, entry.state, entry.order = entry.order, entry.previous_role, STARTING, ""
        return OrderOutcome(name, order, FAILED, why)
