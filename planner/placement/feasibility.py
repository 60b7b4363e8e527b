"""Detects problems that no search could solve, and words the errors for them.

There are two cases: the model does not fit into memory, or no instance or pair meets the SLOs even without load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.costs.capacity import check_memory_fit, smallest_split
from planner.costs.kv.classes import advise_shares, check_class_rooms
from planner.placement.bounds import min_tpot_s, min_ttft_s
from planner.placement.problem import Problem
from planner.types import BOTH, InstancePool, Job, LinkSpec, Placement

# If an SLO is suggested to the user, this share of the requests that may miss it is kept back for those that queue.
SPARED_SHARE = 0.3
# Gigabits per byte.
GIGABITS = 8e-9


class InstanceOnNodes(NamedTuple):
    """An instance of any role, and the number of nodes that its stages lie on."""

    pool: InstancePool
    nodes: int


class ServingPath(NamedTuple):
    """One way to serve a request: the instance that prefills, the one that decodes, and the KV link between them.

    `link` is None if one instance does both.
    """

    prefill: InstanceOnNodes
    decode: InstanceOnNodes
    link: LinkSpec | None = None


@dataclass(frozen=True, slots=True)
class TightestSlo:
    """The tightest SLOs that any instance or pair can meet for a request without load, and which one meets them.

    `ttft_s` and `tpot_s` are each minimal by themselves. `written_s` is the least TPOT if KV transfer took no time;
    `link` is the KV link of the instance or pair with the least TPOT (None: no transfer). `factor` is the factor by
    which both SLOs must be loosened for one placement to meet them together (1: they are possible); `unmoved` is that
    factor if KV transfer took no time.
    """

    ttft_s: float
    ttft_by: str
    tpot_s: float
    tpot_by: str
    written_s: float
    link: LinkSpec | None
    factor: float
    unmoved: float

    def tightest(self, slo: Slo) -> tuple[str, str]:
        """The SLO of `slo` ("TTFT" or "TPOT") with the least slack, and the resource that limits it."""
        if self.ttft_s / slo.ttft_s >= self.tpot_s / slo.tpot_s:
            return "TTFT", "prefill"
        moving = self.tpot_s > slo.tpot_s or self.tpot_s >= 2.0 * self.written_s
        return "TPOT", "the link" if self.link and moving and self.written_s <= slo.tpot_s else "decode"


def check_feasible(problem: Problem) -> None:
    """Raises ConfigError if nothing can be placed: too little memory, or an SLO that no instance meets without load.

    Families for which no placement fits the hardware are checked in `planner.placement.solve`.
    """
    if not any(problem.splits(group) for group in problem.groups):
        raise _no_room_error(problem)
    if not any(_serving_paths(problem)):
        return
    for kind in problem.kinds():
        slo = problem.slo(kind)
        tightest = tightest_slo(problem, kind, slo.attainment)
        if not slo.is_met(tightest.ttft_s, tightest.tpot_s):
            name = "TPOT" if slo.is_met(tightest.ttft_s, None) else "TTFT"
            raise _forbidden_slo(problem, kind, name, tightest)
        if tightest.factor > 1.0:
            raise _conflicting_slos(problem, kind, tightest)


def tightest_slo(problem: Problem, kind: str = "", share: float | None = None) -> TightestSlo:
    """The tightest SLOs possible without load, over the requested families and affinities.

    They hold for `share` of the requests of a kind. The default is somewhat more than the target attainment, so that
    some requests may miss their SLOs because of queueing.
    """
    slo, paths = problem.slo(kind), list(_serving_paths(problem))
    jobs = [job for sample in problem.samples(problem.requests) for job in sample if job.kind == kind]
    times = _UnloadedLatency(problem, jobs, share or _share_unloaded(slo))
    # Pairs are skipped if possible: without load a pair is never faster than one instance alone.
    whole = [path for path in paths if path.link is None] or paths
    first, each = min(whole, key=times.ttft_s), min(whole, key=times.tpot_s)
    names = [
        f"{pool.parallelism} of {pool.device}" if problem.mixed_devices else str(pool.parallelism)
        for pool in (first.prefill.pool, each.decode.pool)
    ]
    unmoved = [way._replace(link=None) for way in paths]
    factor = times.factor(slo, paths)
    return TightestSlo(
        times.ttft_s(first), names[0], times.tpot_s(each), names[1],
        min(times.tpot_s(way._replace(link=None)) for way in whole), each.link,
        factor, times.factor(slo, unmoved) if factor > 1.0 else factor,
    )  # fmt: skip


def _serving_paths(problem: Problem) -> Iterator[ServingPath]:
    """Every way to serve a request: by each split of one instance (if some may do both), and by each possible pair."""
    families = set(problem.families)
    if families & {"colocated", "hybrid"}:
        for group in problem.groups:
            for parallelism in problem.splits(group):
                alone = Placement((InstancePool(BOTH, parallelism, 1, group.device.name),), "none")
                place = InstanceOnNodes(alone.pools[0], problem.nodes(alone, alone.pools[0]))
                yield ServingPath(place, place)
    tried = ["low"] if families & {"disaggregated", "hybrid"} and problem.affinity != "high" else []
    tried += ["high"] if "disaggregated" in families and problem.affinity != "low" else []
    for placement in (unit for kind in tried for unit in problem.units(kind)):
        prefill, decode = (
            InstanceOnNodes(replace(pool, role=BOTH), problem.nodes(placement, pool))
            for pool in placement.pools
        )
        yield ServingPath(prefill, decode, problem.link(placement))


class _UnloadedLatency:
    """Latencies of requests that run alone, and the value that `share` of the requests do not exceed.

    Results are cached, since many serving paths share a prefill or a decode instance.
    """

    def __init__(self, problem: Problem, jobs: Sequence[Job], share: float) -> None:
        self._site, self._jobs, self._share = problem.site, jobs, share
        self._firsts: dict[InstanceOnNodes, tuple[float, list[float]]] = {}
        self._eaches: dict[tuple[InstanceOnNodes, LinkSpec | None], tuple[float, list[float]]] = {}

    def ttft_s(self, path: ServingPath) -> float:
        return self._ttft_quantile(path)[0]

    def tpot_s(self, path: ServingPath) -> float:
        return self._tpot_quantile(path)[0]

    def factor(self, slo: Slo, paths: Sequence[ServingPath]) -> float:
        """The least factor by which both SLOs must be loosened, over all ways; 1 if a way meets them as they are."""

        def lower_bound(path: ServingPath) -> float:
            return max(self.ttft_s(path) / slo.ttft_s, self.tpot_s(path) / slo.tpot_s)

        best = math.inf
        # Maxima over all requests are costly to compute, so the ways are tried in the order of a lower bound, until
        # no later way can be better.
        for path in sorted(paths, key=lower_bound):
            if lower_bound(path) >= best:
                break
            both = zip(self._ttft_quantile(path)[1], self._tpot_quantile(path)[1], strict=True)
            worst = (max(first / slo.ttft_s, each / slo.tpot_s) for first, each in both)
            best = min(best, _quantile_of(worst, self._share))
            if best <= 1.0:
                return 1.0
        return best

    def _ttft_quantile(self, path: ServingPath) -> tuple[float, list[float]]:
        if path.prefill not in self._firsts:
            cost = self._site.cost(path.prefill.pool, path.prefill.nodes)
            found = [min_ttft_s(cost, job, self._site.kv_class(job).work) for job in self._jobs]
            self._firsts[path.prefill] = _quantile_of(found, self._share), found
        return self._firsts[path.prefill]

    def _tpot_quantile(self, path: ServingPath) -> tuple[float, list[float]]:
        key = path.decode, path.link
        if key not in self._eaches:
            cost = self._site.cost(path.decode.pool, path.decode.nodes)
            found = [
                min_tpot_s(cost, job, self._site.kv_class(job).work) + self._moved_s(path.link, job)
                for job in self._jobs
            ]
            self._eaches[key] = _quantile_of(found, self._share), found
        return self._eaches[key]

    def _moved_s(self, link: LinkSpec | None, job: Job) -> float:
        """Seconds that the transfer of a prompt's KV adds to each token after the first."""
        if link is None or job.output < 2:
            return 0.0
        return (link.latency_s + self._site.kv_bytes(job) / link.bytes_per_s) / (job.output - 1)


def _share_unloaded(slo: Slo) -> float:
    """The target attainment without load: higher than the SLO's own, to leave some misses to queueing."""
    return slo.attainment + SPARED_SHARE * (1.0 - slo.attainment)


def _quantile_of(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def _round_up(milliseconds: float) -> str:
    """A time rounded up to three digits: the suggested SLO must be possible."""
    digits = 10 ** (2 - math.floor(math.log10(milliseconds))) if milliseconds > 0 else 1
    return f"{math.ceil(milliseconds * digits - 1e-9) / digits:g}"


def _describe_share(problem: Problem, kind: str) -> str:
    return f"for {problem.slo(kind).attainment:.0%}" + (f" of {kind!r}" if kind else "")


def _describe_link(link: LinkSpec | None) -> str:
    return f"KV comes over {link.bytes_per_s * GIGABITS:.3g} Gb/s" if link else ""


def _forbidden_slo(problem: Problem, kind: str, name: str, tightest: TightestSlo) -> ConfigError:
    """The error for one SLO that no placement meets. The SLO that it suggests leaves room for queueing."""
    slo, found = problem.slo(kind), tightest_slo(problem, kind)
    linked = name == "TPOT" and tightest.written_s <= slo.tpot_s
    if name == "TTFT":
        limit_s, least_s, flag = slo.ttft_s, found.ttft_s, "--slo-ttft-ms"
        why, by, more = "prefill compute forbids it", found.ttft_by, "faster devices"
    else:
        limit_s, least_s, flag = slo.tpot_s, found.tpot_s, "--slo-tpot-ms"
        why, by, more = "decode, bound by memory bandwidth, forbids it", found.tpot_by, "faster devices"
    reason = f"alone on {by}, without any queue, it takes {least_s * 1e3:.4g} ms"
    if linked:
        why, more = "the link forbids it", "a faster link, or --family colocated"
        reason = f"{_describe_link(found.link)}; {reason}, and {found.written_s * 1e3:.4g} ms if nothing were moved"
    return ConfigError(
        f"no placement of {problem.model.name} on {problem.hardware_text} meets {name} {limit_s * 1e3:.4g} ms"
        f" {_describe_share(problem, kind)}",
        f"{why}: {reason}",
        f"the nearest that is possible: {flag} {_round_up(least_s * 1e3)}; or {more}",
    )


def _conflicting_slos(problem: Problem, kind: str, tightest: TightestSlo) -> ConfigError:
    """The error for TTFT and TPOT SLOs that are possible one by one, but not together."""
    slo, factor = problem.slo(kind), tightest_slo(problem, kind).factor
    why, more = "but not both on this many devices: prefill and decode compete for them", "more devices"
    if tightest.unmoved <= 1.0:
        why, more = (
            f"but not both: {_describe_link(tightest.link) or 'KV is moved'}, and the link forbids it",
            "a faster link",
        )
    return ConfigError(
        f"no placement of {problem.model.name} on {problem.hardware_text} meets TTFT {slo.ttft_s * 1e3:.4g} ms and TPOT"
        f" {slo.tpot_s * 1e3:.4g} ms together {_describe_share(problem, kind)}",
        f"each is possible by itself, {why}",
        f"the nearest that is possible: --slo-ttft-ms {_round_up(slo.ttft_s * 1e3 * factor)} --slo-tpot-ms"
        f" {_round_up(slo.tpot_s * 1e3 * factor)}; or {more}",
    )


def slo_too_tight(problem: Problem) -> ConfigError:
    """The error for SLOs that a single request can meet, but no rate of requests that was tried."""
    limits, near = [], []
    for kind in problem.kinds():
        found, slo = tightest_slo(problem, kind), problem.slo(kind)
        name, resource = found.tightest(slo)
        over = f" ({_describe_link(found.link)})" if found.link else ""
        limits.append(
            f"{kind or 'all'}: TTFT {found.ttft_s * 1e3:.4g} ms on {found.ttft_by}, TPOT {found.tpot_s * 1e3:.4g} ms on"
            f" {found.tpot_by}{over}"
        )
        spent = found.ttft_s / slo.ttft_s if name == "TTFT" else found.tpot_s / slo.tpot_s
        near.append((spent, name + (f" of {kind!r}" if kind else ""), resource))
    _, name, resource = max(near)
    return ConfigError(
        f"no placement of {problem.model.name} on {problem.hardware_text} meets the SLOs at any rate",
        f"{resource} leaves nothing to spare for {name}; alone, without any queue, {', '.join(limits)}",
        f"loosen {name}, take more devices, or allow other families",
    )


def _check_class_rooms(problem: Problem) -> None:
    """Raises ConfigError if a class of KV has on no instance room for one request.

    That is one of full length, or the longest one that asks for the class where instances are too small for the other.
    """
    pools = [
        InstancePool(BOTH, parallelism, 1, group.device.name)
        for group in problem.groups
        for parallelism in problem.model.splits(group.devices)
    ]
    most = max(map(problem.site.kv_tokens, pools))
    check_class_rooms(problem.kv_classes, most, problem.model.max_len)
    needs = [problem.class_need(one.name, most) for one in problem.kv_classes]
    for one in problem.kv_classes:
        if most * one.room < (longest := problem.longest_of(one.name)):
            raise ConfigError(
                f"the share of the KV class {one.name} is too small for one request",
                f"{one.share:.3g} of the largest instance holds {most * one.room:,.0f} tokens,"
                f" and the longest request has {longest:,}",
                f"{advise_shares(problem.kv_classes, most, needs)}, or take more devices",
            )


def _no_room_error(problem: Problem) -> ConfigError:
    """The error for a model that fits on no split of any device."""
    if problem.kv_classes:
        _check_class_rooms(problem)
    group = max(problem.groups, key=lambda one: one.devices * one.device.memory_bytes)
    # Raises a more precise error if memory is the reason.
    smallest_split(problem.model, group.device, group.devices, problem.longest)
    whole = max(
        problem.model.splits(group.devices), key=lambda parallelism: (parallelism.devices, parallelism.tp)
    )
    fit = check_memory_fit(problem.model, whole, group.device, problem.longest)
    why = fit.why_not or "its splits are not on whole nodes, or were not profiled"
    return ConfigError(
        f"{problem.model.name} does not fit on {problem.hardware_text}",
        why,
        "take more devices, or a smaller model",
    )
