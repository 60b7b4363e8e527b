"""The planner's answer: which deployment keeps the promises best, whether to disaggregate at all, and what it rests on.

Three families are searched with the same costs and the same samples: colocated instances, disaggregated ones (KV within
nodes as in DistServe's algorithm 2, and anywhere as in its algorithm 1), and hybrids of both. The best few of each are
measured again on seeds that nobody searched with, over a longer horizon, and that is what is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from diptych.errors import ConfigError
from planner import candidates
from planner.bounds import saturation
from planner.finalists import Finalist, Found, staged
from planner.possible import impossible, nearest
from planner.request import Request, enlarged
from planner.search import LOWEST, RATIO, Scored, climb, rung_of
from planner.terms import Placement
from planner.trial import Trial, joint
from planner.verify import Verdict, carried, strengthened, verify

MOST_JUDGED = 8  # placements that are asked whether they carry a rate by the product's own decisions
SLACK = 0.02  # of attainment: what a plan may lack on fresh seeds, and still be called right
NEEDS = {"colocated": ("colocated",), "low": ("disaggregated", "hybrid")}
RESOURCES = ("prefill", "decode", "link", "memory")
MORE = 1.25  # of a resource, to see whether goodput follows it


@dataclass(frozen=True, slots=True)
class Option:
    """A deployment and what it was measured to do, on fresh seeds and a long horizon.

    `goodput_rps` is of all its devices, `interval_rps` from the worst to the best seed, `shares` the joint attainment
    of each kind at `rate_rps`: the wanted rate, or the goodput. `searched_rps` is what the search found, with other
    seeds. `weight` is devices, or their price per hour where there are several kinds.
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

    @property
    def per_device_rps(self) -> float:
        return self.goodput_rps / self.placement.devices


@dataclass(frozen=True, slots=True)
class Use:
    """A resource of a deployment: how busy it is at the rate (an estimate by means), and by how much goodput grows if
    there is a quarter more of it.
    """

    resource: str
    utilisation: float | None
    gain: float


@dataclass(frozen=True, slots=True)
class Answer:
    """`best`, the runners-up (best first, at least one of each family that is possible), and the best one's resources.

    `ties` are others as good as the search can tell. `notes` say in sentences what a reader should know. `verdict` is
    what the product's own decisions make of `best`; none where it was not asked for.
    """

    request: Request
    best: Option
    others: tuple[Option, ...]
    uses: tuple[Use, ...]
    ties: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)
    verdict: Verdict | None = None

    @property
    def binding(self) -> Use:
        """The resource that limits goodput: the one whose growth helps most."""
        return max(self.uses, key=lambda use: use.gain)


def place(request: Request) -> Answer:
    """The best placement for a request.

    Raises ConfigError: the model does not fit, no placement keeps the promises (with the resource that forbids it and
    the nearest ones that are possible), or the hardware does not carry the rate (with the rate that it does carry).
    """
    impossible(request)
    _placeable(request)
    found = Found(request)
    options = sorted(
        (_measured(request, one) for one in found.finalists()),
        key=lambda option: (not _good(request, option), *_rank(request, option)),
    )
    if request.rate is not None and (not options or not _good(request, options[0])):
        raise _too_much(request, found)
    if not options or not options[0].goodput_rps:
        raise _too_tight(request)
    verdict, options, refuted = _judged(request, options, found)
    best = replace(options[0], interval_rps=_interval(request, options[0]))
    family = "low" if best.placement.affinity == "low" else best.family
    return Answer(
        request, best, tuple(options[1:]), uses(request, best), found.ties(family),
        (*_notes(request, best, verdict), *refuted),
        found.dropped, verdict,
    )  # fmt: skip


def _placeable(request: Request) -> None:
    """Raises ConfigError if none of the families that are asked for can be placed, whatever is promised."""
    if "colocated" in request.families:
        return
    asked = " or ".join(request.families)
    what = f"no {asked} placement of {request.model.name} fits {request.hardware}"
    fix = "take more devices, or allow colocated instances: --family colocated"
    if request.devices < 2:
        raise ConfigError(what, "a prefill and a decode instance need a device each", fix)
    if request.affinity == "high" and "disaggregated" not in request.families:
        why = "hybrids are pairs whose KV stays within nodes, and --affinity high rules these out"
        raise ConfigError(what, why, "--affinity auto")
    kinds = [kind for kind in ("low", "high") if request.affinity in ("auto", kind)]
    tried = kinds if "disaggregated" in request.families else ["low"]
    if not any(request.packs(unit) for kind in tried for unit in request.units(kind)):
        least = min(split.devices for stock in request.stocks for split in request.splits(stock))
        raise ConfigError(
            what, f"the smallest instance that has room takes {least} devices, and a pair two of them", fix
        )


def _judged(
    request: Request, options: list[Option], found: Found
) -> tuple[Verdict | None, list[Option], tuple[str, ...]]:
    """The options, first the one that the product's own decisions make the best: of the best of each family. And what
    is to be said of lighter ones that they refute.

    Raises ConfigError: they refute all, and all that is larger.
    """
    if not request.verified:
        return None, options, ()
    kept = [option for option in options if _good(request, option)]
    first: dict[tuple[str, bool], Option] = {}
    for option in kept:  # of colocated ones those with stages and without: there the simulators differ most
        apart = option.family == "colocated" and staged(option.placement)
        first.setdefault((option.family, apart), option)
    if request.rate is not None:
        best, verdict, refuted = _upheld(request, kept, list(first.values()), request.rate, found)
    else:
        judged = [(one, verify(request, one.placement, one.rate_rps, True)) for one in first.values()]
        best, verdict = max(judged, key=lambda one: (one[1].goodput_rps, -one[0].weight))
        refuted = ()
        if not verdict.goodput_rps:
            raise _too_tight(request)
    return verdict, [best, *(one for one in options if one.placement != best.placement)], refuted


def _upheld(
    request: Request, options: list[Option], first: list[Option], rate: float, found: Found
) -> tuple[Option, Verdict, tuple[str, ...]]:
    """The lightest that carries the rate by the product's own decisions. `options` are the lightest first; the `first`
    of each family get more instances if they do not as they are, and if that does not help, all the hardware is tried.
    """
    refuted: list[tuple[Option, Verdict]] = []
    best: tuple[Option, Verdict] | None = None
    for option in options[:MOST_JUDGED]:
        verdict = verify(request, option.placement, rate, False)
        if verdict.goodput_rps:
            best = option, verdict
            break
        refuted.append((option, verdict))
    for option in [one for one, _ in refuted if one in first]:
        below = best[0].weight if best else math.inf
        if larger := strengthened(request, option.placement, rate, below):
            best = _option(request, larger, rate)
    if best is None:
        carries = _whole(request, found, rate)
        able = [one for most, one in carries if most >= rate]
        if not able:
            raise _too_little(request, carries, rate)
        best = _option(request, min(able, key=request.weight), rate)
    chosen = best[0]
    notes = [
        f"the search would take {option.placement}, but the product's scheduler and router keep only"
        f" {verdict.attainment:.1%} there"
        for option, verdict in refuted
        if option.weight <= chosen.weight
    ]
    return chosen, best[1], tuple(notes)


def _option(request: Request, placement: Placement, rate: float) -> tuple[Option, Verdict]:
    return _measured(request, Finalist(placement, rate)), verify(request, placement, rate, False)


def _measured(request: Request, one: Finalist) -> Option:
    trial = request.trial(one.placement, fresh=True, least=(request.rate or 0.0) * request.horizon_s)
    rung = climb(trial, one.placement, 1.0, LOWEST, rung_of(math.inf), rung_of(one.expected_rps))
    goodput = 0.0 if rung is None else Scored(one.placement, rung, 1.0).rate
    rate = goodput if request.rate is None else request.rate
    shares = trial.shares(one.placement, rate) if rate else dict.fromkeys(trial.counted(), 0.0)
    attained, price = joint(shares, trial.counted()), request.price(one.placement)
    tokens = sum(job.output for sample in trial.samples for job in sample) / sum(map(len, trial.samples))
    good_rps = min(rate, goodput) * attained * tokens
    return Option(
        candidates.family(one.placement), one.placement, goodput, (goodput, goodput), one.expected_rps, rate, shares,
        attained, request.weight(one.placement), price, price / 3600.0 / good_rps * 1e6 if good_rps else math.inf,
        len(trial.samples[0]), len(trial.samples),
    )  # fmt: skip


def _interval(request: Request, option: Option) -> tuple[float, float]:
    """Goodput by each seed alone: the lowest and the highest."""
    trial = request.trial(option.placement, fresh=True)
    rates = []
    for sample in trial.samples:
        alone = replace(trial, samples=(sample,))
        top = rung_of(math.inf)
        rung = climb(alone, option.placement, 1.0, LOWEST, top, rung_of(option.goodput_rps))
        rates.append(0.0 if rung is None else Scored(option.placement, rung, 1.0).rate)
    return min(rates), max(rates)


def _good(request: Request, option: Option) -> bool:
    """Whether it keeps the promises at the wanted rate, within the slack that fresh seeds may take."""
    if not option.goodput_rps:
        return False
    return all(share >= request.slo(kind).attainment - SLACK for kind, share in option.shares.items())


def _rank(request: Request, option: Option) -> tuple[float, float, str]:
    """For a rate: the lightest, then who has most to spare. Without: the highest goodput, then the lightest."""
    name = str(option.placement) + option.placement.affinity
    if request.rate is None:
        return -option.goodput_rps, option.weight, name
    return option.weight, -option.goodput_rps, name


def uses(request: Request, option: Option) -> tuple[Use, ...]:
    """The resources of a deployment, with what a quarter more of each would bring."""
    trial, placement = request.trial(option.placement), option.placement
    jobs = [job for sample in trial.samples for job in sample]
    full = saturation(request.site, jobs, request.slos, placement)
    base = _goodput(trial, placement, option.searched_rps)
    found = []
    for resource in RESOURCES:
        if resource == "link" and placement.colocated:
            continue
        larger = request.again(trial, enlarged(request.site, resource, MORE))
        gain = _goodput(larger, placement, base) / base - 1.0 if base else 0.0
        carried = full.get(resource, full.get("compute") if resource in ("prefill", "decode") else None)
        found.append(Use(resource, option.rate_rps / carried if carried else None, gain))
    return tuple(found)


def _goodput(trial: Trial, placement: Placement, guess: float) -> float:
    rung = climb(trial, placement, 1.0, LOWEST, rung_of(math.inf), rung_of(guess))
    return 0.0 if rung is None else Scored(placement, rung, 1.0).rate


def _notes(request: Request, best: Option, verdict: Verdict | None) -> tuple[str, ...]:
    notes = list(request.notes)
    if request.between is not None and request.one_node:
        notes.append("the link between nodes has no effect: there is one node")
    if verdict is not None:
        kept = f"the product's scheduler and router keep {verdict.attainment:.1%} at {best.rate_rps:.3g} requests/s"
        carried = f", and the objectives up to {verdict.goodput_rps:.3g}" if request.rate is None else ""
        notes.append(f"{kept}{carried} (one run of {verdict.requests} requests on a seed of its own)")
    for kind, share in sorted(best.shares.items()):
        wanted = request.slo(kind).attainment
        if share < wanted:
            notes.append(
                f"on fresh seeds {share:.1%} of {kind or 'all'} requests keep their promise, not {wanted:.1%}"
            )
    if best.searched_rps > 1.1 * best.goodput_rps:
        notes.append(
            f"a run of {request.requests} requests promised {best.searched_rps:.3g} requests/s; "
            f"the long one keeps {best.goodput_rps:.3g}"
        )
    for pool in best.placement.pools:
        told = request.profiles[request.stock(pool.device).device.name].how(pool.split)
        if told not in notes:
            notes.append(f"costs of {told}")
    return tuple(notes)


def _down(rate: float) -> float:
    """Three digits, rounded down."""
    digits = 10.0 ** (2 - math.floor(math.log10(rate))) if rate > 0.0 else 1.0
    return math.floor(rate * digits) / digits


def _too_tight(request: Request) -> ConfigError:
    """Possible for a request alone, and at no rate that the long runs tried."""
    kinds = ", ".join(
        f"{kind or 'all'}: TTFT {found.ttft_s * 1e3:.4g} ms on {found.ttft_by}, TPOT {found.tpot_s * 1e3:.4g} ms on"
        f" {found.tpot_by}"
        for kind, found in ((kind, nearest(request, kind)) for kind in request.kinds())
    )
    return ConfigError(
        f"no placement of {request.model.name} on {request.hardware} keeps the objectives at any rate",
        f"alone, without any queue, {kinds}",
        "loosen the objective that is nearest to these, take more devices, or allow other families",
    )


def _too_much(request: Request, found: Found) -> ConfigError:
    """The wanted rate is above what the hardware carries."""
    rate = request.rate or 0.0
    return _too_little(request, _whole(request, found, rate), rate)


def _whole(request: Request, found: Found, rate: float) -> list[tuple[float, Placement]]:
    """What all the hardware carries as the best of each family, up to `rate`, on fresh seeds: the most first."""
    wholes = [
        (one.rate * request.most(one.unit), candidates.times(one.unit, request.most(one.unit)))
        for one in (found.whole(family).best for family in NEEDS if found.asked(*NEEDS[family]))
        if one is not None
    ]
    carries = []
    for told, whole in wholes:
        most = min(rate, _goodput(request.trial(whole, fresh=True), whole, told))
        if most > 0.0 and request.verified:
            most = carried(request, whole, most)
        carries.append((most, whole))
    return sorted(carries, key=lambda one: -one[0])


def _too_little(request: Request, carries: list[tuple[float, Placement]], rate: float) -> ConfigError:
    """`carries`: what the best placements carry, the most first."""
    what = f"{request.hardware} do not carry {rate:g} requests/s of this traffic within the objectives"
    if not carries:
        return ConfigError(what, "no placement that fits keeps them at any rate", "loosen the objectives")
    most, placement = carries[0]
    most = _down(most / RATIO)  # what is told must be possible, also on other seeds
    if most <= 0.0:
        return _too_tight(request)
    jobs = [job for sample in request.samples(request.requests) for job in sample]
    full = saturation(request.site, jobs, request.slos, placement)
    return ConfigError(
        what,
        f"{placement} carries most: about {most:.3g} requests/s; {min(full, key=lambda name: full[name])} limits it",
        f"take about {math.ceil(request.devices * rate / most)} devices, or plan for --rate {most:.3g}",
    )
