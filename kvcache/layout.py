"""How KV lies in memory; everything about its size follows from four numbers.

A page is one layer × one KV head × 64 tokens, keys then values. A chunk is the same 64 tokens over all layers and
heads, `[layers, kv_heads, 2, 64, head_dim]`, contiguous: it moves as one piece, and one layer of it is one slice. Row r
of chunk c belongs to token 64·c + r. The pool, the kernels, the tickets and the planner share this file, so it imports
nothing heavy. `docs/kv-layout.md` has the drawing.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_TOKENS = 64

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank holds: half-open ranges of its layers and KV heads."""

    layers: tuple[int, int]
    heads: tuple[int, int]

    def __post_init__(self) -> None:
        if not (0 <= self.layers[0] < self.layers[1] and 0 <= self.heads[0] < self.heads[1]):
            raise ValueError(f"a shard needs at least one layer and one KV head: {self}")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and element type of a model's KV cache.

    Raises:
        ValueError: a count is not positive, or the dtype is not one of `ITEM_BYTES`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ValueError(f"layers, kv_heads and head_dim must be positive: {self}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")

    @property
    def chunk_shape(self) -> tuple[int, int, int, int, int]:
        """`[layers, kv_heads, keys and values, tokens, head_dim]`."""
        return (self.layers, self.kv_heads, 2, CHUNK_TOKENS, self.head_dim)

    def part(self, shard: Shard) -> KVLayout:
        """The layout of one rank's slabs.

        Raises:
            ValueError: the shard reaches beyond this layout.
        """
        if shard.layers[1] > self.layers or shard.heads[1] > self.kv_heads:
            raise ValueError(f"{shard} is not within {self}")
        layers, heads = shard.layers[1] - shard.layers[0], shard.heads[1] - shard.heads[0]
        return KVLayout(layers, heads, self.head_dim, self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Keys and values of 64 tokens, one layer, one KV head."""
        return 2 * CHUNK_TOKENS * self.head_dim * self.itemsize

    @property
    def layer_bytes(self) -> int:
        """One layer of a chunk: a contiguous slice of it."""
        return self.kv_heads * self.page_bytes

    @property
    def chunk_bytes(self) -> int:
        """A whole chunk, which is the size of a slab."""
        return self.layers * self.layer_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV of one token over all layers and heads."""
        return self.chunk_bytes // CHUNK_TOKENS

    def num_chunks(self, num_tokens: int) -> int:
        """Chunks (slabs) that hold `num_tokens` tokens; the last may be partly filled.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"a number of tokens cannot be {num_tokens}")
        return -(-num_tokens // CHUNK_TOKENS)


def shards(layout: KVLayout, tp: int, pp: int) -> tuple[Shard, ...]:
    """What each rank of one worker holds; rank p * tp + t is the t-th of stage p.

    Stages take even ranges of layers, the earlier ones the remainder; the ranks of a stage take equal ranges of KV
    heads. Any two of them are disjoint, and together they are the whole layout.

    Raises:
        ValueError: `tp` does not divide the KV heads, there are fewer layers than stages, or a count is not positive.
    """
    if min(tp, pp) < 1:
        raise ValueError(f"a worker has at least one rank and one stage, not {tp} and {pp}")
    if layout.kv_heads % tp:
        raise ValueError(f"{tp} ranks cannot share {layout.kv_heads} KV heads evenly")
    if pp > layout.layers:
        raise ValueError(f"{layout.layers} layers are too few for {pp} stages")
    even, more = divmod(layout.layers, pp)
    bounds = [stage * even + min(stage, more) for stage in range(pp + 1)]
    heads = layout.kv_heads // tp
    return tuple(
        Shard((start, end), (rank * heads, (rank + 1) * heads))
        for start, end in zip(bounds, bounds[1:], strict=False)
        for rank in range(tp)
    )
