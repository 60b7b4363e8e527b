"""Finds a worker's model and tokenizer, and what of them fits: the same for every device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diptych.errors import ConfigError, GrammarError, ModelError
from diptych.specs import WorkerSpec
from engine.eviction.memory import count_evicting
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import KvClassChoice, largest_codec, resolve_kv_classes, split_ranks
from engine.model.memory_plan import MemoryPlan
from engine.model.pool_split import split_pool
from engine.model.tokenizer import ModelTokenizer
from engine.sampling import grammar
from engine.sequence import EngineLimits
from kvcache.codecs.calibration import Calibration
from kvcache.eviction.rank_bags import most_rank_extra
from kvcache.layout import KvLayout, Shard
from kvtransfer.resharding import plan_spans

log = logging.getLogger(__name__)

# The type of weights and KV for each `--dtype` on the CPU.
CPU_DTYPES = {"auto": "float32", "float32": "float32"}


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that was found, its split over ranks, and how much memory it gets."""

    checkpoint: Checkpoint
    plan: MemoryPlan
    dtype: str
    shards: tuple[Shard, ...]  # by rank
    # The KV classes, the default one first.
    classes: tuple[KvClassChoice, ...]
    # Slabs of each class.
    class_slabs: tuple[int, ...]

    @property
    def codec(self) -> str:
        """Canonical id of the codec of the default class; empty without one."""
        return self.classes[0].codec

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the default class, if it has one."""
        return self.classes[0].calibration

    @property
    def layout(self) -> KvLayout:
        """The layout of the whole KV of the default class, over all ranks."""
        return self.layouts[0]

    @property
    def layouts(self) -> list[KvLayout]:
        """The layout of the whole KV of each class, over all ranks."""
        return [self.checkpoint.layout(self.dtype, one.codec) for one in self.classes]

    @property
    def kv_classes(self) -> tuple[str, ...]:
        """The names of the KV classes."""
        return tuple(layout.kv_class for layout in self.layouts)

    @property
    def num_slabs(self) -> int:
        """The slabs of all classes."""
        return sum(self.class_slabs)

    @property
    def pool_sizes(self) -> list[int]:
        """Bytes of each rank's memory for KV. All ranks have the same number of slabs."""
        _, sizes = plan_spans(self.sized_layouts, self.shards)
        return list(sizes)

    @property
    def sized_layouts(self) -> list[tuple[KvLayout, int]]:
        """The layout and the number of slabs of each class."""
        return list(zip(self.layouts, self.class_slabs, strict=True))


def resolve_model(spec: WorkerSpec) -> ResolvedModel:
    """Find the model and check that it fits in memory. No weights are read yet.

    Raises:
        ConfigError: this machine lacks the device, the dtype or enough cores for the ranks, or KV cannot be coded this
            way.
        ModelError: the model is not found, not supported, cannot be split this way, or does not fit in memory together
            with the KV of one request of `max_model_len` tokens; or its calibration cannot be read.
    """
    if spec.device not in ("auto", "cpu"):
        why = "a worker like this one computes on the CPU"
        raise ConfigError(f"there is no device {spec.device!r} here", why, "use --device cpu")
    if spec.dtype not in CPU_DTYPES:
        why = "on the CPU weights and KV are float32"
        raise ConfigError(f"{spec.dtype} is not available on the CPU", why, "use --dtype auto")
    if spec.max_num_seqs > spec.max_num_batched_tokens:
        raise ConfigError(
            f"a step of {spec.max_num_batched_tokens} tokens is too small for {spec.max_num_seqs} requests",
            "every running request may decode one token in it",
            f"use --max-num-batched-tokens {spec.max_num_seqs} or more, or a smaller --max-num-seqs",
        )
    torch.set_num_threads(spec.threads)
    checkpoint = Checkpoint.resolve(spec.model, spec.revision)
    classes = resolve_kv_classes(checkpoint, spec.kv_cache_codec, spec.kv_cache_calibration)
    shards = split_ranks(checkpoint, classes, spec.tp, spec.pp)
    plan = checkpoint.memory(
        max_model_len=spec.max_model_len,
        kv_bytes=spec.kv_bytes,
        codec=largest_codec(checkpoint, classes),
        coded=any(one.codec for one in classes),
        tp=spec.tp,
        ranks=spec.tp * spec.pp,
        step_tokens=spec.max_num_batched_tokens,
        step_rows=spec.max_num_seqs,
        evicting_seqs=spec.max_num_seqs if spec.kv_keep < 1 else 0,
    )
    layouts = [checkpoint.layout(CPU_DTYPES[spec.dtype], one.codec) for one in classes]
    class_slabs = split_pool(checkpoint.name, plan, layouts, [one.share for one in classes])
    return ResolvedModel(checkpoint, plan, CPU_DTYPES[spec.dtype], shards, classes, class_slabs)


def engine_limits(spec: WorkerSpec, model: ResolvedModel) -> EngineLimits:
    """The limits of the engine, which are the same in every role."""
    splits = {(spec.tp, spec.pp), *spec.pool_splits}
    return EngineLimits(
        num_slabs=model.num_slabs,
        max_model_len=model.plan.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        chunked_prefill=spec.chunked_prefill,
        tpot_s=spec.tpot_s,
        max_evicting=max_evicting(spec, model),
        arena_slabs={layout.kv_class: count for layout, count in model.sized_layouts}
        if len(model.classes) > 1
        else {},
        extra_slabs={
            layout.kv_class if len(model.classes) > 1 else "": most_rank_extra(
                layout, splits, model.plan.max_model_len
            )
            for layout, _ in model.sized_layouts
        },
    )


def max_evicting(spec: WorkerSpec, model: ResolvedModel) -> int:
    """How many sequences may evict at once: those that memory was set aside for, or what is left beside the pool."""
    if spec.kv_keep < 1:
        return spec.max_num_seqs
    plan, config = model.plan, model.checkpoint.config
    spare = plan.max_kv_bytes - plan.kv_bytes - spec.swap_bytes
    return count_evicting(model.layout, config.heads, plan.max_model_len, spare, spec.max_num_seqs)


def load_tokenizer(folder: Path) -> ModelTokenizer | None:
    """The model's tokenizer, or None (logged) if it cannot be read."""
    try:
        return ModelTokenizer.load(folder)
    except ModelError as error:
        log.warning("neither structured output nor eviction is possible with this model: %s", error)
        return None


def load_grammar_tokens(folder: Path, tokenizer: ModelTokenizer | None) -> Any:
    """The tokenizer in the form that structured output needs, or None (logged) if this model cannot do it."""
    if tokenizer is None:
        return None
    try:
        return grammar.build_tokenizer(tokenizer.backend, tokenizer.end_ids(folder))
    except (GrammarError, OSError, ValueError) as error:
        log.warning("structured output is not possible with this model: %s", error)
        return None
