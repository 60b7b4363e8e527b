"""Reads and writes `plan.json`, which `diptych plan` prints and `diptych serve --plan` deploys.

The file is one versioned JSON object and names no machine; `docs/plan.schema.json` is its JSON Schema. Unknown fields
and versions are refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from diptych.chunks import RAW_CLASS
from diptych.errors import ConfigError
from diptych.slo import DEFAULT_ATTAINMENT, Slo
from planner.costs.kv.classes import check_codecs
from planner.json_file import FileModel, FileVersion, describe_fault, one_of
from planner.types import BOTH, DECODE, PREFILL, Count, InstancePool, Parallelism, Placement, Positive

VERSION: Literal[1] = 1
AFFINITIES = ("high", "low", "none")
LOCAL_PREFILL = ("never", "fallback", "auto")

Role = Annotated[
    str,
    AfterValidator(one_of(PREFILL, DECODE, BOTH)),
    Field(json_schema_extra={"enum": [PREFILL, DECODE, BOTH]}),
]
Affinity = Annotated[
    str, AfterValidator(one_of(*AFFINITIES)), Field(json_schema_extra={"enum": [*AFFINITIES]})
]
LocalPrefill = Annotated[
    str, AfterValidator(one_of(*LOCAL_PREFILL)), Field(json_schema_extra={"enum": [*LOCAL_PREFILL]})
]
KvCodecs = Annotated[str, AfterValidator(check_codecs)]
NotNegative = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]


class PlanPool(FileModel):
    """`count` equal instances of a role (prefill, decode or both), each over tp × pp devices of one kind."""

    role: Role
    tp: Count = 1
    pp: Count = 1
    count: Count = 1
    device: str = ""


class PlanSlo(FileModel):
    """SLOs in seconds; null where there is no limit. `attainment` is the share of requests that must meet both."""

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    attainment: PositiveShare = DEFAULT_ATTAINMENT


class PlanTraffic(FileModel):
    """The traffic that was planned for.

    Its name, mean tokens of prompts and answers, requests per second (null: as many as can be served within the SLOs),
    and the coefficient of variation of the times between arrivals (1: Poisson). `kv_mix` is the share of the requests
    for each class of KV, where there are several. `diptych serve` prints them.
    """

    name: str = ""
    prompt_mean: NotNegative = 0.0
    output_mean: NotNegative = 0.0
    rate_rps: NotNegative | None = None
    burstiness_cv: NotNegative = 1.0
    kv_mix: dict[str, Share] = {}


class PlanPrediction(FileModel):
    """The predicted goodput of all devices, and the joint attainment at it.

    `binding` is the resource that limits goodput. With `searched_rps`, the estimate of the search, all other figures
    come from the exact simulator: then `interval_rps` is from the goodput to the lowest rate that was tried and fails.
    Without it, all figures come from the search, and `interval_rps` is from the worst to the best seed.
    """

    goodput_rps: NotNegative
    goodput_per_device_rps: NotNegative
    interval_rps: tuple[NotNegative, NotNegative]
    attainment: Share
    requests: Annotated[int, Field(ge=0)]
    seeds: Annotated[int, Field(ge=0)]
    binding: str = ""
    cost_per_million_good_tokens: NotNegative | None = None
    searched_rps: NotNegative | None = None


class PlanStepLimits(FileModel):
    """The most that an instance takes on in a step: sequences and tokens, and whether long prompts are cut."""

    max_num_seqs: Count
    max_num_batched_tokens: Count
    chunked_prefill: bool = True

    @model_validator(mode="after")
    def _check_limits(self) -> PlanStepLimits:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"steps of {self.max_num_seqs} sequences in {self.max_num_batched_tokens} tokens are not possible: "
                "max_num_batched_tokens should be at least max_num_seqs"
            )
        return self


class PlanFile(FileModel):
    """A whole plan. `model` is named as the user named it; `layers` are checked when the plan is deployed.

    `slos` are by kind of request; kind "" is the default. `local_prefill` "auto": decode instances also prefill where
    that is sooner; otherwise they prefill only while there is no prefill instance. The prediction is for `steps`; null:
    for those of `diptych serve`. `kv_cache_codec` is how KV is stored and moved: one codec, or several with the share
    of the pool that each gets. `kv_keep` is the threshold of eviction of all requests; 1: they keep everything.
    """

    version: FileVersion
    model: str
    layers: Count
    devices_per_node: Count
    pools: Annotated[tuple[PlanPool, ...], Field(min_length=1)]
    affinity: Affinity
    cross: Count
    slos: dict[str, PlanSlo]
    traffic: PlanTraffic
    predicted: PlanPrediction
    local_prefill: LocalPrefill = "never"
    steps: PlanStepLimits | None = None
    kv_cache_codec: KvCodecs = RAW_CLASS
    kv_keep: PositiveShare = 1.0

    @model_validator(mode="after")
    def _check_pools(self) -> PlanFile:
        if not self.model.strip():
            raise ValueError("model: the name should not be empty")
        for pool in self.pools:
            if self.layers % pool.pp:
                raise ValueError(
                    f"pools: {pool.pp} pipeline stages do not divide {self.layers} layers: pp should divide layers"
                )
        roles = {pool.role for pool in self.pools}
        if (PREFILL in roles) != (DECODE in roles):
            raise ValueError(
                f"pools: prefill and decode need each other, and there is {', '.join(sorted(roles))} only"
            )
        return self

    @property
    def placement(self) -> Placement:
        """The deployment that this file describes, as the planner's own type."""
        pools = (
            InstancePool(pool.role, Parallelism(pool.tp, pool.pp), pool.count, pool.device)
            for pool in self.pools
        )
        return Placement(tuple(pools), self.affinity, self.cross)

    @property
    def slos_by_kind(self) -> dict[str, Slo]:
        """The SLOs by kind of request; kind "" is the default."""
        return {
            kind: Slo(
                math.inf if slo.ttft_s is None else slo.ttft_s,
                math.inf if slo.tpot_s is None else slo.tpot_s,
                slo.attainment,
            )
            for kind, slo in self.slos.items()
        }


def plan_pools(placement: Placement) -> tuple[PlanPool, ...]:
    """The pools of a placement, as they are written."""
    return tuple(
        PlanPool(
            role=pool.role,
            tp=pool.parallelism.tp,
            pp=pool.parallelism.pp,
            count=pool.count,
            device=pool.device,
        )
        for pool in placement.pools
    )


def plan_slo(slo: Slo) -> PlanSlo:
    """An SLO as it is written: JSON has no infinity."""
    limits_s = slo.limits_s()
    return PlanSlo(ttft_s=limits_s["ttft"], tpot_s=limits_s["tpot"], attainment=slo.attainment)


def save_plan(path: Path, plan: PlanFile) -> None:
    """Write a plan; readable by people, byte for byte the same for the same plan."""
    path.write_text(plan.model_dump_json(indent=2) + "\n", encoding="utf-8")


def load_plan(path: Path) -> PlanFile:
    """Read a plan and check it. Raises ConfigError: no such file, not a plan, another version, an impossible pool."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the plan {path} cannot be read",
            error.strerror or str(error),
            "make one: diptych plan --out plan.json",
        ) from error
    try:
        return PlanFile.model_validate_json(content)
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not a plan that can be deployed",
            describe_fault(error),
            "correct it there, or make it anew: diptych plan --out plan.json",
        ) from None
