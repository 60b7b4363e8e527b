"""What a decoder keeps on a device and takes of the host to get there, counted, against the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.request import SamplingParams
from engine.gpu import attention, rowwise
from engine.gpu.batch import StepSizes, view_step
from engine.gpu.decoder import GpuDecoder
from engine.gpu.model_runner import load_kernels
from engine.gpu.sampler import DeviceSampler
from engine.gpu.triton_kernels import TritonKernels
from engine.model import weights
from engine.model.architecture import ModelConfig
from engine.model.checkpoint import Checkpoint
from engine.model.device_plan import (
    DeviceNeeds,
    DeviceShare,
    device_weight_bytes,
    plan_device_memory,
    predict_needs,
)
from engine.model.device_step import PADDED_ITEMS, SAMPLED_LOGITS, forward_bytes, graph_bytes, sampler_bytes
from engine.model.weights import WeightReader
from engine.sampling.sampler import Sampler, SamplerRow
from kvcache.layout import KvLayout
from kvcache.pool import slab_shape
from tests.support.counted_memory import CountedMemory
from tests.support.factories import make_folder
from tests.support.gpu_pages import LLAMA_8B, Random

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def tensors(value: object) -> Iterator[torch.Tensor]:
    """All tensors within a decoder or a part of it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tied"), [("bfloat16", True), ("float32", False)])
def test_weights_are_as_large_as_predicted(family: str, dtype: str, tied: bool, tmp_path: Path) -> None:
    config = Checkpoint.resolve(str(make_folder(tmp_path, family, tie_word_embeddings=tied))).config
    assert config.tied == tied
    kind: torch.dtype = getattr(torch, dtype)
    decoder = GpuDecoder(config, Random(), 256, torch.device("cpu"), kind, load_kernels(emulated=True))
    parts = [decoder.embedding, decoder.layers, decoder.norm, decoder.head, decoder.rotary]
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in tensors(parts) if tensor.nbytes}
    assert sum(kept.values()) == device_weight_bytes(config, dtype, 256)
    assert device_weight_bytes(replace(config, layers=2 * config.layers), dtype, 256) > sum(kept.values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_go_straight_to_the_device(
    dtype: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is "meta", which has no memory, so all that is counted on the CPU passes through the host."""
    monkeypatch.setattr(weights, "PIECE_BYTES", 4096)
    checkpoint = Checkpoint.resolve(str(make_folder(tmp_path, tie_word_embeddings=tied)))
    config, kind = checkpoint.config, getattr(torch, dtype)
    with CountedMemory() as counted, WeightReader(checkpoint.weights) as reader:
        decoder = GpuDecoder(config, reader, 16, torch.device("meta"), kind, load_kernels(emulated=True))
    kept = device_weight_bytes(config, dtype, 16)
    assert counted.held["meta"] == counted.peak["meta"] == kept, (
        "no tensor is there twice, not even for a while"
    )
    assert counted.held["cpu"] == 0 and counted.peak["cpu"] <= 2 * 4096 < kept / 8
    assert (decoder.head.weight is decoder.embedding) == tied


class Launched:
    """A kernel that does nothing, in place of one that is launched on a grid."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **constants: None


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels allocate nothing themselves, so without them all allocations are there still."""
    for module, names in (
        (attention, ("_write", "_decode", "_merge", "_prefill")),
        (rowwise, ("_add_norm", "_gate")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Launched())


def count_forward(decoder: GpuDecoder, layout: KvLayout, sizes: StepSizes) -> int:
    """The peak of a step of these sizes on a device that has shapes only."""
    data = torch.empty(1, *slab_shape(layout)[0], dtype=decoder.dtype, device="meta")
    pages = TritonKernels().open_attention(layout, data, decoder.config, None)
    step = view_step(torch.empty(sizes.numbers, dtype=torch.int32, device="meta"), sizes)
    with CountedMemory() as counted:
        decoder.forward(step, pages)
    return int(counted.peak["meta"])


SHAPES = {
    "8B": replace(LLAMA_8B, layers=2, windows=(0, 0)),
    "tied": replace(
        LLAMA_8B, layers=2, windows=(0, 0), hidden=2048, mlp=5632, tied=True, heads=16, kv_heads=4
    ),
    "wide heads": replace(LLAMA_8B, layers=2, windows=(0, 0), hidden=1024, mlp=1024, heads=32, kv_heads=32),
}


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_steps_take_what_is_predicted(config: ModelConfig, dtype: str) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, dtype)
    with CountedMemory() as counted:
        decoder = GpuDecoder(config, Random(), 8192, torch.device("meta"), kind, TritonKernels())
    weight_bytes = counted.held["meta"]
    # 4,096 tokens, of which one prompt is all but 255; and a decode step of 256 sequences.
    prefill = count_forward(decoder, layout, StepSizes(4096, 256, 0, 0, 64, 1, 128))
    sizes = [StepSizes(256, 256, 256, items, 0, 256, 128) for items in PADDED_ITEMS]
    graph = max(count_forward(decoder, layout, one) for one in sizes) + 256 * config.vocab * 4
    assert prefill == pytest.approx(forward_bytes(config, dtype, 4096, 256), rel=0.03)
    assert graph == pytest.approx(graph_bytes(config, layout, 8192, 256), rel=0.03)
    reckoned = predict_needs(config, layout, 8192, step_tokens=4096, step_rows=256)
    drawn = 256 * config.vocab * 4 + sampler_bytes(config.vocab)
    counted_needs = DeviceNeeds(weight_bytes, graph + max(prefill, drawn))
    assert counted_needs.step_bytes == pytest.approx(reckoned.step_bytes, rel=0.03)

    def plan_pool(needs: DeviceNeeds) -> int:
        # A device that steps and weights nearly fill.
        share = DeviceShare(2 * needs.fixed_bytes + (1 << 30))
        return plan_device_memory(
            "m", config, layout, share, needs, max_model_len=8192, kv_bytes=None
        ).kv_bytes

    assert plan_pool(counted_needs) == pytest.approx(plan_pool(reckoned), rel=0.03)


@pytest.mark.parametrize(
    "asked", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 2000, "top_p": 0.5}, {}], ids=str
)
def test_drawing_takes_no_more_than_is_predicted(asked: dict[str, Any]) -> None:
    vocab, host = 128256, Sampler(128256)
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(0))
    rows = [SamplerRow([0], [], SamplingParams(9, seed, **asked), vocab, None) for seed in range(40)]
    with CountedMemory() as counted:
        DeviceSampler(host, "cpu", SAMPLED_LOGITS).sample(list(torch.split(logits, 1)), rows)
    assert counted.peak["cpu"] <= sampler_bytes(vocab)
    if "top_p" in asked:
        assert counted.peak["cpu"] >= 0.7 * sampler_bytes(vocab), (
            "these take the most, with room for a GPU's own sort"
        )
