"""Random pages for any attention over a pool on a device, and what the plain reference computes over them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.batching.batch import ForwardBatch, pack_batch
from engine.gpu.kernels import StepAttention
from engine.step_work import StepWork
from kvcache.layout import KvLayout
from tests.support import reference_attention

EDGES = [1, 2, 63, 64, 65, 127, 128, 129]
CLOSE = {"float32": (2e-5, 2e-6), "float16": (2e-3, 2e-3), "bfloat16": (1e-2, 1e-2)}
# Positions of the first token, and numbers of tokens.
SPANS = [(0, 2), (0, 65), (1, 64), (63, 2), (64, 64), (65, 130), (190, 3)]
# Lengths of sequences, and what they share (`AttentionBench`).
TREES = {
    "two rows": ([192, 200], {1: (0, 2)}),
    "one prefix for all": ([129, 130, 191, 192, 129], dict.fromkeys(range(1, 5), (0, 2))),
    "levels": ([640, 641, 500, 300, 65, 30], {1: (0, 9), 2: (0, 7), 3: (0, 4), 4: (0, 1)}),
    "two trees": ([200, 300, 200, 400, 129], {2: (0, 3), 3: (1, 4), 4: (1, 2)}),
    "a suffix of one token": ([129, 129, 129], {1: (0, 2), 2: (0, 2)}),
}


class AttentionBench:
    """Random KV of sequences that may begin alike, scattered over a pool whose other rows are not-a-number.

    `shared[n]` = (m, chunks): sequence n begins with the first `chunks` full chunks of sequence m < n. `open_pages`
    makes the attention that is tested, from layout, pool and number of query heads.
    """

    def __init__(
        self,
        open_pages: Callable[[KvLayout, torch.Tensor, int], StepAttention],
        width: int,
        kv_heads: int,
        group: int,
        lengths: list[int],
        shared: dict[int, tuple[int, int]] | None = None,
        dtype: str = "float32",
    ) -> None:
        torch.manual_seed(0)
        self.layout = KvLayout(2, kv_heads, width, dtype)
        self.lengths, self.heads, self.width = lengths, kv_heads * group, width
        order = torch.randperm(sum(map(self.layout.num_chunks, lengths)) + 1).tolist()
        self.data = torch.full((len(order), *self.layout.chunk_shape), float("nan")).to(getattr(torch, dtype))
        self.slabs: list[list[int]] = []
        for n, length in enumerate(lengths):
            other, chunks = (shared or {}).get(n, (0, 0))
            known = self.slabs[other][:chunks] if chunks else []
            self.slabs.append(known + [order.pop() for _ in range(self.layout.num_chunks(length) - chunks)])
            for token in range(chunks * 64, length):
                fresh = torch.randn(2, kv_heads, 2, width)
                self.data[self.slabs[n][token // 64], :, :, :, token % 64] = fresh.to(self.data.dtype)
        self.pages = open_pages(self.layout, self.data, self.heads)
        rows = torch.randn(max(len(lengths), 2), (self.heads + 2 * kv_heads) * width) * 2
        self.qkv = rows.to(self.data.dtype)

    def batch(self) -> ForwardBatch:
        return pack_batch(
            [
                StepWork([0], length - 1, slabs, "none")
                for length, slabs in zip(self.lengths, self.slabs, strict=True)
            ]
        )

    def decode(self, window: int = 0) -> torch.Tensor:
        """Decode the last token of every sequence, layer 1: [sequences, heads, width]."""
        out = torch.full((len(self.qkv), self.heads * self.width), float("nan")).to(self.data.dtype)
        self.pages.decode(1, self.qkv, self.pages.load(self.batch()), window, out)
        return out[: len(self.lengths)].view(-1, self.heads, self.width)

    def check(self, window: int = 0) -> None:
        found = self.decode(window)
        relative, absolute = CLOSE[self.layout.dtype]
        for n, length in enumerate(self.lengths):
            keys, values = reference_attention.gather_pages(self.data, 1, self.slabs[n], length)
            q = self.qkv[n, : self.heads * self.width].view(1, self.heads, self.width)
            expected = reference_attention.attend_reference(q, keys, values, window)[0]
            torch.testing.assert_close(found[n].double(), expected, rtol=relative, atol=absolute)

    def check_prefill(self, spans: list[tuple[int, int]], window: int) -> None:
        """Prefill each sequence's last tokens, spans (start, tokens), layer 1."""
        batch = pack_batch(
            [
                StepWork([0] * count, start, slabs, "none")
                for (start, count), slabs in zip(spans, self.slabs, strict=True)
            ]
        )
        qkv = torch.randn(len(batch.tokens), self.qkv.shape[1])
        out = torch.full((len(qkv), self.heads * self.width), float("nan"))
        self.pages.prefill(1, qkv, self.pages.load(batch), window, out)
        for span, slabs, length in zip(batch.spans, self.slabs, self.lengths, strict=True):
            keys, values = reference_attention.gather_pages(self.data, 1, slabs, length)
            rows = slice(span.row, span.row + span.count)
            q = qkv[rows, : self.heads * self.width].view(span.count, self.heads, self.width)
            expected = reference_attention.attend_reference(q, keys, values, window)
            torch.testing.assert_close(
                out[rows].view(expected.shape).double(), expected, rtol=2e-5, atol=2e-6
            )

    def check_write(self, normed: bool) -> None:
        """Write the tokens at 127 to 129 of the only sequence, which has 130, and 2 KV heads in groups of 2."""
        before = self.data.clone()
        step = self.pages.load(pack_batch([StepWork([0] * 3, 127, self.slabs[0], "none")]))
        qkv = torch.randn(3, 8 * self.width)
        plain = qkv.view(3, 8, self.width).clone()
        angles = torch.rand(130, self.width // 2)
        norms = (
            (torch.rand(self.width), torch.rand(self.width)) if normed else (torch.empty(0), torch.empty(0))
        )
        self.pages.write(1, qkv, step, (angles.cos(), angles.sin()), norms, 1e-6)
        heads = plain[:, :6]
        if normed:
            weight = torch.cat([norms[0].expand(4, -1), norms[1].expand(2, -1)])
            heads = heads * (heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        first, second = heads.chunk(2, dim=-1)
        cos, sin = angles[127:].cos()[:, None], angles[127:].sin()[:, None]
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        torch.testing.assert_close(qkv.view(3, 8, self.width)[:, :6], rotated)
        keys, values = reference_attention.gather_pages(self.data, 1, self.slabs[0], 130)
        torch.testing.assert_close(keys[:, 127:].transpose(0, 1), rotated[:, 4:])
        assert torch.equal(values[:, 127:].transpose(0, 1), plain[:, 6:])
        for token in range(127, 130):
            before[self.slabs[0][token // 64], 1, :, :, token % 64] = 0
            self.data[self.slabs[0][token // 64], 1, :, :, token % 64] = 0
        assert torch.equal(
            before.view(torch.int32), self.data.view(torch.int32)
        )  # as bits: most of it is nan
