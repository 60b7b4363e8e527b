"""The replanner: collects statistics of requests, reviews the traffic regularly, and proposes changes of the fleet.

    replanner = Replanner(policy, evaluator, Journal(path), start_s=now_s)
    replanner.arrived(at_s, prompt_tokens)              # for every request
    replanner.ended(at_s, prompt_tokens, output_tokens, good=True)
    decision = replanner.tick(now_s, workers)           # every second or so
    for action in decision.actions: ...                 # Flip(worker, role) | Start(role, count) | Stop(worker)
    replanner.failed(now_s, worker, why)                # if an action could not be carried out
It is pure: it reads no clock, and writes to nothing but the journal that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from planner.replan.attainment_cache import AttainmentCache, FleetEvaluator, FleetSize
from planner.replan.change_detection import (
    REFERENCE_WINDOWS,
    WINDOW_SIZES,
    ChangeDetector,
    TrafficShift,
    attainment_is_short,
    busiest_rate,
)
from planner.replan.decide import (
    READY,
    STARTING,
    SWITCHING,
    FleetDecision,
    FleetSituation,
    FleetWorker,
    ReplanPolicy,
    count_fleet,
    decide_fleet,
)
from planner.replan.forecast import forecast_rate
from planner.replan.journal import (
    FailedAction,
    Journal,
    JournalHead,
    JournalLine,
    RecordedEvaluator,
    TrafficReview,
)
from planner.replan.traffic_windows import LengthMix, TrafficBucket, TrafficWindows, mix_lengths

# Rates are rounded up to powers of this number, so that the evaluator's answers can be reused.
RATE_GRID = 1.08
# Fewest ended requests from which on a new distribution of lengths is trusted.
MIN_ANSWERS = 40
# If mean lengths change by less than this factor, the new mix is computed from the requests of all of `settle_s`.
FAR_RATIO = 1.5
# The strain multiplies the planned rate after SLO breaches: it grows by STRAIN_STEP up to MAX_STRAIN, and decays by
# RELIEF per window in which the target is reached.
STRAIN_STEP, MAX_STRAIN, RELIEF = 1.1, 2.0, 0.98
# Significance level at which too few requests that meet their SLOs count as a breach.
BREACH_LEVEL = 1e-4


class Replanner:
    """Combines traffic windows, change detector and decisions; its caller passes in all times."""

    def __init__(
        self,
        policy: ReplanPolicy,
        evaluator: FleetEvaluator,
        journal: Journal | None = None,
        start_s: float = 0.0,
    ) -> None:
        """`start_s` is the present time on the clock of all later events. Raises OSError if the journal fails."""
        self.policy, self._cache = policy, AttainmentCache(evaluator)
        self._journal = journal or Journal()
        keep_s = max(
            (REFERENCE_WINDOWS + max(WINDOW_SIZES) + 1) * policy.window_s, policy.settle_s + policy.window_s
        )
        self._windows = TrafficWindows(policy.bucket_s, keep_s, start_s)
        self._detector = ChangeDetector(
            policy.window_s, policy.bucket_s, policy.false_alarms_per_day, start_s
        )
        # The time until which each worker is left alone, by worker.
        self._barred: dict[str, float] = {}
        # The workers as last written to the journal.
        self._workers: tuple[FleetWorker, ...] | None = None
        self._mix: LengthMix | None = None
        # The fallback while too few requests have ended for a new mix.
        self._old_mix: LengthMix | None = None
        # Only requests after this time count for a new mix.
        self._mix_s = start_s
        # The time at which the mix is computed again, from more answers.
        self._renew_s = math.inf
        # The time at which the plan is reviewed next, even without an alarm.
        self._review_s = start_s + policy.window_s
        # The time until which regular reviews go on.
        self._reviews_end_s = start_s + policy.window_s
        self._target: FleetSize | None = None
        # The attainment that the last decision expects of its fleet.
        self._expected = 1.0
        self._changed_s = start_s
        self._grew_s = -math.inf
        self._strain = 1.0
        # The latest alarms.
        self.alarms: list[TrafficShift] = []
        describe = getattr(evaluator, "describe", dict)
        self._journal.write(JournalHead(policy, describe(), start_s))

    # --- events of requests and workers ---

    def arrived(self, at_s: float, prompt: int, kind: str = "") -> None:
        """Counts a request that arrived at `at_s` (seconds) with `prompt` tokens."""
        self._windows.arrived(at_s, prompt, kind)

    def ended(
        self, at_s: float, prompt: int, output: int, kind: str = "", good: bool | None = None, cached: int = 0
    ) -> None:
        """Counts a request that has ended; see `TrafficWindows.ended`. Failed and refused requests are not `good`."""
        self._windows.ended(at_s, prompt, output, kind, good, cached)

    def failed(self, at_s: float, worker: str, why: str = "") -> None:
        """Reports that an action failed: the worker is left alone for a while, and the plan is reviewed at once."""
        self._journal.write(FailedAction(at_s, worker, why))
        self._bar_worker(at_s, worker)

    def _bar_worker(self, at_s: float, worker: str) -> None:
        self._barred[worker] = at_s + self.policy.back_off_s
        self._review_s = at_s
        self._reviews_end_s = max(self._reviews_end_s, at_s + 2 * self.policy.bucket_s)

    # --- decisions ---

    def tick(self, now_s: float, workers: Sequence[FleetWorker]) -> FleetDecision:
        """The decision for now. Without a newly closed bucket nothing changes, so it may be called at any rate.

        The caller carries out the actions, or calls `failed`. Until the fleet is as decided, later decisions propose
        the missing actions again, or others. Raises OSError if the journal cannot be written.
        """
        buckets = self._windows.close(now_s)
        there = tuple(sorted(workers, key=lambda worker: worker.name))
        return self._review_traffic(now_s, buckets, there) if buckets else self._keep_fleet(now_s, there)

    def replay_review(self, review: TrafficReview, workers: tuple[FleetWorker, ...]) -> FleetDecision:
        """Does what `tick` does, with the buckets of a journal line."""
        for bucket in review.buckets:
            self._windows.absorb_bucket(bucket)
        return self._review_traffic(review.at_s, list(review.buckets), workers)

    def _keep_fleet(self, now_s: float, workers: tuple[FleetWorker, ...]) -> FleetDecision:
        """A decision without actions."""
        fleet = count_fleet(workers, READY, SWITCHING, STARTING)
        return FleetDecision(now_s, "", fleet, self._target or fleet)

    def _review_traffic(
        self, now_s: float, buckets: list[TrafficBucket], workers: tuple[FleetWorker, ...]
    ) -> FleetDecision:
        """Looks for a change of traffic, decides on a fleet if there is a reason to, and writes the journal."""
        shift = self._detector.check_buckets(buckets)
        if shift:
            self._on_shift(now_s, shift)
        trigger = self._review_trigger(now_s, workers, shift)
        situation = self._make_situation(now_s, workers) if trigger else None
        if situation is None:
            self._write_review(TrafficReview(now_s, tuple(buckets), self._changed_workers(workers), shift))
            return self._keep_fleet(now_s, workers)
        decision = decide_fleet(situation, self.policy, self._cache, trigger)
        self._record_decision(decision)
        checked = self._cache.take_fresh()
        self._write_review(TrafficReview(now_s, tuple(buckets), workers, shift, situation, checked, decision))
        self._workers = workers
        return decision

    def _on_shift(self, now_s: float, shift: TrafficShift) -> None:
        """Reacts to a change of traffic: new reference, frequent reviews, and a new mix if lengths have changed."""
        self.alarms = [*self.alarms, shift][-100:]
        self._detector.anchor(shift.since_s, self._windows)
        self._reviews_end_s = now_s + self.policy.settle_s + 2 * self.policy.window_s
        self._renew_s = now_s + self.policy.window_s
        if shift.what != "rate" or shift.kind:
            far = max(shift.after, shift.before) > FAR_RATIO * min(shift.after, shift.before)
            self._old_mix, self._mix = self._mix or self._old_mix, None
            self._mix_s = shift.since_s if far else now_s - self.policy.settle_s

    def _review_trigger(
        self, now_s: float, workers: tuple[FleetWorker, ...], shift: TrafficShift | None
    ) -> str:
        """The reason to review the plan now; "" if there is none."""
        policy = self.policy
        if shift:
            return f"shift: {shift}"
        if self._slo_breached(now_s, workers):
            return "breach"
        if now_s < self._review_s:
            return ""
        if self._target is None:
            return "first"
        if now_s <= self._reviews_end_s:
            return "review"
        grace_s = self._changed_s + 3 * policy.flip_s + policy.bucket_s
        unfinished = count_fleet(workers, READY, SWITCHING, STARTING) != self._target
        return "unfinished" if unfinished and now_s >= grace_s else ""

    def _slo_breached(self, now_s: float, workers: tuple[FleetWorker, ...]) -> bool:
        """Whether attainment is significantly below the target although the evaluator expected it to be reached.

        The evaluator is then too optimistic, so a higher rate than measured is planned for (`_strain`) until
        attainment has recovered.
        """
        policy = self.policy
        settled = all(worker.state == READY for worker in workers)
        # SLO misses prove nothing while the fleet changes, or if the last decision expected them.
        if not settled or now_s < self._changed_s + 2 * policy.window_s or self._expected < policy.target:
            return False
        traffic = self._windows.traffic(now_s - policy.window_s, now_s)
        if traffic.checked >= MIN_ANSWERS and traffic.attainment >= policy.target:
            self._strain = max(1.0, self._strain * RELIEF ** (policy.bucket_s / policy.window_s))
        if not attainment_is_short(traffic, policy.target, BREACH_LEVEL) or self._strain >= MAX_STRAIN:
            return False
        self._strain = min(self._strain * STRAIN_STEP, MAX_STRAIN)
        self._changed_s = now_s
        return True

    def _make_situation(self, now_s: float, workers: tuple[FleetWorker, ...]) -> FleetSituation | None:
        """The inputs of a decision; None while too few requests have been seen."""
        policy, windows = self.policy, self._windows
        self._barred = {name: until_s for name, until_s in self._barred.items() if until_s > now_s}
        self._update_mix(now_s)
        if self._mix is None:
            return None
        since_s = max(self._detector.since_s, now_s - 2 * policy.window_s)
        buckets = windows.buckets(since_s, now_s)
        rate = self._round_rate(forecast_rate(buckets, policy.start_s).rate(policy.start_s))
        late = busiest_rate(
            windows.buckets(now_s - policy.settle_s - policy.window_s, now_s), policy.window_s
        )
        cv = windows.traffic(now_s - REFERENCE_WINDOWS * policy.window_s, now_s).burst
        barred = tuple(sorted(self._barred))
        # A fleet that has just grown must not shrink at once, or it would oscillate.
        calm = now_s >= self._grew_s + policy.settle_s
        return FleetSituation(
            now_s, workers, self._mix, rate, max(rate, self._round_rate(late)), cv, barred, calm
        )

    def _round_rate(self, rate: float) -> float:
        """The rate to plan for: with spare and strain, rounded up to the grid."""
        planned = rate * (1 + self.policy.spare) * self._strain
        return round(RATE_GRID ** math.ceil(math.log(planned, RATE_GRID)), 6) if planned > 0 else 0.0

    def _update_mix(self, now_s: float) -> None:
        """Renews the mix of lengths from arrivals since the change, paired with output lengths of ended requests.

        After a small change, older requests are used as well.
        """
        if self._mix is not None and now_s < self._renew_s:
            return
        fresh = self._windows.traffic(self._mix_s, now_s)
        ended = self._windows.traffic(min(self._mix_s, now_s - self.policy.window_s), now_s)
        # Output lengths since the change are used alone once enough requests have ended. Until then earlier requests
        # count too.
        pairs = fresh if sum(cell[3] for cell in fresh.pairs) > 5 * MIN_ANSWERS else ended
        if fresh.arrivals < MIN_ANSWERS or sum(cell[3] for cell in pairs.pairs) < MIN_ANSWERS:
            if self._mix is None and now_s >= self._mix_s + 2 * self.policy.window_s:
                self._mix = self._old_mix
            return
        if now_s >= self._renew_s:
            self._renew_s = math.inf
        self._mix = mix_lengths(fresh.prompts, pairs.pairs, ended.cached_share)

    def _record_decision(self, decision: FleetDecision) -> None:
        """Remembers what later reviews depend on: target fleet, expected attainment, and times of changes."""
        policy, now_s = self.policy, decision.at_s
        self._review_s = now_s + policy.window_s / 2
        self._target = decision.target
        chosen = [option for option in decision.options if option.fleet == decision.target]
        self._expected = chosen[0].attainment if chosen else 1.0
        if decision.actions:
            self._changed_s = now_s
        if policy.held(decision.target) > policy.held(decision.now):
            self._grew_s = now_s

    # --- journal ---

    def _changed_workers(self, workers: tuple[FleetWorker, ...]) -> tuple[FleetWorker, ...] | None:
        """The workers, if names, roles or states differ from those last written; else None. Loads are ignored."""
        plain = [(worker.name, worker.role, worker.state) for worker in workers]
        if self._workers is not None and plain == [(w.name, w.role, w.state) for w in self._workers]:
            return None
        self._workers = workers
        return workers

    def _write_review(self, review: TrafficReview) -> None:
        self._journal.write(review)


class ReplayedDecision(msgspec.Struct, frozen=True):
    """A decision from a journal, and the decision made now from the same inputs."""

    written: FleetDecision
    now: FleetDecision | None
    why: str = ""

    @property
    def same(self) -> bool:
        """Whether the replay chose the same actions and the same target fleet as the log."""
        return self.now is not None and (self.now.actions, self.now.target) == (
            self.written.actions,
            self.written.target,
        )


def replay_decisions(
    lines: Iterable[JournalLine], evaluator: FleetEvaluator | None = None
) -> Iterator[ReplayedDecision]:
    """Replays a journal and yields each decision next to what is decided now.

    The evaluator's answers come from the journal, or from `evaluator` if one is given. A decision that exists on one
    side only counts as a difference.

    Raises:
        ValueError: if the first line is not a head.
    """
    recorded, replanner = RecordedEvaluator(), None
    workers: tuple[FleetWorker, ...] = ()
    for line in lines:
        if isinstance(line, JournalHead):
            replanner = Replanner(line.policy, evaluator or recorded, start_s=line.start_s)
        elif replanner is None:
            raise ValueError("a decision log begins with its head")
        elif isinstance(line, FailedAction):
            replanner.failed(line.at_s, line.worker, line.why)
        else:
            workers = line.workers if line.workers is not None else workers
            recorded.load_answers(line.checked)
            yield from _decide_again(replanner, line, workers)


def _decide_again(
    replanner: Replanner, review: TrafficReview, workers: tuple[FleetWorker, ...]
) -> Iterator[ReplayedDecision]:
    """Replays one review, and yields its decision beside the recorded one if either exists."""
    why = ""
    try:
        now: FleetDecision | None = replanner.replay_review(review, workers)
    except KeyError as error:
        now, why = None, f"the log has no answer for {error.args[0][0]}"
    if review.decision is not None:
        yield ReplayedDecision(review.decision, now if now and now.trigger else None, why)
    elif now is None or now.trigger:
        held = count_fleet(workers, READY, SWITCHING, STARTING)
        yield ReplayedDecision(
            FleetDecision(review.at_s, "", held, held), now, why or "decided where the log has nothing"
        )
