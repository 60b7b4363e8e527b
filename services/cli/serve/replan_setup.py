"""`diptych serve --replan`: from settings, a model and a profile to a replanner that steers this deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from diptych.config.options import Config
from diptych.errors import ConfigError
from diptych.slo import read_slo, strictest_slo
from kvcache.class_shares import parse_class_shares, split_auto
from planner.costs.kv.codec import code_profile, with_kv_codec
from planner.costs.kv.eviction import DecidingCost, find_keep
from planner.costs.model import find_model
from planner.costs.profile import CostProfile
from planner.costs.profile_file import built_in_profile, load_profile
from planner.costs.step import CostWithOverhead
from planner.hardware import CPU
from planner.kv_links import choose_kv_link
from planner.placement.plan_file import PlanFile
from planner.replan.decide import ReplanPolicy
from planner.replan.evaluate import FleetHardware, SimulatedEvaluator
from planner.replan.journal import Journal
from planner.replan.replanner import Replanner
from planner.sim.fast.instance import InstanceLimits
from planner.types import BOTH, DECODE, PREFILL, CostModel, InstancePool, Parallelism
from services.cli.serve.specs import devices_by_worker
from services.cluster.spec import DeploymentSpec
from services.host.model_probe import ProbedModel
from services.replan.driver import GatewayClient, ReplanDriver, StoppableEvaluator, WorkerScaler
from services.replan.roster import Roster

# A window is divided into this many buckets.
WINDOW_BUCKETS = 30
# Seconds that an order to a worker may take in addition to the time that its requests are given to end.
FLIP_GRACE_S = 60.0
# Seconds that a worker with a new role may take until it is linked to another worker.
TRIAL_S = 20.0
# Number of windows in the horizon: the time over which a new fleet must save more than it costs.
HORIZON_WINDOWS = 6
# Number of windows over which the replanner looks back before it shrinks the fleet: a smaller fleet must suffice for
# the busiest of them.
SETTLE_WINDOWS = 3
# A horizon lasts at least this many times as long as a worker's start. In a shorter horizon no start would save
# enough to pay.
HORIZON_STARTS = 4
DEFAULT_ATTAINMENT = 0.9


def replan_policy(config: Config, start_s: float, target: float = DEFAULT_ATTAINMENT) -> ReplanPolicy:
    """What the replanner may do, and the costs that it assumes. Without a budget only roles change.

    `start_s` is how many seconds a worker takes to start. All other times are multiples of the window.
    """
    held = sum(devices_by_worker(config).values())
    sizes = {
        PREFILL: config.prefill_tp * config.prefill_pp,
        DECODE: config.decode_tp * config.decode_pp,
        BOTH: config.decode_tp * config.decode_pp,
    }
    window_s = config.replan_window_s
    return ReplanPolicy(
        budget=config.replan_budget or held,
        floor=0 if config.replan_budget else held,
        devices=sizes,
        target=target,
        window_s=window_s,
        bucket_s=max(window_s / WINDOW_BUCKETS, config.replan_interval_s),
        start_s=start_s,
        horizon_s=max(HORIZON_WINDOWS * window_s, HORIZON_STARTS * start_s),
        settle_s=SETTLE_WINDOWS * window_s,
        back_off_s=window_s,
    )


def fleet_hardware(config: Config, model: ProbedModel, profile: CostProfile) -> FleetHardware:
    """What the workers of this deployment cost, with the memory that they were given.

    Raises:
        ConfigError: requests evict KV, and the profile does not say how much of it stays.
    """
    splits = {
        PREFILL: Parallelism(config.prefill_tp, config.prefill_pp),
        DECODE: Parallelism(config.decode_tp, config.decode_pp),
        BOTH: Parallelism(config.decode_tp, config.decode_pp),
    }
    token_bytes = float(profile.model.kv_token_bytes)
    step_tokens = config.max_num_batched_tokens
    beside = config.colocated and config.enable_chunked_prefill
    step_s = read_slo(config.slo_ttft_ms, config.slo_tpot_ms).tpot_s
    pair = [(InstancePool(role, splits[role]), profile.device.node) for role in (PREFILL, DECODE)]
    limits = InstanceLimits(
        prefill_tokens=step_tokens,
        decode_rows=config.max_num_seqs,
        chunk_tokens=step_tokens if beside else 0,
        step_s=step_s if beside else float("inf"),
    )
    measured = None if config.replan_profile is None else profile
    keep = find_keep(measured, config.kv_keep, config.kv_cache_codec, "--replan-profile")
    costs: dict[str, CostModel] = {
        role: CostWithOverhead(profile.cost(split), profile.overheads.step_s)
        for role, split in splits.items()
    }
    if keep is not None:
        costs = {role: DecidingCost(cost, keep) for role, cost in costs.items()}
    return FleetHardware(
        splits=splits,
        costs=costs,
        kv_tokens=dict.fromkeys(splits, model.kv_bytes / token_bytes),
        link=choose_kv_link(pair, profile.overheads.link, within=True),
        token_bytes=token_bytes,
        limits=limits,
        keep=keep,
    )


def replan_profile(config: Config, model: ProbedModel) -> CostProfile:
    """The measured profile, or else one from a data sheet.

    Raises:
        ConfigError: the profile cannot be read, is of another model or KV codec, or workers have several codecs.
    """
    auto, _ = split_auto(config.kv_cache_codec)
    codecs = () if auto else parse_class_shares(config.kv_cache_codec)
    if len(codecs) != 1:
        raise ConfigError(
            "the replanner knows one KV codec only",
            f"--replan, and --kv-cache-codec {config.kv_cache_codec}",
            "leave out one of the two, or name a single codec",
        )
    codec = str(codecs[0].codec_id)
    if config.replan_profile is None:
        return built_in_profile(with_kv_codec(find_model(model.path), codec), CPU)
    profile = load_profile(config.replan_profile)
    if profile.model.layers != model.num_layers:
        raise ConfigError(
            "the profile is of another model",
            f"{config.replan_profile} has {profile.model.layers} layers, and {model.path} has {model.num_layers}",
            f"measure this one: diptych profile {model.path} --out profile.json",
        )
    return code_profile(profile, codec)


class ReplanSession:
    """The replanner of one run of `diptych serve`."""

    def __init__(self, config: Config, evaluator: StoppableEvaluator, target: float) -> None:
        self._config, self._evaluator, self._target = config, evaluator, target
        self._journal = Journal(config.replan_journal)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def from_settings(cls, config: Config, model: ProbedModel, plan: PlanFile | None) -> ReplanSession | None:
        """None where nothing is to be replanned. Raises ConfigError: the profile or the journal cannot be used."""
        if not config.replan:
            return None
        planned = plan.slos_by_kind.values() if plan else ()
        target = strictest_slo(planned).attainment if planned else DEFAULT_ATTAINMENT
        slo = read_slo(config.slo_ttft_ms, config.slo_tpot_ms, target)
        profile = replan_profile(config, model)
        evaluator = SimulatedEvaluator(
            fleet_hardware(config, model, profile),
            {"": slo},
            about=f"{profile.model.name}: {profile.source}",
        )
        return cls(config, StoppableEvaluator(evaluator), target)

    def begin_steering(
        self, scaler: WorkerScaler, spec: DeploymentSpec, url: str, start_s: float, say: Callable[[str], None]
    ) -> None:
        """Steer a deployment that is up at `url`; `start_s` is how long it took."""
        config, gateway = self._config, spec.gateway
        assert gateway.admin_key is not None
        roster = Roster(
            bool(gateway.num_prefill), config.drain_s + FLIP_GRACE_S, config.start_timeout_s, TRIAL_S
        )
        # Also those that a replanner had started before, and that were adopted.
        for worker, role in scaler.started_roles.items():
            roster.add_found(worker, role)
        if config.replan_profile is None:
            say("replan: costs are those of a data sheet; `diptych profile` measures this machine's")
        steering = ReplanDriver(
            Replanner(replan_policy(config, start_s, self._target), self._evaluator, self._journal),
            GatewayClient(url, gateway.admin_key, gateway.status_key, certfile=gateway.ssl_certfile),
            scaler,
            roster,
            act=config.replan_mode == "act",
            every_s=config.replan_interval_s,
            say=say,
        )
        self._task = asyncio.create_task(steering.run_rounds())

    async def end_steering(self) -> None:
        """Stop steering; nothing is decided after that. Idempotent."""
        self._evaluator.stop.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._journal.close()
