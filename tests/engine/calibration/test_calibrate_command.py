"""`diptych calibrate`: what it writes, what it refuses, and that an interrupt leaves nothing."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.errors import ConfigError, DiptychError, ModelError
from engine.model.calibration_file import load_calibration, load_surrogate
from engine.model.checkpoint import Checkpoint
from kvcache.codecs.calibration import FILE_NAME
from kvcache.eviction.zap import surrogate_path
from services.cli.calibrate import command
from services.cli.calibrate.command import choose_device, run_calibration
from services.cli.calibrate.options import CalibrateOptions

TINY = Path(__file__).parents[3] / "models" / "tiny"
SMALL = CalibrateOptions(samples=2, tokens=64, device="cpu", windows=1, no_quality=True, as_json=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that is not the embedded one, as far as its place tells."""
    copy = Path(shutil.copytree(TINY, tmp_path / "model"))
    (copy / FILE_NAME).unlink()
    surrogate_path(copy / FILE_NAME).unlink()
    return copy


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    lines = (TINY / "README.md").read_text(encoding="utf-8").split("\n\n")
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def refused(options: CalibrateOptions, kind: type[DiptychError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        run_calibration(options)
    assert len(caught.value.lines()) <= 6
    return "\n".join(caught.value.lines())


def test_the_same_text_gives_the_same_bytes_and_quality_stays_outside_the_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    figures: list[dict[str, Any]] = []
    for path in paths:
        assert run_calibration(replace(SMALL, out=path, no_quality=path != paths[2])) == 0
        shown = capsys.readouterr()
        figures.append(json.loads(shown.out))
        assert "layers 1 to 6 of 6: 2 of 2 sequences" in shown.err
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    assert figures[0]["digest"] == figures[2]["digest"] and figures[0]["quality"] is None
    quality = figures[2]["quality"]
    assert quality["windows"] == 1 and quality["codecs"]["nuq2"]["ppl_delta_pct"] > 0
    found = load_calibration(Checkpoint.resolve(str(TINY)), str(paths[2]))
    assert found is not None and (found.digest, found.tokens) == (figures[2]["digest"], 2 * 63)
    surrogates = [surrogate_path(path) for path in paths]
    assert (
        len({path.read_bytes() for path in surrogates}) == 1
        and len({one["zap"]["digest"] for one in figures}) == 1
    )
    weights = load_surrogate(Checkpoint.resolve(str(TINY)), str(paths[2]))
    assert weights is not None and (weights.digest, weights.tokens) == (figures[0]["zap"]["digest"], 2 * 64)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (*paths, *surrogates)}


def test_another_model_is_calibrated_on_a_text_and_beside_its_weights(folder: Path, text: Path) -> None:
    options = replace(SMALL, model=str(folder), text=text, group=64)
    assert run_calibration(options) == 0
    found = load_calibration(Checkpoint.resolve(str(folder)))
    assert found is not None and found.group == 64
    before = (folder / FILE_NAME).read_bytes()
    assert f"{FILE_NAME} is there already" in refused(replace(options, group=32))
    assert (folder / FILE_NAME).read_bytes() == before
    (folder / FILE_NAME).unlink()
    assert "kvquant.zap is there already" in refused(options)
    assert run_calibration(replace(options, group=32, force=True)) == 0
    assert (folder / FILE_NAME).read_bytes() != before


def test_a_model_without_a_text_is_refused(folder: Path) -> None:
    lines = refused(replace(SMALL, model=str(folder)))
    assert "needs a text" in lines and "--text FILE" in lines and not (folder / FILE_NAME).exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"group": 48}, "use one of 32, 64, 128"),
        ({"group": 256}, "--group 256 does not fit this model"),
        ({"tokens": 2049}, "it has 2048 tokens"),
        ({"device": "tpu"}, "use one of auto, cpu, cuda"),
        ({"samples": 4096, "tokens": 2048}, "there is too little text"),
        ({"text": Path("/absent/text.txt")}, "--text /absent/text.txt cannot be read"),
        ({"out": Path("/absent/x.safetensors")}, "--out /absent/x.safetensors cannot be written"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    assert said in refused(replace(SMALL, **({"out": tmp_path / "x.safetensors"} | changed)))
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_fit_in_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "available_memory", lambda: 1 << 30)
    assert "is too large" in refused(replace(SMALL, out=tmp_path / "x.safetensors"), ModelError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="cuda cannot be used"):
        choose_device("cuda")


def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    arguments = ["calibrate", "--samples", "400", "--tokens", "64", "--out", str(tmp_path / "x.safetensors")]
    with subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "of 400 sequences" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
        assert process.wait(120) != 0 and "Traceback" not in rest
    assert not list(tmp_path.iterdir())
