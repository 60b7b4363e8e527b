"""What the exact simulator simulates: instances, and a deployment of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError
from diptych.request import SEGMENTS, TRAITS
from engine.scheduling.saturation import saturation_length
from planner.costs.profile import CostProfile
from planner.costs.step import StepVariation
from planner.sim.exact.bulk import SimBulkSpec, check_bulk
from planner.sim.exact.tiers import SimTier
from planner.types import (
    DECODE,
    PREFILL,
    CostModel,
    GatewayCpuCost,
    InstancePool,
    KvClass,
    KvKeep,
    LinkSpec,
    Placement,
    StepBatch,
)
from router.requests.admission import AdmissionLimits as Bounds

NO_ADMISSION_BOUNDS = Bounds(max_requests=1 << 40, max_queued_tokens=1 << 50, max_wait_s=inf)
# Shortest prompt, in tokens, on the curve from which the saturation length L_m is derived.
MIN_PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One kind of instance: step cost, KV capacity in tokens, and the limits of its scheduler.

    `step_s` is the engine's overhead per step in seconds. `variation` makes steps vary as they did when the worker was
    measured beside the others of its machine; each step is then simulated by itself. The other fields are those of
    `engine.sequence.EngineLimits`. A pipeline divides its memory and seats evenly among as many batches as it has
    stages.
    """

    cost: CostModel
    kv_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunked_prefill: bool = True
    saturation_tokens: int = 0
    tpot_s: float | None = None
    step_s: float = 0.0
    variation: StepVariation | None = None


@dataclass(frozen=True, slots=True)
class SimDeployment:
    """A deployment to simulate: a placement, and settings of its instances and gateways. `instances` has one per pool.

    The placement describes one cell. There are `cells` equal ones, each with its own gateway; a request goes to the
    cell with the fewest requests per device. Colocated pools beside others form a separate cell. `link` is the port of
    each instance (`planner.sim.exact.links`), `token_bytes` the KV bytes per token. With `kv_classes`, of which there
    are several, each instance has a pool for each, with the bytes of that class. With `keep`, all requests evict KV at
    its threshold. A request takes `gateway_s` seconds to reach the relay, each message to or from a worker `hop_s`.
    `max_tokens` is what clients ask for (None: exactly the length of their answer). `local_prefill` and `overdraft`
    are the gateway's settings; with "auto", decode instances keep steps within `tpot_s`. With `cpu_cost`, each gateway
    has a CPU that does one thing at a time and shares `cores` with its workers' steps (of instances with a rhythm and
    one stage). With it or `overdraft` every step is simulated by itself. With `bulk`, decode and colocated instances
    do bulk work beside requests, as long as any is open or to come. `traits` are the workers'; all requests have seeds.
    With `tiers`, which each cell has, the fastest first, prefixes that left a pool are read back.
    """

    placement: Placement
    instances: tuple[InstanceSpec, ...]
    link: LinkSpec = field(default_factory=LinkSpec)
    token_bytes: float = 0.0
    kv_classes: tuple[KvClass, ...] = ()
    keep: KvKeep | None = None
    gateway_s: float = 0.0
    hop_s: float = 0.0
    max_model_len: int = 1 << 20
    max_tokens: int | None = None
    timeout_s: float = inf
    prefix_caching: bool = False
    bounds: Bounds = NO_ADMISSION_BOUNDS
    local_prefill: str = "fallback"
    overdraft: bool = False
    pipelined: bool = True
    cells: int = 1
    beat_s: float = 0.25
    cpu_cost: GatewayCpuCost | None = None
    cores: int = 1
    bulk: SimBulkSpec | None = None
    traits: tuple[str, ...] = TRAITS
    tiers: tuple[SimTier, ...] = ()

    def traits_of(self, pool: InstancePool) -> tuple[str, ...]:
        """The traits of a pool's workers: those of one rank exchange segments, if the rule of `keep` makes any."""
        cuts_kept = self.keep is not None and self.keep.spec.can_cut and pool.parallelism.devices == 1
        return (*self.traits, SEGMENTS) if cuts_kept else self.traits


def build_deployment(
    placement: Placement, profiles: Mapping[str, CostProfile] | CostProfile, **options: object
) -> SimDeployment:
    """Builds a deployment from a placement and cost profiles.

    Step costs, KV capacity, overheads and link come from the profiles, and the saturation length L_m for prefill
    instances. `profiles` are by device name. `options` are fields of `InstanceSpec` (for all pools) or `SimDeployment`.

    Raises:
        ConfigError: a pool's device has no profile, or the weights leave no memory for KV.
    """
    machines = []
    common = {name: options.pop(name) for name in list(options) if name in InstanceSpec.__slots__}
    used = [_profile_of_pool(pool, profiles) for pool in placement.pools]
    for pool, profile in zip(placement.pools, used, strict=True):
        cost, room = profile.cost(pool.parallelism), profile.kv_tokens(pool.parallelism)
        if room < CHUNK_TOKENS:
            raise ConfigError(
                f"{profile.model.name} does not fit on {pool.parallelism} of {profile.device.name}",
                f"weights leave room for {room} tokens of KV",
                "use more devices for an instance",
            )
        instance = InstanceSpec(cost, room, step_s=profile.overheads.step_s)
        instance = replace(instance, **common)  # type: ignore[arg-type]
        if pool.role == PREFILL and "saturation_tokens" not in common:
            instance = replace(
                instance, saturation_tokens=saturation_tokens(cost, instance.max_num_batched_tokens)
            )
        machines.append(instance)
    overheads, dims = used[0].overheads, used[0].model
    settings: dict[str, object] = {
        "link": overheads.link,
        "token_bytes": float(dims.kv_token_bytes),
        "gateway_s": overheads.gateway_s,
        "hop_s": overheads.hop_s,
        "max_model_len": dims.max_len,
    }
    return SimDeployment(placement, tuple(machines), **(settings | options))  # type: ignore[arg-type]


def _profile_of_pool(pool: InstancePool, profiles: Mapping[str, CostProfile] | CostProfile) -> CostProfile:
    """The profile of the pool's device; raises ConfigError if there is none."""
    if isinstance(profiles, CostProfile):
        return profiles
    if pool.device not in profiles:
        what, why = (
            f"there is no profile for the device {pool.device!r}",
            f"known: {', '.join(sorted(profiles))}",
        )
        raise ConfigError(what, why, "name one of these in the placement")
    return profiles[pool.device]


def saturation_tokens(cost: CostModel, longest: int) -> int:
    """L_m of a cost: the shortest prompt that is prefilled at nearly the highest rate, in tokens per second.

    "Nearly" is the share `engine.scheduling.saturation.SATURATED_SHARE`.
    """
    lengths = [MIN_PROMPT_TOKENS]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    curve = [(tokens, cost.stage_s(StepBatch(tokens, float(tokens) ** 2))) for tokens in lengths]
    return saturation_length([(tokens, seconds) for tokens, seconds in curve if seconds > 0])


def check_deployment(deployment: SimDeployment) -> None:
    """Raises ConfigError if the deployment is inconsistent, or has no way to serve a request."""
    pools, instances = deployment.placement.pools, deployment.instances
    if len(pools) != len(instances):
        what = f"{len(pools)} pools and {len(instances)} instance specifications"
        raise ConfigError(what, "each pool needs one specification", "give one per pool")
    roles = {pool.role for pool in pools if pool.count > 0}
    if not roles or len(roles & {PREFILL, DECODE}) == 1:
        what = f"{deployment.placement or 'an empty placement'} cannot serve requests"
        why = "it needs a prefill and a decode pool, or a colocated one"
        raise ConfigError(what, why, "add the pool that is missing")
    if len(deployment.kv_classes) == 1:
        raise ValueError("a deployment with one KV class names none: `token_bytes` and its rooms have it")
    if deployment.kv_classes and deployment.keep is not None:
        raise ValueError("requests that evict are simulated with one KV class only")
    if deployment.bulk is not None:
        check_bulk(pools, deployment.keep)
    if deployment.tiers and not deployment.prefix_caching:
        raise ValueError("tiers below the pools need prefix caching")
    if deployment.cores < 1:
        raise _not_positive(f"{deployment.cores} cores", "core")
    if deployment.cells < 1 or not isfinite(deployment.token_bytes):
        raise _not_positive(f"{deployment.cells} cells", "cell")


def _not_positive(what: str, one: str) -> ConfigError:
    return ConfigError(what, f"at least one {one} is needed", "give a positive number")
