"""The quality benchmark measures what it says: attention reads coded keys and values, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.kv_quality import FOLDER, count_answers, draw_plot
from benchmarks.kv_schemes import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    WIDTH,
    fit_samples,
    fp8_scheme,
    list_schemes,
    per_token_scheme,
)
from engine.calibration.fitting import LayerSample
from engine.calibration.kv_capture import capture_layers
from engine.calibration.kv_quality import (
    CodingScheme,
    coded_attention,
    compare_losses,
    complete_id,
    measure_losses,
    measure_quality,
    model_forward,
    rotate_keys,
    score_windows,
)
from kvcache.codecs.calibration import CALIBRATED_NAMES
from kvcache.codecs.codec_id import CODE_BITS
from kvcache.codecs.page import Floats
from kvcache.codecs.registry import build_codec
from models.recall import RecallSeries
from tests.support.engine_model import EngineModel
from tests.unit.codecs import oracles


@pytest.fixture(scope="module")
def tiny() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def windows() -> list[torch.Tensor]:
    return list(torch.randint(300, 4096, (2, 80), generator=torch.Generator().manual_seed(3)))


@pytest.fixture(scope="module")
def samples(tiny: Any, windows: list[torch.Tensor]) -> list[LayerSample]:
    return capture_layers(tiny, windows, range(LAYERS))


def measure(model: Any, scheme: CodingScheme, windows: list[torch.Tensor]) -> list[float]:
    with coded_attention(model, scheme):
        losses: list[float] = measure_losses(model, windows).tolist()
    return losses


def test_raw_changes_no_bit_and_every_scheme_something(
    tiny: Any, windows: list[torch.Tensor], samples: list[LayerSample]
) -> None:
    exact = measure_losses(tiny, windows).tolist()
    found = {
        scheme.name: measure(tiny, scheme, windows)
        for scheme in list_schemes(fit_samples(samples, CALIBRATED_NAMES), samples)
    }
    assert found.pop("raw") == exact == measure_losses(tiny, windows).tolist()
    assert {*CODE_BITS} - {"raw"} < found.keys()
    assert all(losses != exact for losses in found.values())
    assert len({tuple(losses) for losses in found.values()}) == len(found)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("side", [0, 1])
def test_attention_reads_what_the_scheme_gives(
    tiny: Any, windows: list[torch.Tensor], rotated: bool, side: int
) -> None:
    """The last token alone is changed: only its own prediction, which is not measured, may move."""
    same = CodingScheme("same", 32, rotated, lambda layer, keys, values: (keys, values))

    def change(place: int) -> CodingScheme:
        def code(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
            assert keys.shape == values.shape == (80, KV_HEADS, HEAD_DIM)
            seen = keys.copy(), values.copy()
            seen[side][place] += 1
            return seen

        return replace(same, code=code)

    exact = measure_losses(tiny, windows).tolist()
    assert measure(tiny, same, windows) == exact == measure(tiny, change(79), windows)
    assert measure(tiny, change(40), windows) != exact


@pytest.mark.parametrize("name", ["nuq4-1%", "nuq3", "nuq2-1%"])
def test_codes_of_the_embedded_model_are_those_of_the_formula(samples: list[LayerSample], name: str) -> None:
    calibration = fit_samples(samples, (name,))
    codec_id = complete_id(name, calibration)
    per_side = 1 if name.endswith("%") else 0
    for layer, sample in enumerate(samples):
        codec, constants = (
            build_codec(codec_id, HEAD_DIM, calibration, layer),
            calibration.constants[name][layer],
        )
        rows = [x[:12].reshape(-1, KV_HEADS, HEAD_DIM) for x in (sample.keys, sample.values)]
        page = np.zeros(codec.page_bytes, np.uint8)
        codec.encode_rows(rows[0], rows[1], page)
        keys, values = (x.reshape(-1, WIDTH) for x in codec.expand_page(page, 12))
        for row in range(12):
            key = oracles.nuq_key(sample.keys[row], constants, 2 * per_side)
            value = oracles.nuq_value(sample.values[row], constants.values, per_side)
            assert np.array_equal(keys[row], key[2]) and np.array_equal(values[row], value[2])


def test_intervals_are_of_pairs() -> None:
    exact = np.array([1.0, 3.0, 2.0, 5.0])
    delta, interval = compare_losses(exact + 0.01, exact)
    assert delta == pytest.approx(1.005, abs=1e-3)
    assert interval == pytest.approx((1.005, 1.005), abs=1e-3)


def test_the_quality_of_a_calibration_is_that_of_its_codecs(
    tiny: Any, windows: list[torch.Tensor], samples: list[LayerSample]
) -> None:
    """Codecs with calibration that it has no constants for are left out; the others are all measured."""
    names, calibration = list[str](), fit_samples(samples, ("nuq2-1%",))
    quality = measure_quality(tiny, windows, calibration, names.append)
    assert list(quality.codecs) == names and quality.windows == 2 and quality.tokens == 80
    assert {"nuq2-1%"} == {name for name in names if name.startswith("nuq")}
    assert {name for name in CODE_BITS if not name.startswith("nuq")} - {"raw"} < {*names}
    (scheme,) = (
        one for one in list_schemes(fit_samples(samples, CALIBRATED_NAMES), samples) if one.name == "nuq2-1%"
    )
    exact, coded = measure_losses(tiny, windows), np.array(measure(tiny, scheme, windows))
    assert quality.perplexity == pytest.approx(np.exp(exact.mean()), rel=1e-5)
    assert (quality.codecs["nuq2-1%"].ppl_delta_pct, quality.codecs["nuq2-1%"].interval) == compare_losses(
        coded, exact
    )
    assert quality.codecs["nuq2-1%"].bits == 2.5


def test_int_per_token_has_one_scale_per_token() -> None:
    rows = np.arange(WIDTH, dtype=np.float32).reshape(1, KV_HEADS, HEAD_DIM)
    coded, _ = per_token_scheme(2).code(0, rows, rows)
    assert np.allclose(np.unique(coded), np.linspace(0, WIDTH - 1, 4)) and per_token_scheme(2).bits == 2.25


def test_fp8_has_three_bits_below_the_first_one_and_one_scale_per_tensor() -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 50, WIDTH)).astype(np.float32) * np.array(
        [[[5.0]], [[0.01]]], np.float32
    )
    sample = LayerSample(keys, values, np.ones_like(keys), np.ones_like(values))
    shape = (50, KV_HEADS, HEAD_DIM)
    coded = fp8_scheme([sample]).code(0, keys.reshape(shape), values.reshape(shape))
    for found, exact in zip(coded, (keys, values), strict=True):
        assert found.shape == shape
        large = np.abs(exact) > np.abs(exact).max() / 1_000
        error = np.abs(found.reshape(exact.shape) - exact)[large] / np.abs(exact)[large]
        assert 0.02 < error.max() <= 1 / 16 + 1e-6
    assert np.abs(coded[1]).max() == pytest.approx(np.abs(values).max(), rel=1e-6)
    # Beyond the samples, numbers become the largest one.
    _, far = fp8_scheme([sample]).code(0, keys.reshape(shape), 100 * values.reshape(shape))
    assert np.abs(far).max() == pytest.approx(np.abs(values).max(), rel=1e-6)


def test_keys_are_rotated_as_the_model_does(tiny: Any, windows: list[torch.Tensor]) -> None:
    """With exact keys and values for all tokens, nothing changes, whatever a scheme makes of them."""

    def destroy(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        return np.zeros_like(keys), np.zeros_like(values)

    exact = measure_losses(tiny, windows)
    for rotated in (True, False):
        with coded_attention(tiny, CodingScheme("none", 0, rotated, destroy), exact_tokens=80):
            assert np.allclose(measure_losses(tiny, windows), exact, atol=1e-4)
        with coded_attention(tiny, CodingScheme("none", 0, rotated, destroy), exact_tokens=79):
            choices = score_windows(model_forward(tiny), windows, 79)
        assert np.allclose(choices.losses, score_windows(model_forward(tiny), windows, 79).losses, atol=1e-4)
        with coded_attention(tiny, CodingScheme("none", 0, rotated, destroy), exact_tokens=40):
            assert not np.allclose(measure_losses(tiny, windows), exact, atol=1e-2)
    keys = torch.randn(1, 3, WIDTH)
    rotated_keys = rotate_keys(tiny, keys, HEAD_DIM)
    assert rotated_keys.shape == (1, KV_HEADS, 3, HEAD_DIM)
    assert torch.equal(rotated_keys[0, :, 0], keys[0, 0].reshape(KV_HEADS, HEAD_DIM))


def test_scores_are_of_the_places_that_are_not_given(tiny: Any, windows: list[torch.Tensor]) -> None:
    with torch.no_grad():
        logits = tiny(windows[0][None]).logits[0]
    found = score_windows(model_forward(tiny), windows[:1], 30)
    assert found.choices.tolist() == [logits[29:-1].argmax(-1).tolist()]
    expected = torch.nn.functional.cross_entropy(logits[29:-1], windows[0][30:]).item()
    assert found.losses[0] == pytest.approx(expected, rel=1e-5)


def test_an_answer_counts_if_greedy_decoding_gives_all_of_it(tiny: Any) -> None:
    ids = torch.randint(300, 4096, (20,), generator=torch.Generator().manual_seed(5)).tolist()
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(tiny(torch.tensor([ids])).logits[0, -1].argmax()))
    engine, places = EngineModel(FOLDER, "", None), [(20, 22), (23, 26)]
    cases = {
        (1, 1): RecallSeries(ids, places),
        (0, 0): RecallSeries([*ids[:21], ids[21] ^ 1], [(20, 22)]),
        (1, 0): RecallSeries([*ids[:25], ids[25] ^ 1], places),
    }
    for expected, series in cases.items():
        assert count_answers(model_forward(tiny), series) == engine.count_answers(series) == expected


def test_the_plot_has_a_point_per_codec_that_loses(tmp_path: Path) -> None:
    row = {"bits": 4.5, "bytes_per_token": 864.0, "ppl_delta_pct": 0.6}
    figures = {"models": {"embedded": {"codecs": {"nuq4-1%": row, "raw": row | {"ppl_delta_pct": 0.0}}}}}
    draw_plot(figures, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("PathCollection") == 1


@pytest.mark.parametrize("name", ["raw", "fp16", "int8", "nuq4-1%", "nuq2", "tq3"])
@torch.no_grad()
def test_the_engine_loses_what_the_simulation_says(
    tiny: Any, windows: list[torch.Tensor], samples: list[LayerSample], name: str
) -> None:
    """Windows longer than a chunk, so that a second page is read.

    Sums in another order, as on another processor, may move a number to the next code. Every later token sees that, so
    what is compared is how far apart the two are, beside what the codec changes.
    """
    full = fit_samples(samples, CALIBRATED_NAMES)
    (scheme,) = (one for one in list_schemes(full, samples) if one.name == name)
    engine = EngineModel(FOLDER, "" if name == "raw" else str(complete_id(name, full)), full)
    forward = model_forward(tiny)
    exact = [forward(window) for window in windows]
    with coded_attention(tiny, scheme):
        simulated = [forward(window) for window in windows]
    found = [engine.forward(window) for window in windows]
    assert rms_apart(found, simulated) <= max(1e-3, 0.5 * rms_apart(simulated, exact))


def rms_apart(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Root mean square of the differences between logits."""
    return float((torch.stack(some) - torch.stack(others)).square().mean().sqrt())
