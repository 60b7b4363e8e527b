"""Reproduces DistServe's own simulator: the same coefficients, queues and results.

Source: `simdistserve` of DistServe's artefact (github LLMServe/DistServe, Apache-2.0). It differs from
`planner.sim.fast.cluster` as the search uses it: two decode lines that do not meet (a batch of 95 rows may be faster
than one of 94); overheads of Ray of 2 ms per step and 0.1 µs per token; one more millisecond per stage in each stage of
a prefill; a first token that is decoded a second time; a budget of tokens per step in place of KV memory; and KV
transfer that takes no time. Rows go round the pipeline stages in the groups in which they came, not in even parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from diptych.errors import ConfigError
from planner.costs.capacity import kv_capacity_tokens
from planner.costs.model import find_model
from planner.sim.fast import cluster
from planner.sim.fast.instance import InstanceLimits
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    InstancePool,
    Job,
    JobResult,
    Parallelism,
    Placement,
    StepBatch,
)

BACKENDS = ("distserve", "vllm")
# Bytes of memory of the A100-80G in the artefact's capacity table.
MEMORY_BYTES = 84_990_623_744
# Most tokens of context in one decode step.
STEP_TOKENS = 50_000
# Overhead of Ray in ms, per step and per token. It occurs in the first stage.
RAY_MS, RAY_TOKEN_MS = 2.0, 1e-4
# Overhead in ms. Each stage of a prefill takes this much longer for every stage that the pipeline has.
HOP_MS = 1.0

DistServeFits = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DistServeCost:
    """Step cost with DistServe's fits in ms: prefill a + b·Σl + c·Σl², decode a + b·Σ(context + 1) + c·rows."""

    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]
    threshold: float
    pp: int

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of a step through all stages, with the overhead of Ray."""
        return (self._stage_ms(batch) * self.pp + _ray_ms(batch)) / 1e3

    def stage_s(self, batch: StepBatch) -> float:
        """Seconds of the first stage, which is the slowest, since Ray's overhead occurs there."""
        return (self._stage_ms(batch) + _ray_ms(batch)) / 1e3

    def _stage_ms(self, batch: StepBatch) -> float:
        """Milliseconds of the batch in one stage, without Ray's overhead."""
        if not batch.rows:
            a, b, c = self.prefill
            work_ms = a + b * batch.tokens + c * batch.squares
            hop_ms = HOP_MS * self.pp
        else:
            a, b, c = self.small if batch.rows < self.threshold else self.large
            work_ms = a + b * (batch.context + batch.rows) + c * batch.rows
            hop_ms = 0.0
        if not 0.0 <= work_ms < inf:
            raise ConfigError(
                f"the profile gives {work_ms:.6g} ms for a step",
                f"{batch.tokens} tokens of prompts, {batch.rows} rows with {batch.context} of context",
                "correct the fit: a step cannot take negative time",
            )
        return work_ms / self.pp + hop_ms


def _ray_ms(batch: StepBatch) -> float:
    """Overhead of Ray in milliseconds per step."""
    return RAY_MS + RAY_TOKEN_MS * (batch.tokens + batch.context)


def distserve_cost(profile: Mapping[str, Any], model: str, parallelism: Parallelism) -> DistServeCost:
    """The cost of `model` over `parallelism`, from a profile in the artefact's format: `{model: {tp: fits}}`.

    Raises:
        ConfigError: the profile lacks the model or the TP, or its fits are malformed.
    """
    if not isinstance(profile, Mapping) or model not in profile:
        names = ", ".join(map(str, profile)) if isinstance(profile, Mapping) else "nothing"
        raise ConfigError(
            f"the profile has no model {model!r}", f"it has {names or 'none'}", "name one of these"
        )
    splits = profile[model]
    if not isinstance(splits, Mapping) or str(parallelism.tp) not in splits:
        has = ", ".join(map(str, splits)) if isinstance(splits, Mapping) else "none"
        why = f"it has TP {has}, and fits hold only for the TP they were measured with"
        raise ConfigError(
            f"the profile has no TP {parallelism.tp} of {model}", why, "profile it, or take one of these"
        )
    fits = splits[str(parallelism.tp)]
    try:
        return DistServeCost(
            _three_coefficients(fits["prefill"]),
            _three_coefficients(fits["decoding_smallbs"]),
            _three_coefficients(fits["decoding_largebs"]),
            float(fits["decoding_large_small_bs_threshold"]),
            parallelism.pp,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the profile's fit of {model} with TP {parallelism.tp} cannot be used",
            f"{type(error).__name__}: {error}",
            "it has prefill, decoding_smallbs, decoding_largebs (three numbers each), "
            "decoding_large_small_bs_threshold",
        ) from None


def _three_coefficients(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Exactly three numbers as floats; raises ValueError for any other count."""
    a, b, c = map(float, numbers)
    return a, b, c


def distserve_kv_tokens(model: str, parallelism: Parallelism) -> int:
    """The token budget of an instance: KV tokens that an A100's memory has room for (the artefact's `max_num_tokens`).

    Raises:
        ConfigError: the model is not known, cannot be split so, or its weights leave no memory.
    """
    dims = find_model(model)
    if not dims.valid(parallelism):
        why = f"TP must divide its {dims.heads} heads evenly, and PP its {dims.layers} layers"
        raise ConfigError(
            f"{model} cannot be split as {parallelism}", why, "take a TP and a PP that divide these"
        )
    tokens = kv_capacity_tokens(dims, parallelism, MEMORY_BYTES)
    if not tokens:
        raise ConfigError(
            f"{model} with {parallelism} has no room for KV on an A100-80G",
            "its weights alone take the memory",
            "give it more devices: a larger TP or PP",
        )
    return tokens


def simulate_distserve(
    jobs: Iterable[Job],
    profile: Mapping[str, Any],
    backend: str,
    model: str,
    prefill: Parallelism = Parallelism(),  # noqa: B008
    decode: Parallelism = Parallelism(),  # noqa: B008
) -> list[JobResult]:
    """Simulates one prefill and one decode instance as DistServe's simulator does; results are by time of arrival.

    `profile` is the artefact's JSON. The backend `vllm` is one colocated instance with the split `prefill`; `decode` is
    then ignored. TPOT is the time after the first token divided by all tokens of the answer, as in the artefact.

    Raises:
        ConfigError: unknown backend, model or TP; no memory; or a request larger than the budget of any step.
    """
    if backend not in BACKENDS:
        raise ConfigError(
            f"there is no backend {backend!r}", "known: " + ", ".join(BACKENDS), "use one of them"
        )
    pools = (
        (InstancePool(BOTH, prefill),)
        if backend == "vllm"
        else (InstancePool(PREFILL, prefill), InstancePool(DECODE, decode))
    )
    costs = {pool.parallelism: distserve_cost(profile, model, pool.parallelism) for pool in pools}
    budgets = [distserve_kv_tokens(model, pool.parallelism) for pool in pools]
    jobs = sorted(jobs, key=lambda job: job.at_s)
    _check_jobs(jobs, budgets[0])
    limits = InstanceLimits(
        prefill_tokens=budgets[0], batch_tokens=STEP_TOKENS, batch_rows=budgets[-1], first_again=True
    )
    return cluster.simulate_fast(Placement(pools), costs, jobs, limits=limits, single=True)


def _check_jobs(jobs: Iterable[Job], budget: int) -> None:
    """Raises ConfigError for a request that no step has the budget for: DistServe's simulator would wait for ever."""
    for number, job in enumerate(jobs):
        if job.prompt > budget or job.prompt + job.output > STEP_TOKENS:
            raise ConfigError(
                f"request {number} of the trace can never run",
                f"its prompt has {job.prompt} tokens, its answer {job.output}; "
                f"a step prefills at most {budget}, and decodes with at most {STEP_TOKENS} of context",
                "leave it out, or split the instance over more devices",
            )
