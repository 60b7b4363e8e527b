"""Works out what eviction changes for a model and its profile: the KV that stays, and the time of decisions.

    diptych plan --kv-keep 0.95        heads keep 95 % of their attention, and drop the KV that they do not need for it

How much of its KV a sequence keeps depends on the model, on the prompts and on the threshold, so it is measured:
`diptych profile --kv-keep 0.95` serves its workload once more with requests that evict (`planner.types.KvKeep`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose

from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from diptych.errors import ConfigError
from planner.costs.kv.classes import read_classes
from planner.costs.profile import CostProfile
from planner.types import CostModel, KvKeep, StepBatch

# Thresholds that differ by less are the same.
THRESHOLD_ROUNDING = 1e-9


def check_threshold(threshold: float) -> None:
    """Raises ConfigError: a value of `--kv-keep` is not above 0 and at most 1."""
    if not 0 < threshold <= 1:
        raise ConfigError(
            f"--kv-keep {threshold} is not possible",
            "it is the share of attention that heads keep: above 0, and at most 1",
            "such as --kv-keep 0.95",
        )


def find_keep(
    profile: CostProfile | None, threshold: float, kv_cache_codec: str = RAW_CLASS, flag: str = "--profile"
) -> KvKeep | None:
    """What the profile, which `flag` names, has measured of eviction; None if nothing is evicted (a threshold of 1).

    Raises:
        ConfigError: the threshold is not above 0 and at most 1, the profile has not measured it, or there are several
            classes of KV.
    """
    check_threshold(threshold)
    if threshold < 1 and (classes := read_classes(kv_cache_codec)):
        raise ConfigError(
            "eviction is planned with KV of one class",
            f"--kv-keep {threshold}, and --kv-cache-codec {kv_cache_codec} names {len(classes)} classes",
            "leave out --kv-keep, or name a single codec",
        )
    if threshold == 1:
        return None
    known_keeps = () if profile is None else profile.kv_keep
    found = next(
        (one for one in known_keeps if isclose(one.threshold, threshold, abs_tol=THRESHOLD_ROUNDING)), None
    )
    if found is None:
        why = (
            "no profile is given" if profile is None else f"the profile knows {_name_thresholds(known_keeps)}"
        )
        raise ConfigError(
            f"it is not known how much KV stays with --kv-keep {threshold}",
            f"that depends on the model and the prompts, and {why}",
            f"measure it: diptych profile --kv-keep {threshold} --out profile.json; then add {flag} profile.json",
        )
    return found


def _name_thresholds(known_keeps: Sequence[KvKeep]) -> str:
    return " and ".join(f"{one.threshold}" for one in known_keeps) or "no threshold"


def keep_notes(keep: KvKeep | None) -> tuple[str, ...]:
    """What a reader has to know about eviction; nothing without it."""
    if keep is None:
        return ()
    return (
        f"heads keep {keep.threshold} of their attention: {keep.share:.0%} of the KV, as measured with the"
        " profile's prompts",
    )


@dataclass(frozen=True, slots=True)
class DecidingCost:
    """A step cost with the mean time of decisions about what is kept: at the end of prompts, and every 64 tokens."""

    cost: CostModel
    keep: KvKeep

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of a step, decisions included."""
        return self.cost.step_s(batch) + self._decide_s(batch)

    def stage_s(self, batch: StepBatch) -> float:
        """Seconds in the slowest stage, decisions included."""
        return self.cost.stage_s(batch) + self._decide_s(batch)

    def _decide_s(self, batch: StepBatch) -> float:
        """The batch has tokens and context as they cost (`KvKeep.work`); decisions look at those that there are."""
        keep = self.keep
        prompts, answers = batch.tokens / keep.work.token, batch.context / keep.work.context
        return prompts * keep.prompt_s + answers * keep.answer_s / CHUNK_TOKENS
