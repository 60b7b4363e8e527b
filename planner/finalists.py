"""Which whole deployments are worth measuring again: the best few of each family, found with the short runs (see
`planner.placement`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from planner import candidates
from planner.bounds import ceiling, saturation
from planner.request import Request
from planner.search import NEAR, Result, search
from planner.sizing import apart, carries, lightest, ratios, shortlist, sized, together
from planner.terms import Placement, Pool

FINALISTS = 2  # of each family
HYBRIDS = 6
PAIRED = 6
DOUBT = 0.5  # below the best colocated unit: where it has stages, the product's decisions may like another one better


@dataclass(frozen=True, slots=True)
class Finalist:
    """A whole deployment that the search proposes, with the goodput that it expects."""

    placement: Placement
    expected_rps: float


class Found:
    """The search itself: families one after the other."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.dropped: dict[str, int] = {}
        self.units: dict[str, Result] = {}

    def finalists(self) -> Iterable[Finalist]:
        """Whole deployments, at least one of each family that is asked for and possible."""
        chosen = self._lightest() if self.request.rate is not None else self._fullest()
        return {str(one.placement) + one.placement.affinity: one for one in chosen}.values()

    def ties(self, family: str) -> tuple[str, ...]:
        """Other units of a family that the search cannot tell from the best one's."""
        result = self.units.get(family)
        return tuple(str(one.unit) for one in result.ties[:5]) if result else ()

    def asked(self, *families: str) -> bool:
        """Whether one of `families` is; disaggregation needs two devices."""
        if families != ("colocated",) and self.request.devices < 2:
            return False
        return bool(set(families) & set(self.request.families))

    # ---- the highest goodput of all the hardware

    def _fullest(self) -> list[Finalist]:
        request, chosen = self.request, []
        if self.asked("colocated"):
            chosen += self._multiplied("colocated")
        if self.asked("disaggregated"):
            if request.affinity != "high":
                chosen += self._multiplied("low")
            if request.affinity != "low":
                chosen += self._apart()
        if self.asked("hybrid") and request.affinity != "high":
            chosen += self._hybrids()
        return chosen

    def whole(self, family: str) -> Result:
        """The units of a family, by what all the hardware would carry."""
        if family not in self.units:
            request = self.request
            units = (unit for unit in request.units(family) if request.packs(unit))
            near = DOUBT if family == "colocated" and request.verified else NEAR
            found = search(units, request.trial, request.bound, request.share, near)
            forbidden = Counter(min(why, key=lambda name: why[name]) for _, why in found.impossible)
            for why, count in (*found.dropped.items(), *forbidden.items()):
                self.dropped[why] = self.dropped.get(why, 0) + count
            self.units[family] = found
        return self.units[family]

    def _multiplied(self, family: str) -> list[Finalist]:
        chosen, scored = [], self.whole(family).scored
        whole = (one for one in scored[FINALISTS:] if not staged(one.unit))
        beside = islice(whole, 1) if family == "colocated" else ()
        for one in (*scored[:FINALISTS], *beside):
            count = self.request.most(one.unit)
            chosen.append(Finalist(candidates.times(one.unit, count), one.rate * count))
        return chosen

    def _apart(self) -> list[Finalist]:
        """n prefill and m decode instances, each of its own kind, and what is best within nodes, set free."""
        request, phases = self.request, apart(self.request)
        every = ratios(request, phases) or self._paired()
        low = self.units.get("low")
        if low and low.best:
            pools = candidates.times(low.best.unit, request.most(low.best.unit)).pools
            every.append(Placement(pools, "high"))
        found = search(every, request.trial, request.bound, lambda whole: 1.0)
        return [Finalist(one.unit, one.rate) for one in found.scored[:FINALISTS]]

    def _paired(self) -> list[Placement]:
        """Pairs as they are. Each phase by itself is asked for more than both together have to keep, and where hardly
        anything is to spare that may be more than any keeps.
        """
        request = self.request
        units = [unit for unit in request.units("high") if ceiling(request.bound(unit)) > 0.0]
        units.sort(key=lambda unit: (-request.saturated_rps(unit) / request.share(unit), str(unit)))
        return [candidates.times(unit, request.most(unit)) for unit in units[:PAIRED] if request.packs(unit)]

    def _hybrids(self) -> list[Finalist]:
        """Pairs, and their companions on what they leave: those that promise most by means, measured together."""
        request, rated = self.request, []
        alone = {one.pools[-1]: (one, rate) for one, rate in self._by_size("colocated")}
        for pair, carried in self._by_size("low"):
            found = alone.get(candidates.companion(pair))
            if found is None:
                continue
            one, beside = found
            for count in range(1, request.devices // pair.devices + 1):
                rest = (request.devices - count * pair.devices) // one.devices
                if rest:
                    parts = (candidates.times(pair, count), candidates.times(one, rest))
                    rated.append((-count * carried - rest * beside, str(parts), candidates.both(parts)))
        packed = (
            placement for *_, placement in sorted(rated, key=lambda one: one[:2]) if request.packs(placement)
        )
        best = search(list(islice(packed, HYBRIDS)), request.trial, request.bound, lambda placement: 1.0)
        return [Finalist(one.unit, one.rate) for one in best.scored[:1]]

    def _by_size(self, family: str) -> list[tuple[Placement, float]]:
        """The unit of each size and kind of writing instance that carries most by means, with that rate."""
        request, best = self.request, dict[tuple[int, Pool], tuple[Placement, float]]()
        jobs = [job for sample in request.samples(request.requests) for job in sample]
        for unit in request.units(family):
            if ceiling(request.bound(unit)) <= 0.0:
                continue
            rate = min(saturation(request.site, jobs, request.slos, unit).values())
            key = unit.devices, unit.pools[-1]
            if key not in best or rate > best[key][1]:
                best[key] = unit, rate
        return list(best.values())

    def _beside(self, pairs: Placement, alone: Placement, below: float = math.inf) -> Placement | None:
        """`pairs` and as many of `alone` as fit beside them and are lighter than `below` together."""
        request = self.request
        rest = (request.devices - pairs.devices) // alone.devices
        while rest > 0:
            placement = candidates.both((pairs, candidates.times(alone, rest)))
            if request.weight(placement) < below and request.packs(placement):
                return placement
            rest -= 1
        return None

    # ---- the lightest deployment for a rate

    def _lightest(self) -> list[Finalist]:
        request, rate = self.request, self.request.rate or 0.0
        chosen: list[Placement] = []
        if self.asked("colocated"):
            chosen += lightest(request, request.units("colocated"), rate, FINALISTS)
        if self.asked("disaggregated", "hybrid") and request.affinity != "high":
            pairs = lightest(request, request.units("low"), rate, FINALISTS)
            chosen += pairs if self.asked("disaggregated") else []
            if self.asked("hybrid") and pairs:
                chosen += self._leaner(pairs[0], rate)
        if self.asked("disaggregated") and request.affinity != "low":
            chosen += self._ceilings(rate)
        fresh = (self._sized(one, rate) for one in chosen)
        return [Finalist(one, rate) for one in fresh if one]

    def _ceilings(self, rate: float) -> list[Placement]:
        """Prefill and decode instances of their own kinds, near the counts of algorithm 1."""
        request, phases = self.request, apart(self.request)
        starts = [
            together(reads, writes, rate)
            for reads in shortlist(phases.prefill)
            for writes in shortlist(phases.decode)
        ]
        if not starts:
            return lightest(request, request.units("high"), rate, FINALISTS)
        starts.sort(key=lambda one: (request.weight(one), str(one)))
        return [start for start in starts[: 2 * FINALISTS] if request.packs(start)]

    def _leaner(self, pairs: Placement, rate: float) -> list[Placement]:
        """Fewer pairs with colocated instances beside them, where that is lighter than pairs alone."""
        request, below = self.request, self.request.weight(pairs)
        units = math.gcd(*(pool.count for pool in pairs.pools))
        ones = candidates.counted(pairs, tuple(pool.count // units for pool in pairs.pools))
        alone = candidates.alone(ones.pools[-1].split, ones.pools[-1].device)
        best: list[Placement] = []
        for count in range(units - 1, 0, -1):
            placement = self._beside(candidates.times(ones, count), alone, below)
            if placement and carries(request, placement, rate):
                best, below = [placement], request.weight(placement)
        return best

    def _sized(self, start: Placement, rate: float) -> Placement | None:
        """As many as the rate needs on fresh seeds."""
        return sized(
            self.request,
            self.request.trial(start, fresh=True, least=rate * self.request.horizon_s),
            start,
            rate,
        )


def staged(placement: Placement) -> bool:
    """Whether an instance of it has several stages."""
    return any(pool.split.pp > 1 for pool in placement.pools)
