"""Builds a `CostProfile` from the steps that the workers of a running deployment have logged.

The steps (`services.worker.step_log`) were measured under the conditions of that deployment: with the same threads and
cores, beside the gateway and the load generator. This module selects the steps to use and fits costs to them. Time that
requests spend outside of steps (before the first, between two steps, after the last) becomes the profile's overheads.
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
from diptych.eviction_spec import ADA
from planner.costs.class_fit import fit_class_work, fit_decisions
from planner.costs.fit import FitError, fit_decode, fit_mixed, fit_prefill
from planner.costs.joint_fit import fit_joint, joint_fit_error
from planner.costs.model import ModelDims
from planner.costs.profile import CostProfile, Overheads
from planner.costs.step import CostLine, StepCost
from planner.hardware import Device
from planner.types import KvClassWork, KvKeep, LinkSpec, Parallelism, StepBatch

# Request names with this prefix are the gateway's own readiness probes.
CANARY_PREFIX = "canary-"
# A bin with fewer steps is ignored if at least ENOUGH_STEPS bins are left.
MIN_STEPS = 3
# Number of bins that suffice for a fit.
ENOUGH_STEPS = 12
# Share of a bin's longest steps that is dropped, because something else delayed them.
TRIM_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One logged step; `begun_s` and `ended_s` are seconds on the machine's clock.

    In `decide_s` of its seconds, sequences with `decided` tokens (of prompts, of answers) decided what they keep.
    """

    begun_s: float
    ended_s: float
    batch: StepBatch
    decide_s: float = 0.0
    decided: tuple[int, int] = (0, 0)

    @property
    def seconds(self) -> float:
        """How long the step took, without decisions about what is kept."""
        return self.ended_s - self.begun_s - self.decide_s


@dataclass(slots=True)
class WorkerTrace:
    """The log of one worker while it served in one role.

    By request name, in seconds: `come` is when the request was ready to be worked on, `first` when this worker emitted
    its first token for it.
    """

    worker: str
    role: str
    saturation_tokens: int
    steps: list[MeasuredStep] = field(default_factory=list)
    come: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    # Seconds and tokens of decisions in the step whose line is still to come.
    _deciding: tuple[float, tuple[int, int]] = (0.0, (0, 0))

    def note_decisions(self, seconds: float, prompts: int, answers: int) -> None:
        """In the next step, decisions took so long."""
        self._deciding = seconds, (prompts, answers)

    def add_step(self, begun_s: float, ended_s: float, batch: StepBatch) -> None:
        """The next step, with the decisions that were noted before."""
        self.steps.append(MeasuredStep(begun_s, ended_s, batch, *self._deciding))
        self._deciding = 0.0, (0, 0)

    def between(self, begun_s: float, ended_s: float) -> WorkerTrace:
        """The part of the trace with `begun_s` <= time < `ended_s`."""

        def within(moments: Mapping[str, float]) -> dict[str, float]:
            return {name: at_s for name, at_s in moments.items() if begun_s <= at_s < ended_s}

        steps = [step for step in self.steps if begun_s <= step.begun_s < ended_s]
        return replace(self, steps=steps, come=within(self.come), first=within(self.first))


def parse_step_log(lines: Iterable[bytes]) -> list[WorkerTrace]:
    """Parses a worker's step log into one trace per role that it served in; an incomplete last line is ignored.

    Raises:
        ConfigError: a line before the last is malformed.
    """
    traces: list[WorkerTrace] = []
    broken = 0
    for number, line in enumerate(lines, 1):
        if broken:
            raise ConfigError(
                f"row {broken} of a log of steps cannot be used",
                "it is not a valid line of such a log",
                "measure again",
            )
        try:
            _add_log_line(traces, msgspec.json.decode(line))
        except (msgspec.DecodeError, IndexError, TypeError, ValueError):
            broken = number
    return traces


def _add_log_line(traces: list[WorkerTrace], line: Any) -> None:
    """Adds one decoded log line to the latest trace; raises ValueError if the line has no known form."""
    match line:
        case ["role", _, worker, role, saturation_tokens]:
            traces.append(WorkerTrace(worker, role, saturation_tokens))
        case ["come" | "first", _, str(request)] if request.startswith(CANARY_PREFIX):
            # A readiness probe of the gateway; no client waits for it.
            pass
        case ["come", at_s, request]:
            traces[-1].come.setdefault(request, at_s)
        case ["first", at_s, request]:
            traces[-1].first.setdefault(request, at_s)
        case ["step", begun_s, ended_s, tokens, squares, rows, context]:
            traces[-1].add_step(begun_s, ended_s, StepBatch(tokens, float(squares), rows, context))
        case ["evict", float(seconds) | int(seconds), int(prompts), int(answers)]:
            traces[-1].note_decisions(seconds, prompts, answers)
        case _:
            raise ValueError("not a line of a step log")


# ---- costs


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """A fitted step cost, its errors by kind of step ("prefill", "decode", "mixed" or "all"), and steps by kind."""

    cost: StepCost
    errors: Mapping[str, FitError]
    counts: Mapping[str, int]

    @property
    def relative_errors(self) -> dict[str, float]:
        """The relative errors under the names that a `CostProfile` uses."""
        return {
            name: one for kind, error in self.errors.items() for name, one in error.name_all(kind).items()
        }


def fit_kv_class(
    steps: Sequence[MeasuredStep], cost: StepCost, only_context: bool = False
) -> tuple[KvClassWork, FitError]:
    """Fits what steps on KV of one class cost, over `cost`, which was fitted to steps on KV of another class.

    `only_context` as in `planner.costs.class_fit.fit_class_work`.

    Raises:
        ConfigError: there are no steps.
    """
    keys = {"prefill": _prefill_key, "decode": _decode_key, "mixed": _mixed_key}
    kinds: dict[str, list[MeasuredStep]] = {kind: [] for kind in keys}
    for step in steps:
        kinds[step_kind(step.batch)].append(step)
    timed_batches = [point for kind, some in kinds.items() for point in mean_steps(some, keys[kind])]
    if not timed_batches:
        raise ConfigError(
            "the cost of a KV class cannot be fitted", "no step of it was logged", "measure for longer"
        )
    return fit_class_work(timed_batches, cost, only_context)


def fit_kv_keep(
    steps: Sequence[MeasuredStep], cost: StepCost, threshold: float, share: float, rule: str = ADA
) -> tuple[KvKeep, FitError]:
    """Fits what eviction at a threshold costs, over `cost`, which was fitted to steps of requests that keep everything.

    `share` of their rows is what the requests of `steps` have kept, by `rule`. Rows of prompts attend in full, so
    prompts cost as much as without eviction, beside the decisions.

    Raises:
        ConfigError: there are no steps.
    """
    work, error = fit_kv_class(steps, cost, only_context=True)
    prompt_s, answer_s = fit_decisions(
        [(step.decide_s, *step.decided) for step in steps if any(step.decided)]
    )
    return KvKeep(threshold, share, prompt_s, answer_s, work, rule), error


def fit_costs(steps: Sequence[MeasuredStep]) -> FittedCosts:
    """Fits a step cost to prefill, decode and mixed steps.

    Steps of similar size are averaged before the fit, because queueing delay depends on mean step times. Prefill and
    decode lines are then scaled so that their predicted total equals the measured total. If most steps are mixed, all
    kinds are fitted together (`fit_joint`): the few pure steps cover too few sizes for separate fits.

    Raises:
        ConfigError: there are too few steps of different sizes.
    """
    kinds: dict[str, list[MeasuredStep]] = {"prefill": [], "decode": [], "mixed": []}
    for step in steps:
        kinds[step_kind(step.batch)].append(step)
    counts = {kind: len(some) for kind, some in kinds.items()}
    if counts["mixed"] > min(counts["prefill"], counts["decode"]):
        cost, errors = _fit_jointly(kinds)
    else:
        cost, errors = _fit_separately(kinds)
    return FittedCosts(cost, errors, counts)


def _fit_separately(kinds: Mapping[str, Sequence[MeasuredStep]]) -> tuple[StepCost, dict[str, FitError]]:
    """Fits prefill steps and decode steps by themselves, then the terms that only mixed steps have."""
    prefills, decodes = mean_steps(kinds["prefill"], _prefill_key), mean_steps(kinds["decode"], _decode_key)
    prefill = fit_prefill([(batch.tokens, batch.squares, seconds) for batch, seconds in prefills])
    decode = fit_decode([(batch.context, batch.rows, seconds) for batch, seconds in decodes])
    errors = {"prefill": prefill.error, "decode": decode.error}
    plain = StepCost(prefill.lines[0], decode.lines)
    cost = StepCost(
        _scale_line(prefill.lines[0], measured_ratio(plain, kinds["prefill"])),
        tuple(_scale_line(line, measured_ratio(plain, kinds["decode"])) for line in decode.lines),
    )
    if both := mean_steps(kinds["mixed"], _mixed_key):
        found = fit_mixed(both, cost.prefill, cost.decode)
        cost = replace(cost, shared=found.shared, cross=found.cross)
        errors["mixed"] = found.error
    return cost, errors


def _fit_jointly(kinds: Mapping[str, Sequence[MeasuredStep]]) -> tuple[StepCost, dict[str, FitError]]:
    """Fits all kinds of steps at once; raises ConfigError if fewer than eight groups of similar steps exist."""
    timed_batches = [
        *mean_steps(kinds["prefill"], _prefill_key),
        *mean_steps(kinds["decode"], _decode_key),
        *mean_steps(kinds["mixed"], _mixed_key),
    ]
    if len(timed_batches) < 8:
        why = f"there are {len(timed_batches)} different sizes of steps, and the cost has seven coefficients"
        raise ConfigError(
            "the cost cannot be fitted", why, "measure for longer, or with requests of more different lengths"
        )
    cost = fit_joint(timed_batches)
    factor = measured_ratio(cost, [step for some in kinds.values() for step in some])
    lines = tuple(_scale_line(line, factor) for line in cost.decode)
    return replace(cost, prefill=_scale_line(cost.prefill, factor), decode=lines), {
        "all": joint_fit_error(timed_batches)
    }


def step_kind(batch: StepBatch) -> str:
    """The kind of step: "prefill", "decode" or "mixed"."""
    if batch.tokens and batch.rows:
        return "mixed"
    return "prefill" if batch.tokens else "decode"


def mean_steps(
    steps: Sequence[MeasuredStep], alike: Callable[[StepBatch], Hashable]
) -> list[tuple[StepBatch, float]]:
    """Groups steps by the key `alike` and returns each group's mean batch and mean seconds.

    Groups of fewer than `MIN_STEPS` steps are dropped if at least `ENOUGH_STEPS` larger groups are left.
    """
    groups: dict[Hashable, list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        groups[alike(step.batch)].append(step)
    full = [group for group in groups.values() if len(group) >= MIN_STEPS]
    chosen = full if len(full) >= ENOUGH_STEPS else list(groups.values())
    return [_mean_step(group) for group in chosen]


def measured_ratio(cost: StepCost, steps: Sequence[MeasuredStep]) -> float:
    """Total measured seconds of `steps` divided by the total that `cost` predicts; 1 if it predicts 0."""
    expected = sum(cost.step_s(step.batch) for step in steps)
    return sum(step.seconds for step in steps) / expected if expected else 1.0


def _mean_step(group: Sequence[MeasuredStep]) -> tuple[StepBatch, float]:
    """Mean batch and mean seconds of a group, without its longest 1 % of steps."""
    kept = sorted(group, key=lambda step: step.seconds)[: math.ceil(len(group) * (1.0 - TRIM_SHARE))]
    mean = statistics.fmean
    batch = StepBatch(
        round(mean(step.batch.tokens for step in kept)),
        mean(step.batch.squares for step in kept),
        round(mean(step.batch.rows for step in kept)),
        round(mean(step.batch.context for step in kept)),
    )
    return batch, mean(step.seconds for step in kept)


def _prefill_key(batch: StepBatch) -> Hashable:
    """Groups prefill steps: bins that grow geometrically with tokens and with squared lengths."""
    return round(8 * math.log2(batch.tokens)), round(2 * math.log2(batch.squares))


def _decode_key(batch: StepBatch) -> Hashable:
    """Groups decode steps: equal rows, and bins of the context that grow geometrically."""
    return batch.rows, round(2 * math.log2(batch.context + batch.rows))


def _mixed_key(batch: StepBatch) -> Hashable:
    """Groups mixed steps, with coarser bins since there are three dimensions."""
    return (
        round(3 * math.log2(batch.rows)),
        round(3 * math.log2(batch.tokens)),
        round(math.log2(batch.context + 1)),
    )


def _scale_line(line: CostLine, factor: float) -> CostLine:
    a, b, c = line
    return a * factor, b * factor, c * factor


# ---- overheads


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    """One hand-off of KV from a prefill to a decode worker, as measured."""

    num_bytes: int
    seconds: float


def mean_step_gap_s(traces: Iterable[WorkerTrace]) -> float:
    """Mean idle seconds between two steps of a worker that had work to continue with at once."""
    gaps = [
        after.begun_s - step.ended_s
        for life in traces
        for step, after in zip(life.steps, life.steps[1:], strict=False)
        if continues_directly(step.batch, after.batch)
    ]
    return max(0.0, statistics.fmean(gaps)) if gaps else 0.0


def continues_directly(batch: StepBatch, after: StepBatch) -> bool:
    """Whether the worker went from step `batch` to step `after` without waiting for new work.

    True if the same sequences decode their next token, or if a prefill continues a prompt that was begun before.
    """
    # In a step of prompts that all start at 0, squares is at most tokens². If it is more, a prompt was continued.
    if after.rows == 0:
        return batch.rows == 0 and after.squares > after.tokens**2
    return batch.rows == after.rows and after.context == batch.context + batch.rows


def fit_link(transfers: Sequence[MeasuredTransfer]) -> LinkSpec:
    """Fits latency and bandwidth of hand-offs by least squares, neither below 0.

    Without transfers the link is infinitely fast; one transfer, or times that do not grow with size, give latency only.
    """
    if len(transfers) < 2:
        return LinkSpec(math.inf, transfers[0].seconds if transfers else 0.0)
    size, time = (
        statistics.fmean(one.num_bytes for one in transfers),
        statistics.fmean(one.seconds for one in transfers),
    )
    spread = sum((one.num_bytes - size) ** 2 for one in transfers)
    slope = (
        sum((one.num_bytes - size) * (one.seconds - time) for one in transfers) / spread if spread else 0.0
    )
    if slope <= 0.0:
        # The transfers show no limit of bandwidth.
        return LinkSpec(math.inf, time)
    if time - slope * size < 0.0:  # the fitted latency would be negative
        return LinkSpec(size / time, 0.0)
    return LinkSpec(1.0 / slope, time - slope * size)


def mean_prefill_s(traces: Sequence[WorkerTrace]) -> float:
    """Mean seconds from a request's arrival at a worker that prefills until its first token; nan without requests."""
    prefillers = [life for life in traces if life.role == "prefill"] or traces
    times = [
        life.first[name] - at_s
        for life in prefillers
        for name, at_s in life.come.items()
        if name in life.first
    ]
    return statistics.fmean(times) if times else math.nan


def median_handoff_s(traces: Sequence[WorkerTrace]) -> float:
    """Median seconds from a request's first token at its prefill worker until its decode worker has the KV.

    The result is nan if no request was handed off.
    """
    prefillers = [life for life in traces if life.role == "prefill"]
    decoders = [life for life in traces if life.role != "prefill"]
    first = {name: at_s for life in prefillers for name, at_s in life.first.items()}
    times = [at_s - first[name] for life in decoders for name, at_s in life.come.items() if name in first]
    return statistics.median(times) if times else math.nan


def measure_overheads(
    calm_traces: Sequence[WorkerTrace],
    traces: Sequence[WorkerTrace],
    ttft_s: float,
    transfers: Sequence[MeasuredTransfer],
) -> Overheads:
    """Derives the time that requests spend outside of steps: gateway, messages, gaps between steps, KV link.

    Args:
        calm_traces: the part of the traces in which requests hardly overlapped.
        traces: the whole traces.
        ttft_s: mean TTFT in the calm part, as clients measured it.
        transfers: hand-offs of the calm part.

    TTFT minus prefill time is split into two messages (gateway to worker and back) and time in the gateway. A message
    takes half of what a hand-off takes beyond its transfer; without hand-offs, a quarter of that difference.
    """
    link = fit_link(transfers)
    whole_s = max(0.0, ttft_s - mean_prefill_s(calm_traces))
    handing = median_handoff_s(calm_traces)
    moving_s = statistics.fmean(move.seconds for move in transfers) if transfers else 0.0
    hop_s = whole_s / 4.0 if math.isnan(handing) else max(0.0, (handing - moving_s) / 2.0)
    hop_s = min(hop_s, whole_s / 2.0)
    return Overheads(whole_s - 2.0 * hop_s, hop_s, mean_step_gap_s(traces), link)


def build_profile(
    dims: ModelDims,
    device: Device,
    parallelism: Parallelism,
    room: int,
    costs: FittedCosts,
    overheads: Overheads,
    source: str,
) -> CostProfile:
    """Assembles the profile. `room` is the KV in tokens that an instance holds; `overheads` are the overheads."""
    return CostProfile(
        dims, device, {parallelism: costs.cost}, {parallelism: room}, source, costs.relative_errors, overheads
    )
