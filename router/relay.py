"""The owner of every request: who works on it, which messages count, when it is over (pure).

    Arrive ─▶ Prefill ─▶ Step(first token) ─▶ Offer ─▶ Admit ─▶ Pulled, Release ─▶ Step … Step(finish)
    ADMITTED  QUEUED     PREFILLED                     TRANSFERRING   DECODING          DONE

An attempt has a number, the epoch. Whatever the workers of an earlier attempt still say is late: counted and dropped.
An attempt that dies before decoding has begun may be followed by one more, which reads prompt and delivered tokens
again; noise is drawn by (seed, position), so the answer goes on as if nothing had happened. Whoever holds
anything for an attempt is in `Live.open` until it says it is done or has been told to let go.

Not covered: text, HTTP and counting (services/gateway); how KV moves (kvtransfer).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from diptych.messages import (
    Abort,
    Admit,
    Beat,
    Failed,
    Generate,
    Hello,
    Linked,
    Offer,
    Output,
    Prefill,
    Pulled,
    Release,
    Renew,
    Staged,
    Step,
    ToWorker,
)
from diptych.request import Stage
from router.admission import Admission
from router.effects import (
    Arrive,
    Cancelled,
    Choice,
    ClientGone,
    Deliver,
    Down,
    Durations,
    Effect,
    Event,
    Fail,
    Finish,
    FleetChange,
    FromWorker,
    Moved,
    Retried,
    Send,
    Stop,
    Tick,
    WorkerLost,
)
from router.fleet import Fleet
from router.live import Live
from router.policy import Answers, Ledger, View, choose, rebind
from router.prefix_index import Chunks, PrefixIndex
from router.verdicts import DEADLINE, INTERNAL, LOST, NO_WORKERS, VERDICTS, Verdict, refused

MAX_ATTEMPTS = 2
REMEMBERED = 8192  # ended requests, so that late messages of theirs can be told from unknown ones
WAITING = frozenset({Stage.PREFILLED, Stage.TRANSFERRING})  # a prefill worker holds KV under a lease


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
    ) -> None:
        """Without `index` no worker is thought to share prefixes."""
        self.fleet, self.admission = fleet or Fleet(), admission or Admission()
        self.index, self.answers = PrefixIndex(0) if index is None else index, Answers()
        self.split, self.lease_s = split, lease_s
        self.live: dict[str, Live] = {}
        self.ledger = Ledger()
        self.late: Counter[str] = Counter()  # messages dropped, by type
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._renewed_s = float("-inf")
        self._effects: list[Effect] = []

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Everything that `event` at `now_s` (a clock that never goes back) makes necessary, in order."""
        self._effects = []
        EVENTS[type(event)](self, event, now_s)
        return self._effects

    # ---- requests come and go

    def _arrive(self, event: Arrive, now_s: float) -> None:
        request, pinned = event.request, event.pin is not None
        if request.id in self.live or request.id in self._ended:
            raise ValueError(f"request {request.id} has arrived before")
        chunks = () if pinned else self.index.cut(request.prompt, request.origin.scope)
        expected_tokens = self.answers.expect(request.sampling.max_tokens)
        live = self.live[request.id] = Live(request, event.pin, pinned, chunks, expected_tokens)
        request.entered_s.setdefault(Stage.ADMITTED, now_s)
        live.first_queued_s = now_s
        if self._expire(live, now_s):
            return
        if not pinned:
            if (refusal := self.admission.refusal(1, len(request.prompt))) is not None:
                return self._fail(live, refused(refusal), refusal.message, now_s)
            self.admission.admit(request.id, len(request.prompt), now_s)
        choice = self._pick(live)
        if choice is None:
            return self._fail(live, NO_WORKERS, self._missing(), now_s)
        self._begin(live, choice, now_s)

    def _pick(self, live: Live, avoid: str | None = None) -> Choice | None:
        if not live.pinned:
            return choose(live.need, self._view, avoid)
        pin = live.choice
        if pin is None or pin.prefill is None:
            return pin if pin and pin.decode in self.fleet.members else None
        return pin if (pin.prefill, pin.decode) in self.fleet.pairs() else None

    def _begin(self, live: Live, choice: Choice, now_s: float) -> None:
        """Start an attempt on the chosen workers."""
        request = live.request
        first = choice.prefill or choice.decode
        live.choice, live.attempts, live.fingerprint = choice, live.attempts + 1, self._fingerprint(first)
        request.move(Stage.QUEUED, now_s)
        order = Prefill if choice.prefill else Generate
        remaining_s = request.deadline_s - now_s
        what = list(request.prompt), list(request.output), request.sampling
        self._send(first, order(request.id, request.epoch, *what, remaining_s, request.origin))
        live.open = {first}
        live.unread_tokens = live.need.prompt_tokens - self._view.shared(first, live.need)
        live.spared_tokens = self._view.shared(choice.decode, live.need)
        self._expect(first, live.chunks)
        self._book(live)

    def _expect(self, worker: str, chunks: Chunks) -> None:
        """From now on the worker is thought to have these chunks."""
        if (member := self.fleet.members.get(worker)) is not None:
            self.index.sent(worker, chunks, member.hello.num_slabs)

    def _leave(self, event: ClientGone, now_s: float) -> None:
        if (live := self.live.get(event.request)) is not None:
            self._end(live, Stage.CANCELLED, Cancelled(event.request), now_s)

    def _stop(self, event: Stop, now_s: float) -> None:
        if (live := self.live.get(event.request)) is not None:
            self._end(live, Stage.DONE, Finish(event.request, "stop"), now_s)

    def _fail(self, live: Live, verdict: Verdict, message: str, now_s: float) -> None:
        fresh = not live.request.output  # once tokens went out, sending it again is the client's decision
        retry, after_s = verdict.retry and fresh, verdict.retry_after_s if fresh else None
        effect = Fail(live.request.id, verdict.status, verdict.code, message, retry, after_s)
        self._end(live, Stage.FAILED, effect, now_s)

    def _end(self, live: Live, stage: Stage, effect: Finish | Fail | Cancelled, now_s: float) -> None:
        """The one way out: everybody lets go, the client hears one terminal effect, nothing is kept."""
        request = live.request
        self._let_go(live)
        if stage is Stage.DONE and not live.pinned:
            self._remember(live)
        request.move(stage, now_s)
        del self.live[request.id]
        self._book(live)
        self.admission.done(request.id, now_s)
        self._ended[request.id] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self._effects.append(effect)

    def _remember(self, live: Live) -> None:
        """Whoever goes on with this text later finds prompt and answer where it was written."""
        request, choice = live.request, live.choice
        self.answers.ended(len(request.output))
        if request.stage is Stage.DECODING and choice is not None:
            text = request.prompt + request.output[:-1]  # the last token has no KV
            self._expect(choice.decode, self.index.cut(text, request.origin.scope, live.chunks))

    def _let_go(self, live: Live) -> None:
        for worker in sorted(live.open):
            self._send(worker, Abort(live.request.id, live.request.epoch))
        live.open.clear()

    def _retry(
        self, live: Live, verdict: Verdict, message: str, now_s: float, avoid: str | None = None
    ) -> None:
        """Begin another attempt if this one may have a successor, else fail."""
        if self._expire(live, now_s):
            return
        self.ledger.book(live.request.id, {})
        allowed = verdict.again and live.attempts < MAX_ATTEMPTS and live.request.stage is not Stage.DECODING
        choice = self._pick(live, avoid) if allowed and not live.pinned else None
        if choice is None:
            return self._fail(live, verdict, message, now_s)
        self._let_go(live)
        live.request.epoch += 1
        self._begin(live, choice, now_s)
        self._effects.append(Retried(live.request.id, verdict.code, live.request.epoch))

    # ---- workers speak

    def _hear(self, event: FromWorker, now_s: float) -> None:
        worker, message = event.worker, event.message
        if isinstance(message, Hello | Beat | Linked):
            return self._change(self.fleet.hear(worker, message, now_s), now_s)
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
        if request.stage is Stage.TRANSFERRING:
            return self._fail(live, INTERNAL, f"{worker} sent tokens before it had the KV", now_s)
        if output.tokens or output.finish:
            self._advance(live, Stage.PREFILLED if prefills else Stage.DECODING, output, now_s)
        request.output.extend(output.tokens)
        if live.room_tokens > live.booked_tokens:
            self._book(live)
        self._effects.append(Deliver(request.id, output))
        if output.finish is not None:
            live.open.discard(worker)  # it has freed everything already
            self._end(live, Stage.DONE, Finish(request.id, output.finish), now_s)

    def _advance(self, live: Live, stage: Stage, output: Output, now_s: float) -> None:
        """Enter `stage` with its first tokens, and tell where the time went."""
        request = live.request
        if request.stage is Stage.QUEUED:
            if "first" not in live.told:
                self._tell_first(live, output.seconds, now_s)
            request.move(stage, now_s)
            self._book(live)
            self.admission.read(request.id, now_s)
        elif "second" not in live.told:
            pulled_s, token_s = request.entered_s[Stage.DECODING], request.entered_s[Stage.PREFILLED]
            transfer_s = min(live.transfer_s, pulled_s - token_s)
            self._tell(
                live,
                "second",
                decode_admission=pulled_s - token_s - transfer_s,
                transfer=transfer_s,
                first_decode=now_s - pulled_s,
            )

    def _tell_first(self, live: Live, seconds: dict[str, float], now_s: float) -> None:
        entered_s = live.request.entered_s
        queued_s = entered_s[Stage.QUEUED]
        queue = min(seconds.get("queue", 0.0), now_s - queued_s)
        prefill = min(seconds.get("prefill", now_s - queued_s), now_s - queued_s - queue)
        self._tell(
            live,
            "first",
            admission=live.first_queued_s - entered_s[Stage.ADMITTED],
            retry=queued_s - live.first_queued_s,
            prefill_queue=queue,
            prefill=prefill,
            deliver=now_s - queued_s - queue - prefill,
        )
        if live.source is None:
            live.told.add("second")  # no hand-off to tell of

    def _tell(self, live: Live, moment: str, **seconds: float) -> None:
        live.told.add(moment)
        if not live.pinned:
            self._effects.append(Durations(live.request.id, seconds))

    def _offer(self, live: Live, worker: str, offer: Offer, now_s: float) -> None:
        request = live.request
        if worker != live.source or request.stage is Stage.TRANSFERRING:
            self.late["Offer"] += 1
            return
        if request.stage is not Stage.PREFILLED:
            return self._fail(live, INTERNAL, f"{worker} offered KV before its token", now_s)
        if self._expire(live, now_s):
            return
        decode = self._rebind(live)
        if decode is None:
            return self._retry(live, NO_WORKERS, self._missing(), now_s)
        live.choice = Choice(worker, decode)
        request.move(Stage.TRANSFERRING, now_s)
        what = list(request.prompt), list(request.output), request.sampling, offer.ticket
        remaining_s = request.deadline_s - now_s
        self._send(decode, Admit(request.id, request.epoch, *what, remaining_s, request.origin))
        live.open.add(decode)
        live.spared_tokens = self._view.shared(decode, live.need)
        self._expect(decode, live.chunks)
        self._book(live)

    def _pulled(self, live: Live, worker: str, pulled: Pulled, now_s: float) -> None:
        request, source = live.request, live.source
        if source is None or worker == source or request.stage is not Stage.TRANSFERRING:
            self.late["Pulled"] += 1
            return
        self._send(source, Release(request.id, request.epoch))
        live.open.discard(source)
        request.move(Stage.DECODING, now_s)
        self._book(live)
        live.transfer_s = pulled.seconds.get("transfer", 0.0) + pulled.seconds.get("verify", 0.0)
        moved = Moved(request.id, source, worker, pulled.transport, pulled.num_bytes, live.transfer_s)
        self._effects.append(moved)

    def _failed(self, live: Live, worker: str, failed: Failed, now_s: float) -> None:
        live.open.discard(worker)  # it has freed everything already
        verdict = VERDICTS.get(failed.code, INTERNAL)
        if failed.code == "draining":
            self.fleet.members[worker].draining = True
        self._retry(live, verdict, failed.message, now_s, avoid=worker if verdict.elsewhere else None)

    # ---- workers come and go

    def _lost(self, event: WorkerLost, now_s: float) -> None:
        self._change(self.fleet.lose(event.worker, event.reason, event.incarnation), now_s)

    def _change(self, changes: list[FleetChange], now_s: float) -> None:
        self._effects += changes
        for change in changes:
            if isinstance(change, Down):
                self.index.forget(change.worker)
                for request in self.ledger.requests(change.worker):
                    self._bereave(self.live[request], change, now_s)

    def _bereave(self, live: Live, down: Down, now_s: float) -> None:
        """A worker of this request is gone: plan another one, begin again, or fail."""
        if live.source is not None and down.worker not in live.open:  # it was only planned
            decode = self._rebind(live)
            if decode is not None:
                live.choice = Choice(live.source, decode)
                return self._book(live)
        live.open.discard(down.worker)
        self._retry(live, LOST, f"{down.worker} was lost: {down.reason}", now_s, avoid=down.worker)

    def _rebind(self, live: Live) -> str | None:
        """The best decode worker for KV that is, or will be, at `live.source`: loads change while a prompt is read."""
        if live.source is None or live.choice is None:
            return None
        if live.pinned:
            return live.choice.decode if live.choice.decode in self.fleet.members else None
        self.ledger.book(live.request.id, {})  # its own plan is no reason to go elsewhere
        return rebind(live.source, live.need, self._view)

    # ---- time passes

    def _tick(self, _event: Tick, now_s: float) -> None:
        for live in list(self.live.values()):
            self._expire(live, now_s)
        self._change(self.fleet.tick(now_s), now_s)
        if now_s - self._renewed_s >= self.lease_s / 3:
            self._renewed_s = now_s
            self._renew()

    def _expire(self, live: Live, now_s: float) -> bool:
        """Fail a request whose time is over. Asked before any work begins, since ticks are coarse."""
        over = live.request.deadline_s <= now_s
        if over:
            self._fail(
                live, DEADLINE, f"no end within the time allowed; it was {live.request.stage.value}", now_s
            )
        return over

    def _renew(self) -> None:
        leases: dict[str, list[tuple[str, int]]] = {}
        for live in self.live.values():
            if live.request.stage in WAITING and live.source is not None:
                leases.setdefault(live.source, []).append((live.request.id, live.request.epoch))
        for worker in sorted(leases):
            self._send(worker, Renew(leases[worker]))

    # ---- books

    def _send(self, worker: str, message: ToWorker) -> None:
        self._effects.append(Send(worker, message))

    def _fingerprint(self, worker: str) -> str:
        return self.fleet.members[worker].hello.fingerprint

    def _missing(self) -> str:
        roles = ("prefill", "decode") if self.split else ("decode",)
        absent = [role for role in roles if not self.fleet.role(role)]
        return f"no {' and no '.join(absent)} worker is up" if absent else "no two workers are linked"

    @property
    def _view(self) -> View:
        return View(self.fleet, self.ledger, self.split, self.index)

    def _book(self, live: Live) -> None:
        live.booked_tokens = live.room_tokens
        self.ledger.book(live.request.id, live.shares)

    def stages(self) -> Counter[str]:
        """How many live requests are in each stage."""
        return Counter(live.request.stage.value for live in self.live.values())


EVENTS: dict[type, Callable[..., None]] = {
    Arrive: Relay._arrive,
    FromWorker: Relay._hear,
    WorkerLost: Relay._lost,
    ClientGone: Relay._leave,
    Stop: Relay._stop,
    Tick: Relay._tick,
}

MESSAGES: dict[type, Callable[..., None]] = {
    Output: Relay._output,
    Offer: Relay._offer,
    Pulled: Relay._pulled,
    Failed: Relay._failed,
}
