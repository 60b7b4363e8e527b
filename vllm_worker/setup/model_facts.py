"""What vLLM made of a model and its options, read from its engine; refusals of what cannot be handed over.

This file imports nothing of vLLM: it is given vLLM's objects, which mypy cannot see, so they are `Any` here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError, ModelError
from vllm_worker.port import PortFacts

ENGINES_PAGE = "docs/engines.md has what is supported"
# vLLM's kinds of KV in which a request's blocks hold all its tokens.
WHOLE_KV = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})


def check_model(model: Any) -> None:
    """Check, before weights are read, that KV of the model in vLLM's `ModelConfig` can be handed over.

    Raises:
        ModelError: it has KV of several kinds, or none at all, or it generates no text.
    """
    for refused, what in (
        (model.runner_type != "generate", "the model generates no text"),
        (model.is_encoder_decoder, "the model has an encoder, whose KV is of another kind"),
        (model.is_hybrid, "the model has layers with a state beside layers with KV"),
        (model.is_attention_free, "the model has a state instead of KV"),
    ):
        if refused:
            raise ModelError(what, "KV of one kind is handed over between workers", ENGINES_PAGE)


def check_blocks(config: Any) -> None:
    """Check the size of blocks in vLLM's `VllmConfig`. Raises ModelError if the backend has no others."""
    if (tokens := config.cache_config.block_size) != CHUNK_TOKENS:
        raise ModelError(
            f"vLLM has blocks of {tokens} tokens here, not of {CHUNK_TOKENS}",
            "the attention backend of this model and device has no others",
            f"name another one with --vllm-args '--attention-backend NAME'; {ENGINES_PAGE}",
        )


def check_options(config: Any, ranks: int, is_chunked: bool) -> None:
    """Check in vLLM's `VllmConfig` what must hold, however it was asked for.

    Raises:
        ConfigError: the engine would be split, drafted for or scheduled in a way that is not supported.
    """
    parallel, scheduler = config.parallel_config, config.scheduler_config
    for wrong, what in (
        (parallel.pipeline_parallel_size != 1, "pipeline parallelism"),
        (parallel.data_parallel_size != 1, "data parallelism"),
        (bool(parallel.enable_expert_parallel), "expert parallelism"),
        (parallel.world_size != ranks, f"{parallel.world_size} ranks instead of {ranks}"),
        (config.speculative_config is not None, "speculative decoding"),
        (config.lora_config is not None, "LoRA adapters"),
        (bool(scheduler.async_scheduling), "asynchronous scheduling"),
        (bool(scheduler.enable_chunked_prefill) != is_chunked, "another way to prefill prompts"),
    ):
        if wrong:
            raise ConfigError(f"vLLM was asked for {what}", "workers of vLLM do not support it", ENGINES_PAGE)


def check_kind(spec: Any) -> None:
    """Check vLLM's `KVCacheSpec` of the only group. Raises ModelError if its blocks do not hold every token."""
    layers = getattr(spec, "kv_cache_specs", None) or {"": spec}
    if others := sorted({type(one).__name__ for one in layers.values()} - WHOLE_KV):
        why = f"vLLM keeps it as {' and '.join(others)}, which drops or shares blocks"
        raise ModelError("KV of this kind was never handed over", why, ENGINES_PAGE)


def check_ranks(errors: list[str]) -> None:
    """Check that every rank can copy its blocks; `errors` has a text of each. Raises ModelError."""
    for rank, error in enumerate(errors):
        if error:
            what = f"rank {rank} cannot find its KV in vLLM's memory"
            raise ModelError(what, error, f"try another --attention-backend; {ENGINES_PAGE}")


def read_worker_facts(worker: Any) -> dict[str, str]:
    """Runs in a rank: the names of the attention backends of its layers, and the device's name."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    kinds = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return {"attention": "+".join(sorted(kinds))}


def read_facts(core: Any, version: str, is_cpu: bool, arguments: str) -> PortFacts:
    """The facts of a running engine; `core` is vLLM's `EngineCore`, `arguments` the user's own that may change KV.

    Raises:
        ModelError: its KV is in several groups, or in blocks of another size.
    """
    config, kv = core.vllm_config, core.scheduler.kv_cache_config
    groups, scheduler = kv.kv_cache_groups, config.scheduler_config
    if len(groups) != 1:
        why = "KV of one kind is handed over between workers"
        raise ModelError(f"vLLM keeps the model's KV in {len(groups)} groups", why, ENGINES_PAGE)
    spec = groups[0].kv_cache_spec
    if spec.block_size != CHUNK_TOKENS:
        raise ModelError(
            f"vLLM has blocks of {spec.block_size} tokens, not of {CHUNK_TOKENS}", "", ENGINES_PAGE
        )
    check_kind(spec)
    attention = {facts["attention"] for facts in core.collective_rpc(read_worker_facts)}
    connector = core.scheduler.connector
    parts = () if connector is None else tuple(connector.layer_parts())
    model = config.model_config
    # The second one cuts prompts even where the first one is off.
    cuts = bool(scheduler.enable_chunked_prefill or scheduler.long_prefill_token_threshold)
    return PortFacts(
        version=version,
        attention_backend="+".join(sorted(attention)),
        device="cpu" if is_cpu else config.device_config.device_type,
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=spec.block_size,
        # vLLM keeps one block for padding.
        num_blocks=kv.num_blocks - 1,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        vocab_size=model.get_vocab_size(),
        ranks=config.parallel_config.world_size,
        max_num_seqs=scheduler.max_num_seqs,
        parts=parts,
        seeds_by_position=bool(config.use_v2_model_runner),
        chunks_seeded=not (is_cpu and cuts) or bool(config.use_v2_model_runner),
        identity={
            "kv dtype": str(config.cache_config.cache_dtype),
            "kv layout": str(kv.kv_cache_layout),
            "kv spec": type(spec).__name__,
            "quantization": str(model.quantization),
            "architectures": "+".join(model.architectures),
            "arguments": arguments,
        },
    )


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """What is known of an engine before it loads weights. `block_bytes` are those of one rank, 0 if unknown."""

    device: str
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    attention_backend: str
    block_bytes: int


def describe_config(config: Any, is_cpu: bool) -> ConfigFacts:
    """The facts of vLLM's `VllmConfig`; `attention_backend` is "" where vLLM chooses it later."""
    model, backend = config.model_config, config.attention_config.backend
    width = {"float32": 4}.get(str(model.dtype).removeprefix("torch."), 2)
    if str(config.cache_config.cache_dtype).startswith("fp8"):
        width = 1
    heads, layers = (
        model.get_num_kv_heads(config.parallel_config),
        model.get_num_layers(config.parallel_config),
    )
    # With multi-head latent attention a token has one compressed vector.
    vectors = 1 if model.use_mla else 2 * heads
    return ConfigFacts(
        device="cpu" if is_cpu else config.device_config.device_type,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        attention_backend="" if backend is None else str(backend.name),
        block_bytes=CHUNK_TOKENS * vectors * model.get_head_size() * width * layers,
    )
