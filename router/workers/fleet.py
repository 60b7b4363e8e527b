"""The fleet: which workers live, their latest statistics, and which decode worker can pull from which prefill worker
(pure).

A worker is a member from its `Hello` until it is lost: it has been silent for `lost_s`, says Hello over a new link, its
engine has been stuck for `stuck_s` seconds, or the gateway cannot reach it. A lost worker must say `Hello` again; its
heartbeats alone do not bring it back, since its requests have moved to other workers. A worker that was lost because
its engine was stuck becomes a member again when the engine moves.

Only one worker of a name is a member. A second worker with the same name waits. If the member sends a message
meanwhile, the second one is rejected; if the member is lost, the second one takes the name. So two processes with the
same name do not replace each other again and again, and a life that was replaced while it was disconnected does not
come back.

Prefill and decode workers are paired only if their fingerprints are equal and they share a KV class. A link over which
KV repeatedly arrived corrupt is not used for a while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from msgspec import structs

from diptych.messages import (
    SILENCE_S,
    Heartbeat,
    Hello,
    Linked,
    Opened,
    OpenTransport,
    Peer,
    Unpeer,
)
from router.effects import FleetChange, RejectSession, SendMessage, WorkerDown, WorkerUnfit, WorkerUp
from router.workers.kv_classes import (
    can_exchange_kv,
    classes_of,
    shared_classes,
)
from router.workers.liveness import LivenessMonitor
from router.workers.previous_lives import PreviousLives
from router.workers.worker_fit import find_misfit
from router.workers.worker_state import KvLink, WorkerState

ROLES = ("prefill", "decode")
# Seconds between two attempts to make a link, since the obstacle may be gone by then.
LINK_RETRY_S = 30.0
# Seconds for which a rejected worker is listed as unfit.
REJECTION_SHOWN_S = 60.0
# If a member sends a message this many seconds after another worker of its name appeared, the member is alive.
RIVAL_GRACE_S = 2.0
# Number of unfit workers that are listed.
MAX_UNFIT = 64
# A link is not used for `LINK_RETRY_S` after this many corrupt transfers within this many seconds.
CORRUPT_TIMES, CORRUPT_WITHIN_S = 3, 60.0


@dataclass(slots=True)
class _NameRival:
    """A second worker with a member's name: when it appeared, and when its last message came."""

    hello: Hello
    since_s: float
    seen_s: float


def describe_mismatch(left: Hello, right: Hello) -> str:
    """Why two workers cannot be paired: the differing fields of both identities and KV classes side by side."""
    names = sorted(left.identity.keys() | right.identity.keys())
    rows = [(name, left.identity.get(name, "-"), right.identity.get(name, "-")) for name in names]
    if not shared_classes(left, right):
        rows.append(("kv_classes", " ".join(classes_of(left)), " ".join(classes_of(right))))
    rows = [row for row in rows if row[1] != row[2]] or [("fingerprint", left.fingerprint, right.fingerprint)]
    rows = [("", left.worker, right.worker), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".strip() for a, b, c in rows)


class Fleet:
    """All living workers by name."""

    def __init__(
        self, lost_s: float = SILENCE_S, stuck_s: float = 6.0, tokenizer: str = "", kv_keep: float = 1.0
    ) -> None:
        """`tokenizer` and `kv_keep` are those of the gateway (`router.workers.worker_fit.find_misfit`)."""
        self.lost_s, self.stuck_s, self.tokenizer, self.kv_keep = lost_s, stuck_s, tokenizer, kv_keep
        self.workers: dict[str, WorkerState] = {}
        # Grows with every change of what the members can serve: who is one, drains, is linked, and its Hello.
        self.version = 0
        # Number of links that were dropped because of corrupt KV.
        self.links_given_up = 0
        self._previous_lives = PreviousLives(self.workers)
        # Workers that were lost with a stuck engine, and the latest Hello of each since then.
        self._stuck: dict[str, Hello | None] = {}
        self._unfit: dict[str, str] = {}
        # Workers that wait for a name which a member has.
        self._rivals: dict[str, _NameRival] = {}
        # Why and when each process was rejected, by name and process.
        self._rejected: dict[str, tuple[str, float]] = {}
        self._corrupt_s: dict[tuple[str, str], deque[float]] = {}
        # Members that had been silent for `liveness.QUIET_AFTER_S` at the last tick.
        self.quiet: frozenset[str] = frozenset()
        self._liveness = LivenessMonitor(lost_s)

    def on_message(
        self, worker: str, message: Hello | Heartbeat | Linked | Opened, now_s: float
    ) -> list[FleetChange]:
        """Handle a worker's message about itself; messages of an earlier life are ignored."""
        if isinstance(message, Hello):
            return self._on_hello(message, now_s) if message.worker == worker else []
        if isinstance(message, Heartbeat):
            return self._on_heartbeat(worker, message, now_s)
        if (worker_state := self.workers.get(worker)) is not None:
            worker_state.seen_s = now_s
            if isinstance(message, Opened):
                return self._on_transport_opened(worker_state, message, now_s)
            return self._on_linked(worker_state, message, now_s)
        return []

    def _on_heartbeat(self, worker: str, heartbeat: Heartbeat, now_s: float) -> list[FleetChange]:
        """Update a member's statistics, or remove it if its engine is stuck."""
        still_s, worker_state = heartbeat.stats.stuck_s, self.workers.get(worker)
        if worker_state is None:
            hello = self._stuck.get(worker)
            self._previous_lives.mark_seen(worker)
            if hello is None or hello.incarnation != heartbeat.incarnation or still_s > 0:
                return []
            return self._add_worker(hello, now_s)
        if heartbeat.incarnation != worker_state.hello.incarnation:
            rival = self._rivals.get(worker)
            if rival is not None and rival.hello.incarnation == heartbeat.incarnation:
                rival.seen_s = now_s
            return []
        worker_state.seen_s, worker_state.stats = now_s, heartbeat.stats
        if heartbeat.stats.draining:
            self.stop_accepting(worker)
        if still_s < self.stuck_s:
            return self._reject_rival(worker_state, now_s)
        self._stuck[worker] = None
        return self.remove_worker(worker, f"its engine has been stuck for {still_s:.0f} s")

    def start_draining(self, worker: str, accepts_pending: bool) -> None:
        """No request starts at this member any more. With `accepts_pending`, those that are on their way may arrive."""
        self.workers[worker].draining, self.workers[worker].accepts_pending = True, accepts_pending
        self.version += 1

    def stop_accepting(self, worker: str) -> None:
        """A member itself reports that it takes no new requests."""
        worker_state = self.workers[worker]
        if not worker_state.draining or worker_state.accepts_pending:
            self.start_draining(worker, accepts_pending=False)

    def mark_seen(self, worker: str, now_s: float) -> bool:
        """Note that the worker is alive, since a message of it arrived; False if it is not a member."""
        worker_state = self.workers.get(worker)
        if worker_state is not None:
            worker_state.seen_s = now_s
        return worker_state is not None

    def _on_hello(self, hello: Hello, now_s: float) -> list[FleetChange]:
        """Add a worker, unless it is unfit, stuck, or has the name of a living member."""
        problem = find_misfit(hello, self.tokenizer, self.kv_keep)
        if hello.role not in ROLES:
            problem = f"role {hello.role!r} is not one of {', '.join(ROLES)}"
        if problem is not None:
            self._unfit.pop(hello.worker, None)
            self._unfit[hello.worker] = problem
            if len(self._unfit) > MAX_UNFIT:
                del self._unfit[next(iter(self._unfit))]
            return [WorkerUnfit(hello.worker, problem)]
        before = self._previous_lives.find_hello(hello.worker)
        if hello.worker in self._stuck and before is not None and before.incarnation == hello.incarnation:
            # The worker is connected again, but its engine is still stuck.
            self._stuck[hello.worker] = hello
            return []
        known = self.workers.get(hello.worker)
        if known is not None and known.hello.incarnation != hello.incarnation:
            if self._previous_lives.is_replaced(hello):
                return self._reject_worker(hello, known.hello, now_s)
            if not _is_successor(hello, known.hello):
                self._rivals[hello.worker] = _NameRival(hello, now_s, now_s)
                return []
        return self._add_worker(hello, now_s)

    def _reject_rival(self, worker_state: WorkerState, now_s: float) -> list[FleetChange]:
        """A member sent a message, so it lives: reject the second worker of its name once `RIVAL_GRACE_S` has
        passed.
        """
        rival = self._rivals.get(worker_state.name)
        if rival is None or now_s - rival.since_s < RIVAL_GRACE_S:
            return []
        del self._rivals[worker_state.name]
        return self._reject_worker(rival.hello, worker_state.hello, now_s)

    def _reject_worker(self, hello: Hello, holder_hello: Hello, now_s: float) -> list[FleetChange]:
        """Reject a worker because the living worker of `holder_hello` has its name."""
        why = f"the gateway has a living worker {holder_hello.worker} on {holder_hello.host} (pid {holder_hello.pid})"
        who = f"{hello.worker} on {hello.host} (pid {hello.pid})"
        self._rejected[who] = (why, now_s)
        return [WorkerUnfit(who, why), RejectSession(hello.worker, hello.link, why)]

    def _add_worker(self, hello: Hello, now_s: float) -> list[FleetChange]:
        """Make a worker a member, in place of an earlier life of it, and announce it to its peers."""
        known = self.workers.get(hello.worker)
        changes: list[FleetChange] = []
        if known is not None:
            if (known.hello.incarnation, known.hello.link) == (hello.incarnation, hello.link):
                known.seen_s = now_s
                return self._reject_rival(known, now_s)
            again = known.hello.incarnation == hello.incarnation
            changes += self._remove_worker(hello.worker, "its link broke" if again else "it has restarted")
        self._previous_lives.begin_life(hello)
        self.version += 1
        worker_state = self.workers[hello.worker] = WorkerState(hello, now_s, ended=self._previous_end(hello))
        self._stuck.pop(hello.worker, None)
        self._unfit.pop(hello.worker, None)
        up = WorkerUp(hello.worker, hello.role, hello.incarnation, hello.link)
        return [*changes, up, *self._announce_peers(worker_state)]

    def _previous_end(self, hello: Hello) -> str:
        """How the life before this one ended. A worker that returns as the same process has not ended: "alive"."""
        before = self._previous_lives.find_hello(hello.worker)
        if before is None:
            return hello.ended
        changed_role = (before.host, before.pid) == (hello.host, hello.pid) and before.role != hello.role
        return "alive" if changed_role or before.incarnation == hello.incarnation else hello.ended

    def _announce_peers(self, worker_state: WorkerState) -> list[FleetChange]:
        """Tell decode workers about matching prefill workers; report the worker as unfit if none matches."""
        changes: list[FleetChange] = []
        for other in self._opposite_role(worker_state):
            if can_exchange_kv(other.hello, worker_state.hello):
                source, target = (
                    (worker_state, other) if worker_state.role == "prefill" else (other, worker_state)
                )
                changes.append(_peer_message(source, target))
        text = self._mismatch_of(worker_state)
        return changes if text is None else [WorkerUnfit(worker_state.name, text)]

    def _opposite_role(self, worker_state: WorkerState) -> list[WorkerState]:
        """The members with which this worker could be paired."""
        return self.workers_of("decode" if worker_state.role == "prefill" else "prefill")

    def _mismatch_of(self, worker_state: WorkerState) -> str | None:
        """Why no worker of the other role can exchange KV with this one; None if one can, or none is there."""
        others = self._opposite_role(worker_state)
        if not others or any(can_exchange_kv(other.hello, worker_state.hello) for other in others):
            return None
        return describe_mismatch(others[0].hello, worker_state.hello)

    def find_mismatches(self) -> dict[str, str]:
        """Workers that can serve with no other worker, and why."""
        mismatches = {name: self._mismatch_of(self.workers[name]) for name in sorted(self.workers)}
        rejected = {who: why for who, (why, _) in self._rejected.items()}
        return self._unfit | rejected | {name: text for name, text in mismatches.items() if text is not None}

    def known_hellos(self) -> list[Hello]:
        """The Hello of every member, and the last one of every worker that was lost and may come back."""
        away = self._previous_lives.hellos_away()
        return [*away, *(self.workers[name].hello for name in sorted(self.workers))]

    def remembers_worker(self, worker: str) -> bool:
        """Whether the worker is a member, or was lost and may come back."""
        return worker in self.workers or worker in self._previous_lives

    def _on_transport_opened(self, source: WorkerState, opened: Opened, now_s: float) -> list[FleetChange]:
        """A prefill worker has opened another transport: decode workers that could not reach it try again."""
        self.version += 1
        if opened.error:
            why = f"{opened.transport}: {opened.error}"
            for decode in self.workers_of("decode"):
                if source.name in decode.link_errors:
                    decode.link_errors[source.name] = why
            return []
        endpoints = source.hello.endpoints | {opened.transport: opened.endpoint}
        source.hello = structs.replace(source.hello, endpoints=endpoints)
        changes: list[FleetChange] = []
        for decode in self.workers_of("decode"):
            if source.name in decode.link_errors and can_exchange_kv(source.hello, decode.hello):
                decode.link_retry_s[source.name] = now_s + LINK_RETRY_S
                changes.append(_peer_message(source, decode))
        return changes

    def _on_linked(self, decode: WorkerState, linked: Linked, now_s: float) -> list[FleetChange]:
        """Record a decode worker's measured link, or why it has none; ask for a transport if that would help."""
        self.version += 1
        source = self.workers.get(linked.peer)
        if source is None or source.hello.incarnation != linked.incarnation or source.role != "prefill":
            return []
        if not shared_classes(source.hello, decode.hello):
            # No message asked for this link.
            return []
        _drop_link(decode, linked.peer)
        if linked.error or not linked.transport:
            decode.link_errors[linked.peer] = linked.error or "no transport reaches it"
            decode.link_retry_s[linked.peer] = now_s + LINK_RETRY_S
            if linked.wants:
                return [SendMessage(linked.peer, OpenTransport(linked.wants))]
        else:
            link = KvLink(linked.incarnation, linked.transport, linked.gb_per_s, linked.latency_us)
            decode.links[linked.peer] = link
        return []

    def remove_worker(self, worker: str, reason: str, incarnation: str | None = None) -> list[FleetChange]:
        """A worker (only this `incarnation`, if given) is lost; decode workers are asked to drop their links to it."""
        worker_state = self.workers.get(worker)
        if worker_state is None or incarnation not in (None, worker_state.hello.incarnation):
            return []
        changes, rival = self._remove_worker(worker, reason), self._rivals.pop(worker, None)
        return changes if rival is None else [*changes, *self._add_worker(rival.hello, rival.seen_s)]

    def _remove_worker(self, worker: str, reason: str) -> list[FleetChange]:
        """Remove a member with its links, and tell decode workers that it is gone."""
        worker_state = self.workers.pop(worker)
        self.version += 1
        for name in self._previous_lives.end_life(worker_state.hello, worker_state.draining):
            self._stuck.pop(name, None)
        for pair in [pair for pair in self._corrupt_s if worker in pair]:
            del self._corrupt_s[pair]
        changes: list[FleetChange] = [WorkerDown(worker, worker_state.hello.incarnation, reason)]
        if worker_state.role == "prefill":
            for decode in self.workers_of("decode"):
                _drop_link(decode, worker)
                if can_exchange_kv(worker_state.hello, decode.hello):
                    changes.append(SendMessage(decode.name, Unpeer(worker, worker_state.hello.incarnation)))
        return changes

    def record_corruption(self, source: str, target: str, now_s: float) -> None:
        """KV that `target` pulled from `source` was corrupt.

        If that happens too often, the link is not used for a while.
        """
        decode = self.workers.get(target)
        if decode is None or source not in decode.links:
            return
        times_s = self._corrupt_s.setdefault((source, target), deque(maxlen=CORRUPT_TIMES))
        times_s.append(now_s)
        if len(times_s) == CORRUPT_TIMES and now_s - times_s[0] <= CORRUPT_WITHIN_S:
            times_s.clear()
            self.links_given_up += 1
            self.version += 1
            _drop_link(decode, source)
            decode.link_errors[source] = (
                f"KV came out corrupt {CORRUPT_TIMES} times; not used for {LINK_RETRY_S:g} s"
            )
            decode.link_retry_s[source] = now_s + LINK_RETRY_S

    def check_silence(self, now_s: float) -> list[FleetChange]:
        """Remove the workers that missed their heartbeats for `lost_s`, and retry the links that could not be made.

        The first tick after a long pause does neither: heartbeats of that time are handled before the next one.
        """
        silent = self._liveness.check({name: one.seen_s for name, one in self.workers.items()}, now_s)
        self.quiet = silent.quiet
        if silent.overslept:
            return []
        lost = [
            change
            for name in sorted(silent.lost)
            for change in self.remove_worker(name, f"silent for {self.lost_s:g} s")
        ]
        for who in [who for who, (_, at_s) in self._rejected.items() if now_s - at_s > REJECTION_SHOWN_S]:
            del self._rejected[who]
        return lost + self._retry_links(now_s)

    def _retry_links(self, now_s: float) -> list[FleetChange]:
        """Send `Peer` again for every failed link whose time to retry has come."""
        changes: list[FleetChange] = []
        for decode in self.workers_of("decode"):
            for name in sorted(name for name, due_s in decode.link_retry_s.items() if due_s <= now_s):
                decode.link_retry_s[name] = now_s + LINK_RETRY_S
                changes.append(_peer_message(self.workers[name], decode))
        return changes

    def workers_of(self, role: str) -> list[WorkerState]:
        """Living members of a role, sorted by name."""
        return [self.workers[name] for name in sorted(self.workers) if self.workers[name].role == role]

    def linked_pairs(self) -> list[tuple[str, str]]:
        """Linked (prefill, decode) pairs without draining workers, sorted by name."""
        open_prefill = {
            worker_state.name for worker_state in self.workers_of("prefill") if not worker_state.draining
        }
        decode = [worker_state for worker_state in self.workers_of("decode") if not worker_state.draining]
        return sorted(
            (source, worker_state.name)
            for worker_state in decode
            for source in worker_state.links
            if source in open_prefill
        )


def _is_successor(hello: Hello, known_hello: Hello) -> bool:
    """Whether the life in `hello` clearly follows `known_hello`, so that the latter is over.

    True if the supervisor reports how the previous process ended, or if the same process has begun a new life (a change
    of role).
    """
    return bool(hello.ended) or (known_hello.host, known_hello.pid) == (hello.host, hello.pid)


def _peer_message(source: WorkerState, target: WorkerState) -> SendMessage:
    """Tell the decode worker `target` how to reach the prefill worker `source`."""
    hello = source.hello
    return SendMessage(target.name, Peer(hello.worker, hello.incarnation, hello.endpoints))


def _drop_link(decode: WorkerState, source: str) -> None:
    """Forget a decode worker's link to `source`, and its errors."""
    for table in (decode.links, decode.link_errors, decode.link_retry_s):
        table.pop(source, None)
