"""Calibrating a model: the file belongs to its weights, in any folder, and no loader takes it for weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from diptych.errors import ModelError
from engine.calibration.kv_calibration import calibrate_model
from engine.model.calibration_file import identify_model, load_calibration
from engine.model.checkpoint import Checkpoint
from kvcache.codecs.calibration import (
    CALIBRATED_NAMES,
    FILE_NAME,
    Calibration,
    serialise_calibration,
    write_calibration,
)

TINY = Path(__file__).parents[3] / "models" / "tiny"


@pytest.fixture(scope="module")
def tiny() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    return model.eval()


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(300, 4096, (tokens,), generator=generator) for tokens in (40, 60)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model without its calibration."""
    return Path(
        shutil.copytree(TINY, tmp_path / "copy", ignore=lambda *_: [FILE_NAME] if _[0] == str(TINY) else [])
    )


def test_layers_may_be_captured_in_several_runs(tiny: Any) -> None:
    """What memory has room for decides how often the model runs, and nothing else."""
    identity, reports = identify_model(Checkpoint.resolve(str(TINY))), list[tuple[range, int]]()
    at_once = calibrate_model(tiny, sequences(), identity, 64, names=("nuq3-1%",))
    two_layers = 16 * 98 * 128 * 2
    parts = calibrate_model(
        tiny, sequences(), identity, 64, names=("nuq3-1%",), max_sample_bytes=two_layers,
        progress=lambda layers, done: reports.append((layers, done)),
    )  # fmt: skip
    assert serialise_calibration(parts) == serialise_calibration(at_once)
    assert (at_once.tokens, at_once.group, list(at_once.constants)) == (98, 64, ["nuq3-1%"])
    assert reports == [(range(first, first + 2), done) for first in (0, 2, 4) for done in (1, 2)]


def test_a_calibration_is_found_beside_the_weights_that_it_names(
    tiny: Any, folder: Path, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.resolve(str(folder))
    before = checkpoint.fingerprint()[0]
    assert load_calibration(checkpoint) is None
    made = calibrate_model(tiny, sequences(), identify_model(checkpoint), 128, names=("nuq4",))
    write_calibration(made, folder / FILE_NAME)
    again = Checkpoint.resolve(str(folder))
    found = load_calibration(again)
    assert found is not None and found.digest == made.digest
    assert again.fingerprint()[0] == before and again.hash_weights() == checkpoint.hash_weights()
    # The same weights elsewhere, and the file named.
    elsewhere = Checkpoint.resolve(str(shutil.copytree(folder, tmp_path / "elsewhere")))
    named = load_calibration(elsewhere, str(folder / FILE_NAME))
    assert named is not None and named.digest == made.digest
    with pytest.raises(ModelError, match="cannot be read"):
        load_calibration(elsewhere, str(tmp_path / "absent"))


def test_other_weights_refuse_it(tiny: Any, folder: Path) -> None:
    checkpoint = Checkpoint.resolve(str(folder))
    made = calibrate_model(tiny, sequences(), identify_model(checkpoint), 128, names=("nuq4",))
    write_calibration(made, folder / FILE_NAME)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelError, match="belongs to another model") as caught:
        load_calibration(Checkpoint.resolve(str(folder)))
    assert len(caught.value.lines()) <= 6


def test_the_embedded_model_brings_its_calibration(tiny: Any) -> None:
    """All codecs, and what they cost on text that was held out."""
    found = load_calibration(Checkpoint.resolve(str(TINY)))
    assert found is not None and found.group == 128 and {*found.constants} == {*CALIBRATED_NAMES}
    assert found.tokens == 16 * 2047
    quality = found.quality
    assert quality is not None and {*CALIBRATED_NAMES} < quality.codecs.keys()
    losses = [quality.codecs[name].ppl_delta_pct for name in ("nuq4-1%", "nuq3-1%", "nuq2-1%")]
    assert losses == sorted(losses)
    assert isinstance(found, Calibration) and msgspec.json.encode(quality)
    assert serialise_calibration(found) == (TINY / FILE_NAME).read_bytes()
