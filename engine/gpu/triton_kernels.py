"""The kernels of CUDA devices, in Triton; without a device they run in its interpreter."""

from __future__ import annotations

import torch

from engine.gpu.attention import GpuAttention
from engine.gpu.coded.attention import CodedGpuAttention
from engine.gpu.kernels import AttentionLimits
from engine.gpu.launch import LaunchTuning
from engine.gpu.rowwise import add_rms_norm, silu_and_mul
from engine.model.architecture import ModelConfig
from engine.model.rope import rope_frequencies
from kvcache.codecs.calibration import Calibration
from kvcache.layout import KvLayout, Shard
from kvcache.page_codecs import build_page_codecs


class TritonKernels:
    """See `engine.gpu.kernels.DeviceKernels`."""

    emulated = False
    add_rms_norm = staticmethod(add_rms_norm)
    silu_and_mul = staticmethod(silu_and_mul)

    def open_attention(
        self, layout: KvLayout, data: torch.Tensor, config: ModelConfig, tuning: LaunchTuning | None
    ) -> GpuAttention:
        """See `DeviceKernels.open_attention`."""
        return GpuAttention(layout, data, config.heads, tuning)

    def open_coded_attention(
        self, layout: KvLayout, data: torch.Tensor, config: ModelConfig, calibration: Calibration | None,
        limits: AttentionLimits, tuning: LaunchTuning | None,
    ) -> CodedGpuAttention:  # fmt: skip
        """See `DeviceKernels.open_coded_attention`."""
        codecs = build_page_codecs(layout, calibration, Shard((0, layout.layers), (0, layout.kv_heads)))
        frequencies = rope_frequencies(config.rope, layout.head_dim).double().numpy()
        sizes = limits.max_model_len, limits.sink_slots
        return CodedGpuAttention(layout, data, config.heads, codecs, frequencies, *sizes, tuning)
