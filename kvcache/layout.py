"""How KV lies in memory: the shapes and sizes of pages, chunks and slabs, from four numbers of the model.

A page is one layer × one KV head × 64 tokens, keys then values. A chunk is the same 64 tokens over all layers and
heads, `[layers, kv_heads, 2, 64, head_dim]`, contiguous: it is transferred as one piece, and one layer of it is one
slice. Row r of chunk c belongs to token 64·c + r. With a codec a page is coded (`kvcache.codecs`), and a codec that
scales values over several heads has one page for all of them. The pool, the kernels, the tickets and the planner share
this file, so it imports neither torch nor NumPy. `docs/kv-layout.md` has the drawing.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from kvcache.codecs.codec_id import CodecId, parse_codec_id
from kvcache.codecs.storage import coded_page_bytes, heads_per_page

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank holds: half-open ranges of its layers and KV heads."""

    layers: tuple[int, int]
    heads: tuple[int, int]

    def __post_init__(self) -> None:
        if not (0 <= self.layers[0] < self.layers[1] and 0 <= self.heads[0] < self.heads[1]):
            raise ValueError(f"a shard needs at least one layer and one KV head: {self}")


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and element type of a model's KV cache, or of one rank's shard of it.

    `codec` is the canonical id of the codec of its pages (`kvcache.codecs.codec_id`); empty: pages hold elements of
    `dtype`, as they were computed.

    Raises:
        ValueError: a count is not positive, the dtype is not one of `DTYPE_BYTES`, or the codec's groups do not fit the
            KV heads.
        ConfigError: `codec` is not a codec's id.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    codec: str = ""

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ValueError(f"layers, kv_heads and head_dim must be positive: {self}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.kv_heads % self.page_heads:
            raise ValueError(
                f"{self.kv_heads} KV heads are not whole groups of {self.page_heads}, as {self.codec} codes them"
            )

    @property
    def codec_id(self) -> CodecId | None:
        """The parsed id of the codec; None: pages are not coded."""
        return parse_codec_id(self.codec) if self.codec else None

    @property
    def kv_class(self) -> str:
        """The name by which workers say what KV they have: the codec's canonical id, or `RAW_CLASS` without one."""
        return self.codec or RAW_CLASS

    @property
    def page_heads(self) -> int:
        """KV heads of one page."""
        codec_id = self.codec_id
        return 1 if codec_id is None else heads_per_page(codec_id, self.head_dim)

    @property
    def pages_per_layer(self) -> int:
        """Pages of one layer of a chunk."""
        return self.kv_heads // self.page_heads

    @property
    def chunk_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a chunk: `[layers, kv_heads, 2 (keys and values), 64 tokens, head_dim]`."""
        return (self.layers, self.kv_heads, 2, CHUNK_TOKENS, self.head_dim)

    def shard_layout(self, shard: Shard) -> KvLayout:
        """The layout of the slabs of one rank, which holds only the layers and heads of `shard`.

        Raises:
            ValueError: the shard reaches beyond this layout, or cuts a group of KV heads that are coded together.
        """
        if any(bound % self.page_heads for bound in shard.heads):
            raise ValueError(
                f"{shard} cuts a group of {self.page_heads} KV heads, which {self.codec} codes together"
            )
        if shard.layers[1] > self.layers or shard.heads[1] > self.kv_heads:
            raise ValueError(f"{shard} is not within {self}")
        layers, heads = shard.layers[1] - shard.layers[0], shard.heads[1] - shard.heads[0]
        return KvLayout(layers, heads, self.head_dim, self.dtype, self.codec)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of a page without a codec."""
        return DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the keys and values of 64 tokens for one layer and `page_heads` KV heads."""
        codec_id = self.codec_id
        if codec_id is not None:
            return coded_page_bytes(codec_id, self.head_dim)
        return 2 * CHUNK_TOKENS * self.head_dim * self.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a chunk, which is a contiguous slice of the chunk."""
        return self.pages_per_layer * self.page_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk, which is also the size of a slab."""
        return self.layers * self.layer_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token, over all layers and heads."""
        return self.chunk_bytes // CHUNK_TOKENS

    def num_chunks(self, num_tokens: int) -> int:
        """How many chunks (one slab each) `num_tokens` tokens need; the last one may be partly filled.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"a number of tokens cannot be {num_tokens}")
        return -(-num_tokens // CHUNK_TOKENS)


def split_layout(layout: KvLayout, tp: int, pp: int) -> tuple[Shard, ...]:
    """The shard (layers and KV heads) of each rank of a worker with `tp` · `pp` ranks; rank p * tp + t is the t-th of
    stage p.

    Stages take equal ranges of layers; if the division leaves a remainder, the first stages get one more each. The
    ranks of a stage take equal ranges of KV heads. The shards are disjoint and together cover the whole layout.

    Raises:
        ValueError: `tp` does not divide the KV heads or cuts a group of them that is coded together, there are fewer
            layers than stages, or a count is not positive.
    """
    if min(tp, pp) < 1:
        raise ValueError(f"a worker has at least one rank and one stage, not {tp} and {pp}")
    if layout.kv_heads % tp:
        raise ValueError(f"{tp} ranks cannot share {layout.kv_heads} KV heads evenly")
    if layout.pages_per_layer % tp:
        raise ValueError(
            f"{tp} ranks cannot share {layout.pages_per_layer} groups of KV heads evenly; {layout.codec} codes"
            f" {layout.page_heads} heads together"
        )
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
