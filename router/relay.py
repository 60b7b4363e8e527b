"""The owner of every request: who works on it, which messages count, when it is over (pure).

    Arrive ─▶ queue ─▶ Prefill ─▶ [Staged ─▶ Admit, Staging] ─▶ Step(first token) ─▶ Offer ─▶ Admit or Fetch
    ADMITTED           QUEUED                                   PREFILLED                    TRANSFERRING

    ─▶ Pulled, Release ─▶ Step … Step(finish)
       DECODING            DONE

An attempt has a number, the epoch. Whatever the workers of an earlier attempt still say is late: counted and dropped.
An attempt that dies may be followed by another, at any stage: it reads prompt and delivered tokens again, and since
noise is drawn by (seed, position), grammars and penalties are replayed, the answer goes on as if nothing had happened.
Whoever holds anything for an attempt is in `Live.open` until it says it is done or has been told to let go.

A request is in the queue while no worker holds anything for it: until it has credit (`router.credits`), and while the
workers it needs are away, for as long as there is hope (`router.recovery`).

Not covered: how attempts begin and fail (router.attempts), where requests go (router.places), how KV moves
(kvtransfer), text, HTTP and counting (services/gateway).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable

from diptych.messages import (
    Beat,
    Failed,
    Fetch,
    Hello,
    Linked,
    Offer,
    Output,
    Pulled,
    Release,
    Renew,
    Staged,
    Staging,
    Step,
)
from diptych.request import Stage
from router import waterfall
from router.admission import Admission
from router.attempts import Attempts
from router.docket import Docket, Verdicts
from router.effects import (
    Arrive,
    Cancelled,
    Choice,
    ClientGone,
    Command,
    Deliver,
    Down,
    Effect,
    Event,
    Finish,
    FleetChange,
    FromWorker,
    Moved,
    Quarantined,
    Stop,
    Tick,
    Up,
    WorkerLost,
)
from router.fleet import Fleet
from router.live import Live
from router.orders import Orders
from router.places import Places
from router.policy import Way
from router.prefix_index import PrefixIndex
from router.recovery import Recovery
from router.verdicts import (
    INTERNAL,
    LOST,
    NO_WORKERS,
    QUARANTINED,
    TRANSFER,
    VERDICTS,
    refused,
)

WAITING = frozenset({Stage.PREFILLED, Stage.TRANSFERRING})  # a prefill worker holds KV under a lease
OF_ITSELF = Hello | Beat | Linked  # what a worker says that is of no request
POISON = "workers crashed whenever they worked on this request"


class Relay:
    """All live requests of a gateway. `handle` is the only way in; what it returns is to be done in order."""

    def __init__(
        self,
        fleet: Fleet | None = None,
        admission: Admission | None = None,
        *,
        split: bool = True,
        lease_s: float = 10.0,
        index: PrefixIndex | None = None,
        pipelined: bool = True,
        recovery_s: float = 15.0,
        local_prefill: str = "fallback",
        tpot_s: float | None = None,
    ) -> None:
        """Without `index` no worker is thought to share prefixes.

        `local_prefill`: "never", "fallback", or "auto", where steps of decode workers stay within `tpot_s`.
        """
        self.fleet, self.admission = fleet or Fleet(), admission or Admission()
        self.index = PrefixIndex(0) if index is None else index
        self.split, self.lease_s = split, lease_s
        local, auto = split and local_prefill != "never", split and local_prefill == "auto"
        self.places = Places(self.fleet, self.index, Recovery(recovery_s), split, local, auto, tpot_s)
        self.ledger = self.places.ledger
        self.orders = Orders(self.fleet, self.ledger)
        self.docket = Docket(self.ledger.requests, recovery_s=recovery_s)
        self.attempts = Attempts(self.places, self.docket, self.admission, pipelined)
        self.live, self.queue = self.attempts.live, self.attempts.queue
        self.late: Counter[str] = Counter()  # messages dropped, by type
        self._numbers = itertools.count()
        self._renewed_s = float("-inf")

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Everything that `event` at `now_s` (a clock that never goes back) makes necessary, in order."""
        EVENTS[type(event)](self, event, now_s)
        for worker, order in self.orders.due(self.live):
            self.attempts.send(worker, order)
        return self.attempts.settle(now_s)

    def ways(self) -> list[Way]:
        """The (prefill, decode) workers that can serve now; without a prefill worker where one does both."""
        return self.places.ways()

    def stages(self) -> Counter[str]:
        """How many live requests are in each stage."""
        return Counter(live.request.stage.value for live in self.live.values())

    # ---- requests come and go

    def _arrive(self, event: Arrive, now_s: float) -> None:
        request, pin = event.request, event.pin
        if request.id in self.live or request.id in self.attempts.ended:
            raise ValueError(f"request {request.id} has arrived before")
        live = self.live[request.id] = Live(request, next(self._numbers), pin)
        request.entered_s.setdefault(Stage.ADMITTED, now_s)
        if self.attempts.expire(live, now_s):
            return
        if pin is not None:
            if self.places.pinned(pin):
                return self.attempts.begin(live, pin, now_s)
            return self.attempts.fail(live, NO_WORKERS, self.places.missing(), now_s)
        if self.docket.bans and self.docket.refuses(self.docket.fingerprint(request), now_s):
            return self._quarantine(live, now_s)
        if (refusal := self.admission.refusal(1, len(request.prompt), now_s)) is not None:
            return self.attempts.fail(live, refused(refusal), refusal.message, now_s)
        self.admission.admit(request.id, len(request.prompt), now_s)
        live.chunks = self.index.cut(request.prompt, request.origin.scope)
        live.expected_tokens = self.places.answers.expect(request.sampling.max_tokens)
        self.places.look(now_s)
        self.attempts.wait(live, now_s)

    def _leave(self, event: ClientGone, now_s: float) -> None:
        if (live := self.live.get(event.request)) is not None:
            self.attempts.end(live, Stage.CANCELLED, Cancelled(event.request), now_s)

    def _stop(self, event: Stop, now_s: float) -> None:
        if (live := self.live.get(event.request)) is not None:
            self.attempts.end(live, Stage.DONE, Finish(event.request, "stop"), now_s)

    # ---- workers speak

    def _hear(self, event: FromWorker, now_s: float) -> None:
        worker, message = event.worker, event.message
        if isinstance(message, OF_ITSELF):
            self._change(self.fleet.hear(worker, message, now_s), now_s)
            if not isinstance(message, Beat):
                self.attempts.freed = True
                self.places.look(now_s)
            return
        if not self.fleet.touch(worker, now_s):
            self.late[type(message).__name__] += len(message.outputs) if isinstance(message, Step) else 1
            return
        parts: Iterable[Output | Staged | Offer | Pulled | Failed] = (
            message.outputs if isinstance(message, Step) else (message,)
        )
        for part in parts:
            live = self.live.get(part.request)
            if live is None or part.epoch != live.request.epoch or worker not in live.open:
                self.late[type(part).__name__] += 1
            else:
                MESSAGES[type(part)](self, live, worker, part, now_s)

    def _output(self, live: Live, worker: str, output: Output, now_s: float) -> None:
        request, prefills = live.request, worker == live.source
        if prefills and request.stage is not Stage.QUEUED:
            self.late["Output"] += 1
            return
        if live.source is not None and not prefills and request.stage is not Stage.DECODING:
            return self.attempts.fail(live, INTERNAL, f"{worker} sent tokens before it had the KV", now_s)
        if output.tokens or output.finish:
            self._advance(live, Stage.PREFILLED if prefills else Stage.DECODING, output, now_s)
        request.output.extend(output.tokens)
        if live.room_tokens > live.booked_tokens:
            self.places.book(live)
        self.attempts.effects.append(Deliver(request.id, output))
        if output.finish is not None:
            live.open.discard(worker)  # it has freed everything already
            self.attempts.end(live, Stage.DONE, Finish(request.id, output.finish), now_s)
        elif len(self.docket) and self.docket.ran(request.id, len(request.output)):
            self.attempts.freed = True

    def _advance(self, live: Live, stage: Stage, output: Output, now_s: float) -> None:
        """Enter `stage` with its first tokens, and tell where the time went."""
        if live.request.stage is Stage.QUEUED:
            if "first" not in live.told:
                self.attempts.tell(live, "first", waterfall.first(live, output.seconds, now_s))
            if live.source is None:
                live.told.add("second")  # no hand-off to tell of
            self.attempts.enter(live, stage, now_s)
            self.attempts.book(live)
            self.admission.read(live.request.id, now_s)
        elif "second" not in live.told:
            self.attempts.tell(live, "second", waterfall.second(live, now_s))

    def _staged(self, live: Live, worker: str, staged: Staged, now_s: float) -> None:
        """What is being computed may be pulled meanwhile. A hint that nobody can use is lost, and no loss."""
        request = live.request
        early = request.stage is Stage.QUEUED
        if worker != live.source or not live.staged or not (early or request.stage is Stage.PREFILLED):
            self.late["Staged"] += 1
            return
        if self.attempts.expire(live, now_s):
            return
        if live.target is None and early:  # an Admit without a ticket comes before the first token
            decode = self.places.rebind(live, self.docket)
            if decode is not None:
                live.choice = Choice(worker, decode)
                self.attempts.admit(live, decode, now_s)
            self.attempts.book(live)
        if live.target is not None:
            self.attempts.send(live.target, Staging(request.id, request.epoch, staged.hint))

    def _offer(self, live: Live, worker: str, offer: Offer, now_s: float) -> None:
        request = live.request
        if worker != live.source or request.stage is Stage.TRANSFERRING:
            self.late["Offer"] += 1
            return
        if request.stage is not Stage.PREFILLED:
            return self.attempts.fail(live, INTERNAL, f"{worker} offered KV before its token", now_s)
        if not offer.ticket:  # it would say that the KV is still being computed
            return self.attempts.fail(live, INTERNAL, f"{worker} offered KV without a ticket", now_s)
        if self.attempts.expire(live, now_s):
            return
        live.ticket, live.offered_s = offer.ticket, now_s
        if live.target is not None:
            remaining_s = request.deadline_s - now_s
            fetch = Fetch(request.id, request.epoch, list(request.output), offer.ticket, remaining_s)
            self.attempts.send(live.target, fetch)
        else:
            decode = self.places.rebind(live, self.docket)
            if decode is None:
                return self.attempts.give_up(live, NO_WORKERS, self.places.missing(), now_s)
            live.choice = Choice(worker, decode)
            self.attempts.admit(live, decode, now_s)
        self.attempts.enter(live, Stage.TRANSFERRING, now_s)
        self.attempts.book(live)

    def _pulled(self, live: Live, worker: str, pulled: Pulled, now_s: float) -> None:
        request, source = live.request, live.source
        if source is None or worker != live.target or request.stage is not Stage.TRANSFERRING:
            self.late["Pulled"] += 1
            return
        self.attempts.send(source, Release(request.id, request.epoch))
        live.open.discard(source)
        self.attempts.enter(live, Stage.DECODING, now_s)
        self.attempts.book(live)
        seconds = pulled.seconds
        live.transfer_s = seconds.get("transfer", 0.0) + seconds.get("verify", 0.0)
        if not live.staged:
            self.attempts.hop.heard(now_s - live.offered_s, seconds)
        moved = Moved(
            request.id,
            source,
            worker,
            pulled.transport,
            pulled.num_bytes,
            live.transfer_s,
            seconds.get("hidden", 0.0),
            seconds.get("exposed", 0.0),
        )
        self.attempts.effects.append(moved)

    def _failed(self, live: Live, worker: str, failed: Failed, now_s: float) -> None:
        live.open.discard(worker)  # it has freed everything already
        verdict, source = VERDICTS.get(failed.code, INTERNAL), live.source
        if failed.code == "draining":
            self.fleet.members[worker].close()
        if failed.code == "kv_corrupt" and source is not None:
            self.fleet.corrupt(source, worker, now_s)
        reading = live.request.stage in (Stage.QUEUED, Stage.PREFILLED)
        held = live.request.stage is Stage.TRANSFERRING and (verdict.loss or verdict.elsewhere)
        if source is not None and worker != source and (reading or held) and verdict.again:
            return self.attempts.retarget(live, verdict, failed.message, now_s)
        # A transfer has two ends, and either may be what fails.
        ends = {name for name in (source, worker) if name is not None}
        self.attempts.give_up(
            live, verdict, failed.message, now_s, frozenset(ends if verdict is TRANSFER else {worker})
        )

    # ---- workers come and go

    def _lost(self, event: WorkerLost, now_s: float) -> None:
        self._change(self.fleet.lose(event.worker, event.reason, event.incarnation), now_s)

    def _command(self, event: Command, _now_s: float) -> None:
        self.orders.give(event.worker, event.message)

    def _change(self, changes: list[FleetChange], now_s: float) -> None:
        self.attempts.effects += changes
        self.attempts.freed = self.attempts.freed or bool(changes)
        for change in changes:
            if isinstance(change, Down):
                self.index.forget(change.worker)
                self._mourn(change, now_s)
            elif isinstance(change, Up):
                self.orders.met(change.worker)
                ended = self.fleet.members[change.worker].ended
                self._judge(self.docket.cause(change.worker, ended), now_s)

    def _mourn(self, down: Down, now_s: float) -> None:
        """A worker is gone: for each of its requests another one, another attempt, or the end."""
        lives = [self.live[name] for name in self.ledger.requests(down.worker)]
        there = [live for live in lives if down.worker in live.open]
        for live in there:
            live.open.discard(down.worker)
        delivered = {live.request.id: len(live.request.output) for live in there if not live.pinned}
        self._judge(self.docket.crash(down.worker, delivered, now_s), now_s)
        message = f"{down.worker} was lost: {down.reason}"
        for live in lives:
            if live.request.id not in self.live:
                continue  # the judge has seen to it
            if live.source not in (None, down.worker) and live.request.stage is not Stage.DECODING:
                self.attempts.retarget(live, LOST, message, now_s)
            else:
                self.attempts.give_up(live, LOST, message, now_s)

    def _judge(self, verdicts: Verdicts, now_s: float) -> None:
        """What the docket has found out."""
        self.attempts.freed = self.attempts.freed or bool(verdicts.released)
        for name in verdicts.quarantined:
            if (live := self.live.get(name)) is not None:
                self.docket.ban(self.docket.fingerprint(live.request), now_s)
                self._quarantine(live, now_s)

    def _quarantine(self, live: Live, now_s: float) -> None:
        self.attempts.effects.append(Quarantined(live.request.id))
        self.attempts.fail(live, QUARANTINED, POISON, now_s)

    # ---- time passes

    def _tick(self, _event: Tick, now_s: float) -> None:
        self.attempts.freed = True
        for live in list(self.live.values()):
            self.attempts.expire(live, now_s)
        self._change(self.fleet.tick(now_s), now_s)
        self._judge(self.docket.tick(now_s), now_s)
        self.places.look(now_s)
        for live in list(self.queue.order()):
            if not self.places.recovery.hopes(live.need.fingerprint, now_s):
                self.attempts.fail(live, live.verdict, self.places.missing(), now_s)
        if now_s - self._renewed_s >= self.lease_s / 3:
            self._renewed_s = now_s
            self._renew()

    def _renew(self) -> None:
        leases: dict[str, list[tuple[str, int]]] = {}
        for live in self.live.values():
            if live.request.stage in WAITING and live.source is not None:
                leases.setdefault(live.source, []).append((live.request.id, live.request.epoch))
        for worker in sorted(leases):
            self.attempts.send(worker, Renew(leases[worker]))


EVENTS: dict[type, Callable[..., None]] = {
    Arrive: Relay._arrive,
    FromWorker: Relay._hear,
    WorkerLost: Relay._lost,
    ClientGone: Relay._leave,
    Stop: Relay._stop,
    Command: Relay._command,
    Tick: Relay._tick,
}

MESSAGES: dict[type, Callable[..., None]] = {
    Output: Relay._output,
    Staged: Relay._staged,
    Offer: Relay._offer,
    Pulled: Relay._pulled,
    Failed: Relay._failed,
}
