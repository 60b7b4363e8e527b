"""The attempts of requests: how one begins, is given up for another, and how a request ends (pure).

    queue ──begin──▶ attempt ──give_up──▶ queue          end: from anywhere, once
                        └──retarget: another decode worker, same attempt

What is to be done about it is appended to `effects`. Which messages count, and what they mean, is the relay's matter.
"""

from __future__ import annotations

from collections import OrderedDict

from diptych.messages import Abort, Admit, Generate, Prefill, ToWorker
from diptych.request import Stage
from router.admission import Admission
from router.docket import Docket
from router.effects import (
    Began,
    Cancelled,
    Choice,
    Durations,
    Effect,
    Entered,
    Fail,
    Finish,
    Local,
    Queued,
    Retried,
    Send,
)
from router.live import Live
from router.overlap import Hop
from router.places import Places, named
from router.policy import Way
from router.queue import Queue
from router.verdicts import DEADLINE, Verdict

MAX_LOSSES = 8  # attempts of one request given up for workers that were lost or had to end
MAX_FAILURES = 2  # and for anything else that another attempt may mend
REMEMBERED = 8192  # ended requests, so that late messages of theirs can be told from unknown ones


class Attempts:
    """All requests that have not ended. `freed`: somebody in the queue may have got a way since the last look at it."""

    def __init__(self, places: Places, docket: Docket, admission: Admission, pipelined: bool) -> None:
        self.places, self.docket, self.admission, self.pipelined = places, docket, admission, pipelined
        self.live: dict[str, Live] = {}
        self.ended: OrderedDict[str, None] = OrderedDict()
        self.queue, self.hop = Queue(), Hop()
        self.effects: list[Effect] = []
        self.freed = False
        self._put: list[str] = []  # into the queue, since the last `settle`

    def settle(self, now_s: float) -> list[Effect]:
        """Begin what can begin; returns all effects since the last time."""
        if self.freed and len(self.queue):
            self.pump(now_s)
        told, self.effects = self.effects, []
        told += [Queued(name) for name in self._put if name in self.queue]
        self._put, self.freed = [], False
        return told

    def wait(self, live: Live, now_s: float) -> None:
        """Into the queue, if there is hope for a way."""
        if not self.places.recovery.hopes(live.need.fingerprint, now_s):
            return self.fail(live, live.verdict, self.places.missing(), now_s)
        self.queue.put(live)
        self._put.append(live.request.id)
        self.freed = True

    def pump(self, now_s: float) -> None:
        """Begin whatever in the queue has a way with room, in its order; nobody overtakes for want of room."""
        found: dict[str | None, list[Way]] = {
            None: self.places.ways()
        }  # by the version that a request began with, if any
        everyone, closed = {name for way in found[None] for name in named(way)}, set[str]()
        for live in self.queue.order():
            if self.expire(live, now_s):
                continue
            version = live.need.fingerprint
            if version not in found:
                found[version] = self.places.ways(live.need)
            choice = self.places.pick(live, found[version], self.docket, closed)
            if choice is not None:
                self.begin(live, choice, now_s)
            elif everyone <= closed:
                return

    def begin(self, live: Live, choice: Choice, now_s: float) -> None:
        """Start an attempt on the chosen workers."""
        request, first = live.request, choice.prefill or choice.decode
        live.begin(
            choice, self.places.fleet.members[first].hello.fingerprint, self._worth_staging(live, choice)
        )
        if live.first_queued_s is None:
            live.first_queued_s = now_s
        self.enter(live, Stage.QUEUED, now_s)
        what = list(request.prompt), list(request.output), request.sampling
        remaining_s = request.deadline_s - now_s
        if choice.prefill:
            order: ToWorker = Prefill(
                request.id, request.epoch, *what, remaining_s, request.origin, live.staged
            )
        else:
            order = Generate(request.id, request.epoch, *what, remaining_s, request.origin)
        self.send(first, order)
        live.open = {first}
        self.effects.append(Began(request.id, request.epoch, choice, live.staged))
        if self.places.split and choice.prefill is None and not live.pinned:
            self.effects.append(Local(request.id, self.places.why_local()))
        self.places.begin(live, choice)
        self.book(live)
        self.queue.take(live)

    def _worth_staging(self, live: Live, choice: Choice) -> bool:
        request = live.request
        decodes = request.sampling.max_tokens - len(request.output) > 1  # else nothing is handed over
        if live.pinned or not self.pipelined or not decodes or choice.prefill is None:
            return False
        return self.places.move_s(choice, live.need) >= self.hop.seconds

    def enter(self, live: Live, stage: Stage, now_s: float) -> None:
        """Move the request on, and say so."""
        live.request.move(stage, now_s)
        self.effects.append(Entered(live.request.id, stage))

    def fail(self, live: Live, verdict: Verdict, message: str, now_s: float) -> None:
        """End the request with an error for its client."""
        name = live.request.id
        effect = Fail(name, verdict.status, verdict.code, message, verdict.retry, verdict.retry_after_s)
        self.end(live, Stage.FAILED, effect, now_s)

    def end(self, live: Live, stage: Stage, effect: Finish | Fail | Cancelled, now_s: float) -> None:
        """The one way out: everybody lets go, the client hears one terminal effect, nothing is kept."""
        request = live.request
        self.let_go(live)
        if stage is Stage.DONE and not live.pinned:
            self.places.remember(live)
        request.move(stage, now_s)
        del self.live[request.id]
        self.book(live)
        self.queue.remove(request.id)
        self.docket.forget(request.id)
        self.admission.done(request.id, now_s)
        self.ended[request.id] = None
        if len(self.ended) > REMEMBERED:
            self.ended.popitem(last=False)
        self.effects.append(effect)

    def let_go(self, live: Live) -> None:
        """Whoever holds something for its attempt is told to free it."""
        for worker in sorted(live.open):
            self.send(worker, Abort(live.request.id, live.request.epoch))
        live.open.clear()

    def give_up(
        self,
        live: Live,
        verdict: Verdict,
        message: str,
        now_s: float,
        avoid: frozenset[str] = frozenset(),
    ) -> None:
        """This attempt is over: into the queue for another one, if it may have a successor; rather not by `avoid`."""
        if self.expire(live, now_s) or not self._pardons(live, verdict, message, now_s):
            return
        found = self.places.ways(live.need)
        if verdict.elsewhere and found and all(avoid & named(way) for way in found):
            return self.fail(live, verdict, message, now_s)
        self._again(live, verdict, now_s, avoid)

    def _pardons(self, live: Live, verdict: Verdict, message: str, now_s: float) -> bool:
        """Count it; fails the request that may not go on."""
        live.losses += verdict.loss
        live.failures += not verdict.loss
        few = live.losses <= MAX_LOSSES and live.failures <= MAX_FAILURES
        if verdict.again and few and not live.pinned:
            return True
        self.fail(live, verdict, message, now_s)
        return False

    def _again(self, live: Live, verdict: Verdict, now_s: float, avoid: frozenset[str] = frozenset()) -> None:
        request = live.request
        failed = live.avoid | avoid  # whoever failed it before is no better a choice now
        self.let_go(live)
        live.wait()
        live.verdict, live.avoid = verdict, failed
        self.effects.append(Retried(request.id, verdict.code, request.epoch, len(request.output)))
        self.enter(live, Stage.ADMITTED, now_s)
        self.book(live)
        self.wait(live, now_s)

    def retarget(self, live: Live, verdict: Verdict, message: str, now_s: float) -> None:
        """Its decode worker is out, its prefill worker goes on: another may take what that one reads, or holds."""
        if self.expire(live, now_s):
            return
        if live.target is not None and not self._pardons(live, verdict, message, now_s):
            return
        live.target = None
        decode = self.places.rebind(live, self.docket)
        if decode is None:
            again = not live.pinned
            return self._again(live, verdict, now_s) if again else self.fail(live, verdict, message, now_s)
        live.choice = Choice(live.source, decode)
        if live.request.stage is Stage.TRANSFERRING:
            self.admit(live, decode, now_s)
        self.book(live)

    def admit(self, live: Live, decode: str, now_s: float) -> None:
        """Tell a decode worker of the request, with the ticket if there is one already."""
        request = live.request
        what = list(request.prompt), list(request.output), request.sampling, live.ticket
        remaining_s = request.deadline_s - now_s
        self.send(decode, Admit(request.id, request.epoch, *what, remaining_s, request.origin))
        live.target, live.offered_s = decode, now_s
        live.open.add(decode)
        live.heard.add(self.places.fleet.members[decode].hello.incarnation)
        self.places.admit(live, decode)

    def expire(self, live: Live, now_s: float) -> bool:
        """Fail a request whose time is over. Asked before any work begins, since ticks are coarse."""
        over = live.request.deadline_s <= now_s
        if over:
            text = f"no end within the time allowed; it was {live.request.stage.value}"
            self.fail(live, DEADLINE, text, now_s)
        return over

    def send(self, worker: str, message: ToWorker) -> None:
        """Have a message sent."""
        self.effects.append(Send(worker, message))

    def book(self, live: Live) -> None:
        """Write down what it asks of workers now; that may be less than before."""
        self.places.book(live)
        self.freed = True

    def tell(self, live: Live, moment: str, seconds: dict[str, float]) -> None:
        """Where its time went until `moment`; once, and not of canaries."""
        live.told.add(moment)
        if not live.pinned:
            self.effects.append(Durations(live.request.id, seconds))
