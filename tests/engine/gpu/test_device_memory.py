"""What a decoder keeps on a device and takes of the host to get there, counted, against the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch

from engine.gpu.decoder import GpuDecoder
from engine.gpu.model_runner import load_kernels
from engine.model import weights
from engine.model.checkpoint import Checkpoint
from engine.model.device_plan import device_weight_bytes
from engine.model.weights import WeightReader
from tests.support.counted_memory import CountedMemory
from tests.support.factories import make_folder
from tests.support.gpu_pages import Random

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
