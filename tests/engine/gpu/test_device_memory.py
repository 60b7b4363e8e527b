"""The arithmetic of a device's memory against the tensors that a decoder keeps there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch

from engine.gpu.decoder import GpuDecoder
from engine.gpu.model_runner import load_kernels
from engine.model.checkpoint import Checkpoint
from engine.model.device_plan import device_weight_bytes
from tests.support.factories import make_folder
from tests.support.gpu_pages import Place, Random

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
    place = Place(torch.device("cpu"), dtype)
    kind: torch.dtype = getattr(torch, dtype)
    decoder = GpuDecoder(config, Random(place), 256, place.device, kind, load_kernels(emulated=True))
    parts = [decoder.embedding, decoder.layers, decoder.norm, decoder.head, decoder.rotary]
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in tensors(parts) if tensor.nbytes}
    assert sum(kept.values()) == device_weight_bytes(config, dtype, 256)
    assert device_weight_bytes(replace(config, layers=2 * config.layers), dtype, 256) > sum(kept.values())
