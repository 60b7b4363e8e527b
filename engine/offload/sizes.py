"""What a block needs of memory and disk, in bytes, and what it moves: predicted from the policy, before anything runs.

Everything is counted in whole blocks of the disk and whole chunks of KV, as it is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError, show_bytes, size_setting
from engine.offload.policy import BlockPolicy

# The unit of reading and writing past the page cache, in bytes.
DISK_BLOCK = 4096
# Rows of logits that are computed at once.
LOGIT_ROWS = 64
FLOAT_BYTES = 4


def round_up(num_bytes: int) -> int:
    """The whole blocks of the disk that `num_bytes` take, in bytes."""
    return -(-num_bytes // DISK_BLOCK) * DISK_BLOCK


@dataclass(frozen=True, slots=True)
class BlockModel:
    """The sizes of a model, in bytes."""

    # Of each layer's weights.
    layer_bytes: Sequence[int]
    # Of the weights outside the layers, which always stay in memory.
    end_bytes: int
    # Of one layer's KV of 64 tokens, in whole disk blocks.
    chunk_bytes: int
    # Of a token's activations.
    hidden_bytes: int
    # Of the activations of a unit with `policy.step_tokens` tokens, and of its logits.
    step_bytes: int
    # Of tables: angles, and the exact KV of first tokens.
    table_bytes: int

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.layer_bytes)


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """Bytes that a block needs, by what they are for."""

    memory: dict[str, int]
    disk: dict[str, int]

    @property
    def memory_bytes(self) -> int:
        """All bytes of memory."""
        return sum(self.memory.values())

    @property
    def disk_bytes(self) -> int:
        """All bytes on disk."""
        return sum(self.disk.values())


def batch_chunks(policy: BlockPolicy) -> int:
    """Chunks of KV for which a batch has room, in each layer."""
    return policy.rows * -(-policy.sequence_tokens // CHUNK_TOKENS)


def predict_needs(model: BlockModel, policy: BlockPolicy) -> BlockNeeds:
    """The memory and the disk that a block needs. Weights on disk count as far as they are read from there."""
    layers, windows = model.layers, 2 if policy.overlap else 1
    resident = policy.resident_layers(layers)
    streamed = [model.layer_bytes[index] for index in range(layers) if index not in resident]
    kv_room = batch_chunks(policy) * model.chunk_bytes
    kv_here = len(policy.kv_pairs_in_memory(layers))
    kv_there = layers * policy.batches - kv_here
    hidden_room = round_up(policy.rows * policy.prompt_tokens * model.hidden_bytes)
    hidden_here = len(policy.hidden_batches_in_memory())
    hidden_there = policy.batches - hidden_here
    return BlockNeeds(
        {
            "weights": sum(model.layer_bytes[index] for index in resident) + model.end_bytes,
            "weights being read": windows * max(streamed, default=0),
            "KV": kv_here * kv_room,
            "KV being read": windows * kv_room if kv_there else 0,
            "activations": hidden_here * hidden_room,
            "activations being read": windows * hidden_room if hidden_there else 0,
            "steps": model.step_bytes,
            "tables": model.table_bytes,
        },
        {
            "weights": sum(streamed),
            "KV": kv_there * kv_room,
            "activations": hidden_there * hidden_room,
        },
    )


def check_caps(
    model: BlockModel, policy: BlockPolicy, memory_bytes: int | None, disk_bytes: int | None
) -> BlockNeeds:
    """What a block needs, if it keeps within the caps.

    Raises:
        ConfigError: it does not; the error names what the policy needs, and the least that the model needs.
    """
    needs = predict_needs(model, policy)
    caps = (("memory", needs.memory_bytes, memory_bytes), ("disk", needs.disk_bytes, disk_bytes))
    for name, needed, cap in caps:
        if cap is not None and needed > cap:
            parts = needs.memory if name == "memory" else needs.disk
            listed = ", ".join(f"{what} {show_bytes(size)}" for what, size in parts.items() if size)
            least_text = f"{show_bytes(least_needs(model, policy).memory_bytes)} of memory"
            if name == "disk":
                least_text = f"{show_bytes(least_disk_bytes(model, policy, memory_bytes))} of disk"
            raise ConfigError(
                f"bulk work does not fit: it needs {show_bytes(needed)} of {name}, and may take {show_bytes(cap)}",
                f"{listed}\nthe least for this model, one sequence at a time, is {least_text}",
                f"use --bulk-{name}-bytes {size_setting(needed)}, or another --bulk-policy",
            )
    return needs


# Shapes that `fit_policy` tries: batches of so many sequences, and blocks of so many batches.
FIT_ROWS, FIT_BATCHES = (32, 16, 8, 4, 2, 1), (16, 12, 8, 6, 4, 3, 2, 1)
# Shares are fitted in steps of this size.
FIT_STEPS = 20


def fit_policy(
    measure: Callable[[BlockPolicy], BlockModel],
    base_policy: BlockPolicy,
    memory_bytes: int,
    disk_bytes: int,
    max_sequence_tokens: int,
) -> BlockPolicy:
    """The largest block that fits, with as much of it in memory as fits: activations, then weights, then KV.

    Lengths, kinds and overlap are those of `base_policy`. A batch has room for a sequence of `max_sequence_tokens`.

    Raises:
        ConfigError: not even the smallest block fits; the error names the least.
    """
    shapes = [
        (rows, batches)
        for rows in FIT_ROWS
        for batches in FIT_BATCHES
        if rows * base_policy.sequence_tokens >= max_sequence_tokens
    ] or [(-(-max_sequence_tokens // base_policy.sequence_tokens), 1)]
    on_disk = replace(base_policy, weights_in_memory=0.0, kv_in_memory=0.0, hidden_in_memory=0.0)
    for rows, batches in sorted(shapes, key=lambda one: (-one[0] * one[1], -one[0])):
        policy = replace(on_disk, rows=rows, batches=batches)
        model = measure(policy)

        for filled in _fill_memory(model, policy, memory_bytes):
            needs = predict_needs(model, filled)
            if needs.memory_bytes <= memory_bytes and needs.disk_bytes <= disk_bytes:
                return filled
    smallest = replace(on_disk, rows=shapes[-1][0], batches=shapes[-1][1], overlap=False)
    model = measure(smallest)
    every = _fill_memory(model, smallest, memory_bytes)
    least = min(every, key=lambda one: predict_needs(model, one).disk_bytes)
    check_caps(model, least, memory_bytes, disk_bytes)
    return least


def trim_policy(
    measure: Callable[[BlockPolicy], BlockModel],
    planned: BlockPolicy,
    memory_bytes: int,
    disk_bytes: int,
    max_sequence_tokens: int,
) -> BlockPolicy:
    """`planned` with as little less in memory as makes it fit: KV first, then weights, then activations.

    If it does not fit with everything on disk, its batches are halved, and there are twice as many of them. If that
    does not help, it is the largest block that fits (`fit_policy`).

    Raises:
        ConfigError: not even the smallest block fits; the error names the least.
    """
    rows, batches = planned.rows, planned.batches
    while rows and rows * planned.sequence_tokens >= max_sequence_tokens:
        policy = replace(planned, rows=rows, batches=batches)
        model = measure(policy)
        for name in reversed(MEMORY_ORDER):
            share: float = getattr(policy, name)
            for step in range(FIT_STEPS, -1, -1):
                policy = replace(policy, **{name: share * step / FIT_STEPS})  # type: ignore[arg-type]
                needs = predict_needs(model, policy)
                if needs.memory_bytes <= memory_bytes and needs.disk_bytes <= disk_bytes:
                    return policy
        rows, batches = rows // 2, batches * 2
    return fit_policy(measure, planned, memory_bytes, disk_bytes, max_sequence_tokens)


# What goes to memory first.
MEMORY_ORDER = ("hidden_in_memory", "weights_in_memory", "kv_in_memory")


def _fill_memory(model: BlockModel, policy: BlockPolicy, memory_bytes: int | None) -> list[BlockPolicy]:
    """`policy` with as much in memory as fits there, in the usual order and in the opposite one; None: all fits."""
    return [_raise_shares(model, policy, memory_bytes, order) for order in (MEMORY_ORDER, MEMORY_ORDER[::-1])]


def _raise_shares(
    model: BlockModel, policy: BlockPolicy, memory_bytes: int | None, order: Sequence[str]
) -> BlockPolicy:
    """Raise the shares in memory one after the other, as far as the policy fits."""
    for name in order:
        for step in range(FIT_STEPS, 0, -1):
            filled = replace(policy, **{name: step / FIT_STEPS})  # type: ignore[arg-type]
            if memory_bytes is None or predict_needs(model, filled).memory_bytes <= memory_bytes:
                policy = filled
                break
    return policy


def least_needs(model: BlockModel, policy: BlockPolicy) -> BlockNeeds:
    """The needs of the smallest block of the same kinds, one sequence with everything on disk: the least memory."""
    return predict_needs(model, smallest_policy(policy))


def least_disk_bytes(model: BlockModel, policy: BlockPolicy, memory_bytes: int | None) -> int:
    """The disk of the smallest block of the same kinds, with as much in memory as `memory_bytes` hold; None: all."""
    every = _fill_memory(model, smallest_policy(policy), memory_bytes)
    return min(predict_needs(model, one).disk_bytes for one in every)


def smallest_policy(policy: BlockPolicy) -> BlockPolicy:
    """The policy of the same kinds and lengths that takes the least memory."""
    return BlockPolicy(
        rows=1,
        batches=1,
        prompt_tokens=policy.prompt_tokens,
        output_tokens=policy.output_tokens,
        weights_in_memory=0.0,
        kv_in_memory=0.0,
        hidden_in_memory=0.0,
        weight_kind=policy.weight_kind,
        kv_codec=policy.kv_codec,
        overlap=False,
        step_tokens=policy.step_tokens,
    )
