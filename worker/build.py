"""From a specification to an engine: model files, KV pool, runner, sampler. All is built once, here."""

from __future__ import annotations

import json
import logging
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from diptych.channel import Link
from diptych.config import WorkerSpec
from diptych.errors import ConfigError, GrammarError
from diptych.keys import load_worker_keys
from diptych.messages import Hello
from engine import grammar
from engine.loop import Engine
from engine.model.files import ModelFiles
from engine.model.memory import Memory
from engine.runner import Runner
from engine.sampler import Sampler
from engine.scheduler import Limits, Scheduler
from kvcache.pool import Pool
from worker.shell import Books
from worker.start import Voice

log = logging.getLogger(__name__)

DTYPES = {"auto": "float32", "float32": "float32"}  # by device; on the CPU weights and KV are float32


@dataclass(frozen=True, slots=True)
class Found:
    """A model that was found, and how much memory it gets."""

    files: ModelFiles
    plan: Memory
    dtype: str


def find(spec: WorkerSpec) -> Found:
    """Find the model and check that it fits; nothing large is read yet.

    Raises:
        ConfigError: the device or dtype is not to be had here.
        ModelError: the model is not found, not supported, or does not fit (one whole request has to).
    """
    if spec.device not in ("auto", "cpu"):
        why = "this engine computes on the CPU"
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
    plan = files.memory(max_model_len=spec.max_model_len, kv_bytes=spec.kv_bytes)
    return Found(files, plan, DTYPES[spec.dtype])


def make_engine(
    spec: WorkerSpec, found: Found, memory: memoryview | None, voice: Voice
) -> tuple[Engine, Pool]:
    """Load the weights, warm up, and put the engine together over `memory` (None: private memory).

    Raises:
        ModelError: the checkpoint cannot be read.
    """
    pool = Pool(found.files.layout(found.dtype), found.plan.num_slabs, memory)
    runner = Runner.load(found.files, pool, found.plan.max_model_len)
    sampler = Sampler(runner.vocab_size, _grammar_tokens(found.files.path))
    voice.tell("load")
    voice.tell("warm", 0)
    runner.warm()
    voice.tell("warm")
    limits = Limits(
        num_slabs=found.plan.num_slabs,
        max_model_len=found.plan.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        chunked_prefill=spec.chunked_prefill,
    )
    return Engine(runner, Scheduler(limits), pool, sampler), pool


def introduce(spec: WorkerSpec, found: Found, endpoints: dict[str, bytes]) -> Hello:
    """What the gateway is told about this life of the worker; no other has had its `incarnation`."""
    hex_digest, identity = found.files.fingerprint(found.dtype)
    return Hello(
        worker=spec.worker,
        role=spec.role,
        incarnation=uuid.uuid4().hex,
        fingerprint=hex_digest,
        identity=identity,
        host=spec.host,
        pid=os.getpid(),
        num_slabs=found.plan.num_slabs,
        chunk_bytes=found.files.layout(found.dtype).chunk_bytes,
        max_model_len=found.plan.max_model_len,
        endpoints=endpoints,
    )


def connect(spec: WorkerSpec, hello: Hello, books: Books) -> Link:
    """The link to the gateway, not yet open. Raises ConfigError if a key file is missing or not private."""
    return Link(spec.gateway, load_worker_keys(spec.keys_dir), hello, lambda: books.stats)


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
