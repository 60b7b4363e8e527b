"""`plan.json`: what `diptych plan` answers and `diptych serve --plan` deploys.

One versioned JSON object. Reading refuses unknown fields and versions in words; nothing in it names a machine.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from diptych.errors import ConfigError
from planner.terms import BOTH, DECODE, PREFILL, Placement, Pool, Slo, Split

VERSION = 1
LOCAL_PREFILL = ("never", "fallback", "auto")


class PoolOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` equal instances of a role (prefill, decode or both), each over tp × pp devices of one kind."""

    role: str
    tp: int = 1
    pp: int = 1
    count: int = 1
    device: str = ""


class SloOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A promise in seconds; none where there is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    attainment: float = 0.9


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was planned for: its name, mean tokens of prompts and answers, requests per second (none: as many
    as can be), and the coefficient of variation of the times between arrivals (1: Poisson). `diptych serve` tells them.
    """

    name: str = ""
    prompt_mean: float = 0.0
    output_mean: float = 0.0
    rate_rps: float | None = None
    burstiness_cv: float = 1.0


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the plan was found to do: goodput of all its devices, and the joint attainment at it, with how they were
    measured. `binding` is the resource that limits it.

    With `searched_rps`, which is what the search had found, they are those of the product's own decisions: then
    `interval_rps` is from the goodput to the lowest rate tried that fails, and a plan for a rate has that rate. Else
    they are the search's, and it is between the lowest and the highest seed.
    """

    goodput_rps: float
    goodput_per_device_rps: float
    interval_rps: tuple[float, float]
    attainment: float
    requests: int
    seeds: int
    binding: str = ""
    cost_per_million_good_tokens: float | None = None
    searched_rps: float | None = None


class StepsOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an instance takes on in a step: sequences, tokens, and whether long prompts are cut."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole plan. `model` as the user named it; `layers` are checked when it is deployed.

    `local_prefill` "auto": decode instances read prompts where that is sooner; else they do so only while no prefill
    instance is there. `steps` are those that the prediction is for; None: nobody has said, so those of `diptych serve`.
    """

    version: int
    model: str
    layers: int
    devices_per_node: int
    pools: tuple[PoolOf, ...]
    affinity: str
    cross: int
    slos: dict[str, SloOf]
    traffic: Traffic
    predicted: Predicted
    local_prefill: str = "never"
    steps: StepsOf | None = None

    @property
    def placement(self) -> Placement:
        pools = (Pool(pool.role, Split(pool.tp, pool.pp), pool.count, pool.device) for pool in self.pools)
        return Placement(tuple(pools), self.affinity, self.cross)

    @property
    def promises(self) -> dict[str, Slo]:
        """The objectives by kind of request; kind "" is everyone's."""
        return {
            kind: Slo(
                float("inf") if slo.ttft_s is None else slo.ttft_s,
                float("inf") if slo.tpot_s is None else slo.tpot_s,
                slo.attainment,
            )
            for kind, slo in self.slos.items()
        }


def pools_of(placement: Placement) -> tuple[PoolOf, ...]:
    """The pools of a placement, as they are written."""
    return tuple(
        PoolOf(pool.role, pool.split.tp, pool.split.pp, pool.count, pool.device) for pool in placement.pools
    )


def slo_of(slo: Slo) -> SloOf:
    """A promise, as it is written: JSON knows no infinity."""
    ttft_s, tpot_s = (None if value == float("inf") else value for value in (slo.ttft_s, slo.tpot_s))
    return SloOf(ttft_s, tpot_s, slo.attainment)


def save(path: Path, plan: PlanFile) -> None:
    """Write a plan; readable by people, byte for byte the same for the same plan."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")


def load(path: Path) -> PlanFile:
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
        plan = msgspec.json.decode(content, type=PlanFile)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is not a plan", str(error), "make one: diptych plan --out plan.json"
        ) from error
    fault = _fault(plan)
    if fault:
        raise ConfigError(f"{path} cannot be deployed", fault, "make it anew: diptych plan --out plan.json")
    return plan


def _fault(plan: PlanFile) -> str:
    if plan.version != VERSION:
        return f"it is of version {plan.version}, and this program reads version {VERSION}"
    if not plan.model.strip():
        return "it names no model"
    if not plan.pools:
        return "it has no pools"
    steps = plan.steps
    if steps is not None and not 0 < steps.max_num_seqs <= steps.max_num_batched_tokens:
        return f"steps of {steps.max_num_seqs} sequences in {steps.max_num_batched_tokens} tokens are not possible"
    for pool in plan.pools:
        if pool.role not in (PREFILL, DECODE, BOTH):
            return f"there is no role {pool.role!r}"
        if min(pool.tp, pool.pp, pool.count, plan.layers) < 1 or plan.layers % pool.pp:
            return f"{pool.count} instances of TP{pool.tp} PP{pool.pp} do not fit {plan.layers} layers"
    roles = {pool.role for pool in plan.pools}
    if (PREFILL in roles) != (DECODE in roles):
        return f"prefill and decode need each other, and it has {', '.join(sorted(roles))} only"
    if plan.affinity not in ("high", "low", "none"):
        return f"there is no affinity {plan.affinity!r}"
    if min(plan.devices_per_node, plan.cross) < 1:
        return f"a node has at least one device, and an instance is on at least one node, not {plan.cross}"
    if plan.local_prefill not in LOCAL_PREFILL:
        return f"local_prefill is one of {', '.join(LOCAL_PREFILL)}, not {plan.local_prefill!r}"
    for slo in plan.slos.values():
        if any(limit is not None and limit <= 0.0 for limit in (slo.ttft_s, slo.tpot_s)):
            return "an objective is a time above 0"
        if not 0.0 < slo.attainment <= 1.0:
            return f"an attainment is a share above 0 and at most 1, not {slo.attainment:g}"
    return ""
