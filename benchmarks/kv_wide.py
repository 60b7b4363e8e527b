"""Decode attention over coded pages of large heads: 8 KV heads of 128 with four queries each, one layer.

`benchmarks.kv_decode` measures it beside the embedded model. Rows are random numbers; codecs with a calibration are
fitted to such rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.batching.batch import ForwardBatch, pack_batch
from engine.calibration.fitting import LayerSample, fit_layer
from engine.cpu.attention import CpuAttention, PagedAttention
from engine.cpu.coded.attention import CodedPool
from engine.cpu.coded.compiled_attention import CompiledAttention, build_angles
from engine.cpu.coded.sink_table import SinkTable
from engine.step_work import StepWork
from kvcache.codecs.calibration import CalibratedModel, Calibration
from kvcache.codecs.codec_id import CALIBRATED, complete_codec_id, parse_codec_id
from kvcache.codecs.datatype import LayerConstants
from kvcache.layout import KvLayout, Shard
from kvcache.page_codecs import build_page_codecs

KV_HEADS, QUERIES, WIDTH = 8, 4, 128
HEADS = KV_HEADS * QUERIES
SAMPLE_TOKENS = 512
NO_NORMS = (np.empty(0, np.float32), np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class WideSide:
    """Attention over a pool in which every sequence has the same tokens, in slabs of its own."""

    attention: PagedAttention
    alone: ForwardBatch
    shared: ForwardBatch
    qkv: torch.Tensor  # [sequences, (heads + 2 * kv_heads) * head_dim]
    out: torch.Tensor  # [sequences, heads * head_dim]

    def decode(self, batch: ForwardBatch) -> None:
        """Attention of the layer."""
        self.attention.decode(0, self.qkv, batch, 0, self.out)


def make_wide_side(codec: str, sequences: int, tokens: int) -> WideSide:
    """A pool of one codec."""
    layout, calibration = _find_layout(codec)
    chunks = layout.num_chunks(tokens)
    shape = layout.chunk_shape if not codec else (layout.layers, layout.pages_per_layer, layout.page_bytes)
    kind = torch.uint8 if codec else torch.float32
    data = torch.zeros((sequences * chunks, *shape), dtype=kind)
    frequencies = 1e6 ** -(np.arange(WIDTH // 2) / (WIDTH // 2))
    angles = build_angles(frequencies, tokens)
    attention: PagedAttention
    if codec:
        codecs = build_page_codecs(layout, calibration, Shard((0, 1), (0, KV_HEADS)))
        pool = CodedPool(layout, data, codecs, frequencies, SinkTable(layout))
        attention = CompiledAttention(pool, HEADS, angles)
    else:
        attention = CpuAttention(layout, data, HEADS)
    generator, width = torch.Generator().manual_seed(3), (HEADS + 2 * KV_HEADS) * WIDTH
    rows = torch.randn(tokens, width, generator=generator)
    slabs = np.random.default_rng(1).permutation(sequences * chunks).reshape(sequences, chunks)
    first = slabs[0].tolist()
    tables = angles[0].reshape(-1, WIDTH // 2), angles[1].reshape(-1, WIDTH // 2)
    attention.write(0, rows, pack_batch([StepWork([5] * tokens, 0, first, "none")], [0]), tables, NO_NORMS, 0)
    for row in slabs[1:]:
        data[row] = data[first]
    works = [StepWork([0], tokens - 1, row.tolist(), "none", 0) for row in slabs]
    shared = [StepWork([0], tokens - 1, [*first[:-1], int(row[-1])], "none", 0) for row in slabs]
    sinks = [0] * sequences
    qkv, out = torch.randn(sequences, width, generator=generator), torch.empty(sequences, HEADS * WIDTH)
    return WideSide(attention, pack_batch(works, sinks), pack_batch(shared, sinks), qkv, out)


def _find_layout(codec: str) -> tuple[KvLayout, Calibration | None]:
    """The layout of one layer with a codec (empty: none), and the calibration that the codec needs."""
    if not codec:
        return KvLayout(1, KV_HEADS, WIDTH, "float32"), None
    codec_id, calibration, group = parse_codec_id(codec), None, KV_HEADS * WIDTH
    if codec_id.family == CALIBRATED:
        rng = np.random.default_rng(7)
        sample = LayerSample(*rng.standard_normal((4, SAMPLE_TOKENS, group), np.float32))
        sample.key_fisher[:], sample.value_fisher[:] = 1, 1
        model = CalibratedModel("random rows", 1, KV_HEADS, WIDTH)
        constants: dict[str, tuple[LayerConstants, ...]] = {}
        constants[codec_id.name] = (fit_layer(sample, [codec_id], group)[codec_id.name],)
        calibration = Calibration(model, group, SAMPLE_TOKENS, constants)
    digest = None if calibration is None else calibration.digest
    complete = complete_codec_id(codec_id, KV_HEADS, WIDTH, digest)
    return KvLayout(1, KV_HEADS, WIDTH, "float32", str(complete)), calibration
