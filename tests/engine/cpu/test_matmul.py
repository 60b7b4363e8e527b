"""The matrix product: right for every way to store weights, every edge of its blocks, and any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.cpu.linear import MIN_THREADED_WEIGHTS, NARROW_DTYPES, PackedLinear, narrowest_dtype
from engine.cpu.matmul import PANEL_OUTPUTS, TILE_ROWS

DTYPES = {"float32": torch.float32, **NARROW_DTYPES}


@pytest.fixture
def threads() -> Iterator[None]:
    """Three compute threads for one test."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def weights(kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """Random ones that `kind` holds without loss, and no shorter type does."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    return torch.randn(outputs, inputs, generator=generator).to(DTYPES[kind]).float()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(
    "outputs",
    [1, PANEL_OUTPUTS - 1, PANEL_OUTPUTS, PANEL_OUTPUTS + 1, 3 * PANEL_OUTPUTS, 5 * PANEL_OUTPUTS // 2],
)
def test_it_is_the_product_of_the_given_weights(kind: str, outputs: int) -> None:
    for inputs in (1, 7, 33, 256):
        weight, bias = weights(kind, outputs, inputs), torch.randn(outputs)
        plain, biased = PackedLinear.pack(weight.clone()), PackedLinear.pack(weight.clone(), bias)
        assert plain.kind == kind or inputs * outputs < 8  # a few numbers may fit a shorter one by chance
        for rows in (*range(1, 2 * TILE_ROWS + 2), 100):
            x = torch.randn(rows, inputs)
            expected = x.double() @ weight.double().T
            torch.testing.assert_close(plain(x).double(), expected, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(biased(x).double(), expected + bias.double(), rtol=1e-5, atol=1e-4)


def test_how_weights_are_stored_does_not_change_a_bit() -> None:
    weight = weights("bfloat16", 3 * PANEL_OUTPUTS + 5, 129)
    short = PackedLinear.pack(weight)
    odd = weight.clone()
    odd[0, 0] = 1 / 3
    long = PackedLinear.pack(odd)
    assert (short.kind, long.kind) == ("bfloat16", "float32")
    assert long.weight.nbytes == 2 * short.weight.nbytes
    x = torch.randn(9, 129)
    assert torch.equal(short(x)[:, 1:], long(x)[:, 1:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-45, 1e-7, 70000.0, 3e38])
def test_what_short_types_cannot_hold_stays(value: float) -> None:
    weight = torch.ones(2, 2)
    weight[1, 1] = value
    held = weight.to(DTYPES[narrowest_dtype(weight)]).float()
    assert torch.equal(held.nan_to_num(nan=5), weight.nan_to_num(nan=5))


@pytest.mark.usefixtures("threads")
def test_threads_share_the_outputs() -> None:
    inputs = 256
    outputs = MIN_THREADED_WEIGHTS // inputs + PANEL_OUTPUTS + 3
    weight = weights("float32", outputs, inputs)
    shared = PackedLinear.pack(weight.clone())
    torch.set_num_threads(1)
    alone = PackedLinear.pack(weight)
    for rows in (1, 5, 40):
        x = torch.randn(rows, inputs)
        assert torch.equal(shared(x), alone(x))


def test_it_refuses_what_does_not_fit() -> None:
    linear = PackedLinear.pack(torch.randn(8, 8))
    for rows, inputs in ((0, 8), (2, 7)):
        with pytest.raises(AssertionError):
            linear(torch.randn(rows, inputs))
