"""4-bit weights: the product is that of simulated quantisation to the last bit, at 4.5 bits per weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.errors import ModelError
from engine.cpu.decoder import CpuDecoder
from engine.cpu.linear import PackedLinear, PackedMatrix
from engine.cpu.matmul import PANEL_OUTPUTS
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.weights.decoder_weights import SectionReader, read_weights
from engine.cpu.weights.prepared_folder import PreparedFolder
from engine.model.checkpoint import Checkpoint
from engine.model.weights import WeightReader
from engine.step_work import StepWork
from kvcache.pool import KvPool
from tests.support.factories import make_oracle, save_model

GROUP = 64
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def simulate_int4(weight: torch.Tensor) -> torch.Tensor:
    """What 4-bit groups make of a weight [outputs, inputs], number by number: the reference."""
    out = np.empty(tuple(weight.shape), np.float32)
    for row, line in enumerate(weight.numpy()):
        for first in range(0, len(line), GROUP):
            group = line[first : first + GROUP]
            least = np.float16(group.min())
            scale = np.float16((group.max() - np.float32(least)) / np.float32(15))
            for place, value in enumerate(group):
                step = np.float32(scale) if scale > 0 else np.float32(1)
                code = np.clip(np.rint((value - np.float32(least)) / step), 0, 15)
                out[row, first + place] = np.float32(max(scale, np.float16(0))) * code + np.float32(least)
    return torch.from_numpy(out)


@pytest.mark.parametrize("outputs", [1, PANEL_OUTPUTS - 1, 2 * PANEL_OUTPUTS + 3])
@pytest.mark.parametrize("inputs", [1, 7, 64, 65, 129, 192])
def test_products_equal_simulated_quantisation(outputs: int, inputs: int) -> None:
    torch.manual_seed(outputs * inputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    dense = PackedLinear.pack(weight, bias, "int4")
    exact = PackedLinear.pack(simulate_int4(weight), bias)
    for rows in (1, 2, 3, 4, 5, 9, 40):
        x = torch.randn(rows, inputs)
        assert torch.equal(dense(x), exact(x)), rows


def test_a_weight_takes_four_and_a_half_bits() -> None:
    matrix = PackedMatrix.pack(torch.randn(2 * PANEL_OUTPUTS, 4 * GROUP), kind="int4")
    assert matrix.panels.nbytes * 8 == 4.5 * matrix.outputs * matrix.inputs


def test_normal_weights_lose_nine_percent() -> None:
    torch.manual_seed(0)
    weight = torch.randn(PANEL_OUTPUTS, 16 * GROUP)
    identity = torch.eye(weight.shape[1])
    held = PackedLinear.pack(weight, kind="int4")(identity).T
    error = float((held - weight).square().mean().sqrt() / weight.square().mean().sqrt())
    assert abs(error - 0.090) <= 0.003


@pytest.mark.parametrize("value", [0.0, 0.5, -3.0, 1e-9, 6e4])
def test_constant_groups_stay_numbers(value: float) -> None:
    weight = torch.full((3, 130), value)
    found = PackedLinear.pack(weight, kind="int4")(torch.eye(130)).T
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, weight, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("value", [1e5, -1e5, float("inf"), float("nan")])
def test_weights_that_scales_cannot_hold_are_refused(value: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 3] = value
    with pytest.raises(ModelError, match="4 bits"):
        PackedMatrix.pack(weight, kind="int4")


def test_a_model_computes_as_its_quantised_checkpoint(tmp_path: Path) -> None:
    oracle = make_oracle("qwen2")
    plain = Checkpoint.resolve(str(save_model(tmp_path / "plain", oracle)))
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("weight") and name.split(".")[-2] in PROJECTIONS:
                parameter.copy_(simulate_int4(parameter))
    quantised = Checkpoint.resolve(str(save_model(tmp_path / "quantised", oracle)))
    work = [5, 9, 200, 31, 7]
    found = []
    for prepared in (None, tmp_path):
        with torch.no_grad(), WeightReader(plain.weights) as weights:
            reader = SectionReader(plain.config, weights, layer_kind="int4")
            source = PreparedFolder(tmp_path, plain.packing_identity())
            packed = read_weights(reader) if prepared is None else source.load_weights(reader)
        assert packed.layers[0].qkv.kind == "int4" and packed.head is not None and packed.head.kind != "int4"
        pool = KvPool(plain.layout(), 1)
        runner = CpuModelRunner(CpuDecoder(plain.config, packed, 64), pool, 64)
        found += runner.run([StepWork(work, 0, pool.take_slabs(1, "a"), "all")])
    pool = KvPool(plain.layout(), 1)
    exact = CpuModelRunner.load(quantised, pool, 64)
    (expected,) = exact.run([StepWork(work, 0, pool.take_slabs(1, "a"), "all")])
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)
    plain_runner = CpuModelRunner.load(plain, pool, 64, prepared=tmp_path)
    assert not torch.equal(plain_runner.run([StepWork(work, 0, [0], "all")])[0], expected)
