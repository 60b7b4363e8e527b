"""`diptych serve --replan`: from settings, a model and a profile to a replanner that steers this deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from diptych.config import Config
from diptych.errors import ConfigError
from diptych.load import Loaded
from planner.decide import Policy
from planner.des_base import Limits
from planner.elastic import Hardware, Simulated
from planner.hardware import CPU
from planner.journal import Journal
from planner.links import way
from planner.plan_file import PlanFile
from planner.profile import Profile, built_in, load
from planner.replan import Replanner
from planner.request import Slower
from planner.terms import BOTH, DECODE, PREFILL, Pool, Slo, Split
from services.cli.model import Model
from services.cli.plan import devices
from services.cluster.crew import Crew
from services.cluster.parts import Plan
from services.cluster.replanner import Gateway, Plant, Steering, Stoppable

BUCKETS = 30  # of a window
FLIP_GRACE_S = 60.0  # beyond the time that requests are given to end
TRIAL_S = 20.0
HORIZON, SETTLE = 6, 3  # windows
STARTS = 4  # in a horizon: else no start would ever pay
TARGET = 0.9


def check(loaded: Loaded) -> None:
    """Raises ConfigError: a setting of the replanner without it, or what it cannot work with."""
    config, origins = loaded.config, loaded.origins
    idle = [name for name in origins if name.startswith("replan_")]
    if idle and not config.replan:
        raise ConfigError(
            f"{origins[idle[0]]} has no effect", "nothing is replanned", "add --replan, or leave it out"
        )
    if not config.replan:
        return
    if config.slo_ttft_ms is None and config.slo_tpot_ms is None:
        raise ConfigError(
            "there is nothing to plan for",
            "the replanner keeps the share of requests within their objectives, and none is given",
            "--slo-ttft-ms MS and --slo-tpot-ms MS, or a --plan that has them",
        )
    held = sum(devices(config).values())
    if config.replan_budget is not None and config.replan_budget < held:
        raise ConfigError(
            f"a budget of {config.replan_budget} devices is less than the deployment begins with",
            f"its workers hold {held} (budget from {loaded.origin('replan_budget')})",
            f"--replan-budget {held} or more, or fewer workers",
        )
    if config.replan_interval_s * 4 > config.replan_window_s:
        raise ConfigError(
            f"a window of {config.replan_window_s:g} s is too short to see changes in",
            f"traffic is asked for every {config.replan_interval_s:g} s, and a window needs four of them at least",
            "--replan-window-s 300",
        )
    if config.replan_profile is not None:
        load(config.replan_profile)


def policy(config: Config, start_s: float, target: float = TARGET) -> Policy:
    """What may be done. Without a budget only roles change; `start_s` is how long a worker takes to be there.

    All times follow the window.
    """
    held = sum(devices(config).values())
    sizes = {
        PREFILL: config.prefill_tp * config.prefill_pp,
        DECODE: config.decode_tp * config.decode_pp,
        BOTH: config.decode_tp * config.decode_pp,
    }
    window_s = config.replan_window_s
    return Policy(
        budget=config.replan_budget or held,
        floor=0 if config.replan_budget else held,
        devices=sizes,
        target=target,
        window_s=window_s,
        bucket_s=max(window_s / BUCKETS, config.replan_interval_s),
        start_s=start_s,
        horizon_s=max(HORIZON * window_s, STARTS * start_s),
        settle_s=SETTLE * window_s,
        back_off_s=window_s,
    )


def hardware(config: Config, model: Model, profile: Profile) -> Hardware:
    """What the workers of this deployment cost, with the memory that they were given."""
    splits = {
        PREFILL: Split(config.prefill_tp, config.prefill_pp),
        DECODE: Split(config.decode_tp, config.decode_pp),
        BOTH: Split(config.decode_tp, config.decode_pp),
    }
    token_bytes = float(profile.model.kv_token_bytes)
    step_tokens = config.max_num_batched_tokens
    beside = config.colocated and config.enable_chunked_prefill
    step_s = config.slo_tpot_ms / 1e3 if config.slo_tpot_ms else float("inf")
    pair = [(Pool(role, splits[role]), profile.device.node) for role in (PREFILL, DECODE)]
    limits = Limits(
        prefill_tokens=step_tokens,
        decode_rows=config.max_num_seqs,
        chunk_tokens=step_tokens if beside else 0,
        step_s=step_s if beside else float("inf"),
    )
    return Hardware(
        splits=splits,
        costs={role: Slower(profile.cost(split), profile.overheads.step_s) for role, split in splits.items()},
        kv_tokens=dict.fromkeys(splits, model.kv_bytes / token_bytes),
        link=way(pair, profile.overheads.link, within=True),
        token_bytes=token_bytes,
        limits=limits,
    )


def profile_of(config: Config, model: Model) -> Profile:
    """The measured profile, or else one from a data sheet.

    Raises:
        ConfigError: the profile cannot be read, or is of another model.
    """
    if config.replan_profile is None:
        return built_in(model.path, CPU)
    profile = load(config.replan_profile)
    if profile.model.layers != model.layers:
        raise ConfigError(
            "the profile is of another model",
            f"{config.replan_profile} has {profile.model.layers} layers, and {model.path} has {model.layers}",
            f"measure this one: diptych profile {model.path} --out profile.json",
        )
    return profile


class Replan:
    """The replanner of one run of `diptych serve`."""

    def __init__(self, config: Config, judge: Stoppable, target: float) -> None:
        self._config, self._judge, self._target = config, judge, target
        self._journal = Journal(config.replan_journal)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, config: Config, model: Model, answer: PlanFile | None) -> Replan | None:
        """None where nothing is to be replanned. Raises ConfigError: the profile or the journal cannot be used."""
        if not config.replan:
            return None
        slos = [slo.attainment for slo in answer.slos.values()] if answer else []
        target = max(slos, default=TARGET)
        ttft_s, tpot_s = (
            limit / 1e3 if limit is not None else float("inf")
            for limit in (config.slo_ttft_ms, config.slo_tpot_ms)
        )
        profile = profile_of(config, model)
        judge = Simulated(
            hardware(config, model, profile),
            {"": Slo(ttft_s, tpot_s, target)},
            about=f"{profile.model.name}: {profile.source}",
        )
        return cls(config, Stoppable(judge), target)

    def begin(self, plant: Plant, what: Plan, url: str, start_s: float, say: Callable[[str], None]) -> None:
        """Steer a deployment that is up at `url`; `start_s` is how long it took."""
        config, spec = self._config, what.gateway
        assert spec.admin_key is not None
        crew = Crew(bool(spec.num_prefill), config.drain_s + FLIP_GRACE_S, config.start_timeout_s, TRIAL_S)
        for worker in what.workers:
            crew.found(worker.worker, worker.role)
        if config.replan_profile is None:
            say("replan: costs are those of a data sheet; `diptych profile` measures this machine's")
        steering = Steering(
            Replanner(policy(config, start_s, self._target), self._judge, self._journal),
            Gateway(url, spec.admin_key, spec.api_keys[0] if spec.api_keys else None),
            plant,
            crew,
            act=config.replan_mode == "act",
            every_s=config.replan_interval_s,
            say=say,
        )
        self._task = asyncio.create_task(steering.run())

    async def end(self) -> None:
        """Stop steering; nothing is decided after that. Idempotent."""
        self._judge.stop.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._journal.close()
