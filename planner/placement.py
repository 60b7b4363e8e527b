"""The planner's answer: which deployment keeps the promises best, whether to disaggregate at all, and what it rests on.

Three families are searched with the same costs and the same samples: colocated instances, disaggregated ones (KV within
nodes as in DistServe's algorithm 2, and anywhere as in its algorithm 1), and hybrids of both. The best few of each are
measured again on seeds that nobody searched with, over a longer horizon, and that is what is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from diptych.errors import ConfigError
from planner import candidates
from planner.bounds import saturation
from planner.finalists import Finalist, Found, staged
from planner.possible import impossible, too_tight
from planner.request import Request, enlarged
from planner.search import LOWEST, RATIO, Scored, climb, rung_of
from planner.terms import Job, Placement
from planner.trial import Trial, joint
from planner.verify import Verdict, carried, confirmed, judge, strengthened, verify

MOST_JUDGED = 8  # placements that are asked whether they carry a rate by the product's own decisions
SLACK = 0.02  # of attainment: what a plan may lack on fresh seeds, and still be called right
NEEDS = {"colocated": ("colocated",), "low": ("disaggregated", "hybrid")}
RESOURCES = ("prefill", "decode", "link", "memory")
MORE = 1.25  # of a resource, to see whether goodput follows it
Samples = Sequence[Sequence[Job]]
OPEN_ENDED = "one objective is infinite: goodput is at most what the deployment sustains for ever"


@dataclass(frozen=True, slots=True)
class Option:
    """A deployment and what it is found to do.

    `goodput_rps` is of all its devices, `shares` the joint attainment of each kind at `rate_rps`: the wanted rate, or
    the goodput. Where the product's own decisions were asked (`verdict`), all figures are theirs: `interval_rps` is
    from the goodput to the lowest rate tried that fails, a wanted rate is the goodput if they keep the promises there
    (0 if they do not), and `searched` is what the search's simulator has measured. Else its figures are all there are,
    on fresh seeds and a long horizon, `interval_rps` from the worst to the best seed. `searched_rps` is what the search
    found first, with other seeds. `weight` is devices, or their price per hour where there are several kinds. A run is
    of `requests`, of which the first tenth is served and not counted, and there is one for each of `seeds`.
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
    verdict: Verdict | None = None
    searched: Option | None = None

    @property
    def per_device_rps(self) -> float:
        return self.goodput_rps / self.placement.devices

    @property
    def fast(self) -> Option:
        """As the search's simulator has it."""
        return self.searched or self

    @property
    def local_prefill(self) -> str:
        """Who reads prompts where it is deployed (`diptych.config.Config`)."""
        return self.verdict.local_prefill if self.verdict else candidates.local_prefill(self.placement)


@dataclass(frozen=True, slots=True)
class Use:
    """A resource of a deployment: how busy it is at the rate that the search's simulator has for it (an estimate by
    means), and by how much goodput grows if there is a quarter more of it.
    """

    resource: str
    utilisation: float | None
    gain: float


@dataclass(frozen=True, slots=True)
class Answer:
    """`best`, the runners-up (those that were judged, then others, best first; at least one of each family that is
    possible), and the best one's resources.

    `ties` are others as good as the search can tell. `notes` say in sentences what a reader should know.
    """

    request: Request
    best: Option
    others: tuple[Option, ...]
    uses: tuple[Use, ...]
    ties: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict | None:
        """What the product's own decisions make of `best`; none where they were not asked."""
        return self.best.verdict

    @property
    def binding(self) -> Use:
        """The resource that limits goodput: the one whose growth helps most; if none's does, the busiest."""
        return max(self.uses, key=lambda use: (max(use.gain, 0.0), use.utilisation or 0.0))


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
        raise too_tight(request)
    options, refuted = _judged(request, options, found)
    fast = options[0].fast
    fast = replace(fast, interval_rps=_interval(request, fast))
    best = replace(options[0], searched=fast) if options[0].verdict else fast
    family = "low" if best.placement.affinity == "low" else best.family
    return Answer(
        request, best, tuple(options[1:]), uses(request, best.fast), found.ties(family),
        (*_notes(request, best), *refuted),
        found.dropped,
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
    if "disaggregated" not in request.families:
        pairs = list(request.units("low"))
        wholes = [candidates.both((pair, Placement((candidates.companion(pair),)))) for pair in pairs]
        if pairs and not any(map(request.packs, wholes)):
            least = min(whole.devices for whole in wholes)
            why = f"a pair and a colocated instance like the one that decodes take {least} devices at least"
            raise ConfigError(what, why, fix)
    if not any(request.packs(unit) for kind in tried for unit in request.units(kind)):
        least = min(split.devices for stock in request.stocks for split in request.splits(stock))
        raise ConfigError(
            what, f"the smallest instance that has room takes {least} devices, and a pair two of them", fix
        )


def _judged(request: Request, options: list[Option], found: Found) -> tuple[list[Option], tuple[str, ...]]:
    """The options, those first that the product's own decisions have judged, the best one foremost: the best of each
    family, or for a rate the lightest. And what is to be said of lighter ones that they refute.

    Raises ConfigError: they refute all, and all that is larger.
    """
    if not request.verified:
        return options, ()
    kept = [option for option in options if _good(request, option)]
    first: dict[tuple[str, bool], Option] = {}
    for option in kept:  # of colocated ones those with stages and without: there the simulators differ most
        apart = option.family == "colocated" and staged(option.placement)
        first.setdefault((option.family, apart), option)
    if request.rate is not None:
        judged, refuted = _upheld(request, kept, list(first.values()), request.rate, found)
    else:
        refuted = ()
        judged = [
            _promised(request, one, judge(request, one.placement, one.rate_rps, True))
            for one in first.values()
        ]
        judged = _settled(request, judged)
        if not judged[0].goodput_rps:
            raise too_tight(request)
    seen = {one.placement for one in judged}
    return [*judged, *(one for one in options if one.placement not in seen)], refuted


def _settled(request: Request, judged: list[Option]) -> list[Option]:
    """Best first, after longer runs of the best colocated one and the best that is not: of as many as it takes until no
    other promises more.
    """

    def rank(one: Option) -> tuple[float, float]:
        return -one.goodput_rps, one.weight

    found: list[Option] = []
    for colocated in (True, False):
        side = [one for one in judged if (one.family == "colocated") == colocated]
        sure = set[Placement]()
        while side:
            side.sort(key=rank)
            best = side[0]
            if best.verdict is None or not best.goodput_rps or best.placement in sure:
                break
            sure.add(best.placement)
            side[0] = _promised(request, best.fast, confirmed(request, best.placement, best.verdict))
        found += side
    return sorted(found, key=rank)


def _upheld(
    request: Request, options: list[Option], first: list[Option], rate: float, found: Found
) -> tuple[list[Option], tuple[str, ...]]:
    """The lightest that carries the rate by the product's own decisions, then those that they refute, and what is to be
    said of these. `options` are the lightest first; the `first` of each family get more instances if they do not as
    they are, and if that does not help, all the hardware is tried.
    """
    refuted: list[Option] = []
    best: Option | None = None
    for option in options[:MOST_JUDGED]:
        asked = judge if option in first else verify
        one = _promised(request, option, asked(request, option.placement, rate, False))
        if one.goodput_rps:
            best = one
            break
        refuted.append(one)
    for option in [one.fast for one in refuted if one.fast in first]:
        below = best.weight if best else math.inf
        if larger := strengthened(request, option.placement, rate, below):
            best = _option(request, larger, rate)
    if best is None:
        carries = _whole(request, found, rate)
        able = [one for most, one in carries if most >= rate]
        if not able:
            raise _too_little(request, carries, rate)
        best = _option(request, min(able, key=request.weight), rate)
    notes = [
        f"the search would take {option.placement}, but the product's scheduler and router keep only"
        f" {option.attainment:.1%} there"
        for option in refuted
        if option.weight <= best.weight
    ]
    return [best, *refuted], tuple(notes)


def _option(request: Request, placement: Placement, rate: float) -> Option:
    measured = _measured(request, Finalist(placement, rate))
    return _promised(request, measured, verify(request, placement, rate, False))


def _promised(request: Request, option: Option, verdict: Verdict) -> Option:
    """The option with the figures of the product's own decisions."""
    return replace(
        option,
        goodput_rps=verdict.goodput_rps,
        interval_rps=(verdict.goodput_rps, verdict.fails_rps or verdict.goodput_rps),
        rate_rps=verdict.rate_rps,
        shares=verdict.shares,
        attainment=verdict.attainment,
        cost_per_million=_per_million(
            option.price_per_hour, verdict.goodput_rps * verdict.attainment, request.samples(request.requests)
        ),
        requests=verdict.requests,
        seeds=1,
        verdict=verdict,
        searched=option,
    )


def _per_million(price_per_hour: float, good_rps: float, samples: Samples) -> float:
    """What a million tokens of answers that keep their promise cost; infinite where there are none."""
    tokens = sum(job.output for sample in samples for job in sample) / sum(map(len, samples))
    return price_per_hour / 3600.0 / (good_rps * tokens) * 1e6 if good_rps else math.inf


def _long(request: Request, placement: Placement) -> Trial:
    """The trial by which a placement is told: on fresh seeds, and as long as the wanted rate asks for."""
    return request.trial(placement, fresh=True, least=(request.rate or 0.0) * request.horizon_s)


def _measured(request: Request, one: Finalist) -> Option:
    trial = _long(request, one.placement)
    rung = climb(trial, one.placement, 1.0, LOWEST, rung_of(math.inf), rung_of(one.expected_rps))
    goodput = 0.0 if rung is None else Scored(one.placement, rung, 1.0).rate
    rate = goodput if request.rate is None else request.rate
    shares = trial.shares(one.placement, rate) if rate else dict.fromkeys(trial.counted(), 0.0)
    attained, price = joint(shares, trial.counted()), request.price(one.placement)
    cost = _per_million(price, min(rate, goodput) * attained, trial.samples)
    return Option(
        candidates.family(one.placement), one.placement, goodput, (goodput, goodput), one.expected_rps, rate, shares,
        attained, request.weight(one.placement), price, cost,
        len(trial.samples[0]), len(trial.samples),
    )  # fmt: skip


def _interval(request: Request, option: Option) -> tuple[float, float]:
    """Goodput by each seed alone, and by all of them together: the lowest and the highest."""
    trial = _long(request, option.placement)
    rates = [option.goodput_rps]
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


def _notes(request: Request, best: Option) -> tuple[str, ...]:
    notes, fast = list(request.notes), best.fast
    if request.between is not None and request.one_node:
        notes.append("the link between nodes has no effect: there is one node")
    if request.open_ended:
        notes.append(OPEN_ENDED)
    for kind, share in sorted(best.shares.items()):
        wanted = request.slo(kind).attainment
        if share < wanted:
            notes.append(
                f"on fresh seeds {share:.1%} of {kind or 'all'} requests keep their promise, not {wanted:.1%}"
            )
    if fast.searched_rps > 1.1 * fast.goodput_rps:
        notes.append(
            f"a run of {request.requests} requests promised {fast.searched_rps:.3g} requests/s; "
            f"the long one keeps {fast.goodput_rps:.3g}"
        )
    for pool in best.placement.pools:
        told = f"costs of {request.profiles[request.stock(pool.device).device.name].how(pool.split)}"
        if told not in notes:
            notes.append(told)
    return tuple(notes)


def _down(rate: float) -> float:
    """Three digits, rounded down."""
    digits = 10.0 ** (2 - math.floor(math.log10(rate))) if rate > 0.0 else 1.0
    return math.floor(rate * digits) / digits


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
        return too_tight(request)
    jobs = [job for sample in request.samples(request.requests) for job in sample]
    full = saturation(request.site, jobs, request.slos, placement)
    return ConfigError(
        what,
        f"{placement} carries most: about {most:.3g} requests/s; {min(full, key=lambda name: full[name])} limits it",
        f"take about {math.ceil(request.devices * rate / most)} devices, or plan for --rate {most:.3g}",
    )
