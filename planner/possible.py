"""What cannot be: a model that does not fit, and promises that no instance or pair keeps even for one request alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diptych.errors import ConfigError
from planner.bounds import each_s, first_s
from planner.capacity import fits, smallest
from planner.request import Request
from planner.terms import BOTH, Job, Link, Placement, Pool, Slo

SPARED = 0.3  # of the requests that may miss a promise
GIGABITS = 8e-9  # per second, of a byte per second


class Place(NamedTuple):
    """An instance, whatever its role, and on how many nodes its stages lie."""

    pool: Pool
    nodes: int


class Way(NamedTuple):
    """How a request may be served: who reads it, who writes its answer, and the link between them (none: one instance
    does both).
    """

    reads: Place
    writes: Place
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Nearest:
    """The tightest objectives that something keeps for one request alone, and what that is.

    Each of `ttft_s` and `tpot_s` by itself; `written_s` is the least TPOT if KV were moved in no time, and `link` the
    way that it goes (none: it stays). `factor` is by how much both must be loosened for one placement to keep them
    together (1: they are possible), `unmoved` the same if KV were moved in no time.
    """

    ttft_s: float
    ttft_by: str
    tpot_s: float
    tpot_by: str
    written_s: float
    link: Link | None
    factor: float
    unmoved: float

    def tightest(self, slo: Slo) -> tuple[str, str]:
        """The objective of `slo` that is nearest to being impossible, or is, and the resource that forbids it."""
        if self.ttft_s / slo.ttft_s >= self.tpot_s / slo.tpot_s:
            return "TTFT", "prefill"
        moving = self.tpot_s > slo.tpot_s or self.tpot_s >= 2.0 * self.written_s
        return "TPOT", "the link" if self.link and moving and self.written_s <= slo.tpot_s else "decode"


def impossible(request: Request) -> None:
    """Raises ConfigError if nothing can be placed: memory, or a promise that nothing keeps at no load.

    Families of which the hardware takes no placement at all are told elsewhere (`planner.placement`).
    """
    if not any(request.splits(stock) for stock in request.stocks):
        raise _no_room(request)
    if not any(_ways(request)):
        return
    for kind in request.kinds():
        slo = request.slo(kind)
        bare = nearest(request, kind, slo.attainment)
        if bare.ttft_s > slo.ttft_s or bare.tpot_s > slo.tpot_s:
            raise _forbidden(request, kind, "TTFT" if bare.ttft_s > slo.ttft_s else "TPOT", bare)
        if bare.factor > 1.0:
            raise _not_both(request, kind, bare)


def nearest(request: Request, kind: str = "", share: float | None = None) -> Nearest:
    """What is possible for `share` of a kind's requests, with nobody else there, of the families and affinities that
    are asked for; by default for so many that some are to spare.
    """
    slo, ways = request.slo(kind), list(_ways(request))
    jobs = [job for sample in request.samples(request.requests) for job in sample if job.kind == kind]
    times = _Times(request, jobs, share or _share(slo))
    whole = [
        way for way in ways if way.link is None
    ] or ways  # a pair keeps neither better than one instance alone
    first, each = min(whole, key=times.ttft_s), min(whole, key=times.tpot_s)
    names = [
        f"{pool.split} of {pool.device}" if request.mixed else str(pool.split)
        for pool in (first.reads.pool, each.writes.pool)
    ]
    unmoved = [way._replace(link=None) for way in ways]
    factor = times.factor(slo, ways)
    return Nearest(
        times.ttft_s(first), names[0], times.tpot_s(each), names[1],
        min(times.tpot_s(way._replace(link=None)) for way in whole), each.link,
        factor, times.factor(slo, unmoved) if factor > 1.0 else factor,
    )  # fmt: skip


def _ways(request: Request) -> Iterator[Way]:
    """By one instance, where some may do both, and by every pair that may be."""
    families = set(request.families)
    if families & {"colocated", "hybrid"}:
        for stock in request.stocks:
            for split in request.splits(stock):
                alone = Placement((Pool(BOTH, split, 1, stock.device.name),), "none")
                place = Place(alone.pools[0], request.nodes(alone, alone.pools[0]))
                yield Way(place, place)
    tried = ["low"] if families & {"disaggregated", "hybrid"} and request.affinity != "high" else []
    tried += ["high"] if "disaggregated" in families and request.affinity != "low" else []
    for unit in (unit for kind in tried for unit in request.units(kind)):
        reads, writes = (Place(replace(pool, role=BOTH), request.nodes(unit, pool)) for pool in unit.pools)
        yield Way(reads, writes, request.link(unit))


class _Times:
    """What requests take with nobody else there, and what `share` of them do not exceed. What several ways have in
    common is computed once.
    """

    def __init__(self, request: Request, jobs: Sequence[Job], share: float) -> None:
        self._site, self._jobs, self._share = request.site, jobs, share
        self._firsts: dict[Place, tuple[float, list[float]]] = {}
        self._eaches: dict[tuple[Place, Link | None], tuple[float, list[float]]] = {}

    def ttft_s(self, way: Way) -> float:
        return self._first(way)[0]

    def tpot_s(self, way: Way) -> float:
        return self._each(way)[0]

    def factor(self, slo: Slo, ways: Sequence[Way]) -> float:
        """The least by which both objectives must grow, over all ways; 1 where they need not."""

        def least(way: Way) -> float:
            return max(self.ttft_s(way) / slo.ttft_s, self.tpot_s(way) / slo.tpot_s)

        best = math.inf
        for way in sorted(ways, key=least):
            if least(way) >= best:
                break
            both = zip(self._first(way)[1], self._each(way)[1], strict=True)
            worst = (max(first / slo.ttft_s, each / slo.tpot_s) for first, each in both)
            best = min(best, _quantile(worst, self._share))
            if best <= 1.0:
                return 1.0
        return best

    def _first(self, way: Way) -> tuple[float, list[float]]:
        if way.reads not in self._firsts:
            cost = self._site.cost(way.reads.pool, way.reads.nodes)
            found = [first_s(cost, job) for job in self._jobs]
            self._firsts[way.reads] = _quantile(found, self._share), found
        return self._firsts[way.reads]

    def _each(self, way: Way) -> tuple[float, list[float]]:
        key = way.writes, way.link
        if key not in self._eaches:
            cost = self._site.cost(way.writes.pool, way.writes.nodes)
            found = [each_s(cost, job) + self._moved_s(way.link, job) for job in self._jobs]
            self._eaches[key] = _quantile(found, self._share), found
        return self._eaches[key]

    def _moved_s(self, link: Link | None, job: Job) -> float:
        """What moving the KV of a prompt adds to each token after the first."""
        if link is None or job.output < 2:
            return 0.0
        return (link.latency_s + job.prompt * self._site.token_bytes / link.bytes_per_s) / (job.output - 1)


def _share(slo: Slo) -> float:
    """The share that must keep a promise alone: a part of those that may miss it is for queues and for chance."""
    return slo.attainment + SPARED * (1.0 - slo.attainment)


def _quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def _up(milliseconds: float) -> str:
    """Three digits, rounded up: what is told must be possible."""
    digits = 10 ** (2 - math.floor(math.log10(milliseconds))) if milliseconds > 0 else 1
    return f"{math.ceil(milliseconds * digits - 1e-9) / digits:g}"


def _told(request: Request, kind: str) -> str:
    return f"for {request.slo(kind).attainment:.0%}" + (f" of {kind!r}" if kind else "")


def _over(link: Link | None) -> str:
    return f"KV comes over {link.bytes_per_s * GIGABITS:.3g} Gb/s" if link else ""


def _forbidden(request: Request, kind: str, name: str, bare: Nearest) -> ConfigError:
    """One objective that nothing keeps. What is told as possible leaves something to spare for queues."""
    slo, found = request.slo(kind), nearest(request, kind)
    linked = name == "TPOT" and bare.written_s <= slo.tpot_s
    if name == "TTFT":
        limit_s, least_s, flag = slo.ttft_s, found.ttft_s, "--slo-ttft-ms"
        why, by, more = "prefill compute forbids it", found.ttft_by, "faster devices"
    else:
        limit_s, least_s, flag = slo.tpot_s, found.tpot_s, "--slo-tpot-ms"
        why, by, more = "decode, bound by memory bandwidth, forbids it", found.tpot_by, "faster devices"
    told = f"alone on {by}, without any queue, it takes {least_s * 1e3:.4g} ms"
    if linked:
        why, more = "the link forbids it", "a faster link, or --family colocated"
        told = f"{_over(found.link)}; {told}, and {found.written_s * 1e3:.4g} ms if nothing were moved"
    return ConfigError(
        f"no placement of {request.model.name} on {request.hardware} keeps {name} {limit_s * 1e3:.4g} ms"
        f" {_told(request, kind)}",
        f"{why}: {told}",
        f"the nearest that is possible: {flag} {_up(least_s * 1e3)}; or {more}",
    )


def _not_both(request: Request, kind: str, bare: Nearest) -> ConfigError:
    slo, factor = request.slo(kind), nearest(request, kind).factor
    why, more = "but not both on so many devices: prefill and decode want them at once", "more devices"
    if bare.unmoved <= 1.0:
        why, more = (
            f"but not both: {_over(bare.link) or 'KV is moved'}, and the link forbids it",
            "a faster link",
        )
    return ConfigError(
        f"no placement of {request.model.name} on {request.hardware} keeps TTFT {slo.ttft_s * 1e3:.4g} ms and TPOT"
        f" {slo.tpot_s * 1e3:.4g} ms together {_told(request, kind)}",
        f"each is possible by itself, {why}",
        f"the nearest that is possible: --slo-ttft-ms {_up(slo.ttft_s * 1e3 * factor)} --slo-tpot-ms"
        f" {_up(slo.tpot_s * 1e3 * factor)}; or {more}",
    )


def too_tight(request: Request) -> ConfigError:
    """What is possible for a request alone, and at no rate that the long runs tried."""
    told, near = [], []
    for kind in request.kinds():
        found, slo = nearest(request, kind), request.slo(kind)
        name, resource = found.tightest(slo)
        over = f" ({_over(found.link)})" if found.link else ""
        told.append(
            f"{kind or 'all'}: TTFT {found.ttft_s * 1e3:.4g} ms on {found.ttft_by}, TPOT {found.tpot_s * 1e3:.4g} ms on"
            f" {found.tpot_by}{over}"
        )
        spent = found.ttft_s / slo.ttft_s if name == "TTFT" else found.tpot_s / slo.tpot_s
        near.append((spent, name + (f" of {kind!r}" if kind else ""), resource))
    _, name, resource = max(near)
    return ConfigError(
        f"no placement of {request.model.name} on {request.hardware} keeps the objectives at any rate",
        f"{resource} leaves nothing to spare for {name}; alone, without any queue, {', '.join(told)}",
        f"loosen {name}, take more devices, or allow other families",
    )


def _no_room(request: Request) -> ConfigError:
    stock = max(request.stocks, key=lambda one: one.devices * one.device.memory_bytes)
    smallest(
        request.model, stock.device, stock.devices, request.longest
    )  # says why, if memory is what forbids it
    whole = max(request.model.splits(stock.devices), key=lambda split: (split.devices, split.tp))
    fit = fits(request.model, whole, stock.device, request.longest)
    why = fit.why_not or "its splits are not on whole nodes, or were not profiled"
    return ConfigError(
        f"{request.model.name} does not fit on {request.hardware}",
        why,
        "take more devices, or a smaller model",
    )
