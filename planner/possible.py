"""What cannot be: a model that does not fit, and promises that no instance keeps even for one request alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diptych.errors import ConfigError
from planner.bounds import each_s, first_s
from planner.capacity import fits, smallest
from planner.request import Request
from planner.terms import BOTH, Job, Pool, Slo

SPARED = 0.3  # of the requests that may miss a promise


@dataclass(frozen=True, slots=True)
class Nearest:
    """The tightest objectives that some instance keeps for one request alone, and which instance that is.

    Each of `ttft_s` and `tpot_s` by itself; `factor` is by how much both must be loosened for one placement to keep
    them together (1: they are possible).
    """

    ttft_s: float
    ttft_by: str
    tpot_s: float
    tpot_by: str
    factor: float


def impossible(request: Request) -> None:
    """Raises ConfigError if nothing can be placed: memory, or a promise that no instance keeps at no load."""
    if not any(request.splits(stock) for stock in request.stocks):
        raise _no_room(request)
    for kind in request.kinds():
        slo = request.slo(kind)
        bare = nearest(request, kind, slo.attainment)
        if bare.ttft_s <= slo.ttft_s and bare.tpot_s <= slo.tpot_s and bare.factor <= 1.0:
            continue
        found = nearest(request, kind)  # with something to spare for queues
        told = f" of {kind!r}" if kind else ""
        for name, flag, limit_s, bare_s, least_s, by, why in (
            ("TTFT", "--slo-ttft-ms", slo.ttft_s, bare.ttft_s, found.ttft_s, found.ttft_by, "prefill compute forbids"
             " it"),
            ("TPOT", "--slo-tpot-ms", slo.tpot_s, bare.tpot_s, found.tpot_s, found.tpot_by, "decode, bound by memory"
             " bandwidth, forbids it"),
        ):  # fmt: skip
            if bare_s > limit_s:
                raise ConfigError(
                    f"no placement of {request.model.name} on {request.hardware} keeps {name} {limit_s * 1e3:.4g} ms"
                    f" for {slo.attainment:.0%}{told}",
                    f"{why}: alone on {by}, without any queue, it takes {least_s * 1e3:.4g} ms",
                    f"the nearest that is possible: {flag} {_up(least_s * 1e3)}; or faster devices",
                )
        raise _not_both(request, slo, found.factor, told)


def nearest(request: Request, kind: str = "", share: float | None = None) -> Nearest:
    """What is possible for `share` of a kind's requests, with nobody else there; by default for so many that some are
    to spare.
    """
    slo = request.slo(kind)
    jobs = [job for sample in request.samples(request.requests) for job in sample if job.kind == kind]
    pools = [
        Pool(BOTH, split, 1, stock.device.name) for stock in request.stocks for split in request.splits(stock)
    ]
    cost, share = request.site.cost, share or _share(slo)
    ttft = {pool: _quantile((first_s(cost(pool), job) for job in jobs), share) for pool in pools}
    tpot = {pool: _quantile((each_s(cost(pool), job) for job in jobs), share) for pool in pools}
    first, each = min(ttft, key=lambda pool: ttft[pool]), min(tpot, key=lambda pool: tpot[pool])
    names = [f"{one.split} of {one.device}" if request.mixed else str(one.split) for one in (first, each)]
    return Nearest(ttft[first], names[0], tpot[each], names[1], _factor(request, slo, jobs, pools, share))


def _factor(request: Request, slo: Slo, jobs: Sequence[Job], pools: Sequence[Pool], share: float) -> float:
    """The least by which both objectives must grow, over all instances and pairs that the hardware takes."""
    cost = request.site.cost
    firsts = {pool: [first_s(cost(pool), job) / slo.ttft_s for job in jobs] for pool in pools}
    eaches = {pool: [each_s(cost(pool), job) / slo.tpot_s for job in jobs] for pool in pools}
    best = math.inf
    for reads in sorted(pools, key=lambda pool: _quantile(firsts[pool], share)):
        for writes in pools:
            if writes == reads or reads.devices + writes.devices <= request.devices:
                worst = map(max, firsts[reads], eaches[writes])
                best = min(best, _quantile(worst, share))
                if best <= 1.0:
                    return 1.0
    return best


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


def _not_both(request: Request, slo: Slo, factor: float, told: str) -> ConfigError:
    return ConfigError(
        f"no placement of {request.model.name} on {request.hardware} keeps TTFT {slo.ttft_s * 1e3:.4g} ms and TPOT"
        f" {slo.tpot_s * 1e3:.4g} ms together for {slo.attainment:.0%}{told}",
        "each is possible by itself, but not both on so many devices: prefill and decode want them at once",
        f"the nearest that is possible: --slo-ttft-ms {_up(slo.ttft_s * 1e3 * factor)} --slo-tpot-ms"
        f" {_up(slo.tpot_s * 1e3 * factor)}; or more devices",
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
