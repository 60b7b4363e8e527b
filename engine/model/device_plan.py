"""Plans the memory of a worker on a device: weights, one largest step and the KV pool in its share of the device.

    share = total × utilization ÷ workers on the device
    pool  = share − context − weights − tables − largest step

The command line predicts all of it by arithmetic, before weights are read. A worker that has loaded its weights has
measured context, weights and step instead, and plans its pool with them. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError, ModelError, size_setting
from engine.model.architecture import ModelConfig
from engine.model.device_step import FLOAT_BYTES, device_step_bytes
from engine.model.memory_plan import (
    MemoryPlan,
    angle_table_bytes,
    format_bytes,
    plan_max_length,
    sink_table_slots,
    token_kv_bytes,
)
from kvcache.layout import DTYPE_BYTES, KvLayout

# What CUDA and cuBLAS take of a process before anything is loaded, and what captured graphs take beside their tensors.
CONTEXT_BYTES = 1 << 30
# The transfer buffer holds this many requests of full length, unless a setting says otherwise or the host is small.
AUTO_BUFFER_REQUESTS = 4
# The share of a worker's host memory that a transfer buffer of automatic size takes at most.
BUFFER_SHARE = 0.25


# The first compute capability with products in bfloat16.
BFLOAT16_CAPABILITY = (8, 0)
# The type of weights and KV for each `--dtype` on a GPU.
DEVICE_DTYPES = {"auto": "bfloat16", "float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


def device_dtype(dtype: str) -> str:
    """The type of weights and KV on a GPU for a `--dtype`. Raises ConfigError if there is none."""
    if dtype not in DEVICE_DTYPES:
        raise ConfigError(f"{dtype} is not available on a GPU", fix=f"use one of {', '.join(DEVICE_DTYPES)}")
    return DEVICE_DTYPES[dtype]


def check_device_dtype(dtype: str, gpu: str, capability: tuple[int, int]) -> None:
    """Check that a GPU with this compute capability computes in `dtype`, which is not "auto".

    Raises:
        ConfigError: it does not.
    """
    if dtype == "bfloat16" and capability < BFLOAT16_CAPABILITY:
        raise ConfigError(
            f"{gpu} does not compute in bfloat16",
            f"its compute capability is {'.'.join(map(str, capability))}, and bfloat16 needs 8.0",
            "use --dtype float16 or --dtype float32",
        )


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A worker's share of the memory of its device."""

    total_bytes: int
    # The share of it that all of its workers together may take.
    utilization: float = 0.9
    # Workers on the device.
    workers: int = 1
    context_bytes: int = CONTEXT_BYTES

    @property
    def budget_bytes(self) -> int:
        """What the worker may take."""
        return int(self.total_bytes * self.utilization) // self.workers

    def describe(self) -> str:
        """The arithmetic of the budget, for an error."""
        among = f" / {self.workers} workers" if self.workers > 1 else ""
        return f"{format_bytes(self.budget_bytes)} ({self.utilization:.0%} of {format_bytes(self.total_bytes)}{among})"


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """What a worker takes of its device beside the pool, in bytes: predicted, or measured after loading."""

    weight_bytes: int
    step_bytes: int
    # The exact KV of first tokens and the angles of all positions, if the pool is coded.
    sink_slots: int = 0
    tables: MappingProxyType[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def fixed_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.step_bytes + sum(self.tables.values())


def predict_needs(
    config: ModelConfig, layout: KvLayout, max_model_len: int, *, step_tokens: int, step_rows: int
) -> DeviceNeeds:
    """What a model with KV of `layout` takes: its matrices have the type of the layout.

    Steps have up to `step_tokens` tokens, and logits for up to `step_rows` of them.
    """
    tables, slots = dict[str, int](), 0
    if layout.codec:
        slots = sink_table_slots(config, layout, step_rows)
        tables["first tokens"] = slots * token_kv_bytes(layout)
        tables["angles"] = angle_table_bytes(layout.head_dim, max_model_len)
    step = device_step_bytes(config, layout, max_model_len, tokens=step_tokens, rows=step_rows)
    return DeviceNeeds(
        device_weight_bytes(config, layout.dtype, max_model_len), step, slots, MappingProxyType(tables)
    )


def device_weight_bytes(config: ModelConfig, dtype: str, max_model_len: int) -> int:
    """Bytes of a model's tensors on a device, as `engine.gpu.decoder.GpuDecoder` keeps them.

    Matrices have `dtype`, norms and the tables of rotary positions are float32. A tied output matrix is kept once.
    """
    again = config.vocab * config.hidden if config.tied else 0
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    biases = (queries + 2 * keys) * config.qkv_bias
    biases += config.hidden * config.o_bias + (2 * config.mlp + config.hidden) * config.mlp_bias
    norms = config.layers * (2 * config.hidden + 2 * config.head_dim * config.qk_norm) + config.hidden
    rotary = max_model_len * config.head_dim
    matrices = config.parameters - again + config.layers * biases
    return matrices * DTYPE_BYTES[dtype] + (norms + rotary) * FLOAT_BYTES


def plan_device_memory(
    name: str,
    config: ModelConfig,
    layout: KvLayout,
    share: DeviceShare,
    needs: DeviceNeeds,
    *,
    max_model_len: int | None,
    kv_bytes: int | None,
    max_requests: int | None = None,
) -> MemoryPlan:
    """The pool in a worker's share of its device: `kv_bytes` if that is set, else all that is left.

    It holds at most `max_requests` requests of full length, if that is given.

    Raises:
        ModelError: `max_model_len` exceeds the model's context or is not positive, or it does not fit: with the sum,
            and the largest context and pool that do.
    """
    length = plan_max_length(name, config, max_model_len)
    one = layout.num_chunks(length) * layout.chunk_bytes
    room = share.budget_bytes - share.context_bytes - needs.fixed_bytes
    largest = room if max_requests is None else min(room, max_requests * one)
    pool = kv_bytes if kv_bytes is not None else max(largest, one)
    if pool < one or pool > room:
        raise _does_not_fit(name, config, layout, share, needs, pool, length, kv_bytes is not None)
    slabs = pool // layout.chunk_bytes
    return MemoryPlan(
        max_model_len=length,
        num_slabs=slabs,
        kv_bytes=slabs * layout.chunk_bytes,
        weight_bytes=needs.weight_bytes,
        step_bytes=needs.step_bytes,
        sink_slots=needs.sink_slots,
        sink_bytes=needs.tables.get("first tokens", 0),
        angle_bytes=needs.tables.get("angles", 0),
        max_kv_bytes=room,
    )


def _does_not_fit(
    name: str,
    config: ModelConfig,
    layout: KvLayout,
    share: DeviceShare,
    needs: DeviceNeeds,
    pool: int,
    length: int,
    asked: bool,
) -> ModelError:
    """The error with the sum and what would fit; `asked` says that the user set the size of the pool."""
    room = share.budget_bytes - share.context_bytes - needs.fixed_bytes
    one = layout.num_chunks(length) * layout.chunk_bytes
    most = max(0, min(pool, room) if asked else room)
    longest = min(config.context, most // layout.chunk_bytes * CHUNK_TOKENS)
    parts = {"context": share.context_bytes, "weights": needs.weight_bytes, **needs.tables}
    parts |= {"a step": needs.step_bytes, "KV pool": pool}
    shown = " + ".join(f"{title} {format_bytes(size)}" for title, size in parts.items() if size)
    why = f"{shown} = {format_bytes(sum(parts.values()))}; a worker may take {share.describe()}\n"
    why += f"a request of {length} tokens takes {format_bytes(one)} of KV; the largest context that fits is {longest}"
    ways = []
    if asked and one <= room:
        pool_fits = f"{size_setting(one)} or more" if pool < one else f"{room >> 20}MiB or less"
        ways.append(f"use --kv-cache-memory-bytes {pool_fits}")
    if longest and longest < length:
        ways.append(f"use --max-model-len {longest} or less")
    if asked and not ways:
        ways.append("leave out --kv-cache-memory-bytes")
    if not longest:
        ways.append("use a smaller model, a smaller --max-num-batched-tokens, or a larger GPU")
    if share.workers > 1:
        ways.append("use fewer workers per GPU")
    return ModelError(f"{name} does not fit on the device", why, ", or ".join(ways))


def plan_transfer_buffer(
    name: str, layout: KvLayout, max_model_len: int, *, asked: int | None, host_bytes: int
) -> int:
    """Bytes of the host memory through which a worker's KV passes: whole slabs, room for one request at least.

    Args:
        name: of the model.
        layout: of the device's pool.
        max_model_len: most tokens of a request.
        asked: the size that is set; None: room for `AUTO_BUFFER_REQUESTS` requests, or a quarter of the host's memory.
        host_bytes: the worker's share of the host's memory, less what else it holds there.

    Raises:
        ModelError: it is too small for one request, or larger than the host's memory.
    """
    chunks = layout.num_chunks(max_model_len)
    one = chunks * layout.chunk_bytes
    size = asked
    if size is None:
        size = max(one, min(AUTO_BUFFER_REQUESTS * one, int(host_bytes * BUFFER_SHARE)))
    request = (
        f"a request of {max_model_len} tokens: {chunks} chunks x {format_bytes(layout.chunk_bytes)}"
        f" = {format_bytes(one)}"
    )
    longest = max(0, min(size, host_bytes)) // layout.chunk_bytes * CHUNK_TOKENS
    shorter = f"use --max-model-len {longest} or less" if longest else "use a smaller model"
    if size < one:
        raise ModelError(
            f"a transfer buffer of {format_bytes(size)} is too small for one request of {name}",
            request,
            f"use --transfer-buffer-bytes {size_setting(one)} or more, or {shorter}",
        )
    if size > host_bytes:
        fix = f"use --transfer-buffer-bytes {host_bytes >> 20}MiB or less" if one <= host_bytes else shorter
        raise ModelError(
            f"a transfer buffer of {format_bytes(size)} does not fit in host memory",
            f"{format_bytes(max(0, host_bytes))} are there for it; {request}",
            fix,
        )
    return size // layout.chunk_bytes * layout.chunk_bytes
