"""The arithmetic of memory: what a model and its KV need against what there is; and how no more is kept than that."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diptych.errors import ModelError
from engine.model.shape import Shape
from kvcache.layout import CHUNK_TOKENS, KVLayout

REQUESTS = 16  # full-length requests that a pool of automatic size has room for, memory permitting
SPARE = (
    0.9  # share of the available memory that is planned with; the rest is for activations and the processes
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
ITEM_BYTES = 4  # float32 on the CPU; only matrices may be held in less


@dataclass(frozen=True, slots=True)
class Memory:
    """A plan that fits; all figures are of a whole worker, over all its ranks."""

    max_model_len: int
    num_slabs: int
    kv_bytes: int  # num_slabs whole slabs
    weight_bytes: int
    step_bytes: int  # the most that a step needs besides: activations and logits

    @property
    def total_bytes(self) -> int:
        """What is announced: weights, pool and a step. The program itself (interpreter, libraries) comes on top."""
        return self.weight_bytes + self.kv_bytes + self.step_bytes


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


@contextlib.contextmanager
def frugal() -> Iterator[None]:
    """Inside, large blocks that are freed go back to the system, and at the end whatever is free.

    glibc otherwise learns from large blocks being freed to keep them, and after loading weights the process holds
    half as much again in pieces that nothing fits into. Afterwards it keeps blocks of up to 32 MiB, which is where it
    ends up by itself: activations come and go at every step, and need not be asked of the system each time.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # another C library, which has ways of its own
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        libc.malloc_trim(0)


def plan_memory(
    name: str,
    shape: Shape,
    layout: KVLayout,
    *,
    max_model_len: int | None,
    kv_bytes: int | None,
    available: int,
    tp: int = 1,
    matrix_bytes: int = ITEM_BYTES,
    step_tokens: int = 512,
    step_rows: int = 64,
) -> Memory:
    """Weights + pool within `SPARE` of `available`, the pool holding at least one request of `max_model_len` tokens.

    Matrices are held in `matrix_bytes` per number. The embedding is float32, and each of `tp` ranks holds it; all
    else they share. Steps have up to `step_tokens` tokens, and logits of up to `step_rows` of them.

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
    embedding = shape.vocab * shape.hidden
    weights = (shape.parameters - embedding) * matrix_bytes + tp * embedding * ITEM_BYTES
    one = layout.num_chunks(length) * layout.chunk_bytes
    room = int(available * SPARE) - weights
    pool = kv_bytes if kv_bytes is not None else min(REQUESTS * one, max(room, one))
    if pool < one or pool > room:
        longest = (
            max(0, min(pool, room) if kv_bytes is not None else room) // layout.chunk_bytes * CHUNK_TOKENS
        )
        longest = min(longest, shape.context)
        asked = kv_bytes is not None
        raise _too_large(name, layout, weights, pool, length, available, longest, asked)
    slabs = pool // layout.chunk_bytes
    step = step_memory(shape, tokens=step_tokens, rows=step_rows)
    return Memory(length, slabs, slabs * layout.chunk_bytes, weights, step)


def step_memory(shape: Shape, *, tokens: int, rows: int) -> int:
    """Bytes that are alive at the widest moment of a step of `tokens` tokens and `rows` rows of logits.

    That is in attention (queries, keys and values, and their mixture), in the MLP, or, at the end, the logits, which
    the sampler copies once.
    """
    stream = 3 * tokens * shape.hidden  # the residual, what is added to it, and the normed
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention = tokens * heads
    mlp = tokens * (3 * shape.mlp + shape.hidden)
    return ITEM_BYTES * max(stream + attention, stream + mlp, 2 * rows * shape.vocab)


def _too_large(
    name: str,
    layout: KVLayout,
    weights: int,
    pool: int,
    length: int,
    available: int,
    longest: int,
    asked: bool,
) -> ModelError:
    """Why, and the way out; `asked` if the size of the pool was set by hand."""
    one = layout.num_chunks(length) * layout.chunk_bytes
    usable = int(available * SPARE)
    why = (
        f"weights {show(weights)} + KV pool {show(pool)} = {show(weights + pool)}; "
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
        shorter = f", or use --max-model-len {longest} or less" if longest else ""
        fix = f"raise the KV pool to at least {show(one)}{shorter}"
    elif weights + one <= usable < weights + pool:
        fix = f"lower the KV pool to {show(usable - weights)} or less"
    elif asked and longest and weights + pool > usable:
        fix += f", and lower the KV pool to {show(usable - weights)} or less"
    return ModelError(f"{name} does not fit in memory", why, fix)


def show(num_bytes: float) -> str:
    """Bytes in the unit a person would use: "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
