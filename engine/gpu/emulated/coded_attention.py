"""Attention over coded pages in torch, for the emulated device: pages are coded and expanded by the NumPy codecs."""

from __future__ import annotations

import torch

from diptych.chunks import CHUNK_TOKENS
from engine.gpu.batch import DeviceStep
from engine.gpu.emulated.attention import TorchAttention, clear_absent_rows
from engine.gpu.emulated.codec_pages import CodecPages
from engine.gpu.kernels import AttentionLimits
from kvcache.codecs.page import Codec
from kvcache.layout import KvLayout


class CodedTorchAttention(TorchAttention):
    """See `engine.gpu.kernels.CodedStepAttention`.

    Args:
        layout: with a codec; its dtype is the type of the model's rows.
        data: the pool, uint8 [slabs, layers, pages per layer, page_bytes].
        heads: query heads.
        codecs: by layer and page (`kvcache.page_codecs.build_page_codecs`).
        frequencies: [head_dim / 2] float64, radians per token of each rotary pair.
        limits: sizes of the tables of angles and of first tokens.

    Raises:
        ValueError: the pool is not of bytes.
    """

    def __init__(
        self, layout: KvLayout, data: torch.Tensor, heads: int, codecs: tuple[tuple[Codec, ...], ...],
        frequencies: torch.Tensor, limits: AttentionLimits,
    ) -> None:  # fmt: skip
        super().__init__(layout, data, heads)
        self._pages = CodecPages(layout, data, codecs)
        self._rotated = codecs[0][0].codes_rotated_keys
        positions = torch.arange(max(limits.max_model_len, CHUNK_TOKENS), dtype=torch.float64)
        angles = positions[:, None] * frequencies
        self._angles = angles.cos().float(), angles.sin().float()
        # [slots, layers, 2, kv_heads, head_dim]
        self.sinks = torch.zeros(limits.sink_slots, layout.layers, 2, layout.kv_heads, layout.head_dim)
        self.broken = torch.zeros(1, dtype=torch.int32)

    def write(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, rotary: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor], eps: float,
    ) -> None:  # fmt: skip
        """See `engine.gpu.coded.attention.CodedGpuAttention.write`."""
        self.prepare_rows(qkv, step, self._angles, norms, eps, rotate_keys=self._rotated)
        _, keys, values = self.split_rows(qkv.float())
        finite = torch.isfinite(keys).flatten(1).all(1) & torch.isfinite(values).flatten(1).all(1)
        live = step.slots >= 0
        if bool((live & ~finite).any()):
            self.broken.fill_(1)
        kept = live & finite
        slabs, rows = step.slots[kept].long(), step.positions[kept].long() % CHUNK_TOKENS
        pages = self._pages.layers[layer]
        pages.encode(slabs.numpy(), rows.numpy(), keys[kept].numpy(), values[kept].numpy())

    def normalise(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, norms: tuple[torch.Tensor, torch.Tensor], eps: float
    ) -> None:  # fmt: skip
        """See `CodedStepAttention.normalise`."""
        self.prepare_rows(qkv, step, self._angles, norms, eps, rotate_keys=False)

    def keep_sinks(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `CodedStepAttention.keep_sinks`."""
        self.sinks[slots, layer] = torch.stack([keys, values], dim=1).float()

    def gather_pages(
        self, layer: int, slabs: torch.Tensor, chunks: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """See `TorchAttention.gather_pages`. Row 0 of a sequence's first page is not the exact first token yet."""
        expanded = self._pages.layers[layer].expand(slabs.numpy(), counts.numpy())
        pages = clear_absent_rows(torch.from_numpy(expanded), counts)
        if self._rotated:
            return pages
        places = chunks[:, None] * CHUNK_TOKENS + torch.arange(CHUNK_TOKENS)
        # Places behind the longest sequence hold no token.
        places = places.clamp(max=len(self._angles[0]) - 1)
        cos, sin = (table[places][:, None] for table in self._angles)  # [n, 1, 64, head_dim / 2]
        left, right = pages[:, :, 0].chunk(2, dim=-1)
        pages[:, :, 0] = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        return pages

    def place_sinks(self, layer: int, pages: torch.Tensor, first: int, sinks: torch.Tensor) -> torch.Tensor:
        """See `TorchAttention.place_sinks`. `sinks`: [rows], the place of each row's first token."""
        if first == 0:
            # [rows, kv_heads, 2, head_dim]
            pages[:, 0, :, :, 0] = self.sinks[sinks.long(), layer].transpose(1, 2)
        return pages
