"""How many bits each codec stores, from its id and the shape alone: the formula for pools, links and planning.

With b code bits, a group of g values, n outlier slots per token and group, i bits of an outlier's index and heads of d
values, the bits per stored number are

    raw, bf16, fp16      b                                  int8, int4    b + 32 / g          (scale, minimum)
    nuq*, keys           b + n · (16 + i) / g               nuq*, values  b + n · (16 + i) / g + 32 / g
    tq*                  b + 16 / d

(docs/design/codecs.md). This file imports no NumPy.
"""

from __future__ import annotations

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.codec_id import CALIBRATED, GROUPED, ROTATED, CodecId

# There is one outlier slot per this many values on each side: 0.5 % + 0.5 % (KVQuant, section 3.4).
OUTLIER_SHARE = 200
FP16_BITS = 16


def outliers_per_side(codec_id: CodecId, group: int) -> int:
    """Outliers among the largest values of a token and group, and as many among the smallest: ⌈0.5 % of the group⌉."""
    return -(-group // OUTLIER_SHARE) if codec_id.has_outliers else 0


def index_bits(group: int) -> int:
    """Bits of the place of an outlier within its group: 8 or 16."""
    return 8 if group <= 1 << 8 else 16


def bits_per_value(codec_id: CodecId, head_dim: int) -> tuple[float, float]:
    """Bits that one number of a key and one of a value take, with their share of scales and outliers.

    Args:
        codec_id: a canonical id (`kvcache.codecs.codec_id.complete_codec_id`).
        head_dim: values of a head.
    """
    key_bits, value_bits = codec_id.code_bits
    group = codec_id.group or head_dim
    if codec_id.family == GROUPED:
        return key_bits + 2 * FP16_BITS / group, value_bits + 2 * FP16_BITS / group
    if codec_id.family == ROTATED:
        return key_bits + FP16_BITS / head_dim, value_bits + FP16_BITS / head_dim
    if codec_id.family == CALIBRATED:
        slots = 2 * outliers_per_side(codec_id, group)
        outliers = slots * (FP16_BITS + index_bits(group)) / group
        return key_bits + outliers, value_bits + outliers + 2 * FP16_BITS / group
    return float(key_bits), float(value_bits)


def mean_bits(codec_id: CodecId, head_dim: int) -> float:
    """Mean of the bits of a key's and a value's number: what `16 / mean_bits` compares with 16-bit storage."""
    return sum(bits_per_value(codec_id, head_dim)) / 2


def bytes_per_token(codec_id: CodecId, layers: int, kv_heads: int, head_dim: int) -> float:
    """Bytes of one token in the pool and on the wire, over all layers and heads."""
    return layers * kv_heads * head_dim * sum(bits_per_value(codec_id, head_dim)) / 8


def heads_per_page(codec_id: CodecId, head_dim: int) -> int:
    """KV heads of one page: those of a group for `nuq*`, one for all others.

    Args:
        codec_id: a canonical id (`kvcache.codecs.codec_id.complete_codec_id`).
        head_dim: values of a head.

    Raises:
        ValueError: the group is not a whole number of heads.
    """
    if codec_id.family != CALIBRATED:
        return 1
    if codec_id.group is None or codec_id.group % head_dim:
        raise ValueError(f"{codec_id} has no group that is a whole number of heads of {head_dim} values")
    return codec_id.group // head_dim


def coded_page_bytes(codec_id: CodecId, head_dim: int) -> int:
    """Bytes of a page: 64 rows of keys and of values, each row's codes filled up to whole bytes.

    Args:
        codec_id: a canonical id (`kvcache.codecs.codec_id.complete_codec_id`).
        head_dim: values of a head.

    Raises:
        ValueError: the group is not a whole number of heads.
    """
    width = heads_per_page(codec_id, head_dim) * head_dim
    codes = sum(-(-width * bits // 8) for bits in codec_id.code_bits)
    stored = width * sum(bits_per_value(codec_id, head_dim))
    extra = stored - width * sum(codec_id.code_bits)
    return CHUNK_TOKENS * (codes + round(extra) // 8)


def chunk_bytes(codec_id: CodecId, layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of a chunk of 64 tokens by the formula, rounded up to whole bytes; real pages are at least as large."""
    exact = CHUNK_TOKENS * bytes_per_token(codec_id, layers, kv_heads, head_dim)
    return int(-(-exact // 1))
