"""The replanner: hears of requests, looks at the traffic now and then, and says what to change in the fleet.

    replanner = Replanner(policy, judge, Journal(path), start_s=now_s)
    replanner.arrived(at_s, prompt_tokens)              # of every request
    replanner.ended(at_s, prompt_tokens, output_tokens, good=True)
    decision = replanner.tick(now_s, workers)           # every second or so
    for action in decision.actions: ...                 # Flip(worker, role) | Start(role, count) | Stop(worker)
    replanner.failed(now_s, worker, why)                # if one could not be done

Pure: it reads no clock, and writes to nothing but the journal that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from planner.decide import (
    READY,
    STARTING,
    TURNING,
    Decision,
    Policy,
    Situation,
    Worker,
    decide,
    fleet_of,
)
from planner.detect import REFERENCE, STRETCHES, Detector, Shift, busiest, short
from planner.forecast import outlook
from planner.journal import Failed, Head, Heard, Journal, Line, Look
from planner.known import Fleet, Judge, Known
from planner.windows import Bucket, Mix, Windows, mixed

GRID = 1.08  # rates are rounded up to powers of it, so that the judge is asked the same question again
ENOUGH = 40  # requests, from which on lengths are known, if they are far from what they were
FAR = 1.5  # ratio of means; lengths that change by less are taken from all of `settle_s`
STRAIN, MOST_STRAIN, RELIEF = 1.1, 2.0, 0.98
BREACH_LEVEL = 1e-4


class Replanner:
    """Windows, detector and decisions in one loop, driven by the moments that it is told."""

    def __init__(
        self, policy: Policy, judge: Judge, journal: Journal | None = None, start_s: float = 0.0
    ) -> None:
        """`start_s` is now, on the clock of all later events. Raises OSError if the journal cannot be written."""
        self.policy, self._judge = policy, Known(judge)
        self._journal = journal or Journal()
        keep_s = max((REFERENCE + max(STRETCHES) + 1) * policy.window_s, policy.settle_s + policy.window_s)
        self._windows = Windows(policy.bucket_s, keep_s, start_s)
        self._detector = Detector(policy.window_s, policy.bucket_s, policy.false_alarms_per_day, start_s)
        self._barred: dict[str, float] = {}  # worker -> until when
        self._workers: tuple[Worker, ...] | None = None  # as the journal knows them
        self._mix: Mix | None = None
        self._old: Mix | None = None  # what is planned with if too little comes to know the new one
        self._mix_s = start_s  # from when on arrivals count for a new mix
        self._renew_s = math.inf  # when the mix is taken anew, from more answers
        self._review_s = start_s + policy.window_s  # when the plan is next looked at, alarm or not
        self._reviews_end_s = start_s + policy.window_s
        self._target: Fleet | None = None
        self._expected = 1.0  # attainment, of the fleet of the last decision
        self._changed_s = start_s
        self._grew_s = -math.inf
        self._strain = 1.0
        self.alarms: list[Shift] = []  # the latest ones
        describe = getattr(judge, "describe", dict)
        self._journal.write(Head(policy, describe(), start_s))

    # --- what is heard ---

    def arrived(self, at_s: float, prompt: int, kind: str = "") -> None:
        """A request with `prompt` tokens came."""
        self._windows.arrived(at_s, prompt, kind)

    def ended(
        self, at_s: float, prompt: int, output: int, kind: str = "", good: bool | None = None, cached: int = 0
    ) -> None:
        """A request was answered; see `Windows.ended`. Requests that failed or were refused count as not good."""
        self._windows.ended(at_s, prompt, output, kind, good, cached)

    def failed(self, at_s: float, worker: str, why: str = "") -> None:
        """An action could not be done: the worker is left alone for a while, and the plan looked at again."""
        self._journal.write(Failed(at_s, worker, why))
        self._bar(at_s, worker)

    def _bar(self, at_s: float, worker: str) -> None:
        self._barred[worker] = at_s + self.policy.back_off_s
        self._review_s = at_s
        self._reviews_end_s = max(self._reviews_end_s, at_s + 2 * self.policy.bucket_s)

    # --- what is decided ---

    def tick(self, now_s: float, workers: Sequence[Worker]) -> Decision:
        """What to do now. Nothing happens between the ends of buckets, so that calling it more often changes nothing.

        The caller is to do the actions, or to say `failed`; they are proposed again, or others, while the fleet is not
        what was decided. Raises OSError if the journal cannot be written.
        """
        buckets = self._windows.close(now_s)
        there = tuple(sorted(workers, key=lambda worker: worker.name))
        return self._look(now_s, buckets, there) if buckets else self._hold(now_s, there)

    def replayed(self, look: Look, workers: tuple[Worker, ...]) -> Decision:
        """As `tick`, with the buckets of a journal's line."""
        for bucket in look.buckets:
            self._windows.absorb(bucket)
        return self._look(look.at_s, list(look.buckets), workers)

    def _hold(self, now_s: float, workers: tuple[Worker, ...]) -> Decision:
        fleet = fleet_of(workers, READY, TURNING, STARTING)
        return Decision(now_s, "", fleet, self._target or fleet)

    def _look(self, now_s: float, buckets: list[Bucket], workers: tuple[Worker, ...]) -> Decision:
        shift = self._detector.look(buckets)
        if shift:
            self._shifted(now_s, shift)
        trigger = self._trigger(now_s, workers, shift)
        situation = self._situation(now_s, workers) if trigger else None
        if situation is None:
            self._write(Look(now_s, tuple(buckets), self._news(workers), shift))
            return self._hold(now_s, workers)
        decision = decide(situation, self.policy, self._judge, trigger)
        self._took(decision)
        judged = self._judge.fresh()
        self._write(Look(now_s, tuple(buckets), workers, shift, situation, judged, decision))
        self._workers = workers
        return decision

    def _shifted(self, now_s: float, shift: Shift) -> None:
        self.alarms = [*self.alarms, shift][-100:]
        self._detector.anchor(shift.since_s, self._windows)
        self._reviews_end_s = now_s + self.policy.settle_s + 2 * self.policy.window_s
        self._renew_s = now_s + self.policy.window_s
        if shift.what != "rate" or shift.kind:
            far = max(shift.after, shift.before) > FAR * min(shift.after, shift.before)
            self._old, self._mix = self._mix or self._old, None
            self._mix_s = shift.since_s if far else now_s - self.policy.settle_s

    def _trigger(self, now_s: float, workers: tuple[Worker, ...], shift: Shift | None) -> str:
        """Why the plan is to be looked at now, or nothing."""
        policy = self.policy
        if shift:
            return f"shift: {shift}"
        if self._breached(now_s, workers):
            return "breach"
        if now_s < self._review_s:
            return ""
        if self._target is None:
            return "first"
        if now_s <= self._reviews_end_s:
            return "review"
        grace_s = self._changed_s + 3 * policy.flip_s + policy.bucket_s
        unfinished = fleet_of(workers, READY, TURNING, STARTING) != self._target
        return "unfinished" if unfinished and now_s >= grace_s else ""

    def _breached(self, now_s: float, workers: tuple[Worker, ...]) -> bool:
        """Fewer answers are good than the judge expects: count on more traffic than there is, until that has passed."""
        policy = self.policy
        settled = all(worker.state == READY for worker in workers)
        if not settled or now_s < self._changed_s + 2 * policy.window_s or self._expected < policy.target:
            return False
        traffic = self._windows.traffic(now_s - policy.window_s, now_s)
        if traffic.judged >= ENOUGH and traffic.attainment >= policy.target:
            self._strain = max(1.0, self._strain * RELIEF ** (policy.bucket_s / policy.window_s))
        if not short(traffic, policy.target, BREACH_LEVEL) or self._strain >= MOST_STRAIN:
            return False
        self._strain = min(self._strain * STRAIN, MOST_STRAIN)
        self._changed_s = now_s
        return True

    def _situation(self, now_s: float, workers: tuple[Worker, ...]) -> Situation | None:
        """None while too little has been seen."""
        policy, windows = self.policy, self._windows
        self._barred = {name: until_s for name, until_s in self._barred.items() if until_s > now_s}
        self._mixed(now_s)
        if self._mix is None:
            return None
        since_s = max(self._detector.since_s, now_s - 2 * policy.window_s)
        seen = windows.buckets(since_s, now_s)
        rate = self._grid(outlook(seen, policy.start_s).rate(policy.start_s))
        late = busiest(windows.buckets(now_s - policy.settle_s - policy.window_s, now_s), policy.window_s)
        cv = windows.traffic(now_s - REFERENCE * policy.window_s, now_s).burst
        barred = tuple(sorted(self._barred))
        calm = now_s >= self._grew_s + policy.settle_s
        return Situation(now_s, workers, self._mix, rate, max(rate, self._grid(late)), cv, barred, calm)

    def _grid(self, rate: float) -> float:
        planned = rate * (1 + self.policy.spare) * self._strain
        return round(GRID ** math.ceil(math.log(planned, GRID)), 6) if planned > 0 else 0.0

    def _mixed(self, now_s: float) -> None:
        """Take lengths of arrivals since the change (or, if it was small, long before it too), with their outputs."""
        if self._mix is not None and now_s < self._renew_s:
            return
        fresh = self._windows.traffic(self._mix_s, now_s)
        ended = self._windows.traffic(min(self._mix_s, now_s - self.policy.window_s), now_s)
        pairs = fresh if sum(cell[3] for cell in fresh.pairs) > 5 * ENOUGH else ended
        if fresh.arrivals < ENOUGH or sum(cell[3] for cell in pairs.pairs) < ENOUGH:
            if self._mix is None and now_s >= self._mix_s + 2 * self.policy.window_s:
                self._mix = self._old
            return
        if now_s >= self._renew_s:
            self._renew_s = math.inf
        self._mix = mixed(fresh.prompts, pairs.pairs, ended.cached_share)

    def _took(self, decision: Decision) -> None:
        policy, now_s = self.policy, decision.at_s
        self._review_s = now_s + policy.window_s / 2
        self._target = decision.target
        chosen = [option for option in decision.options if option.fleet == decision.target]
        self._expected = chosen[0].attainment if chosen else 1.0
        if decision.actions:
            self._changed_s = now_s
        if policy.held(decision.target) > policy.held(decision.now):
            self._grew_s = now_s

    # --- what is written ---

    def _news(self, workers: tuple[Worker, ...]) -> tuple[Worker, ...] | None:
        """The workers, if other ones, or in other states, than were written last: their loads do not matter here."""
        plain = [(worker.name, worker.role, worker.state) for worker in workers]
        if self._workers is not None and plain == [(w.name, w.role, w.state) for w in self._workers]:
            return None
        self._workers = workers
        return workers

    def _write(self, look: Look) -> None:
        self._journal.write(look)


class Replayed(msgspec.Struct, frozen=True):
    """A decision of a log, and what is decided from the same inputs now."""

    written: Decision
    now: Decision | None
    why: str = ""

    @property
    def same(self) -> bool:
        return self.now is not None and (self.now.actions, self.now.target) == (
            self.written.actions,
            self.written.target,
        )


def replay(lines: Iterable[Line], judge: Judge | None = None) -> Iterator[Replayed]:
    """Decide again what a log says was decided, with its own answers or those of another judge.

    A decision that is taken now where the log has none (or the other way round) is one that differs.
    """
    heard, replanner = Heard(), None
    workers: tuple[Worker, ...] = ()
    for line in lines:
        if isinstance(line, Head):
            replanner = Replanner(line.policy, judge or heard, start_s=line.start_s)
        elif replanner is None:
            raise ValueError("a decision log begins with its head")
        elif isinstance(line, Failed):
            replanner.failed(line.at_s, line.worker, line.why)
        else:
            workers = line.workers if line.workers is not None else workers
            heard.hear(line.judged)
            yield from _again(replanner, line, workers)


def _again(replanner: Replanner, look: Look, workers: tuple[Worker, ...]) -> Iterator[Replayed]:
    why = ""
    try:
        now: Decision | None = replanner.replayed(look, workers)
    except KeyError as error:
        now, why = None, f"the log has no answer for {error.args[0][0]}"
    if look.decision is not None:
        yield Replayed(look.decision, now if now and now.trigger else None, why)
    elif now is None or now.trigger:
        held = fleet_of(workers, READY, TURNING, STARTING)
        yield Replayed(Decision(look.at_s, "", held, held), now, why or "decided where the log has nothing")
