"""The codecs of a pool's pages, for every engine and device."""

from __future__ import annotations

from kvcache.codecs.calibration import Calibration
from kvcache.codecs.page import Codec
from kvcache.codecs.registry import build_codec
from kvcache.layout import KvLayout, Shard


def build_page_codecs(
    layout: KvLayout, calibration: Calibration | None, shard: Shard
) -> tuple[tuple[Codec, ...], ...]:
    """The codec of each page of a chunk, by layer of the shard and then by group of heads.

    Args:
        layout: of this rank's pool, with a codec.
        calibration: the one that the codec's id names; None for codecs without one.
        shard: the layers and KV heads of the model that this rank has.

    Raises:
        ConfigError: the calibration is another one, or the codec does not fit the heads.
    """
    codec_id = layout.codec_id
    assert codec_id is not None
    heads = range(*shard.heads, layout.page_heads)
    return tuple(
        tuple(build_codec(codec_id, layout.head_dim, calibration, layer, head) for head in heads)
        for layer in range(*shard.layers)
    )
