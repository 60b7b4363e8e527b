"""Computes how many tokens of KV one instance can hold, and whether the model fits at all.

Source: the capacity table of DistServe's artefact. The formula below reproduces each of its rows (A100-80G, OPT).
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.errors import ConfigError
from planner.costs.model import ModelDims
from planner.hardware import Device
from planner.types import Parallelism

# MEMORY_UTILIZATION is the share of the device's memory that the engine may use. SPARE_SHARE, a share of the whole
# memory too, is kept free of it for activations.
MEMORY_UTILIZATION = 0.95
SPARE_SHARE = 0.01
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Whether an instance fits: tokens of KV that it can hold, and the reason if it does not fit ("" if it does)."""

    tokens: int
    why_not: str = ""

    def __bool__(self) -> bool:
        return not self.why_not


def kv_capacity_tokens(
    dims: ModelDims,
    parallelism: Parallelism,
    memory_bytes: float,
    *,
    use: float = MEMORY_UTILIZATION,
    spare: float = SPARE_SHARE,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """Tokens of KV that the fullest device of an instance holds; 0 if not even its weights fit.

    `block_tokens * floor((use * memory - spare * memory - weights) / block)`, with weights and blocks of one device
    (DistServe's artefact; distserve.md section 3.5).
    """
    room = use * memory_bytes - spare * memory_bytes - dims.weights_bytes(parallelism)
    block_bytes = dims.kv_device_token_bytes(parallelism) * block_tokens
    return max(0, block_tokens * int(room // block_bytes))


def check_memory_fit(dims: ModelDims, parallelism: Parallelism, device: Device, tokens: int = 0) -> MemoryFit:
    """Checks that the model's heads and layers divide over `parallelism`, and that memory holds its weights and the KV.

    `tokens` is how many tokens of KV are needed at least; one block is always needed. If the check fails, `why_not` is
    one line that begins with the resource: heads, layers or memory.
    """
    if dims.heads % parallelism.tp or not dims.valid(Parallelism(parallelism.tp)):
        return MemoryFit(
            0,
            f"heads: {parallelism.tp} devices cannot share {dims.heads} heads over {dims.kv_heads} of KV evenly",
        )
    if dims.layers % parallelism.pp:
        return MemoryFit(0, f"layers: {parallelism.pp} stages cannot share {dims.layers} layers evenly")
    weights, memory = dims.weights_bytes(parallelism), device.memory_bytes
    if weights >= (MEMORY_UTILIZATION - SPARE_SHARE) * memory:
        return MemoryFit(
            0, f"memory: weights take {weights / 1e9:.1f} GB of {memory / 1e9:.1f} GB on each {device.name}"
        )
    room = kv_capacity_tokens(dims, parallelism, memory)
    if room < max(tokens, BLOCK_TOKENS):
        asked = f"{max(tokens, BLOCK_TOKENS)} tokens of KV are wanted"
        return MemoryFit(room, f"memory: weights leave room for {room} tokens, and {asked}")
    return MemoryFit(room)


def smallest_split(dims: ModelDims, device: Device, devices: int, tokens: int = 0) -> Parallelism:
    """The split over the fewest devices, at most `devices`, that fits in memory; of equals, that with fewest stages.

    Raises:
        ConfigError: no split fits. The error says why the largest split does not fit and how many devices would do.
    """
    for count in range(1, devices + 1):
        for parallelism in sorted(dims.splits(count, exactly=True), key=lambda one: one.pp):
            if check_memory_fit(dims, parallelism, device, tokens):
                return parallelism
    largest = max(dims.splits(devices), key=lambda one: (one.devices, one.tp))
    need = dims.weights_bytes(Parallelism()) + tokens * dims.kv_token_bytes
    least = -(-need // ((MEMORY_UTILIZATION - SPARE_SHARE) * device.memory_bytes))
    raise ConfigError(
        f"{dims.name} does not fit on {devices} × {device.name}",
        f"{largest}: {check_memory_fit(dims, largest, device, tokens).why_not}",
        f"about {least:.0f} × {device.name} hold one instance; use more, or devices with more memory",
    )
