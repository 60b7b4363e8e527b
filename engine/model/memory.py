"""The arithmetic of memory: what a model and its KV need against what there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.errors import ModelError
from engine.model.shape import Shape
from kvcache.layout import CHUNK_TOKENS, KVLayout

REQUESTS = 16  # full-length requests that a pool of automatic size has room for, memory permitting
SPARE = (
    0.9  # share of the available memory that is planned with; the rest is for activations and the processes
)
WEIGHT_BYTES = 4  # float32 on the CPU, whatever the checkpoint holds


@dataclass(frozen=True, slots=True)
class Memory:
    """A plan that fits."""

    max_model_len: int
    num_slabs: int
    kv_bytes: int  # num_slabs whole slabs
    weight_bytes: int


def available_memory() -> int:
    """Bytes that can still be taken: the system's, or what is left to this control group if that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    system = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return system
    return system if limit == "max" else min(system, int(limit) - int(used))


def plan_memory(
    name: str,
    shape: Shape,
    layout: KVLayout,
    *,
    max_model_len: int | None,
    kv_bytes: int | None,
    available: int,
) -> Memory:
    """Weights + pool within `SPARE` of `available`, the pool holding at least one request of `max_model_len` tokens.

    Raises:
        ModelError: `max_model_len` exceeds the model's context or is not positive, or it does not fit.
    """
    length = shape.context if max_model_len is None else max_model_len
    if not 1 <= length <= shape.context:
        raise ModelError(
            f"a maximum length of {length} tokens does not suit {name}",
            f"the model was made for 1 to {shape.context} tokens",
            f"use --max-model-len {shape.context} or less",
        )
    weights, one = shape.parameters * WEIGHT_BYTES, layout.num_chunks(length) * layout.chunk_bytes
    room = int(available * SPARE) - weights
    pool = kv_bytes if kv_bytes is not None else min(REQUESTS * one, max(room, one))
    if pool < one or pool > room:
        longest = (
            max(0, min(pool, room) if kv_bytes is not None else room) // layout.chunk_bytes * CHUNK_TOKENS
        )
        raise _too_large(name, layout, weights, pool, length, available, min(longest, shape.context))
    slabs = pool // layout.chunk_bytes
    return Memory(length, slabs, slabs * layout.chunk_bytes, weights)


def _too_large(
    name: str, layout: KVLayout, weights: int, pool: int, length: int, available: int, longest: int
) -> ModelError:
    one = layout.num_chunks(length) * layout.chunk_bytes
    usable = int(available * SPARE)
    why = (
        f"weights {show(weights)} (float32) + KV pool {show(pool)} = {show(weights + pool)}; "
        f"usable {show(usable)} ({SPARE:.0%} of {show(available)} available)\n"
        f"one request of {length} tokens: {layout.num_chunks(length)} chunks x {show(layout.chunk_bytes)}"
        f" = {show(one)} of KV\n"
        f"the largest context that fits is {longest} tokens"
    )
    fix = (
        f"use --max-model-len {longest} or less"
        if longest
        else "use a smaller model, or a machine with more memory"
    )
    if weights + one <= usable and pool < one:
        fix = f"raise the KV pool to at least {show(one)}, or use --max-model-len {longest} or less"
    elif weights + one <= usable < weights + pool:
        fix = f"lower the KV pool to {show(usable - weights)} or less"
    return ModelError(f"{name} does not fit in memory", why, fix)


def show(num_bytes: float) -> str:
    """Bytes in the unit a person would use: "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
