"""How many tokens of KV an instance has room for, and whether it fits at all.

Source: the capacity table of DistServe's artefact, which this formula reproduces row by row (A100-80G, OPT).
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.errors import ConfigError
from planner.hardware import Device
from planner.shape import Shape
from planner.terms import Split

USE = 0.95  # of the device's memory is the engine's
SPARE = 0.01  # of it for activations
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether an instance fits, room for KV in tokens, and if not, in words why."""

    tokens: int
    why_not: str = ""

    def __bool__(self) -> bool:
        return not self.why_not


def kv_tokens(
    shape: Shape,
    split: Split,
    memory_bytes: float,
    *,
    use: float = USE,
    spare: float = SPARE,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """Tokens of KV that the fullest device of an instance holds; 0 if not even its weights fit.

    `block_tokens * floor((use * memory - spare * memory - weights) / block)`, with weights and blocks of one device
    (DistServe's artefact; distserve.md section 3.5).
    """
    room = use * memory_bytes - spare * memory_bytes - shape.weights_bytes(split)
    block_bytes = shape.kv_device_token_bytes(split) * block_tokens
    return max(0, block_tokens * int(room // block_bytes))


def fits(shape: Shape, split: Split, device: Device, tokens: int = 0) -> Fit:
    """Whether an instance can run with room for `tokens` of KV (at least one block): weights and KV, with the reason.

    The reason is one line that names the resource: heads, layers, weights or KV.
    """
    if shape.heads % split.tp or not shape.valid(Split(split.tp)):
        return Fit(
            0,
            f"heads: {split.tp} devices cannot share {shape.heads} heads over {shape.kv_heads} of KV evenly",
        )
    if shape.layers % split.pp:
        return Fit(0, f"layers: {split.pp} stages cannot share {shape.layers} layers evenly")
    weights, memory = shape.weights_bytes(split), device.memory_bytes
    if weights >= (USE - SPARE) * memory:
        return Fit(
            0, f"memory: weights take {weights / 1e9:.1f} GB of {memory / 1e9:.1f} GB on each {device.name}"
        )
    room = kv_tokens(shape, split, memory)
    if room < max(tokens, BLOCK_TOKENS):
        asked = f"{max(tokens, BLOCK_TOKENS)} tokens of KV are wanted"
        return Fit(room, f"memory: weights leave room for {room} tokens, and {asked}")
    return Fit(room)


def smallest(shape: Shape, device: Device, devices: int, tokens: int = 0) -> Split:
    """The feasible split over the fewest of at most `devices` devices (fewest stages first).

    Raises:
        ConfigError: none is; it says why the largest of them does not fit, and what would.
    """
    for count in range(1, devices + 1):
        for split in sorted(shape.splits(count, exactly=True), key=lambda one: one.pp):
            if fits(shape, split, device, tokens):
                return split
    largest = max(shape.splits(devices), key=lambda one: (one.devices, one.tp))
    need = shape.weights_bytes(Split()) + tokens * shape.kv_token_bytes
    least = -(-need // ((USE - SPARE) * device.memory_bytes))
    raise ConfigError(
        f"{shape.name} does not fit on {devices} × {device.name}",
        f"{largest}: {fits(shape, largest, device, tokens).why_not}",
        f"about {least:.0f} × {device.name} hold one instance; use more, or devices with more memory",
    )
