"""Selects the finalists: the best few deployments of each family (colocated, disaggregated, hybrid), by short runs.

`planner.placement.solve` then measures the finalists again with longer runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from planner.placement import candidates
from planner.placement.bounds import lowest_bound, saturation_rates
from planner.placement.problem import Problem
from planner.placement.search import NEAR_BEST, SearchResult, search_units
from planner.placement.sizing import (
    best_per_size,
    carries_rate,
    combine_phases,
    lightest_deployments,
    ratio_deployments,
    search_phases,
    size_deployment,
)
from planner.types import InstancePool, Placement

FINALISTS_PER_FAMILY = 2
MAX_HYBRIDS = 6
# Least requests, and least seconds of traffic, of a run for a first answer.
FIRST_REQUESTS, FIRST_S = 600, 5.0
MAX_PAIRED = 6
# Colocated units with stages stay in the search if they are within this share of the best, since the exact simulator
# may prefer them.
STAGED_MARGIN = 0.5


@dataclass(frozen=True, slots=True)
class Finalist:
    """A deployment that the search proposes, with the goodput in requests/s that the search expects of it."""

    placement: Placement
    expected_rps: float


class FamilySearch:
    """Searches the families one after the other, and remembers the results that several of them need."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dropped: dict[str, int] = {}
        self.units: dict[str, SearchResult] = {}

    def finalists(self) -> Iterable[Finalist]:
        """The finalists: at least one for each family that is requested and possible, without duplicates."""
        chosen = self._lightest_for_rate() if self.problem.rate is not None else self._highest_goodput()
        return {
            str(finalist.placement) + finalist.placement.affinity: finalist for finalist in chosen
        }.values()

    def ties(self, family: str) -> tuple[str, ...]:
        """Up to five other units of a family whose goodput the search cannot distinguish from the best one's."""
        result = self.units.get(family)
        return tuple(str(unit.placement) for unit in result.ties[:5]) if result else ()

    def asked(self, *families: str) -> bool:
        """Whether one of `families` is requested and possible; all but colocated need at least two devices."""
        if families != ("colocated",) and self.problem.devices < 2:
            return False
        return bool(set(families) & set(self.problem.families))

    # ---- without a wanted rate: the highest goodput of all the hardware

    def _highest_goodput(self) -> list[Finalist]:
        """The finalists that use all the hardware, family by family."""
        problem, chosen = self.problem, []
        if self.asked("colocated"):
            chosen += self._replicated("colocated")
        if self.asked("disaggregated"):
            if problem.affinity != "high":
                chosen += self._replicated("low")
            if problem.affinity != "low":
                chosen += self._separate_phases()
        if self.asked("hybrid") and problem.affinity != "high":
            chosen += self._hybrid_finalists()
        return chosen

    def whole(self, family: str) -> SearchResult:
        """The units of "colocated", or of "low" (pairs with KV within nodes), ranked by goodput per device."""
        if family not in self.units:
            problem = self.problem
            units = (placement for placement in problem.units(family) if problem.fits_on_nodes(placement))
            near = STAGED_MARGIN if family == "colocated" and problem.verified else NEAR_BEST
            result = search_units(units, problem.trial, problem.bound, problem.share, near)
            forbidden = Counter(min(why, key=lambda name: why[name]) for _, why in result.impossible)
            for why, count in (*result.dropped.items(), *forbidden.items()):
                self.dropped[why] = self.dropped.get(why, 0) + count
            self.units[family] = result
        return self.units[family]

    def _replicated(self, family: str) -> list[Finalist]:
        """The best units of a family, replicated until they fill the hardware."""
        chosen, scored = [], self.whole(family).scored
        whole = (unit for unit in scored[FINALISTS_PER_FAMILY:] if not has_stages(unit.placement))
        beside = islice(whole, 1) if family == "colocated" else ()
        for one in (*scored[:FINALISTS_PER_FAMILY], *beside):
            count = self.problem.most(one.placement)
            chosen.append(Finalist(candidates.replicate_unit(one.placement, count), one.rate * count))
        return chosen

    def _separate_phases(self) -> list[Finalist]:
        """Deployments of n prefill and m decode instances whose splits were searched separately (algorithm 1).

        The best deployment within nodes is tried as well, with KV free to move anywhere.
        """
        problem, phases = self.problem, search_phases(self.problem)
        every = ratio_deployments(problem, phases) or self._as_pairs()
        low = self.units.get("low")
        if low and low.best:
            pools = candidates.replicate_unit(low.best.placement, problem.most(low.best.placement)).pools
            every.append(Placement(pools, "high"))
        result = search_units(every, problem.trial, problem.bound, lambda whole: 1.0)
        return [Finalist(unit.placement, unit.rate) for unit in result.scored[:FINALISTS_PER_FAMILY]]

    def _as_pairs(self) -> list[Placement]:
        """Replicated pairs, used if the separate search of the phases found nothing.

        That search demands a higher attainment of each phase than both need together, which may be unreachable when
        the SLOs are tight.
        """
        problem = self.problem
        units = [
            placement for placement in problem.units("high") if lowest_bound(problem.bound(placement)) > 0.0
        ]
        units.sort(key=lambda unit: (-problem.saturated_rps(unit) / problem.share(unit), str(unit)))
        return [
            candidates.replicate_unit(unit, problem.most(unit))
            for unit in units[:MAX_PAIRED]
            if problem.fits_on_nodes(unit)
        ]

    def _hybrid_finalists(self) -> list[Finalist]:
        """Hybrids: n pairs, and colocated instances on the remaining devices.

        Combinations are ranked by mean rates; the first few that fit the nodes are simulated.
        """
        problem, rated = self.problem, []
        alone = {one.pools[-1]: (one, rate) for one, rate in self._best_by_size("colocated")}
        for pair, carried in self._best_by_size("low"):
            found = alone.get(candidates.colocated_companion(pair))
            if found is None:
                continue
            one, beside = found
            for count in range(1, problem.devices // pair.devices + 1):
                rest = (problem.devices - count * pair.devices) // one.devices
                if rest:
                    parts = (candidates.replicate_unit(pair, count), candidates.replicate_unit(one, rest))
                    rated.append(
                        (-count * carried - rest * beside, str(parts), candidates.combine_placements(parts))
                    )
        packed = (
            placement
            for *_, placement in sorted(rated, key=lambda one: one[:2])
            if problem.fits_on_nodes(placement)
        )
        best = search_units(
            list(islice(packed, MAX_HYBRIDS)), problem.trial, problem.bound, lambda placement: 1.0
        )
        return [Finalist(one.placement, one.rate) for one in best.scored[:1]]

    def _best_by_size(self, family: str) -> list[tuple[Placement, float]]:
        """The unit with the highest mean rate, for each number of devices and each split of its decode instance."""
        problem, best = self.problem, dict[tuple[int, InstancePool], tuple[Placement, float]]()
        jobs = [job for sample in problem.samples(problem.requests) for job in sample]
        for placement in problem.units(family):
            if lowest_bound(problem.bound(placement)) <= 0.0:
                continue
            rate = min(saturation_rates(problem.site, jobs, problem.slos, placement).values())
            key = placement.devices, placement.pools[-1]
            if key not in best or rate > best[key][1]:
                best[key] = placement, rate
        return list(best.values())

    def _add_colocated(
        self, pair_placement: Placement, alone: Placement, below: float = math.inf
    ) -> Placement | None:
        """That with as many `alone` instances as fit beside it while its weight stays below `below`, or None."""
        problem = self.problem
        rest = (problem.devices - pair_placement.devices) // alone.devices
        while rest > 0:
            placement = candidates.combine_placements(
                (pair_placement, candidates.replicate_unit(alone, rest))
            )
            if problem.weight(placement) < below and problem.fits_on_nodes(placement):
                return placement
            rest -= 1
        return None

    # ---- for a wanted rate: the lightest deployment (fewest devices, or lowest price) that carries it

    def _lightest_for_rate(self) -> list[Finalist]:
        """The lightest deployments of each family that carry the wanted rate, sized again on fresh seeds."""
        problem, rate = self.problem, self.problem.rate or 0.0
        chosen: list[Placement] = []
        if self.asked("colocated"):
            chosen += lightest_deployments(problem, problem.units("colocated"), rate, FINALISTS_PER_FAMILY)
        if self.asked("disaggregated", "hybrid") and problem.affinity != "high":
            pairs = lightest_deployments(problem, problem.units("low"), rate, FINALISTS_PER_FAMILY)
            chosen += pairs if self.asked("disaggregated") else []
            if self.asked("hybrid") and pairs:
                chosen += self._fewer_pairs(pairs[0], rate)
        if self.asked("disaggregated") and problem.affinity != "low":
            chosen += self._rounded_up(rate)
        fresh = (self._size_start(one, rate) for one in chosen)
        return [Finalist(one, rate) for one in fresh if one]

    def _rounded_up(self, rate: float) -> list[Placement]:
        """Prefill and decode instances of separately searched splits, with the instance counts of algorithm 1."""
        problem, phases = self.problem, search_phases(self.problem)
        starts = [
            combine_phases(prefill_unit, decode_unit, rate)
            for prefill_unit in best_per_size(phases.prefill)
            for decode_unit in best_per_size(phases.decode)
        ]
        if not starts:
            return lightest_deployments(problem, problem.units("high"), rate, FINALISTS_PER_FAMILY)
        starts.sort(key=lambda one: (problem.weight(one), str(one)))
        return [
            placement for placement in starts[: 2 * FINALISTS_PER_FAMILY] if problem.fits_on_nodes(placement)
        ]

    def _fewer_pairs(self, pair_placement: Placement, rate: float) -> list[Placement]:
        """Replaces some of the pairs by colocated instances, if that is lighter and still carries the rate."""
        problem, below = self.problem, self.problem.weight(pair_placement)
        units = math.gcd(*(pool.count for pool in pair_placement.pools))
        ones = candidates.with_counts(
            pair_placement, tuple(pool.count // units for pool in pair_placement.pools)
        )
        alone = candidates.make_colocated(ones.pools[-1].parallelism, ones.pools[-1].device)
        best_placements: list[Placement] = []
        for count in range(units - 1, 0, -1):
            placement = self._add_colocated(candidates.replicate_unit(ones, count), alone, below)
            if placement and carries_rate(problem, placement, rate):
                best_placements, below = [placement], problem.weight(placement)
        return best_placements

    def _size_start(self, placement: Placement, rate: float) -> Placement | None:
        """Adjusts the instance counts of `placement` until it carries the rate on fresh seeds; None if it cannot."""
        return size_deployment(
            self.problem,
            self.problem.trial(placement, fresh=True, least=rate * self.problem.horizon_s),
            placement,
            rate,
        )


def first_answer(problem: Problem) -> Finalist | None:
    """What short runs of one seed suggest; None if no placement meets the SLOs in them, or the
    search itself has no longer ones.
    """
    if problem.requests <= FIRST_REQUESTS and problem.span_s <= FIRST_S:
        return None
    quick = replace(
        problem, seeds=1, requests=min(problem.requests, FIRST_REQUESTS), span_s=min(problem.span_s, FIRST_S),
        families=tuple(family for family in problem.families if family != "hybrid") or problem.families,
        verified=False,
    )  # fmt: skip
    found = sorted(
        FamilySearch(quick).finalists(),
        key=lambda one: (-one.expected_rps, quick.weight(one.placement), str(one.placement)),
    )
    return found[0] if found else None


def has_stages(placement: Placement) -> bool:
    """Whether some instance of the placement has several pipeline stages."""
    return any(pool.parallelism.pp > 1 for pool in placement.pools)
