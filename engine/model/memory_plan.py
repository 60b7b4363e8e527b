"""Plans the memory of a worker: what the model and its KV need, what the machine has, and whether it fits."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diptych.cgroups import available_memory_bytes
from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ModelError
from engine.eviction.memory import eviction_bytes
from engine.model.architecture import ModelConfig
from engine.step_work import MAX_FUSED_ROWS
from kvcache.layout import KvLayout

# A pool of automatic size has room for this many full-length requests, memory permitting.
AUTO_POOL_REQUESTS = 16
# Share of the available memory that is planned with; the rest is for activations and the processes.
USABLE_SHARE = 0.9
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>
# Most bytes of the exact KV of first tokens, beside a pool with a codec, unless the sequences of a step need more.
MAX_SINK_BYTES = 64 << 20
# Bytes of a float32. On the CPU only matrices may use fewer bytes per number.
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A memory plan that fits. All values are for a whole worker, over all its ranks."""

    max_model_len: int
    num_slabs: int
    # Size of `num_slabs` slabs in bytes.
    kv_bytes: int
    weight_bytes: int
    # Most bytes that a step needs in addition, for activations and logits.
    step_bytes: int
    # Slots of the table of first tokens (`engine.cpu.coded.sink_table`), and its most bytes; 0 without a codec.
    sink_slots: int = 0
    sink_bytes: int = 0
    # The ranks' tables of angles (`engine.cpu.coded.compiled_attention.build_angles`); 0 without a codec.
    angle_bytes: int = 0
    # The largest pool that would fit, in bytes.
    max_kv_bytes: int = 0
    # Set aside for sequences that evict (`engine.eviction.memory`).
    eviction_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """What has to fit in memory beside the pool."""
        return self.weight_bytes + self.sink_bytes + self.angle_bytes + self.eviction_bytes

    @property
    def total_bytes(self) -> int:
        """The bytes that the worker announces: all of the above. The program itself comes on top."""
        return self.fixed_bytes + self.kv_bytes + self.step_bytes


def available_memory() -> int:
    """Bytes that this process can still take: the system's free memory, or less if a control group limits it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    system = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    left = available_memory_bytes()
    return system if left is None else min(system, left)


@contextlib.contextmanager
def return_freed_memory() -> Iterator[None]:
    """Return freed memory to the system: within this context every large block at once, and at its end all free memory.

    Without it glibc adapts to large blocks being freed by keeping them, and after loading weights the process would
    hold half as much again in unusable pieces. Afterwards glibc keeps blocks of up to 32 MiB, its own final state:
    activations are allocated at every step, and need not be requested from the system each time.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        # Without mallopt the C library is not glibc, and there is nothing to set.
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        libc.malloc_trim(0)


def return_large_blocks() -> None:
    """Return every block of 128 KiB or more to the system as soon as it is freed, from now on.

    For processes whose memory is bounded closely. Activations are then requested from the system each time, which takes
    a few percent of the time of a step.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 10)
        libc.malloc_trim(0)


def plan_memory(
    name: str,
    config: ModelConfig,
    layout: KvLayout,
    *,
    max_model_len: int | None,
    kv_bytes: int | None,
    available: int,
    tp: int = 1,
    ranks: int | None = None,
    matrix_bytes: int = FLOAT_BYTES,
    step_tokens: int = 512,
    step_rows: int = 64,
    coded: bool | None = None,
    evicting_seqs: int = 0,
) -> MemoryPlan:
    """Plan weights and pool within `USABLE_SHARE` of `available` bytes; the pool must hold one request of full length.

    `kv_bytes` is the pool's size (None: automatic). Matrices take `matrix_bytes` per number. The embedding is float32
    and each of `tp` ranks holds it; everything else is split over the ranks, of which there are `ranks` (None: `tp`).
    Steps have up to `step_tokens` tokens, and logits for up to `step_rows` of them. Beside a pool with a codec the
    exact KV of first tokens takes memory, too, and on every rank the angles of all positions; `coded` says whether
    there is one, if `layout` is only one of several. Memory is set aside for `evicting_seqs` sequences that evict.

    Raises:
        ModelError: `max_model_len` exceeds the model's context or is not positive, or the plan does not fit.
    """
    length = plan_max_length(name, config, max_model_len)
    embedding = config.vocab * config.hidden
    weights = (config.parameters - embedding) * matrix_bytes + tp * embedding * FLOAT_BYTES
    one = layout.num_chunks(length) * layout.chunk_bytes
    keeps_sinks = bool(layout.codec) if coded is None else coded
    sink_slots = sink_table_slots(config, layout, step_rows) if keeps_sinks else 0
    sinks = sink_slots * token_kv_bytes(layout)
    angles = (ranks or tp) * angle_table_bytes(layout.head_dim, length) if keeps_sinks else 0
    evictions = eviction_bytes(layout, config.heads, length, evicting_seqs)
    room = int(available * USABLE_SHARE) - weights - sinks - angles - evictions
    pool = kv_bytes if kv_bytes is not None else min(AUTO_POOL_REQUESTS * one, max(room, one))
    if pool < one or pool > room:
        longest = (
            max(0, min(pool, room) if kv_bytes is not None else room) // layout.chunk_bytes * CHUNK_TOKENS
        )
        longest = min(longest, config.context)
        asked = kv_bytes is not None
        beside = {"first tokens": sinks, "angles": angles, "evictions": evictions}
        raise _does_not_fit(name, layout, weights, beside, pool, length, available, longest, asked)
    slabs = pool // layout.chunk_bytes
    step = step_memory_bytes(config, tokens=step_tokens, rows=step_rows)
    step += fused_step_bytes(config, tokens=step_tokens) if (ranks or tp) == 1 else 0
    kv = slabs * layout.chunk_bytes
    return MemoryPlan(length, slabs, kv, weights, step, sink_slots, sinks, angles, room, evictions)


def token_kv_bytes(layout: KvLayout) -> int:
    """Bytes of the exact KV of one token, as float32."""
    return FLOAT_BYTES * layout.layers * 2 * layout.kv_heads * layout.head_dim


def angle_table_bytes(head_dim: int, max_model_len: int) -> int:
    """Bytes of the angles that a rank with a codec needs: a cosine and a sine of each rotary pair and position."""
    return FLOAT_BYTES * head_dim * CHUNK_TOKENS * -(-max_model_len // CHUNK_TOKENS)


def sink_table_slots(config: ModelConfig, layout: KvLayout, max_num_seqs: int) -> int:
    """First tokens whose exact KV a worker keeps beside a pool with a codec.

    There is room for `MAX_SINK_BYTES` over all ranks, and at least for one token of every sequence of a step.
    """
    return min(config.vocab, max(max_num_seqs, MAX_SINK_BYTES // token_kv_bytes(layout)))


def plan_max_length(name: str, config: ModelConfig, max_model_len: int | None) -> int:
    """The longest prompt plus answer, in tokens: `max_model_len`, or the model's context if that is None.

    Raises:
        ModelError: `max_model_len` exceeds the model's context or is not positive.
    """
    length = config.context if max_model_len is None else max_model_len
    if not 1 <= length <= config.context:
        raise ModelError(
            f"a maximum length of {length} tokens does not suit {name}",
            f"the model was made for 1 to {config.context} tokens",
            f"use --max-model-len {config.context} or less",
        )
    return length


def step_memory_bytes(config: ModelConfig, *, tokens: int, rows: int) -> int:
    """The peak memory, in bytes, of a step with `tokens` tokens and `rows` rows of logits.

    The peak is in attention (queries, keys, values and their mixture), in the MLP, or at the end: the logits, which the
    sampler copies once.
    """
    # The residual, the change that is added to it, and the normalised sum.
    stream = 3 * tokens * config.hidden
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    attention = tokens * heads
    mlp = tokens * (3 * config.mlp + config.hidden)
    return FLOAT_BYTES * max(stream + attention, stream + mlp, 2 * rows * config.vocab)


def fused_step_bytes(config: ModelConfig, *, tokens: int) -> int:
    """What a worker of one rank keeps from step to step to compute steps with few rows (`engine.cpu.fused_step`)."""
    stream, heads = 3 * config.hidden, (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    return FLOAT_BYTES * min(tokens, MAX_FUSED_ROWS) * (stream + heads + 3 * config.mlp + 2 * config.heads)


def _does_not_fit(
    name: str,
    layout: KvLayout,
    weights: int,
    tables: dict[str, int],
    pool: int,
    length: int,
    available: int,
    longest: int,
    asked: bool,
) -> ModelError:
    """The error with the calculation and a fix; `tables` are what is beside weights and pool, and `asked` says that
    the user set the size of the pool.
    """
    one = layout.num_chunks(length) * layout.chunk_bytes
    usable = int(available * USABLE_SHARE)
    beside = "".join(f" + {title} {format_bytes(size)}" for title, size in tables.items() if size)
    fixed = weights + sum(tables.values())
    why = (
        f"weights {format_bytes(weights)}{beside} + KV pool {format_bytes(pool)} = {format_bytes(fixed + pool)}; "
        f"usable {format_bytes(usable)} ({USABLE_SHARE:.0%} of {format_bytes(available)} available)\n"
        f"one request of {length} tokens: {layout.num_chunks(length)} chunks x {format_bytes(layout.chunk_bytes)}"
        f" = {format_bytes(one)} of KV\n"
        f"the largest context that fits is {longest} tokens"
    )
    fix = (
        f"use --max-model-len {longest} or less"
        if longest
        else "use a smaller model, or a machine with more memory"
    )
    if fixed + one <= usable and pool < one:
        shorter = f", or use --max-model-len {longest} or less" if longest else ""
        fix = f"raise the KV pool to at least {format_bytes(one)}{shorter}"
    elif fixed + one <= usable < fixed + pool:
        fix = f"lower the KV pool to {format_bytes(usable - fixed)} or less"
    elif asked and longest and fixed + pool > usable:
        fix += f", and lower the KV pool to {format_bytes(usable - fixed)} or less"
    return ModelError(f"{name} does not fit in memory", why, fix)


def format_bytes(num_bytes: float) -> str:
    """Bytes in a readable unit, for example "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
