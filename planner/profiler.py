"""From what workers' steps cost to a `Profile`: which steps to take, how to fit them, and what else a request costs.

The steps are those of a running deployment (`services.worker.steps`), so they cost what they cost there: the same
threads, cores and neighbours, the gateway and the client among them. What is between two steps, before the first and
after the last, becomes the profile's overheads.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from diptych.errors import ConfigError
from planner.cost import Line, StepCost
from planner.fit import Error, fit_decode, fit_mixed, fit_prefill
from planner.hardware import Device
from planner.joint import error_of, fit_joint
from planner.profile import Overheads, Profile
from planner.shape import Shape
from planner.terms import Batch, Link, Split

CANARY = "canary-"  # begins the names of such requests
LEAST = 3  # steps that a bin needs to count, where there are bins enough
ENOUGH = 12  # bins
CUT = 0.01  # of the longest steps of a bin, if it has a hundred: the machine did something else


@dataclass(frozen=True, slots=True)
class Step:
    """One step, from `begun_s` to `ended_s` on the machine's clock."""

    begun_s: float
    ended_s: float
    batch: Batch

    @property
    def seconds(self) -> float:
        return self.ended_s - self.begun_s


@dataclass(slots=True)
class Life:
    """What one worker noted in one role. `come` and `first` are moments by request: when it was there to be worked on,
    and when its first token from this worker was.
    """

    worker: str
    role: str
    saturation_tokens: int
    steps: list[Step] = field(default_factory=list)
    come: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)

    def between(self, begun_s: float, ended_s: float) -> Life:
        """The part of it within that time."""

        def within(moments: Mapping[str, float]) -> dict[str, float]:
            return {name: at_s for name, at_s in moments.items() if begun_s <= at_s < ended_s}

        steps = [step for step in self.steps if begun_s <= step.begun_s < ended_s]
        return replace(self, steps=steps, come=within(self.come), first=within(self.first))


def parse(lines: Iterable[bytes]) -> list[Life]:
    """The lives in a worker's log of steps; a last line that is cut short is left out.

    Raises:
        ConfigError: another line is not of such a log.
    """
    lives: list[Life] = []
    broken = 0
    for number, line in enumerate(lines, 1):
        if broken:
            raise ConfigError(
                f"row {broken} of a log of steps cannot be used",
                "it is not one of its lines",
                "measure again",
            )
        try:
            _hear(lives, msgspec.json.decode(line))
        except (msgspec.DecodeError, IndexError, TypeError, ValueError):
            broken = number
    return lives


def _hear(lives: list[Life], line: Any) -> None:
    match line:
        case ["role", _, worker, role, saturation_tokens]:
            lives.append(Life(worker, role, saturation_tokens))
        case ["come" | "first", _, str(request)] if request.startswith(CANARY):
            pass  # the gateway asked itself: no client waited
        case ["come", at_s, request]:
            lives[-1].come.setdefault(request, at_s)
        case ["first", at_s, request]:
            lives[-1].first.setdefault(request, at_s)
        case ["step", begun_s, ended_s, tokens, squares, rows, context]:
            lives[-1].steps.append(Step(begun_s, ended_s, Batch(tokens, float(squares), rows, context)))
        case _:
            raise ValueError("no such line")


# ---- costs


@dataclass(frozen=True, slots=True)
class Costs:
    """A fitted cost with its errors by kind of step, and how many steps of each there were."""

    cost: StepCost
    errors: Mapping[str, Error]
    counts: Mapping[str, int]

    @property
    def told(self) -> dict[str, float]:
        """The errors, relative, as a `Profile` holds them."""
        named = {}
        for kind, error in self.errors.items():
            named[f"{kind}_mean"], named[f"{kind}_max"] = error.mean, error.largest
            named[f"{kind}_held_out_mean"], named[f"{kind}_held_out_max"] = (
                error.held_out,
                error.held_out_largest,
            )
        return named


def fit_costs(steps: Sequence[Step]) -> Costs:
    """A cost from steps that read, that write, and that do both.

    Steps alike are averaged before lines are fitted: what a queue feels is the mean, not the usual step. Each kind is
    then scaled so that all its steps together take as long as they did. Where most steps do both, all are fitted
    together: the few others are of few sizes.

    Raises:
        ConfigError: too few steps of unlike sizes.
    """
    kinds: dict[str, list[Step]] = {"prefill": [], "decode": [], "mixed": []}
    for step in steps:
        kinds[kind_of(step.batch)].append(step)
    counts = {kind: len(some) for kind, some in kinds.items()}
    if counts["mixed"] > min(counts["prefill"], counts["decode"]):
        cost, errors = _together(kinds)
    else:
        cost, errors = _apart(kinds)
    return Costs(cost, errors, counts)


def _apart(kinds: Mapping[str, Sequence[Step]]) -> tuple[StepCost, dict[str, Error]]:
    reading, writing = means(kinds["prefill"], _reading), means(kinds["decode"], _writing)
    first = fit_prefill([(batch.tokens, batch.squares, seconds) for batch, seconds in reading])
    then = fit_decode([(batch.context, batch.rows, seconds) for batch, seconds in writing])
    errors = {"prefill": first.error, "decode": then.error}
    plain = StepCost(first.lines[0], then.lines)
    cost = StepCost(
        _times(first.lines[0], balance(plain, kinds["prefill"])),
        tuple(_times(line, balance(plain, kinds["decode"])) for line in then.lines),
    )
    if both := means(kinds["mixed"], _both):
        found = fit_mixed(both, cost.prefill, cost.decode)
        cost = replace(cost, shared=found.shared, cross=found.cross)
        errors["mixed"] = found.error
    return cost, errors


def _together(kinds: Mapping[str, Sequence[Step]]) -> tuple[StepCost, dict[str, Error]]:
    points = [
        *means(kinds["prefill"], _reading),
        *means(kinds["decode"], _writing),
        *means(kinds["mixed"], _both),
    ]
    if len(points) < 8:
        why = f"there are {len(points)} unlike sizes of steps, and the cost has seven coefficients"
        raise ConfigError(
            "the cost cannot be fitted", why, "measure for longer, or with more unlike requests"
        )
    cost = fit_joint(points)
    factor = balance(cost, [step for some in kinds.values() for step in some])
    lines = tuple(_times(line, factor) for line in cost.decode)
    return replace(cost, prefill=_times(cost.prefill, factor), decode=lines), {"all": error_of(points)}


def kind_of(batch: Batch) -> str:
    """ "prefill", "decode" or "mixed"."""
    if batch.tokens and batch.rows:
        return "mixed"
    return "prefill" if batch.tokens else "decode"


def means(steps: Sequence[Step], alike: Callable[[Batch], Hashable]) -> list[tuple[Batch, float]]:
    """The mean batch and the mean time of steps that are `alike`, each group with enough of them."""
    groups: dict[Hashable, list[Step]] = defaultdict(list)
    for step in steps:
        groups[alike(step.batch)].append(step)
    full = [group for group in groups.values() if len(group) >= LEAST]
    chosen = full if len(full) >= ENOUGH else list(groups.values())
    return [_mean(group) for group in chosen]


def balance(cost: StepCost, steps: Sequence[Step]) -> float:
    """How many times longer `steps` took in all than `cost` says."""
    expected = sum(cost.step_s(step.batch) for step in steps)
    return sum(step.seconds for step in steps) / expected if expected else 1.0


def _mean(group: Sequence[Step]) -> tuple[Batch, float]:
    kept = sorted(group, key=lambda step: step.seconds)[: math.ceil(len(group) * (1.0 - CUT))]
    mean = statistics.fmean
    batch = Batch(
        round(mean(step.batch.tokens for step in kept)),
        mean(step.batch.squares for step in kept),
        round(mean(step.batch.rows for step in kept)),
        round(mean(step.batch.context for step in kept)),
    )
    return batch, mean(step.seconds for step in kept)


def _reading(batch: Batch) -> Hashable:
    return round(8 * math.log2(batch.tokens)), round(2 * math.log2(batch.squares))


def _writing(batch: Batch) -> Hashable:
    return batch.rows, round(2 * math.log2(batch.context + batch.rows))


def _both(batch: Batch) -> Hashable:
    return (
        round(3 * math.log2(batch.rows)),
        round(3 * math.log2(batch.tokens)),
        round(math.log2(batch.context + 1)),
    )


def _times(line: Line, factor: float) -> Line:
    a, b, c = line
    return a * factor, b * factor, c * factor


# ---- overheads


@dataclass(frozen=True, slots=True)
class Move:
    """KV that went from one worker to another."""

    num_bytes: int
    seconds: float


def between_steps(lives: Iterable[Life]) -> float:
    """Mean seconds from the end of a step to the begin of the next, where there was something to do at once."""
    gaps = [
        after.begun_s - step.ended_s
        for life in lives
        for step, after in zip(life.steps, life.steps[1:], strict=False)
        if goes_on(step.batch, after.batch)
    ]
    return max(0.0, statistics.fmean(gaps)) if gaps else 0.0


def goes_on(batch: Batch, after: Batch) -> bool:
    """The same sequences write, or a prompt that was begun is read on: the worker did not wait in between."""
    if (
        after.rows == 0
    ):  # were all of them read from their begin, the sum of squares would be no larger than this
        return batch.rows == 0 and after.squares > after.tokens**2
    return batch.rows == after.rows and after.context == batch.context + batch.rows


def link_of(moves: Sequence[Move]) -> Link:
    """Latency and bandwidth of hand-offs, by least squares without falling below 0; an infinite link without any."""
    if len(moves) < 2:
        return Link(math.inf, moves[0].seconds if moves else 0.0)
    size, time = (
        statistics.fmean(one.num_bytes for one in moves),
        statistics.fmean(one.seconds for one in moves),
    )
    spread = sum((one.num_bytes - size) ** 2 for one in moves)
    slope = sum((one.num_bytes - size) * (one.seconds - time) for one in moves) / spread if spread else 0.0
    if slope <= 0.0:
        return Link(math.inf, time)
    if time - slope * size < 0.0:
        return Link(size / time, 0.0)
    return Link(1.0 / slope, time - slope * size)


def reading_s(lives: Sequence[Life]) -> float:
    """Mean seconds from when a request was there to be read until its first token; nan if none was."""
    readers = [life for life in lives if life.role == "prefill"] or lives
    times = [
        life.first[name] - at_s for life in readers for name, at_s in life.come.items() if name in life.first
    ]
    return statistics.fmean(times) if times else math.nan


def handing_s(lives: Sequence[Life]) -> float:
    """Median seconds from a first token at one worker until another has the request's KV; nan without hand-offs."""
    readers = [life for life in lives if life.role == "prefill"]
    writers = [life for life in lives if life.role != "prefill"]
    first = {name: at_s for life in readers for name, at_s in life.first.items()}
    times = [at_s - first[name] for life in writers for name, at_s in life.come.items() if name in first]
    return statistics.median(times) if times else math.nan


def overheads(
    calm: Sequence[Life],
    lives: Sequence[Life],
    ttft_s: float,
    moves: Sequence[Move],
) -> Overheads:
    """What requests cost beside steps.

    Args:
        calm: the part in which requests hardly met each other.
        lives: all of it.
        ttft_s: mean time to the first token in the calm part, as clients saw it.
        moves: hand-offs of the calm part.

    What a client waits for and no worker works at is divided: two messages, and the rest at the gateway. A message's
    time is half of what a hand-off takes beside the link; without hand-offs, a quarter of the whole.
    """
    link = link_of(moves)
    whole_s = max(0.0, ttft_s - reading_s(calm))
    handing = handing_s(calm)
    moving_s = statistics.fmean(move.seconds for move in moves) if moves else 0.0
    hop_s = whole_s / 4.0 if math.isnan(handing) else max(0.0, (handing - moving_s) / 2.0)
    hop_s = min(hop_s, whole_s / 2.0)
    return Overheads(whole_s - 2.0 * hop_s, hop_s, between_steps(lives), link)


def profile(
    shape: Shape, device: Device, split: Split, room: int, costs: Costs, beside: Overheads, source: str
) -> Profile:
    """All of it. `room` are the tokens of KV that an instance holds."""
    return Profile(shape, device, {split: costs.cost}, {split: room}, source, costs.told, beside)
