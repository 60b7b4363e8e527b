"""The policy of a block: how many sequences are computed together, and what of them lies in memory or on disk.

A block is `batches` batches of `rows` sequences each. It is computed layer by layer, batch after batch, so that the
weights of a layer are read once for all batches of a step (FlexGen, Sheng et al. 2023, section 4.2). Where weights, KV
and activations lie changes the time and never the tokens; `weight_kind` and `kv_codec` change the tokens, and are one
for the whole block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from diptych.errors import ConfigError

WEIGHT_KINDS = ("exact", "int4")
# Tokens that one unit of a block computes, at most.
STEP_TOKENS = 512
# The lengths for which a sequence of a block has room, unless the policy says otherwise.
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
SHAPE_FIELDS = ("rows", "batches")
SHARE_FIELDS = ("weights_in_memory", "kv_in_memory", "hidden_in_memory")


@dataclass(frozen=True, slots=True)
class BlockPolicy:
    """How a block is computed. Shares are between 0 and 1, and what is not in memory is on disk."""

    # Sequences of a batch, and batches of the block.
    rows: int
    batches: int
    # Tokens of a prompt and of an answer for which each sequence has room. A batch's room is one for all its sequences:
    # a longer sequence takes the room of several.
    prompt_tokens: int
    output_tokens: int
    # Share of the layers whose weights stay in memory. The others are read from disk once in each step.
    weights_in_memory: float = 1.0
    # Share of the (layer, batch) pairs whose KV stays in memory.
    kv_in_memory: float = 1.0
    # Share of the batches whose activations stay in memory between two layers.
    hidden_in_memory: float = 1.0
    # "exact": as in the checkpoint; "int4": 4 bits in groups of 64, in memory and on disk.
    weight_kind: str = "exact"
    # The codec of KV, in memory and on disk; "" is none, which is float32.
    kv_codec: str = ""
    # Whether the next layer's weights, and the next batch's KV and activations, are read while this one is computed.
    overlap: bool = True
    # The most tokens of a unit.
    step_tokens: int = STEP_TOKENS

    def __post_init__(self) -> None:
        """Raises ConfigError: a number is out of its range."""
        for name in ("rows", "batches", "prompt_tokens", "output_tokens", "step_tokens"):
            if getattr(self, name) < 1:
                raise _bad_policy(f"{name} must be at least 1 (got {getattr(self, name)})")
        for name in SHARE_FIELDS:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise _bad_policy(f"{name} must be between 0 and 1 (got {getattr(self, name)})")
        if self.weight_kind not in WEIGHT_KINDS:
            raise _bad_policy(f"weight_kind must be {' or '.join(WEIGHT_KINDS)} (got {self.weight_kind})")

    @property
    def sequences(self) -> int:
        """All sequences of the block."""
        return self.rows * self.batches

    @property
    def sequence_tokens(self) -> int:
        """Tokens of prompt and answer for which each sequence has room."""
        return self.prompt_tokens + self.output_tokens

    def resident_layers(self, layers: int) -> frozenset[int]:
        """The layers whose weights stay in memory, spread evenly over the model's `layers`."""
        return frozenset(_spread_share(self.weights_in_memory, layers))

    def kv_pairs_in_memory(self, layers: int) -> frozenset[tuple[int, int]]:
        """The (layer, batch) pairs whose KV stays in memory, spread evenly over the order of computation."""
        pairs = _spread_share(self.kv_in_memory, layers * self.batches)
        return frozenset(divmod(index, self.batches) for index in pairs)

    def hidden_batches_in_memory(self) -> frozenset[int]:
        """The batches whose activations stay in memory."""
        return frozenset(_spread_share(self.hidden_in_memory, self.batches))


def _spread_share(share: float, count: int) -> Iterator[int]:
    """The numbers below `count` that make up a share of them, spread evenly: round(share * count) of them."""
    chosen = round(share * count)
    return (index for index in range(count) if (index + 1) * chosen // count > index * chosen // count)


def default_policy(max_model_len: int) -> BlockPolicy:
    """The smallest block with the usual lengths, of a model whose sequences have at most `max_model_len` tokens."""
    return BlockPolicy(1, 1, min(PROMPT_TOKENS, max_model_len), min(OUTPUT_TOKENS, max_model_len))


def names_shape(text: str) -> bool:
    """Whether a policy's text says how many sequences there are, so that it is taken as it is.

    Raises:
        ConfigError: it does not, and yet says what lies in memory.
    """
    names = [part.partition("=")[0].strip() for part in text.split(",")]
    if any(name in SHAPE_FIELDS for name in names):
        return True
    if shares := [name for name in names if name in SHARE_FIELDS]:
        raise _bad_policy(f"{shares[0]} has no effect without rows and batches: what fits stays in memory")
    return False


def parse_policy(text: str, base_policy: BlockPolicy) -> BlockPolicy:
    """The policy `base_policy` with what `text` says instead, for example "rows=16,batches=8,weights_in_memory=0.25".

    Raises:
        ConfigError: a name is unknown, a value cannot be read or is out of its range.
    """
    kinds: dict[str, Any] = {one.name: type(getattr(base_policy, one.name)) for one in fields(BlockPolicy)}
    values = {name: getattr(base_policy, name) for name in kinds}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, value = (one.strip() for one in part.partition("="))
        if name not in kinds or not equals:
            raise _bad_policy(f"{part!r} is not one of {', '.join(kinds)} with =VALUE")
        values[name] = _read_value(name, kinds[name], value)
    return BlockPolicy(**values)


def format_policy(policy: BlockPolicy) -> str:
    """The text that `parse_policy` reads as `policy`, whatever its base is; shares with six digits."""
    values = ((one.name, getattr(policy, one.name)) for one in fields(BlockPolicy))
    return ",".join(f"{name}={_show_value(value)}" for name, value in values)


def _show_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read_value(name: str, kind: type, value: str) -> Any:
    """The value of a field. Raises ConfigError."""
    try:
        return {"on": True, "off": False}[value] if kind is bool else kind(value)
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "on or off"}.get(kind, "a word")
        raise _bad_policy(f"{name} must be {wanted} (got {value!r})") from None


def _bad_policy(why: str) -> ConfigError:
    return ConfigError(
        "the policy of bulk work is wrong",
        why,
        "for example --bulk-policy rows=16,batches=8,weights_in_memory=0.25",
    )
