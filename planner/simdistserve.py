"""The paper's own simulator, reproduced: same coefficients, same queues, same figures.

Source: `simdistserve` of DistServe's artefact (github LLMServe/DistServe, Apache-2.0). What differs from `planner.des`
as the search uses it, and holds only here: two lines for decoding that do not meet (a batch of 95 rows may be faster
than one of 94), 2 ms and 0.1 µs per token of Ray in each step, one more millisecond per stage in each stage of a
prompt, the first token decoded a second time, no memory for KV but a budget of tokens per step, and hand-over that
takes no time. Rows go round the stages in groups as they came, not in even parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from diptych.errors import ConfigError
from planner import des
from planner.capacity import kv_tokens
from planner.shape import known
from planner.terms import BOTH, DECODE, PREFILL, Batch, Job, Placement, Pool, Served, Split

BACKENDS = ("distserve", "vllm")
MEMORY_BYTES = 84_990_623_744  # of the A100-80G that the artefact's table of capacities is for
STEP_TOKENS = 50_000  # of context, in one decoding step
RAY_MS, RAY_TOKEN_MS = 2.0, 1e-4  # in the first stage of each step
HOP_MS = 1.0  # per stage, in each stage of a prompt

Fits = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PaperCost:
    """Seconds of a step. The fits are in ms: prefill a + b·Σl + c·Σl², decode a + b·Σ(context + 1) + c·rows."""

    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]
    threshold: float
    pp: int

    def step_s(self, batch: Batch) -> float:
        return (self._stage_ms(batch) * self.pp + _ray_ms(batch)) / 1e3

    def stage_s(self, batch: Batch) -> float:
        """The first stage's: it is the one that waits for Ray."""
        return (self._stage_ms(batch) + _ray_ms(batch)) / 1e3

    def _stage_ms(self, batch: Batch) -> float:
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
                "mend its fit: a step takes some time, not less than none",
            )
        return work_ms / self.pp + hop_ms


def _ray_ms(batch: Batch) -> float:
    return RAY_MS + RAY_TOKEN_MS * (batch.tokens + batch.context)


def cost_of(profile: Mapping[str, Any], model: str, split: Split) -> PaperCost:
    """The cost of `model` over `split`, from a profile in the artefact's format: model, TP, then fits.

    Raises:
        ConfigError: the model or the TP is not in the profile, or what is there is no fit.
    """
    if not isinstance(profile, Mapping) or model not in profile:
        names = ", ".join(map(str, profile)) if isinstance(profile, Mapping) else "nothing"
        raise ConfigError(
            f"the profile has no model {model!r}", f"it has {names or 'none'}", "name one of these"
        )
    splits = profile[model]
    if not isinstance(splits, Mapping) or str(split.tp) not in splits:
        has = ", ".join(map(str, splits)) if isinstance(splits, Mapping) else "none"
        why = f"it has TP {has}, and fits are not carried over from one to another"
        raise ConfigError(
            f"the profile has no TP {split.tp} of {model}", why, "profile it, or take one of these"
        )
    fits = splits[str(split.tp)]
    try:
        return PaperCost(
            _three(fits["prefill"]),
            _three(fits["decoding_smallbs"]),
            _three(fits["decoding_largebs"]),
            float(fits["decoding_large_small_bs_threshold"]),
            split.pp,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the profile's fit of {model} with TP {split.tp} cannot be used",
            f"{type(error).__name__}: {error}",
            "it has prefill, decoding_smallbs, decoding_largebs (three numbers each), "
            "decoding_large_small_bs_threshold",
        ) from None


def _three(numbers: Sequence[float]) -> tuple[float, float, float]:
    a, b, c = map(float, numbers)
    return a, b, c


def tokens_of(model: str, split: Split) -> int:
    """The budget of tokens of an instance: what the A100's memory leaves for KV (`max_num_tokens` of the artefact).

    Raises:
        ConfigError: the model is not known, does not divide so, or its weights leave no room.
    """
    shape = known(model)
    if not shape.valid(split):
        why = f"{shape.heads} heads are shared by TP devices, {shape.layers} layers by PP stages, evenly"
        raise ConfigError(f"{model} cannot be spread as {split}", why, "take a TP and a PP that divide these")
    tokens = kv_tokens(shape, split, MEMORY_BYTES)
    if not tokens:
        raise ConfigError(
            f"{model} with {split} has no room for KV on an A100-80G",
            "its weights alone take the memory",
            "give it more devices: a larger TP or PP",
        )
    return tokens


def run(
    jobs: Iterable[Job],
    profile: Mapping[str, Any],
    backend: str,
    model: str,
    prefill: Split = Split(),  # noqa: B008
    decode: Split = Split(),  # noqa: B008
) -> list[Served]:
    """How each of `jobs` fares in the paper's simulator, by time of arrival: one prefill and one decode instance.

    `profile` is as the artefact's JSON. Backend `vllm` is one instance for both, over the split `prefill`; `decode` is
    then not looked at. TPOT is what follows the first token, divided by all tokens of the answer.

    Raises:
        ConfigError: an unknown backend, model or TP; no memory; a request that no step has the budget for.
    """
    if backend not in BACKENDS:
        raise ConfigError(
            f"there is no backend {backend!r}", "known: " + ", ".join(BACKENDS), "use one of them"
        )
    pools = (Pool(BOTH, prefill),) if backend == "vllm" else (Pool(PREFILL, prefill), Pool(DECODE, decode))
    costs = {pool.split: cost_of(profile, model, pool.split) for pool in pools}
    budgets = [tokens_of(model, pool.split) for pool in pools]
    jobs = sorted(jobs, key=lambda job: job.at_s)
    _check(jobs, budgets[0])
    limits = des.Limits(
        prefill_tokens=budgets[0], turn_tokens=STEP_TOKENS, turn_rows=budgets[-1], first_again=True
    )
    return des.run(Placement(pools), costs, jobs, limits=limits, single=True)


def _check(jobs: Iterable[Job], budget: int) -> None:
    """The original waits for ever where a request is longer than a step may be."""
    for number, job in enumerate(jobs):
        if job.prompt > budget or job.prompt + job.output > STEP_TOKENS:
            raise ConfigError(
                f"request {number} of the trace can never run",
                f"its prompt has {job.prompt} tokens, its answer {job.output}; "
                f"a step reads at most {budget}, and decodes with at most {STEP_TOKENS} of context",
                "leave it out, or spread the instance over more devices",
            )
