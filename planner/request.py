"""What is asked of the planner, and what follows from it: where things may run, what they cost, and trials of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from diptych.errors import ConfigError
from planner import candidates, des
from planner.bounds import Site, bounds, saturation
from planner.candidates import Grid
from planner.groups import assign, groups
from planner.hardware import Device
from planner.links import way
from planner.profile import Profile
from planner.shape import Shape
from planner.terms import BOTH, DECODE, PREFILL, Batch, Cost, Job, Link, Placement, Pool, Served, Slo, Split
from planner.trial import WARMUP, Effort, Trial
from planner.workload import Source

MOST_REQUESTS = 20_000  # of one run: large deployments get longer samples, up to this
PATIENCE = 10.0  # how many times the TTFT objective a run lasts
FRESH = 1000  # seeds from here on were never searched with


@dataclass(frozen=True, slots=True)
class Stock:
    """Equal nodes with devices of one kind; `slots` is how many a node could take, where that is more (0: no more)."""

    device: Device
    nodes: int
    devices_per_node: int
    slots: int = 0

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Request:
    """A question to the planner.

    `stocks` is the hardware on offer, `profiles` what the model costs on each by the device's name. With `rate`
    (requests/s) the cheapest deployment that carries it is asked for, else the one with the highest goodput. The
    horizon of a run is `requests` a seed, and more where those would come within `span_s` seconds (or ten times the
    objective of TTFT). `between` replaces the link between nodes. `limits` is what instances take on at once;
    `planner.verify.limits` are the product's. `verified` puts the best of each family to the product's own decisions
    (`planner.verify`). `notes` are what a reader of the answer should know of the question.
    """

    model: Shape
    stocks: tuple[Stock, ...]
    profiles: Mapping[str, Profile]
    workload: Source
    slos: Mapping[str, Slo]
    rate: float | None = None
    name: str = ""
    affinity: str = "auto"
    families: tuple[str, ...] = ("colocated", "disaggregated", "hybrid")
    cv: float = 1.0
    seeds: int = 2
    requests: int = 600
    span_s: float = 60.0
    between: Link | None = None
    profiled_only: bool = False
    limits: des.Limits = field(default_factory=des.Limits)
    verified: bool = False
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return sum(stock.devices for stock in self.stocks)

    @property
    def horizon_s(self) -> float:
        """Seconds of arrivals that a run has at least: long against TTFT, or queues that only grow go unseen.

        With `span_s` 0 runs are as short as `requests` makes them, as those of the paper are.
        """
        limits = [slo.ttft_s for slo in self.slos.values() if math.isfinite(slo.ttft_s)]
        return max(self.span_s, PATIENCE * max(limits, default=0.0)) if self.span_s else 0.0

    @property
    def hardware(self) -> str:
        """In words: 8 × H100."""
        return " + ".join(f"{stock.devices} × {stock.device.name}" for stock in self.stocks)

    @property
    def one_node(self) -> bool:
        """Whether nothing can be between nodes."""
        return sum(stock.nodes for stock in self.stocks) == 1

    @property
    def mixed(self) -> bool:
        """Whether devices are of several kinds, so that they are compared by price."""
        return len(self.stocks) > 1

    def stock(self, device: str) -> Stock:
        """The nodes with that device; the first where a placement names none."""
        return next((one for one in self.stocks if one.device.name == device), self.stocks[0])

    def slo(self, kind: str) -> Slo:
        """The objective of a kind of request."""
        return self.slos[kind] if kind in self.slos else self.slos[""]

    def weight(self, placement: Placement) -> float:
        """What goodput is divided by: devices, or their price per hour where there are several kinds."""
        return self.price(placement) if self.mixed else float(placement.devices)

    def most(self, unit: Placement) -> int:
        """How many of a unit the nodes take."""
        low, high = 0, self.devices // unit.devices
        while low < high:  # what packs, packs with one less
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.packs(candidates.times(unit, middle)) else (low, middle - 1)
        return low

    def share(self, unit: Placement) -> float:
        """What one unit takes of the whole hardware, in devices: those included that no further unit can use."""
        most = self.most(unit)
        return self.devices / most if most else math.inf

    def price(self, placement: Placement) -> float:
        """Of all its devices, per hour."""
        return sum(pool.devices * self.stock(pool.device).device.price_per_hour for pool in placement.pools)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request of the samples: an instance has room for it, or is not tried."""
        return max(job.prompt + job.output for sample in self.samples(self.requests) for job in sample)

    @cached_property
    def site(self) -> Site:
        """What placements run on."""
        costs: dict[tuple[str, Split, int], Cost] = {}
        rooms: dict[tuple[str, Split], float] = {}

        def cost(pool: Pool, nodes: int = 1) -> Cost:
            key = (pool.device, pool.split, nodes)
            if key not in costs:
                found, extra_s = self.bare(pool, nodes), self._profile(pool.device).overheads.step_s
                costs[key] = Slower(found, extra_s) if extra_s else found
            return costs[key]

        def kv_tokens(pool: Pool) -> float:
            key = (pool.device, pool.split)
            if key not in rooms:
                rooms[key] = float(self._profile(pool.device).kv_tokens(pool.split))
            return rooms[key]

        limits = self.limits
        return Site(
            cost, kv_tokens, self.link, self.model.kv_token_bytes, self.nodes, limits.decode_rows, limits.prefill_tokens
        )  # fmt: skip

    def bare(self, pool: Pool, nodes: int) -> Cost:
        """What a step of the model alone costs, with the stages on so many nodes."""
        profile, between = self._profile(pool.device), self.between
        if between is not None and nodes > 1:
            device = profile.device
            profile = replace(profile, device=replace(device, node=replace(device.node, inter=between)))
        return profile.cost(pool.split, nodes)

    def nodes(self, placement: Placement, pool: Pool) -> int:
        """On how many nodes the stages of an instance lie: on as few as it fits, or one for each segment of a pair."""
        least = -(-pool.split.devices // self.stock(pool.device).devices_per_node)
        return max(least, placement.cross) if placement.affinity == "low" and pool.role != BOTH else least

    def link(self, placement: Placement) -> Link:
        """The way between two instances (`planner.links.way`). Where there is but one node, all is within it."""
        if placement.colocated:
            return Link()
        moving = [
            (pool, self.stock(pool.device).device.node) for pool in placement.pools if pool.role != BOTH
        ]
        measured = self._profile(moving[0][0].device).overheads.link
        return way(moving, measured, placement.affinity == "low" or self.one_node, self.between)

    @cached_property
    def _drawn(self) -> dict[tuple[int, int], tuple[tuple[Job, ...], ...]]:
        return {}

    @cached_property
    def effort(self) -> Effort:
        """What all its trials have simulated."""
        return Effort()

    def samples(self, requests: int, first_seed: int = 0) -> tuple[tuple[Job, ...], ...]:
        """Samples of the workload at one request per second; a longer one begins as a shorter one of its seed does."""
        key = (requests, first_seed)
        if key not in self._drawn:
            seeds = range(first_seed, first_seed + self.seeds)
            self._drawn[key] = tuple(
                tuple(self.workload.sample(requests, 1.0, seed, self.cv)) for seed in seeds
            )
        return self._drawn[key]

    def kinds(self) -> list[str]:
        """The kinds of request that come."""
        return sorted({job.kind for sample in self.samples(self.requests) for job in sample})

    def trial(self, placement: Placement, fresh: bool = False, least: float = 0.0) -> Trial:
        """A trial long enough for `placement`, of at least so many requests; `fresh` with other seeds, three times as
        long, and its first tenth not counted.
        """
        most = self.saturated_rps(placement)
        wanted = max(self.requests, min(least, MOST_REQUESTS) if least else most * self.horizon_s) * (
            3 if fresh else 1
        )
        count = self.requests
        while count < wanted:
            count *= 2  # few different lengths, so that units share samples
        return self._trial(min(count, max(self.requests, MOST_REQUESTS)), fresh, self.site)

    @cached_property
    def _saturated(self) -> dict[Placement, float]:
        return {}

    @cached_property
    def _sustained(self) -> dict[Placement, float]:
        return {}

    def saturated_rps(self, placement: Placement) -> float:
        """The rate at which the first resource of `placement` would be busy all the time, by means."""
        if placement not in self._saturated:
            self._saturated[placement] = self._full_rps(placement, self.site)
        return self._saturated[placement]

    def _full_rps(self, placement: Placement, site: Site) -> float:
        jobs = [job for sample in self.samples(self.requests) for job in sample]
        return min(saturation(site, jobs, self.slos, placement).values())

    def _sustained_rps(self, placement: Placement, site: Site) -> float:
        """The rate that means allow, or what comes out of a run at that rate, if that is less: steps that are kept
        short for TPOT do not read as many prompts as could be.
        """
        rate, trial = self._full_rps(placement, site), replace(self.trial(placement), run=self.runner(site))
        served = trial.serve(placement, rate, 0)
        came_s, went_s = (
            _middle_s([one.job.at_s for one in served]),
            _middle_s([one.ended_s for one in served]),
        )
        return rate * min(1.0, came_s / went_s) if went_s > 0.0 else rate

    @property
    def open_ended(self) -> bool:
        """Whether an objective is infinite, so that a run at any rate may keep the promises, as it ends."""
        return not all(math.isfinite(slo.ttft_s) and math.isfinite(slo.tpot_s) for slo in self.slos.values())

    def most_rps(self, placement: Placement) -> float:
        """The highest rate that counts as goodput: any, but what is sustained where an objective is infinite."""
        return self.sustained_rps(placement) if self.open_ended else math.inf

    def sustained_rps(self, placement: Placement) -> float:
        """The rate that `placement` sustains for ever, in the search's simulator."""
        if placement not in self._sustained:
            self._sustained[placement] = self._sustained_rps(placement, self.site)
        return self._sustained[placement]

    def bound(self, placement: Placement) -> dict[str, float]:
        """What `placement` cannot exceed in its trial; `sustained` by means where an objective is infinite."""
        found = bounds(self.trial(placement), self.site, placement)
        return found | {"sustained": self.saturated_rps(placement)} if self.open_ended else found

    def again(self, trial: Trial, site: Site) -> Trial:
        """The same trial, elsewhere."""

        @cache
        def most_rps(placement: Placement) -> float:
            return self._sustained_rps(placement, site) if self.open_ended else math.inf

        return replace(trial, run=self.runner(site), most_rps=most_rps)

    def _trial(self, count: int, fresh: bool, site: Site) -> Trial:
        samples = self.samples(count, FRESH if fresh else 0)
        warmup = round(WARMUP * count) if fresh else 0
        return Trial(samples, self.slos, self.runner(site), warmup, self.effort, self.most_rps)

    def runner(self, site: Site) -> _Runner:
        """Simulates placements on `site`."""
        return _Runner(site, self.limits)

    def units(self, family: str) -> Iterator[Placement]:
        """Every unit of `low`, `high` or `colocated` whose instances fit: weights, and KV of the longest request."""
        for stock in self.stocks:
            device = stock.device.name
            grid = Grid(self.model.layers, self.model.heads, stock.nodes, stock.devices_per_node)
            if family == "colocated":
                made = candidates.colocated(grid, device)
            elif family == "low":
                made = candidates.low(grid, device, device)
            else:
                made = candidates.high(grid, device, device)
            yield from (unit for unit in made if all(map(self.fits, unit.pools)))
        if family == "high" and self.mixed:
            yield from self._across()

    def _across(self) -> Iterator[Placement]:
        """Prefill on one kind of device, decode on another."""
        for one in self.stocks:
            for other in self.stocks:
                if one is not other:
                    for reads in self.splits(one):
                        for writes in self.splits(other):
                            yield candidates.pair(
                                reads, writes, "high", 1, one.device.name, other.device.name
                            )

    def splits(self, stock: Stock) -> list[Split]:
        """Instances that fit on that kind of device."""
        grid = Grid(self.model.layers, self.model.heads, stock.nodes, stock.devices_per_node)
        every = candidates.splits(grid)
        return [split for split in every if self.fits(Pool(BOTH, split, 1, stock.device.name))]

    def fits(self, pool: Pool) -> bool:
        """Whether an instance is valid for the model, was profiled if that is asked for, and has room."""
        profile = self._profile(pool.device)
        if not self.model.valid(pool.split) or (self.profiled_only and not _profiled(profile, pool.split)):
            return False
        return self.site.kv_tokens(pool) >= self.longest

    def packs(self, placement: Placement) -> bool:
        """Whether the nodes of the stocks take all its groups."""
        try:
            for stock in self.stocks:
                pools = tuple(pool for pool in placement.pools if self.stock(pool.device) is stock)
                paired = {PREFILL, DECODE} <= {pool.role for pool in pools}
                mine = Placement(pools, placement.affinity if paired else "high", placement.cross)
                if mine.pools:
                    nodes = {f"{node:06d}": stock.devices_per_node for node in range(stock.nodes)}
                    assign(groups(mine, self.model.layers, stock.devices_per_node), nodes)
        except ConfigError:
            return False
        return True

    def _profile(self, device: str) -> Profile:
        return self.profiles[self.stock(device).device.name]


def _middle_s(moments: list[float]) -> float:
    """Seconds in which the middle half of them lies."""
    ordered = sorted(moments)
    return ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]


@dataclass(frozen=True, slots=True)
class _Runner:
    site: Site
    limits: des.Limits

    def __call__(self, placement: Placement, jobs: Sequence[Job]) -> Sequence[Served]:
        site = self.site
        return des.run(
            placement, site.costs(placement), jobs, limits=self.limits, kv_tokens=site.kv_tokens,
            link=site.link(placement), token_bytes=site.token_bytes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slower:
    """A cost with `extra_s` of each step beside the model: what a measured profile says of the engine's own work."""

    cost: Cost
    extra_s: float

    def step_s(self, batch: Batch) -> float:
        return self.cost.step_s(batch) + self.extra_s

    def stage_s(self, batch: Batch) -> float:
        return self.cost.stage_s(batch) + self.extra_s


@dataclass(frozen=True, slots=True)
class Quicker:
    """A cost whose prompts or rows take a part of the time: what would be, if that resource were larger."""

    cost: Cost
    prefill: float = 1.0
    decode: float = 1.0

    def step_s(self, batch: Batch) -> float:
        return self._quicker(batch, self.cost.step_s)

    def stage_s(self, batch: Batch) -> float:
        return self._quicker(batch, self.cost.stage_s)

    def _quicker(self, batch: Batch, of: Callable[[Batch], float]) -> float:
        """Of a step with both, the rows are what they would take alone, and the prompts the rest."""
        if not batch.rows:
            return of(batch) / self.prefill
        rows_s = of(Batch(0, 0.0, batch.rows, batch.context))
        return rows_s / self.decode + ((of(batch) - rows_s) / self.prefill if batch.tokens else 0.0)


def enlarged(site: Site, resource: str, by: float) -> Site:
    """`site` with more of a resource: prefill, decode, link or memory."""
    if resource == "link":

        def wider(placement: Placement) -> Link:
            link = site.link(placement)
            return Link(link.bytes_per_s * by, link.latency_s)

        return replace(site, link=wider)
    if resource == "memory":
        return replace(site, kv_tokens=lambda pool: math.floor(site.kv_tokens(pool) * by))
    prefill, decode = (by, 1.0) if resource == "prefill" else (1.0, by)
    made: dict[tuple[str, Split, int], Cost] = {}

    def cost(pool: Pool, nodes: int = 1) -> Cost:
        key = (pool.device, pool.split, nodes)
        if key not in made:
            made[key] = Quicker(site.cost(pool, nodes), prefill, decode)
        return made[key]

    return replace(site, cost=cost)


def _profiled(profile: Profile, split: Split) -> bool:
    """Whether the split was measured, or is a measured one with its work divided by stages."""
    return any(one.tp == split.tp for one in profile.costs)
