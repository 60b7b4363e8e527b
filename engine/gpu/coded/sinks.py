"""First tokens on a device: their exact keys and values, beside a pool of coded pages.

As on the CPU (`engine.cpu.coded.sink_table`): a first token attends to itself alone, so its KV depends on its id only.
Which ids are in the table is decided by the same `SinkSlots`.
"""

from __future__ import annotations

import torch

from engine.gpu.batch import DeviceStep
from engine.gpu.kernels import CodedStepAttention


class GpuSinkRecorder:
    """Attention of tokens at position 0, each alone: stores their exact keys and values as sinks.

    It takes the place of a pool's attention in a forward pass that computes sinks. `slots` are the places in the table
    of the tokens of the pass, in order.
    """

    def __init__(self, attention: CodedStepAttention, slots: list[int]) -> None:
        self._attention, self._slots = attention, torch.tensor(slots, device=attention.data.device)

    def write(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, rotary: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor], eps: float,
    ) -> None:  # fmt: skip
        """Keep the normalised keys, and the values. At position 0 rotation changes nothing."""
        self._attention.normalise(layer, qkv, step, norms, eps)
        keys, values = self._split_rows(qkv)
        self._attention.keep_sinks(layer, self._slots, keys, values)

    def decode(self, layer: int, qkv: torch.Tensor, step: DeviceStep, window: int, out: torch.Tensor) -> None:
        """A token that attends to itself alone gets its own values."""
        _, values = self._split_rows(qkv)
        group = self._attention.heads // self._attention.layout.kv_heads
        out[: len(values)] = values.repeat_interleave(group, dim=1).view(len(values), -1)

    def prefill(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, window: int, out: torch.Tensor
    ) -> None:
        """Nothing to do: a pass for sinks has single tokens only."""

    def _split_rows(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the pass's tokens, each [tokens, kv_heads, head_dim]."""
        count, layout = len(self._slots), self._attention.layout
        start = self._attention.heads * layout.head_dim
        rows = qkv[:count, start:].view(count, 2, layout.kv_heads, layout.head_dim)
        return rows[:, 0], rows[:, 1]
