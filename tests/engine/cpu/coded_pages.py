"""Coded pages of random rows, beside those of the NumPy codecs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from engine.batching.batch import pack_batch
from engine.calibration.fitting import fit_layer
from engine.cpu.coded.attention import CodedAttention, CodedPool
from engine.cpu.coded.compiled_attention import CompiledAttention, build_angles
from engine.cpu.coded.sink_table import SinkTable
from engine.step_work import StepWork
from kvcache.codecs.basis import Basis
from kvcache.codecs.codec_id import CALIBRATED, ROTATED, complete_codec_id, parse_codec_id
from kvcache.codecs.datatype import LayerConstants
from kvcache.codecs.grouped import GroupedCodec
from kvcache.codecs.nuq import NuqCodec
from kvcache.codecs.page import Codec, PageShape
from kvcache.codecs.registry import build_codec
from kvcache.codecs.turbo import TurboCodec
from kvcache.layout import KvLayout
from tests.unit.codecs.oracles import outlier_rows, random_sample

DIGEST = "0123456789abcdef"
LAYERS, QUERIES, CHUNKS, LAYER = 2, 2, 12, 1
MAX_LEN = 320
NO_NORMS = (np.empty(0, np.float32), np.empty(0, np.float32))


@cache
def fit(name: str, heads: int, width: int) -> LayerConstants:
    """Constants of one layer for one page of all heads."""
    kind = parse_codec_id(name)
    sample = random_sample(np.random.default_rng(7), 300, heads, width)
    return fit_layer(sample, [kind], heads * width)[name]


def make_codec(name: str, heads: int, width: int, place: int = 0) -> Codec:
    """The codec of a page, which has all heads for `nuq*` and one for all others; `int4@` has factors per channel,
    others for each `place`.
    """
    if name.endswith("@"):
        codec = make_codec(name[:-1], heads, width)
        rng = np.random.default_rng([width, place])
        pairs, rest = rng.uniform(-3, 3, (2, width)).astype(np.float32)
        basis = Basis(np.tile(np.exp2(pairs[: width // 2]), 2), np.exp2(rest), codec.basis.seed)
        made: type[TurboCodec | GroupedCodec] = (
            TurboCodec if codec.codec_id.family == ROTATED else GroupedCodec
        )
        return made(replace(codec.codec_id, calibration=DIGEST), width, basis)
    kind = parse_codec_id(name)
    digest = DIGEST if kind.family == CALIBRATED else None
    codec_id = complete_codec_id(kind, heads, width, digest)
    if digest is not None:
        return NuqCodec(codec_id, PageShape(heads, width), fit(name, heads, width))
    return build_codec(codec_id, width)


def make_rows(rng: np.random.Generator, tokens: int, heads: int, width: int) -> tuple[Any, Any]:
    """Rows with outliers, more of them than slots, equal ones, constant ones, zeros, and numbers beyond float16."""
    keys, values = outlier_rows(rng, tokens, heads, width)
    keys[3] *= 50
    keys[4], values[4] = 0, 0
    keys[5], values[5] = 100, 3.25
    values[6, :, ::2], values[6, :, 1::2] = 2, -2
    keys[7], values[7, :, 1] = -1e6, 1e6
    values[8] *= 1e-7
    values[9, :, : width // 2] = -0.0
    return keys, values


def make_pair(
    name: str, heads: int, width: int, groups: int = 1, *, chunks: int = CHUNKS, max_len: int = MAX_LEN
) -> tuple[CodedAttention, CompiledAttention]:
    """The slow and the fast attention, each over its own empty pool of `chunks` slabs, with equal random sinks."""
    codec = make_codec(name, heads, width)
    pages = heads // codec.shape.heads * groups
    layout = KvLayout(LAYERS, heads * groups, width, "float32", str(codec.codec_id))
    codecs = tuple(
        tuple(make_codec(name, heads, width, layer * pages + page) for page in range(pages))
        for layer in range(LAYERS)
    )
    frequencies = 10000.0 ** -(np.arange(width // 2) / (width // 2))
    sinks, rng = SinkTable(layout), np.random.default_rng(1)
    for layer in range(LAYERS):
        first = rng.standard_normal((2, 3, heads * groups, width)).astype(np.float32)
        sinks.write([0, 1, 2], layer, first[0], first[1])
    pools = (torch.zeros(chunks, LAYERS, pages, layout.page_bytes, dtype=torch.uint8) for _ in range(2))
    query_heads = QUERIES * heads * groups
    slow, fast = pools
    return (
        CodedAttention(CodedPool(layout, slow, codecs, frequencies, sinks), query_heads),
        CompiledAttention(
            CodedPool(layout, fast, codecs, frequencies, sinks),
            query_heads,
            build_angles(frequencies, max_len),
        ),
    )


def make_qkv(heads: int, width: int, tokens: int, *, extreme: bool = False) -> torch.Tensor:
    """Queries, keys and values of `tokens` tokens with `heads` KV heads; with `extreme` rows."""
    rng = np.random.default_rng(tokens)
    make = make_rows if extreme else outlier_rows
    keys, values = make(rng, tokens, heads, width)
    queries = rng.standard_normal((tokens, QUERIES * heads * width)).astype(np.float32)
    return torch.from_numpy(np.hstack([queries, keys.reshape(tokens, -1), values.reshape(tokens, -1)]))


def write(pages: CodedAttention, qkv: torch.Tensor, works: list[StepWork]) -> torch.Tensor:
    """Write a step's rows; returns them with rotated queries."""
    rows = qkv.clone()
    pages.write(LAYER, rows, pack_batch(works), NO_NORMS, NO_NORMS, 1e-5)
    return rows
