"""The kernels of the emulated device: plain torch on CPU tensors, so that tests run what a GPU worker runs.

Everything around the kernels is that of a CUDA device: packed steps, padding, graphs' fixed buffers, the pool's tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf

from engine.gpu.emulated.attention import TorchAttention
from engine.gpu.emulated.coded_attention import CodedTorchAttention
from engine.gpu.kernels import AttentionLimits
from engine.gpu.launch import LaunchTuning
from engine.model.architecture import ModelConfig
from engine.model.rope import rope_frequencies
from kvcache.codecs.calibration import Calibration
from kvcache.layout import KvLayout, Shard
from kvcache.page_codecs import build_page_codecs


class TorchKernels:
    """See `engine.gpu.kernels.DeviceKernels`. There is nothing to tune."""

    emulated = True

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `DeviceKernels.add_rms_norm`."""
        x += delta
        return nnf.rms_norm(x, weight.shape, weight, eps).to(delta.dtype)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `DeviceKernels.silu_and_mul`."""
        gate, up = x.float().chunk(2, dim=-1)
        return (nnf.silu(gate) * up).to(x.dtype)

    def open_attention(
        self, layout: KvLayout, data: torch.Tensor, config: ModelConfig, tuning: LaunchTuning | None
    ) -> TorchAttention:
        """See `DeviceKernels.open_attention`."""
        return TorchAttention(layout, data, config.heads)

    def open_coded_attention(
        self, layout: KvLayout, data: torch.Tensor, config: ModelConfig, calibration: Calibration | None,
        limits: AttentionLimits, tuning: LaunchTuning | None,
    ) -> CodedTorchAttention:  # fmt: skip
        """See `DeviceKernels.open_coded_attention`."""
        codecs = build_page_codecs(layout, calibration, Shard((0, layout.layers), (0, layout.kv_heads)))
        frequencies = rope_frequencies(config.rope, layout.head_dim).double()
        return CodedTorchAttention(layout, data, config.heads, codecs, frequencies, limits)
