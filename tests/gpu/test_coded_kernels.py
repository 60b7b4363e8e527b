"""The compiled kernels for coded pages at Llama-3.1-8B's shape: bytes of the NumPy codecs, and attention over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip(
    "engine.gpu.attention",
    reason="triton is not installed (it has wheels for Linux only)",
    exc_type=ImportError,
)

from engine.batching.batch import pack_batch
from engine.gpu.coded.attention import CodedGpuAttention
from engine.gpu.launch import LaunchTuning
from engine.step_work import StepWork
from tests.support import gpu_pages, reference_attention

pytestmark = pytest.mark.gpu

SHAPE = gpu_pages.LLAMA_8B
CODECS = ("nuq4-1%", "nuq3", "nuq2-1%", "int8", "int4", "tq4", "tq3", "tq-k8v4", "fp16", "bf16")


@pytest.mark.parametrize("name", CODECS)
def test_bytes_and_attention_are_those_of_the_codec(device: torch.device, name: str) -> None:
    check_codec(gpu_pages.Place(device, layers=1), name)


def check_codec(place: gpu_pages.Place, name: str) -> None:
    """Codes of 64 random tokens, and the last one's attention to all of them."""
    torch.manual_seed(0)
    pages = gpu_pages.open_pages(SHAPE, place, name, 2, LaunchTuning.of(place.device))
    assert isinstance(pages, CodedGpuAttention) and pages.layout.codec_id is not None
    kv_heads, width, none = SHAPE.kv_heads, SHAPE.head_dim, torch.empty(0, device=place.device)
    rows = torch.randn(64, (SHAPE.heads + 2 * kv_heads) * width).to(pages._angles[0].device)
    rows = rows.to(getattr(torch, place.dtype))
    step = pages.load(pack_batch([StepWork([0] * 64, 0, [1], "none")]))
    pages.write(0, rows, step, (none, none), (none, none), 1e-5)
    codec = gpu_pages.made_up_codec(pages.layout.codec_id, pages.layout)
    stored = rows[:, SHAPE.heads * width :].float().cpu().numpy().reshape(64, 2, kv_heads, width)
    for number, found in enumerate(pages.data[1, 0].cpu().numpy()):
        part = slice(number * codec.shape.heads, (number + 1) * codec.shape.heads)
        expected = np.zeros_like(found)
        codec.encode_rows(stored[:, 0, part], stored[:, 1, part], expected)
        assert np.array_equal(found, expected)
    last = pages.load(pack_batch([StepWork([0], 63, [1], "none")]))
    query, out = (
        rows[63:].repeat(2, 1),
        torch.zeros(2, SHAPE.heads * width, device=rows.device).to(rows.dtype),
    )
    pages.decode(0, query, last, 0, out)
    keys, values = pages.expand_spans(0, step, 0, torch.float32)[0].cpu().unbind(dim=1)
    q = rows[63:, : SHAPE.heads * width].cpu().view(1, SHAPE.heads, width)
    reference = reference_attention.attend_reference(q, keys, values)[0].view(-1)
    error = (out[0].cpu().double() - reference).abs().max() / reference.abs().max()
    assert error <= 1e-2
