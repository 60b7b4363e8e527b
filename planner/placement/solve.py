"""The planner's main entry: finds the deployment with the best goodput, and whether it should be disaggregated.

Colocated, disaggregated (KV within nodes as in DistServe's algorithm 2, anywhere as in its algorithm 1) and hybrid
placements are searched with the same costs and samples. The solution reports the best few, measured on fresh seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from diptych.errors import ConfigError
from planner.placement import candidates
from planner.placement.bounds import saturation_rates
from planner.placement.enlarged import ResourceUse, resource_uses
from planner.placement.families import FamilySearch, Finalist, has_stages
from planner.placement.feasibility import check_feasible, slo_too_tight
from planner.placement.problem import Problem
from planner.placement.search import RUNG_RATIO, measure_goodput
from planner.placement.trial import Trial, overall_attainment
from planner.placement.validate import (
    Validation,
    add_instances,
    carried_rate,
    confirm_goodput,
    validate_placement,
    validate_rate,
)
from planner.types import Job, Placement

MAX_VALIDATED = 8  # most candidates that are run in the exact simulator for a wanted rate
ATTAINMENT_SLACK = 0.02  # a plan may fall short of the target attainment by this much on fresh seeds
FAMILY_NEEDS = {"colocated": ("colocated",), "low": ("disaggregated", "hybrid")}
Samples = Sequence[Sequence[Job]]
OPEN_ENDED = "one SLO is infinite: goodput is at most the rate at which queues do not grow for ever"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A deployment and its measured goodput, attainment and cost.

    `goodput_rps` is that of all its devices. `shares` is the joint attainment of each kind at `rate_rps`, which is the
    wanted rate, or else the goodput. `weight` is the number of devices, or their hourly price if types differ. Each of
    `seeds` runs has `requests` requests, of which the first tenth is not counted.

    With a `validation` all figures are the exact simulator's: `interval_rps` goes from the goodput to the lowest rate
    tried that fails; for a wanted rate the goodput is that rate (0 if it misses the SLOs); `searched` holds the fast
    simulator's figures. Without, the figures are the fast simulator's on fresh seeds, and `interval_rps` goes from the
    worst to the best seed. `searched_rps` is the first estimate of the search, from other seeds.
    """

    family: str
    placement: Placement
    goodput_rps: float
    interval_rps: tuple[float, float]
    searched_rps: float
    rate_rps: float
    shares: dict[str, float]
    attainment: float
    weight: float
    price_per_hour: float
    cost_per_million: float
    requests: int
    seeds: int
    validation: Validation | None = None
    searched: Candidate | None = None

    @property
    def per_device_rps(self) -> float:
        """Goodput in requests/s per device."""
        return self.goodput_rps / self.placement.devices

    @property
    def fast_result(self) -> Candidate:
        """The figures of the fast simulator."""
        return self.searched or self

    @property
    def local_prefill(self) -> str:
        """Whether decode instances prefill too in this deployment (setting `local_prefill`)."""
        mode = candidates.local_prefill_mode(self.placement)
        return self.validation.local_prefill if self.validation else mode


@dataclass(frozen=True, slots=True)
class Solution:
    """The planner's result: the best candidate, the runners-up, and the utilisation of the best one's resources.

    `others` begins with candidates from the exact simulator; each possible family has at least one. `ties` are
    deployments that the search cannot distinguish from the best. `notes` are sentences for the user.
    """

    problem: Problem
    best_candidate: Candidate
    others: tuple[Candidate, ...]
    uses: tuple[ResourceUse, ...]
    ties: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def validation(self) -> Validation | None:
        """The exact simulator's result for `best_candidate`; None if the exact simulator was not used."""
        return self.best_candidate.validation

    @property
    def binding(self) -> ResourceUse:
        """The resource that limits goodput: that whose growth helps most; if none helps, the most utilised one."""
        return max(self.uses, key=lambda use: (max(use.gain, 0.0), use.utilisation or 0.0))


def ignore_progress(text: str) -> None:
    """The default for `report` of `solve_placement`."""


def solve_placement(problem: Problem, report: Callable[[str], None] = ignore_progress) -> Solution:
    """Finds the best placement for a problem; `report` is told what is being done.

    Raises:
        ConfigError: the model does not fit, no placement meets the SLOs (the error names the limiting resource and
            the nearest possible SLOs), or the hardware cannot carry the rate (the error names the rate it can carry).
    """
    check_feasible(problem)
    _check_placeable(problem)
    search = FamilySearch(problem)
    report("searching")
    finalists = list(search.finalists())
    report(f"measuring {len(finalists)} finalists")
    options = sorted(
        (_measure_finalist(problem, finalist) for finalist in finalists),
        key=lambda candidate: (not _meets_slos(problem, candidate), *_rank_key(problem, candidate)),
    )
    if problem.rate is not None and (not options or not _meets_slos(problem, options[0])):
        raise _rate_too_high(problem, search)
    if not options or not options[0].goodput_rps:
        raise slo_too_tight(problem)
    report(f"checking {options[0].placement} with the exact simulator")
    options, refuted = _validate_candidates(problem, options, search)
    report("looking for what limits the answer")
    fast = options[0].fast_result
    fast = replace(fast, interval_rps=_goodput_interval(problem, fast))
    best = replace(options[0], searched=fast) if options[0].validation else fast
    family = "low" if best.placement.affinity == "low" else best.family
    return Solution(
        problem, best, tuple(options[1:]), resource_uses(
            problem, best.placement, best.fast_result.searched_rps, best.fast_result.rate_rps
        ),
        search.ties(family), (*_solution_notes(problem, best), *refuted),
        search.dropped,
    )  # fmt: skip


def _check_placeable(problem: Problem) -> None:
    """Raises ConfigError if no placement of the requested families fits the hardware, whatever the SLOs are."""
    if "colocated" in problem.families:
        return
    asked = " or ".join(problem.families)
    what = f"no {asked} placement of {problem.model.name} fits {problem.hardware_text}"
    fix = "take more devices, or allow colocated instances: --family colocated"
    if problem.devices < 2:
        raise ConfigError(what, "a prefill and a decode instance need a device each", fix)
    if problem.affinity == "high" and "disaggregated" not in problem.families:
        why = "hybrids are pairs whose KV stays within nodes, and --affinity high rules these out"
        raise ConfigError(what, why, "--affinity auto")
    kinds = [kind for kind in ("low", "high") if problem.affinity in ("auto", kind)]
    tried = kinds if "disaggregated" in problem.families else ["low"]
    if "disaggregated" not in problem.families:
        pairs = list(problem.units("low"))
        wholes = [
            candidates.combine_placements((pair, Placement((candidates.colocated_companion(pair),))))
            for pair in pairs
        ]
        if pairs and not any(map(problem.fits_on_nodes, wholes)):
            least = min(whole.devices for whole in wholes)
            why = f"a pair and a colocated instance like the one that decodes take {least} devices at least"
            raise ConfigError(what, why, fix)
    if not any(problem.fits_on_nodes(placement) for kind in tried for placement in problem.units(kind)):
        least = min(parallelism.devices for group in problem.groups for parallelism in problem.splits(group))
        raise ConfigError(
            what, f"the smallest instance that has room takes {least} devices, and a pair two of them", fix
        )


def _validate_candidates(
    problem: Problem, candidates: list[Candidate], search: FamilySearch
) -> tuple[list[Candidate], tuple[str, ...]]:
    """Runs the best candidate of each family (for a wanted rate: the lightest ones) in the exact simulator.

    Returns the candidates with the validated ones first, best of all foremost, and notes on lighter candidates that the
    exact simulator refuted. Raises ConfigError if all are refuted, and all larger deployments too.
    """
    if not problem.verified:
        return candidates, ()
    kept = [candidate for candidate in candidates if _meets_slos(problem, candidate)]
    first: dict[tuple[str, bool], Candidate] = {}
    # Colocated with and without stages are both validated, since the two simulators differ most there.
    for option in kept:
        apart = option.family == "colocated" and has_stages(option.placement)
        first.setdefault((option.family, apart), option)
    if problem.rate is not None:
        validated, refuted = _lightest_upheld(problem, kept, list(first.values()), problem.rate, search)
    else:
        refuted = ()
        validated = [
            _with_validation(problem, one, validate_placement(problem, one.placement, one.rate_rps, True))
            for one in first.values()
        ]
        validated = _settle_order(problem, validated)
        if not validated[0].goodput_rps:
            raise slo_too_tight(problem)
    placements = {one.placement for one in validated}
    return [*validated, *(one for one in candidates if one.placement not in placements)], refuted


def _settle_order(problem: Problem, validated: list[Candidate]) -> list[Candidate]:
    """Sorts validated candidates, best first; those at the top are run again, longer, until the best is confirmed."""

    def rank(candidate: Candidate) -> tuple[float, float]:
        return -candidate.goodput_rps, candidate.weight

    found: list[Candidate] = []
    for colocated in (True, False):
        group = [candidate for candidate in validated if (candidate.family == "colocated") == colocated]
        confirmed = set[Placement]()
        while group:
            group.sort(key=rank)
            best = group[0]
            if best.validation is None or not best.goodput_rps or best.placement in confirmed:
                break
            confirmed.add(best.placement)
            group[0] = _with_validation(
                problem, best.fast_result, confirm_goodput(problem, best.placement, best.validation)
            )
        found += group
    return sorted(found, key=rank)


def _lightest_upheld(
    problem: Problem, candidates: list[Candidate], first: list[Candidate], rate: float, search: FamilySearch
) -> tuple[list[Candidate], tuple[str, ...]]:
    """The lightest candidate that carries `rate` in the exact simulator, then the refuted ones, and notes on these.

    `candidates` are sorted lightest first. If those in `first` (one per family) fail, instances are added to them; if
    that does not help, deployments on all the hardware are tried.
    """
    refuted: list[Candidate] = []
    best_candidate: Candidate | None = None
    for candidate in candidates[:MAX_VALIDATED]:
        asked = validate_placement if candidate in first else validate_rate
        one = _with_validation(problem, candidate, asked(problem, candidate.placement, rate, False))
        if one.goodput_rps:
            best_candidate = one
            break
        refuted.append(one)
    for candidate in [one.fast_result for one in refuted if one.fast_result in first]:
        below = best_candidate.weight if best_candidate else math.inf
        if larger := add_instances(problem, candidate.placement, rate, below):
            best_candidate = _evaluate_candidate(problem, larger, rate)
    if best_candidate is None:
        carries = _whole_hardware_rates(problem, search, rate)
        able = [one for most, one in carries if most >= rate]
        if not able:
            raise _too_little_hardware(problem, carries, rate)
        best_candidate = _evaluate_candidate(problem, min(able, key=problem.weight), rate)
    notes = [
        f"the search would choose {option.placement}, but the exact simulator measures an attainment of only"
        f" {option.attainment:.1%} there"
        for option in refuted
        if option.weight <= best_candidate.weight
    ]
    return [best_candidate, *refuted], tuple(notes)


def _evaluate_candidate(problem: Problem, placement: Placement, rate: float) -> Candidate:
    """Measures a placement at `rate` in both simulators."""
    measured = _measure_finalist(problem, Finalist(placement, rate))
    return _with_validation(problem, measured, validate_rate(problem, placement, rate, False))


def _with_validation(problem: Problem, candidate: Candidate, validation: Validation) -> Candidate:
    """The candidate with its figures replaced by those of the exact simulator."""
    samples, good_rps = problem.samples(problem.requests), validation.goodput_rps * validation.attainment
    return replace(
        candidate,
        goodput_rps=validation.goodput_rps,
        interval_rps=(validation.goodput_rps, validation.fails_rps or validation.goodput_rps),
        rate_rps=validation.rate_rps,
        shares=validation.shares,
        attainment=validation.attainment,
        cost_per_million=_cost_per_million(candidate.price_per_hour, good_rps, samples),
        requests=validation.requests,
        seeds=1,
        validation=validation,
        searched=candidate,
    )


def _cost_per_million(price_per_hour: float, good_rps: float, samples: Samples) -> float:
    """Price of a million output tokens of requests that meet their SLOs; infinite if no request does."""
    tokens = sum(job.output for sample in samples for job in sample) / sum(map(len, samples))
    return price_per_hour / 3600.0 / (good_rps * tokens) * 1e6 if good_rps else math.inf


def _long_trial(problem: Problem, placement: Placement) -> Trial:
    """The trial for the reported figures: on fresh seeds, and long enough for the wanted rate."""
    return problem.trial(placement, fresh=True, least=(problem.rate or 0.0) * problem.horizon_s)


def _measure_finalist(problem: Problem, finalist: Finalist) -> Candidate:
    """Measures goodput, attainment and cost of a finalist in a long run of the fast simulator."""
    trial = _long_trial(problem, finalist.placement)
    goodput = measure_goodput(trial, finalist.placement, finalist.expected_rps)
    rate = goodput if problem.rate is None else problem.rate
    shares = trial.shares(finalist.placement, rate) if rate else dict.fromkeys(trial.counted(), 0.0)
    attained, price = overall_attainment(shares, trial.counted()), problem.hourly_price(finalist.placement)
    cost = _cost_per_million(price, min(rate, goodput) * attained, trial.samples)
    return Candidate(
        candidates.family_of(finalist.placement), finalist.placement, goodput, (goodput, goodput),
        finalist.expected_rps, rate, shares, attained, problem.weight(finalist.placement), price, cost,
        len(trial.samples[0]), len(trial.samples),
    )  # fmt: skip


def _goodput_interval(problem: Problem, candidate: Candidate) -> tuple[float, float]:
    """The lowest and the highest goodput among each seed alone and all seeds together."""
    trial = _long_trial(problem, candidate.placement)
    rates = [candidate.goodput_rps]
    for sample in trial.samples:
        alone = replace(trial, samples=(sample,))
        rates.append(measure_goodput(alone, candidate.placement, candidate.goodput_rps))
    return min(rates), max(rates)


def _meets_slos(problem: Problem, candidate: Candidate) -> bool:
    """Whether a candidate meets the SLOs at its rate, up to `ATTAINMENT_SLACK` for the chance of fresh seeds."""
    if not candidate.goodput_rps:
        return False
    return all(
        share >= problem.slo(kind).attainment - ATTAINMENT_SLACK for kind, share in candidate.shares.items()
    )


def _rank_key(problem: Problem, candidate: Candidate) -> tuple[float, float, str]:
    """Sort key, best first. With a wanted rate: least weight, then highest goodput; without: the other way round."""
    name = str(candidate.placement) + candidate.placement.affinity
    if problem.rate is None:
        return -candidate.goodput_rps, candidate.weight, name
    return candidate.weight, -candidate.goodput_rps, name


def _solution_notes(problem: Problem, candidate: Candidate) -> tuple[str, ...]:
    """Sentences for the user: settings without effect, missed SLOs, over-optimistic short runs, sources of costs."""
    notes, fast = list(problem.notes), candidate.fast_result
    if problem.node_link is not None and problem.one_node:
        notes.append("the link between nodes has no effect: there is one node")
    if problem.is_open_ended:
        notes.append(OPEN_ENDED)
    for kind, share in sorted(candidate.shares.items()):
        wanted = problem.slo(kind).attainment
        if share < wanted:
            notes.append(
                f"on fresh seeds {share:.1%} of {kind or 'all'} requests meet their SLOs, not {wanted:.1%}"
            )
    if fast.searched_rps > 1.1 * fast.goodput_rps:
        notes.append(
            f"a run of {problem.requests} requests suggested {fast.searched_rps:.3g} requests/s; "
            f"the longer run reaches {fast.goodput_rps:.3g}"
        )
    for pool in candidate.placement.pools:
        profile = problem.profiles[problem.group(pool.device).device.name]
        note = f"costs of {profile.cost_source(pool.parallelism)}"
        if note not in notes:
            notes.append(note)
    return tuple(notes)


def _round_down(rate: float) -> float:
    """A rate rounded down to three digits."""
    digits = 10.0 ** (2 - math.floor(math.log10(rate))) if rate > 0.0 else 1.0
    return math.floor(rate * digits) / digits


def _rate_too_high(problem: Problem, search: FamilySearch) -> ConfigError:
    """The error for a wanted rate above what the hardware carries."""
    rate = problem.rate or 0.0
    return _too_little_hardware(problem, _whole_hardware_rates(problem, search, rate), rate)


def _whole_hardware_rates(
    problem: Problem, search: FamilySearch, rate: float
) -> list[tuple[float, Placement]]:
    """The rates (at most `rate`) that all the hardware carries with the best unit of each family; highest first."""
    carries = []
    for unit in (search.whole(name).best for name in FAMILY_NEEDS if search.asked(*FAMILY_NEEDS[name])):
        if unit is None:
            continue
        count = problem.most(unit.placement)
        expected, whole = unit.rate * count, candidates.replicate_unit(unit.placement, count)
        most = min(rate, measure_goodput(problem.trial(whole, fresh=True), whole, expected))
        if most > 0.0 and problem.verified:
            most = carried_rate(problem, whole, most)
        carries.append((most, whole))
    return sorted(carries, key=lambda one: -one[0])


def _too_little_hardware(
    problem: Problem, carries: list[tuple[float, Placement]], rate: float
) -> ConfigError:
    """The error that names the highest rate possible. `carries` holds (rate, placement), the highest rate first."""
    what = f"{problem.hardware_text} do not carry {rate:g} requests/s of this traffic within the SLOs"
    if not carries:
        return ConfigError(what, "no placement that fits meets the SLOs at any rate", "loosen the SLOs")
    most, placement = carries[0]
    most = _round_down(most / RUNG_RATIO)  # one rung lower, to be possible on other seeds too
    if most <= 0.0:
        return slo_too_tight(problem)
    jobs = [job for sample in problem.samples(problem.requests) for job in sample]
    full = saturation_rates(problem.site, jobs, problem.slos, placement)
    return ConfigError(
        what,
        f"{placement} carries most: about {most:.3g} requests/s; {min(full, key=lambda name: full[name])} limits it",
        f"take about {math.ceil(problem.devices * rate / most)} devices, or plan for --rate {most:.3g}",
    )
