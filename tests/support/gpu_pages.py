"""Random pages and weights of Llama-3.1-8B's shape on a device, raw or coded, and the time of what reads them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from diptych.chunks import CHUNK_TOKENS
from engine.batching.batch import pack_batch
from engine.gpu.attention import GpuAttention
from engine.gpu.coded.attention import CodedGpuAttention
from engine.gpu.launch import LaunchTuning
from engine.model.architecture import ModelConfig, RopeConfig
from engine.step_work import StepWork
from kvcache.codecs.codec_id import CALIBRATED, CodecId, complete_codec_id, parse_codec_id
from kvcache.codecs.datatype import Datatype, LayerConstants
from kvcache.codecs.hadamard import uniform_levels
from kvcache.codecs.nuq import NuqCodec
from kvcache.codecs.page import Codec, PageShape
from kvcache.codecs.registry import build_codec
from kvcache.layout import KvLayout
from kvcache.pool import slab_shape

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336,
    vocab=128256, context=131072, eps=1e-5, tied=False, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
    windows=(0,) * 32, rope=RopeConfig("llama3", 500_000.0, 8.0, 1.0, 4.0, 8192),
)  # fmt: skip
# Most tokens of a sequence that the attention benchmarks read.
MAX_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how often to measure."""

    device: torch.device
    dtype: str = "bfloat16"
    rounds: int = 15
    copy_bytes: int = 2 << 30
    layers: int = 4  # whose KV the attention benchmarks read in turn, so that none of it is in a cache

    def seconds(self, call: Callable[[], object]) -> float:
        """Median time of `call`, the device's where it has a clock of its own."""
        times: list[float] = []
        for _ in range(self.rounds + 2):  # the first two warm up
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                call()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3)
            else:
                began_s = time.perf_counter()
                call()
                times.append(time.perf_counter() - began_s)
        return median(times[2:])

    def bandwidth(self) -> float:
        """Bytes per second that a copy within the device reads and writes."""
        source = torch.ones(self.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * self.copy_bytes / self.seconds(lambda: target.copy_(source))


class Random:
    """Weights out of thin air."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Small normal numbers, or ones for a norm."""
        if out.dim() == 1 and "norm" in name:
            out.fill_(1)
        else:
            out.normal_(0, 0.02)


def open_pages(
    shape: ModelConfig, place: Place, codec: str, slabs: int, tuning: LaunchTuning
) -> GpuAttention:
    """Attention over a pool of random pages; `codec`: its name, empty for raw pages.

    Calibrated codecs get constants out of thin air: what a kernel does depends on none of them.
    """
    layout = KvLayout(place.layers, shape.kv_heads, shape.head_dim, place.dtype)
    if not codec:
        kind: torch.dtype = getattr(torch, place.dtype)
        data = torch.randn(slabs, *layout.chunk_shape, dtype=kind, device=place.device)
        return GpuAttention(layout, data, shape.heads, tuning)
    asked = parse_codec_id(codec)
    digest = "0" * 16 if asked.family == CALIBRATED else None
    codec_id = complete_codec_id(asked, shape.kv_heads, shape.head_dim, digest)
    layout = replace(layout, codec=str(codec_id))
    codecs = ((made_up_codec(codec_id, layout),) * layout.pages_per_layer,) * layout.layers
    data = torch.zeros(slabs, *slab_shape(layout)[0], dtype=torch.uint8, device=place.device)
    frequencies = shape.rope.theta ** -np.linspace(0, 1, shape.head_dim // 2)
    pages = CodedGpuAttention(layout, data, shape.heads, codecs, frequencies, MAX_TOKENS, 1, tuning)
    fill_pages(pages)
    return pages


def made_up_codec(codec_id: CodecId, layout: KvLayout) -> Codec:
    """The codec of one page, with constants out of thin air if it is calibrated."""
    if codec_id.family != CALIBRATED:
        return build_codec(codec_id, layout.head_dim)
    shape = PageShape(layout.page_heads, layout.head_dim)
    levels = uniform_levels(codec_id.code_bits[0])
    ones = np.full(shape.width, 3, np.float16)
    return NuqCodec(
        codec_id, shape, LayerConstants(ones, ones * 0, Datatype(levels, levels), Datatype(levels, levels))
    )


def fill_pages(pages: CodedGpuAttention) -> None:
    """Code random keys and values into one slab, and copy it to all others: codes and outliers as in real pages."""
    layout, device = pages.layout, pages.data.device
    width = (pages.heads + 2 * layout.kv_heads) * layout.head_dim
    none = torch.empty(0, device=device)
    step = pages.load(pack_batch([StepWork([0] * CHUNK_TOKENS, 0, [0], "none")]))
    for layer in range(layout.layers):
        kind: torch.dtype = getattr(torch, layout.dtype)
        rows = torch.randn(len(step.tokens), width, device=device).to(kind)
        pages.write(layer, rows, step, (none, none), (none, none), 1e-5)
    pages.data[1:] = pages.data[:1]
