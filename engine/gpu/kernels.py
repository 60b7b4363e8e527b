"""What a device has to compute beside matrix products, and who computes it: Triton's kernels, or torch's operations.

The runner and the decoder know these protocols only. `engine.gpu.model_runner.load_kernels` imports what a device
needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batching.batch import ForwardBatch
from engine.gpu.batch import DeviceStep, Ints, SharedItems
from engine.gpu.launch import LaunchTuning
from engine.model.architecture import ModelConfig
from kvcache.codecs.calibration import Calibration
from kvcache.layout import KvLayout


class PagedGpuAttention(Protocol):
    """Attention over a pool on a device; arguments are those of `engine.gpu.attention.GpuAttention`."""

    def write(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, rotary: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor], eps: float,
    ) -> None:  # fmt: skip
        """Prepare the queries of a step's rows in `qkv`, and store their keys and values."""

    def decode(self, layer: int, qkv: torch.Tensor, step: DeviceStep, window: int, out: torch.Tensor) -> None:
        """Attention of the rows that decode one token."""

    def prefill(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, window: int, out: torch.Tensor
    ) -> None:
        """Attention of the rows of prefill spans."""


class StepAttention(PagedGpuAttention, Protocol):
    """The attention of a runner, which also packs steps for it."""

    def cut_batch(self, batch: ForwardBatch) -> tuple[SharedItems, Ints]:
        """Cut the batch's shared runs into items, and its prefill spans into tiles."""

    def load(self, batch: ForwardBatch) -> DeviceStep:
        """Copy the batch to the device, without padding."""


class CodedStepAttention(StepAttention, Protocol):
    """A `StepAttention` over coded pages. `broken` is [1], not 0 after a step with numbers that are not finite."""

    heads: int
    layout: KvLayout
    data: torch.Tensor
    broken: torch.Tensor

    def normalise(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, norms: tuple[torch.Tensor, torch.Tensor], eps: float
    ) -> None:  # fmt: skip
        """Normalise the keys of `qkv` in place; its queries are rotated too."""

    def keep_sinks(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer of several sinks: `slots` [n] int64, keys and values [n, kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """How large the tables beside a pool of coded pages are."""

    max_model_len: int
    # How many different first tokens a step may have.
    sink_slots: int


class DeviceKernels(Protocol):
    """The kernels of a device."""

    # Whether the device is emulated: CPU tensors, and steps padded as for graphs.
    emulated: bool

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to the residual stream `x` [rows, hidden] float32 in place, and return its RMSNorm.

        delta: [rows, hidden]; weight: [hidden] float32. Returns [rows, hidden] in delta's type.
        """

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(left half of the columns) * right half. x: [rows, 2 * width]; returns [rows, width]."""

    def open_attention(
        self, layout: KvLayout, data: torch.Tensor, config: ModelConfig, tuning: LaunchTuning | None
    ) -> StepAttention:
        """Attention over a pool of raw pages. Raises ValueError: the pool is not as `layout` says."""

    def open_coded_attention(
        self, layout: KvLayout, data: torch.Tensor, config: ModelConfig, calibration: Calibration | None,
        limits: AttentionLimits, tuning: LaunchTuning | None,
    ) -> CodedStepAttention:  # fmt: skip
        """Attention over a pool of coded pages.

        Raises:
            ConfigError: the codec is of another calibration, or the device cannot handle it for heads of this size.
            ValueError: the pool is not as `layout` says.
        """
