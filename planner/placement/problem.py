"""Defines the planner's input (model, traffic, SLOs, hardware), and derives splits, step costs and trials from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from diptych.errors import ConfigError
from diptych.eviction_spec import RING_AND_MAP_TOKENS
from diptych.slo import Slo, Slos, slo_for
from planner.costs.kv.classes import whole_request
from planner.costs.kv.eviction import DecidingCost
from planner.costs.model import ModelDims
from planner.costs.profile import CostProfile
from planner.costs.step import CostWithOverhead
from planner.hardware import Device
from planner.kv_links import choose_kv_link
from planner.placement import candidates
from planner.placement.bounds import PlacementSite, rate_bounds, saturation_rates
from planner.placement.candidates import ClusterGrid
from planner.placement.packing import assign_nodes, device_groups
from planner.placement.trial import WARMUP, JobDraws, JobSample, SimulationEffort, Trial
from planner.sim.fast import cluster
from planner.sim.fast.compiled import CompiledCluster, compile_cluster
from planner.sim.fast.instance import InstanceLimits
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    CostModel,
    InstancePool,
    Job,
    JobResult,
    KvClass,
    KvClassWork,
    KvKeep,
    LinkSpec,
    Parallelism,
    Placement,
)
from planner.workload.workload import JobSource

MAX_REQUESTS = 20_000  # most requests of one run; large deployments get longer samples than small ones
HORIZON_PER_TTFT = 10.0  # a run lasts at least this many times the TTFT SLO
FRESH_SEED = 1000  # first seed of validation runs; the search uses smaller seeds


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Equal nodes with one type of device. `slots` is how many devices a node could hold, if more (0: no more)."""

    device: Device
    nodes: int
    devices_per_node: int
    slots: int = 0

    @property
    def devices(self) -> int:
        """Number of devices on all nodes of the group."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Problem:
    """Everything that is given to the planner.

    `groups` is the available hardware, `profiles` the model's cost profile by device name. With `rate` (requests/s) the
    planner looks for the cheapest deployment that carries it, else for the deployment with the highest goodput. A run
    has at least `requests` requests per seed, and covers at least `span_s` seconds (or ten times the TTFT SLO).
    `node_link` replaces the link between nodes. `limits` says how much an instance batches at once;
    `planner.placement.validate.product_limits` gives those of Diptych's workers. `verified` runs the best of each
    family in the exact simulator (`planner.placement.validate`). `notes` are shown with the solution. `kv_classes` are
    the classes of KV that each instance has pools for, if there are several, and `kv_mix` the share of the requests for
    each; the workload's jobs name theirs. `keep` is what all requests keep of their KV, if they evict.
    """

    model: ModelDims
    groups: tuple[NodeGroup, ...]
    profiles: Mapping[str, CostProfile]
    source: JobSource
    slos: Slos
    rate: float | None = None
    name: str = ""
    affinity: str = "auto"
    families: tuple[str, ...] = ("colocated", "disaggregated", "hybrid")
    cv: float = 1.0
    seeds: int = 2
    requests: int = 600
    span_s: float = 60.0
    node_link: LinkSpec | None = None
    profiled_only: bool = False
    limits: InstanceLimits = field(default_factory=InstanceLimits)
    verified: bool = False
    notes: tuple[str, ...] = ()
    kv_classes: tuple[KvClass, ...] = ()
    kv_mix: Mapping[str, float] = field(default_factory=dict)
    keep: KvKeep | None = None

    @property
    def devices(self) -> int:
        """Number of devices of all kinds that may be used."""
        return sum(group.devices for group in self.groups)

    @property
    def horizon_s(self) -> float:
        """Least seconds of arrivals in a run: long compared with TTFT, so that growing queues show (0: no limit)."""
        limits = [slo.ttft_s for slo in self.slos.values() if math.isfinite(slo.ttft_s)]
        return max(self.span_s, HORIZON_PER_TTFT * max(limits, default=0.0)) if self.span_s else 0.0

    @property
    def hardware_text(self) -> str:
        """The hardware in words, for example "8 × H100"."""
        return " + ".join(f"{group.devices} × {group.device.name}" for group in self.groups)

    @property
    def one_node(self) -> bool:
        """Whether there is only one node, so that no link between nodes is ever used."""
        return sum(group.nodes for group in self.groups) == 1

    @property
    def mixed_devices(self) -> bool:
        """Whether there are several types of devices, so that deployments are compared by price."""
        return len(self.groups) > 1

    def group(self, device: str) -> NodeGroup:
        """The nodes with that type of device; the first nodes if the name is unknown or empty."""
        return next((one for one in self.groups if one.device.name == device), self.groups[0])

    def slo(self, kind: str) -> Slo:
        """The SLOs of a kind of request. Raises KeyError if there are none."""
        return slo_for(self.slos, kind)

    def weight(self, placement: Placement) -> float:
        """The cost that goodput is divided by: the number of devices, or their hourly price if types differ."""
        return self.hourly_price(placement) if self.mixed_devices else float(placement.devices)

    def most(self, placement: Placement) -> int:
        """How many copies of a unit fit on the nodes."""
        low, high = 0, self.devices // placement.devices
        while low < high:  # bisection: if some count fits, every smaller count fits too
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high)
                if self.fits_on_nodes(candidates.replicate_unit(placement, middle))
                else (low, middle - 1)
            )
        return low

    def share(self, placement: Placement) -> float:
        """Devices that one unit uses up when the hardware is filled with it, including those left over."""
        most = self.most(placement)
        return self.devices / most if most else math.inf

    def hourly_price(self, placement: Placement) -> float:
        """Price per hour of all devices of a placement."""
        return sum(pool.devices * self.group(pool.device).device.price_per_hour for pool in placement.pools)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request in the samples; an instance without KV memory for it is not tried."""
        return max(job.prompt + job.output for sample in self.samples(self.requests) for job in sample)

    @cached_property
    def site(self) -> PlacementSite:
        """Step costs, KV capacity and links of this problem, as bounds and simulations need them."""
        costs: dict[tuple[str, Parallelism, int], CostModel] = {}
        rooms: dict[tuple[str, Parallelism], float] = {}

        def cost(pool: InstancePool, nodes: int = 1) -> CostModel:
            key = (pool.device, pool.parallelism, nodes)
            if key not in costs:
                found, extra_s = self.bare_cost(pool, nodes), self._profile(pool.device).overheads.step_s
                plain = CostWithOverhead(found, extra_s) if extra_s else found
                costs[key] = plain if self.keep is None else DecidingCost(plain, self.keep)
            return costs[key]

        def kv_tokens(pool: InstancePool) -> float:
            key = (pool.device, pool.parallelism)
            if key not in rooms:
                rooms[key] = float(self._profile(pool.device).kv_tokens(pool.parallelism))
            return rooms[key]

        limits, work = self.limits, KvClassWork() if self.keep is None else self.keep.work
        classes = self.kv_classes or (KvClass("", 1.0, self.model.kv_token_bytes, 1.0, work),)
        return PlacementSite(
            cost, kv_tokens, self.link, classes, self.nodes, limits.decode_rows, limits.prefill_tokens, self.keep
        )  # fmt: skip

    def bare_cost(self, pool: InstancePool, nodes: int) -> CostModel:
        """Step cost of the model without the engine's overhead, with its stages on the given number of nodes."""
        profile, node_link = self._profile(pool.device), self.node_link
        if node_link is not None and nodes > 1:
            device = profile.device
            profile = replace(profile, device=replace(device, node=replace(device.node, inter=node_link)))
        return profile.cost(pool.parallelism, nodes)

    def nodes(self, placement: Placement, pool: InstancePool) -> int:
        """Nodes that an instance's stages lie on: as few as hold it, or one per segment if KV stays within nodes."""
        least = -(-pool.parallelism.devices // self.group(pool.device).devices_per_node)
        return max(least, placement.cross) if placement.affinity == "low" and pool.role != BOTH else least

    def link(self, placement: Placement) -> LinkSpec:
        """The link between two instances (`planner.kv_links.choose_kv_link`); on a single node, the link within it."""
        if placement.colocated:
            return LinkSpec()
        moving_pools = [
            (pool, self.group(pool.device).device.node) for pool in placement.pools if pool.role != BOTH
        ]
        measured_link = self._profile(moving_pools[0][0].device).overheads.link
        return choose_kv_link(
            moving_pools, measured_link, placement.affinity == "low" or self.one_node, self.node_link
        )

    @cached_property
    def _drawn(self) -> JobDraws:
        return JobDraws(self.source, self.cv)

    @cached_property
    def effort(self) -> SimulationEffort:
        """Counts the simulations of all trials of this problem."""
        return SimulationEffort()

    def samples(self, requests: int, first_seed: int = 0) -> tuple[JobSample, ...]:
        """One sample per seed, at one request per second. A longer sample of a seed begins with its shorter one."""
        return tuple(
            self._drawn.sample(requests, seed) for seed in range(first_seed, first_seed + self.seeds)
        )

    def kinds(self) -> list[str]:
        """The kinds of request in the workload."""
        return sorted({job.kind for sample in self.samples(self.requests) for job in sample})

    def trial(self, placement: Placement, fresh: bool = False, least: float = 0.0) -> Trial:
        """A trial long enough for `placement`, of at least `least` requests.

        `fresh` trials validate: they use other seeds, are three times as long, and do not count their first tenth.
        """
        most = self.saturated_rps(placement)
        wanted = max(self.requests, min(least, MAX_REQUESTS) if least else most * self.horizon_s) * (
            3 if fresh else 1
        )
        count = self.requests
        while count < wanted:
            count *= 2  # doubling gives few different lengths, so that units share samples
        return self._trial(min(count, max(self.requests, MAX_REQUESTS)), fresh, self.site)

    @cached_property
    def _saturated(self) -> dict[Placement, float]:
        return {}  # cache of `saturated_rps`

    @cached_property
    def _bounds(self) -> dict[Placement, dict[str, float]]:
        return {}  # cache of `bound`

    @cached_property
    def _sustained(self) -> dict[Placement, float]:
        return {}  # cache of `sustained_rps`

    def saturated_rps(self, placement: Placement) -> float:
        """The rate at which the first resource of `placement` reaches 100 % utilisation, estimated from means."""
        if placement not in self._saturated:
            self._saturated[placement] = self._full_rps(placement, self.site)
        return self._saturated[placement]

    def _full_rps(self, placement: Placement, site: PlacementSite) -> float:
        jobs = [job for sample in self.samples(self.requests) for job in sample]
        return min(saturation_rates(site, jobs, self.slos, placement).values())

    def _sustained_rps(self, placement: Placement, site: PlacementSite) -> float:
        """The rate at which requests leave `placement` when they arrive at the rate estimated from means.

        It can be lower than the estimate: steps kept short for the TPOT SLO prefill fewer prompts.
        """
        rate, trial = self._full_rps(placement, site), replace(self.trial(placement), run=self.runner(site))
        arrivals_s, ends_s = map(_middle_span_s, trial.spans(placement, rate, 0))
        return rate * min(1.0, arrivals_s / ends_s) if ends_s > 0.0 else rate

    @property
    def is_open_ended(self) -> bool:
        """Whether an SLO is infinite. A finite run then meets the SLOs at any rate, although queues only grow."""
        return not all(math.isfinite(slo.ttft_s) and math.isfinite(slo.tpot_s) for slo in self.slos.values())

    def most_rps(self, placement: Placement) -> float:
        """The highest rate that counts as goodput: the sustained rate if an SLO is infinite, else no limit."""
        return self.sustained_rps(placement) if self.is_open_ended else math.inf

    def sustained_rps(self, placement: Placement) -> float:
        """The rate that `placement` can serve without its queues growing for ever, in the fast simulator."""
        if placement not in self._sustained:
            self._sustained[placement] = self._sustained_rps(placement, self.site)
        return self._sustained[placement]

    def bound(self, placement: Placement) -> dict[str, float]:
        """Upper bounds on the rate of `placement`, by name; with an infinite SLO also `sustained`, from means."""
        if placement not in self._bounds:
            found = rate_bounds(self.trial(placement), self.site, placement)
            more = {"sustained": self.saturated_rps(placement)} if self.is_open_ended else {}
            self._bounds[placement] = found | more
        return self._bounds[placement]

    def again(self, trial: Trial, site: PlacementSite) -> Trial:
        """The same trial on another site, for example one with more of a resource."""

        @cache
        def most_rps(placement: Placement) -> float:
            return self._sustained_rps(placement, site) if self.is_open_ended else math.inf

        return replace(trial, run=self.runner(site), most_rps=most_rps)

    def _trial(self, count: int, fresh: bool, site: PlacementSite) -> Trial:
        """A trial of `count` requests per seed; `fresh` ones have other seeds and a warm-up."""
        samples = self.samples(count, FRESH_SEED if fresh else 0)
        warmup = round(WARMUP * count) if fresh else 0
        return Trial(samples, self.slos, self.runner(site), warmup, self.effort, self.most_rps)

    def runner(self, site: PlacementSite) -> _FastRunner:
        """A function that runs placements on `site` in the fast simulator."""
        return _FastRunner(site, self.limits)

    def units(self, family: str) -> Iterator[Placement]:
        """Every unit of "colocated", "low" (pairs, KV within nodes) or "high" (pairs, KV anywhere) that fits memory."""
        for group in self.groups:
            device = group.device.name
            grid = ClusterGrid(self.model.layers, self.model.heads, group.nodes, group.devices_per_node)
            if family == "colocated":
                made = candidates.colocated_units(grid, device)
            elif family == "low":
                made = candidates.pairs_within_nodes(grid, device, device)
            else:
                made = candidates.pairs_across_nodes(grid, device, device)
            yield from (placement for placement in made if all(map(self.fits, placement.pools)))
        if family == "high" and self.mixed_devices:
            yield from self._across()

    def _across(self) -> Iterator[Placement]:
        """Pairs that prefill on one type of device and decode on another."""
        for one in self.groups:
            for other in self.groups:
                if one is not other:
                    for prefill_split in self.splits(one):
                        for decode_split in self.splits(other):
                            yield candidates.make_pair(
                                prefill_split, decode_split, "high", 1, one.device.name, other.device.name
                            )

    def splits(self, group: NodeGroup) -> list[Parallelism]:
        """The splits whose instances fit on these nodes."""
        grid = ClusterGrid(self.model.layers, self.model.heads, group.nodes, group.devices_per_node)
        every = candidates.enumerate_splits(grid)
        return [
            parallelism
            for parallelism in every
            if self.fits(InstancePool(BOTH, parallelism, 1, group.device.name))
        ]

    def fits(self, pool: InstancePool) -> bool:
        """Whether an instance is valid for the model, was profiled (if required), and holds the longest request."""
        profile = self._profile(pool.device)
        if not self.model.valid(pool.parallelism) or (
            self.profiled_only and not _is_profiled(profile, pool.parallelism)
        ):
            return False
        if self.kv_classes:
            room = self.site.kv_tokens(pool)
            return all(room * one.room >= self.class_need(one.name, room) for one in self.kv_classes)
        extra = 0 if self.keep is None else RING_AND_MAP_TOKENS
        return self.site.kv_tokens(pool) >= self.longest + extra

    def longest_of(self, kv_class: str) -> int:
        """Tokens of the longest request for a class of KV in the samples; 0 if there is none."""
        return self._longest_by_class.get(kv_class, 0)

    def class_need(self, kv_class: str, kv_tokens: float) -> int:
        """Tokens that a class must have room for on an instance with room for `kv_tokens`."""
        return max(self.longest_of(kv_class), whole_request(kv_tokens, self.model.max_len))

    @cached_property
    def _longest_by_class(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for sample in self.samples(self.requests):
            for job in sample:
                found[job.kv_class] = max(found.get(job.kv_class, 0), job.prompt + job.output)
        return found

    def fits_on_nodes(self, placement: Placement) -> bool:
        """Whether the nodes have room for all device groups of the placement."""
        try:
            for group in self.groups:
                pools = tuple(pool for pool in placement.pools if self.group(pool.device) is group)
                paired = {PREFILL, DECODE} <= {pool.role for pool in pools}
                part = Placement(pools, placement.affinity if paired else "high", placement.cross)
                if part.pools:
                    nodes = {f"{node:06d}": group.devices_per_node for node in range(group.nodes)}
                    assign_nodes(device_groups(part, self.model.layers, group.devices_per_node), nodes)
        except ConfigError:
            return False
        return True

    def _profile(self, device: str) -> CostProfile:
        return self.profiles[self.group(device).device.name]


def _middle_span_s(moments: list[float]) -> float:
    """Seconds between the first and the third quartile of the moments."""
    ordered = sorted(moments)
    return ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]


@dataclass(frozen=True, slots=True)
class _FastRunner:
    """Runs placements in the fast simulator."""

    site: PlacementSite
    limits: InstanceLimits

    def __call__(self, placement: Placement, jobs: Sequence[Job]) -> Sequence[JobResult]:
        site = self.site
        return cluster.simulate_fast(
            placement, site.costs(placement), jobs, limits=self.limits, kv_tokens=site.kv_tokens,
            link=site.link(placement), token_bytes=site.token_bytes,
            kv_classes=site.kv_classes if len(site.kv_classes) > 1 else (), keep=site.keep,
        )  # fmt: skip

    def compile(self, placement: Placement) -> CompiledCluster | None:
        """The placement as machine code, which knows one class of KV and no eviction; None if it needs others."""
        site = self.site
        if len(site.kv_classes) > 1 or site.keep is not None:
            return None
        return compile_cluster(
            placement,
            site.costs(placement),
            self.limits,
            site.kv_tokens,
            site.link(placement),
            site.token_bytes,
        )


def _is_profiled(profile: CostProfile, parallelism: Parallelism) -> bool:
    """Whether the split was measured with this tp; stages may differ, since they divide the measured work."""
    return any(one.tp == parallelism.tp for one in profile.costs)
