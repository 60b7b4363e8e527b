"""From a specification to an engine: model files, KV pools, ranks, runner, sampler. All is built once, here."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from diptych.config import WorkerSpec
from diptych.errors import ConfigError, GrammarError
from engine import grammar, saturation
from engine.loop import Engine
from engine.model.files import ModelFiles
from engine.model.memory import Memory
from engine.parallel import Place
from engine.runner import Runner
from engine.sampler import Sampler
from engine.scheduler import Limits, Scheduler
from kvcache.holdings import Holdings
from kvcache.layout import KVLayout, Shard
from kvcache.pool import Pool
from kvcache.prefix_tree import PrefixTree
from kvcache.tiers.host import HostTier
from kvtransfer.memory import SharedMemory
from kvtransfer.parts import Parts
from worker.ranks import Orders, Ranks, lead
from worker.start import Voice, give_up

log = logging.getLogger(__name__)

DTYPES = {"auto": "float32", "float32": "float32"}  # by device; on the CPU weights and KV are float32


@dataclass(frozen=True, slots=True)
class Found:
    """A model that was found, how it is split, and how much memory it gets."""

    files: ModelFiles
    plan: Memory
    dtype: str
    shards: tuple[Shard, ...]  # by rank

    @property
    def layout(self) -> KVLayout:
        """Of the whole KV, over all ranks."""
        return self.files.layout(self.dtype)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each rank's pool; slabs have the same numbers in all of them."""
        return [self.plan.num_slabs * self.layout.part(shard).chunk_bytes for shard in self.shards]


@dataclass(frozen=True, slots=True)
class Body:
    """What computes, and what it computes in: an engine, what its sequences hold, and the pools of all ranks."""

    engine: Engine
    holdings: Holdings
    pool: Parts
    ranks: Ranks | None  # those besides this process, if there are any

    def close(self) -> None:
        """End the other ranks."""
        if self.ranks is not None:
            self.ranks.close()


def find(spec: WorkerSpec) -> Found:
    """Find the model and check that it fits; nothing large is read yet.

    Raises:
        ConfigError: the device, the dtype or so many ranks are not to be had here.
        ModelError: the model is not found, not supported, cannot be split like this, or does not fit (one whole request
            has to).
    """
    if spec.device not in ("auto", "cpu"):
        why = "workers compute on the CPU; the code for GPUs has not been run on one yet (docs/gpu.md)"
        raise ConfigError(f"there is no device {spec.device!r} here", why, "use --device cpu")
    if spec.dtype not in DTYPES:
        why = "on the CPU weights and KV are float32"
        raise ConfigError(f"{spec.dtype} is not available on the CPU", why, "use --dtype auto")
    if spec.max_num_seqs > spec.max_num_batched_tokens:
        raise ConfigError(
            f"a step of {spec.max_num_batched_tokens} tokens is too small for {spec.max_num_seqs} requests",
            "every running request may decode one token in it",
            f"use --max-num-batched-tokens {spec.max_num_seqs} or more, or a smaller --max-num-seqs",
        )
    torch.set_num_threads(spec.threads)
    files = ModelFiles.resolve(spec.model, spec.revision)
    shards = files.split(spec.tp, spec.pp)
    plan = files.memory(
        max_model_len=spec.max_model_len,
        kv_bytes=spec.kv_bytes,
        tp=spec.tp,
        step_tokens=spec.max_num_batched_tokens,
        step_rows=spec.max_num_seqs,
    )
    return Found(files, plan, DTYPES[spec.dtype], shards)


def make_engine(spec: WorkerSpec, found: Found, memories: Sequence[SharedMemory], voice: Voice) -> Body:
    """Load the weights, warm up, and put the engine together over `memories`, one per rank.

    Raises:
        ModelError: the checkpoint cannot be read.
        StartError: a rank could not start.
    """
    pools = [
        Pool(found.layout.part(shard), found.plan.num_slabs, memory.view)
        for shard, memory in zip(found.shards, memories, strict=True)
    ]
    holdings = Holdings(pools[0], PrefixTree() if spec.prefix_caching else None)
    ranks = Ranks(spec.worker, partial(give_up, voice)) if len(pools) > 1 else None
    try:
        if ranks is None:
            runner = Runner.load(found.files, pools[0], found.plan.max_model_len)
        else:
            runner = lead(_orders(spec, found), found.shards, memories, ranks)
        sampler = Sampler(runner.vocab_size, _grammar_tokens(found.files.path))
        voice.tell("load")
        voice.tell("warm", 0)
        runner.warm()
        scheduler = Scheduler(_limits(spec, found))
        voice.tell("warm")
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise
    host = HostTier(pools, spec.swap_bytes) if spec.swap_bytes else None
    parts = Parts(
        found.layout, [(shard, pool.memory) for shard, pool in zip(found.shards, pools, strict=True)]
    )
    return Body(Engine(runner, scheduler, holdings, sampler, host), holdings, parts, ranks)


def _orders(spec: WorkerSpec, found: Found) -> Orders:
    """Rank 0's."""
    return Orders(
        worker=spec.worker,
        place=Place(0, spec.tp, spec.pp),
        shard=found.shards[0],
        shape=found.files.shape,
        weights={name: str(path) for name, path in found.files.weights.items()},
        dtype=found.dtype,
        max_model_len=found.plan.max_model_len,
        num_slabs=found.plan.num_slabs,
        core=spec.core,
        threads=spec.threads,
        log_level=spec.log_level,
    )


def _limits(spec: WorkerSpec, found: Found) -> Limits:
    """What the engine takes on, in whatever role."""
    return Limits(
        num_slabs=found.plan.num_slabs,
        max_model_len=found.plan.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        chunked_prefill=spec.chunked_prefill,
        tpot_s=None if spec.tpot_ms is None else spec.tpot_ms / 1000,
    )


class Tuning:
    """What of an engine depends on the role: one that only reads prompts fills its steps no more than keeps it busy.

    How many tokens that are is measured, once, before the first life in that role.
    """

    def __init__(self, engine: Engine, holdings: Holdings) -> None:
        self.engine, self.holdings = engine, holdings
        self._busy: int | None = None

    def suit(self, role: str) -> None:
        """Make the engine fit for `role`. Nothing may run in it, and the pool needs room for one step."""
        limits, busy = self.engine.scheduler.limits, 0
        if role == "prefill":
            if self._busy is None:
                longest = min(limits.max_num_batched_tokens, limits.max_model_len)
                curve = saturation.measure(self.engine.runner.run, self.holdings, longest, time.monotonic)
                self._busy = saturation.shortest(curve)
            busy = self._busy
        self.engine.scheduler.limits = replace(limits, saturation_tokens=busy)


def _grammar_tokens(folder: Path) -> Any:
    """The tokenizer as structured output needs it, or None (logged) if this model's cannot serve that."""
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        return grammar.load(tokenizer, _end_ids(folder, tokenizer))
    except (GrammarError, OSError, ValueError) as error:
        log.warning("structured output is not possible with this model: %s", error)
        return None


def _end_ids(folder: Path, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Every id that ends an answer of this model, as the gateway reads them."""
    ends: list[Any] = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ends.append(json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id"))
    listed = [end if isinstance(end, list) else [end] for end in ends if end is not None]
    return {int(token) for end in listed for token in end}
