"""The benchmark of decoding on GPUs, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "engine.gpu.attention",
    reason="triton is not installed (it has wheels for Linux only)",
    exc_type=ImportError,
)

from benchmarks import gpu_decode
from tests.support import gpu_pages


def test_the_gpu_benchmark_measures_all_it_says(tmp_path: Path) -> None:
    """Its arithmetic and its calls, on a toy shape: on this machine the figures themselves mean nothing."""
    shape = replace(
        gpu_pages.LLAMA_8B,
        layers=1,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=32,
        vocab=50,
        windows=(0,),
    )
    place = gpu_pages.Place(torch.device("cpu"), "float32", rounds=1, copy_bytes=1 << 12, layers=1)
    with torch.no_grad():
        found = gpu_decode.figures(shape, place, batch=2, tokens=64, context=70)
        saved = gpu_decode.profile(shape, place, [1], [70], [65])
    coded = {f"coded_{codec}" for codec in gpu_decode.CODECS}
    assert set(found) == {"attention_ratio", "tpp_4096", "tpp_4096_pages", "step_ratio", "run_ratio", *coded}
    assert all(value > 0 for value in found.values())
    assert set(saved) == {"device", "dtype", "tp", "pp", "decode", "prefill"}
