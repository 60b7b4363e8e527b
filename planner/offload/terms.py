"""The terms of the programme that places weights, KV and activations of a block over tiers: model, work, block, shares.

Source: FlexGen (Sheng et al. 2023), §4.3 and appendix A.3, with grouped queries and gated MLPs. There a layer has
`8 h1² + 4 h1 h2` bytes and a token's KV `4 h1`; here both follow from the model's dimensions and the bytes per number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from planner.costs.model import ModelDims

# Weights, KV and activations, each over three tiers: the fastest first.
NUM_SHARES = 9
Triple = tuple[float, float, float]
NOWHERE: Triple = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class OffloadModel:
    """A model as the programme needs it. Bytes are per number: of matrices, of KV, and of activations.

    `end_bytes` are the weights outside the layers, which the fastest tier holds beside everything else.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    ffn_matrices: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    hidden_bytes: float = 2.0
    end_bytes: float = 0.0

    @classmethod
    def from_dims(cls, dims: ModelDims, hidden_bytes: float = 4.0) -> OffloadModel:
        """The model with these dimensions; activations have `hidden_bytes` per number."""
        ends = dims.vocab * dims.hidden * (hidden_bytes + dims.weight_bytes)
        return cls(
            dims.layers, dims.hidden, dims.heads, dims.kv_heads, dims.head_dim, dims.ffn, dims.ffn_matrices,
            dims.weight_bytes, dims.kv_bytes, hidden_bytes, ends,
        )  # fmt: skip

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of a layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + self.ffn_matrices * self.hidden * self.ffn

    @property
    def layer_bytes(self) -> float:
        """Bytes of a layer's matrices."""
        return self.layer_weights * self.weight_bytes

    @property
    def token_kv_bytes(self) -> float:
        """Bytes of a token's KV in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def token_hidden_bytes(self) -> float:
        """Bytes of a token's activations between two layers."""
        return self.hidden * self.hidden_bytes

    @property
    def attention_flops(self) -> int:
        """Operations of one layer for one token that attends to one token."""
        return 4 * self.heads * self.head_dim

    def with_bytes(self, weight_bytes: float, kv_bytes: float) -> OffloadModel:
        """The same model with other bytes per number of its matrices and its KV."""
        return replace(self, weight_bytes=weight_bytes, kv_bytes=kv_bytes)


def whole_chunks(tokens: int) -> int:
    """The tokens for which there is room in the chunks that hold `tokens` tokens."""
    return -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class OffloadWorkload:
    """Sequences with equal lengths: `prompt_tokens` are read, and `output_tokens` generated."""

    prompt_tokens: int
    output_tokens: int

    @property
    def mean_context(self) -> float:
        """Tokens that a generated token attends to, on average."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def mean_read(self) -> float:
        """Tokens whose KV a decode step reads where it moves in whole chunks, on average."""
        steps = max(1, self.output_tokens - 1)
        return sum(whole_chunks(self.prompt_tokens + i) for i in range(steps)) / steps

    @property
    def total_tokens(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block: `batches` batches of `rows` sequences each, computed layer by layer, one batch after the other."""

    rows: int
    batches: int

    @property
    def sequences(self) -> int:
        """All sequences of the block."""
        return self.rows * self.batches


@dataclass(frozen=True, slots=True)
class ShareCosts:
    """A cost that is linear in the nine shares: seconds or bytes per whole share, and a constant."""

    weights: Triple = NOWHERE
    kv: Triple = NOWHERE
    hidden: Triple = NOWHERE
    constant: float = 0.0

    @property
    def slopes(self) -> NDArray[np.float64]:
        """[9]: the cost of each share: weights, KV and activations, by tier."""
        return np.array([*self.weights, *self.kv, *self.hidden])

    def __add__(self, other: ShareCosts) -> ShareCosts:
        """The sum of two costs."""
        a, b = self.slopes + other.slopes, self.constant + other.constant
        return ShareCosts(tuple(a[:3]), tuple(a[3:6]), tuple(a[6:]), b)

    def evaluate(self, shares: NDArray[np.float64]) -> float:
        """The cost of nine shares."""
        return float(self.slopes @ shares) + self.constant


@dataclass(frozen=True, slots=True)
class TimedResource:
    """What a layer of one step keeps busy, in seconds: a link, a disk, the processor. All of them work at once."""

    name: str
    seconds: ShareCosts


@dataclass(frozen=True, slots=True)
class BoundedMemory:
    """A memory, what the block needs of it, and how much there is, in bytes; `flag` is the one that says how much."""

    name: str
    needed: ShareCosts
    capacity: float
    flag: str = ""


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """The costs of a block on a machine: of one layer of the prompts' step and of one decode step, and its memories.

    `closed` are the shares (0 to 8) that this machine cannot use; `end_s` is what a step takes outside the layers.
    """

    prefill: tuple[TimedResource, ...]
    decode: tuple[TimedResource, ...]
    memories: tuple[BoundedMemory, ...]
    closed: tuple[int, ...] = ()
    prefill_end_s: float = 0.0
    decode_end_s: float = 0.0
