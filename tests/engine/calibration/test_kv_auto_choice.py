"""`--kv-cache-codec auto`: which classes it stands for, what workers say of their losses, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.errors import ConfigError, DiptychError
from diptych.specs import WorkerSpec
from engine.model.calibration_file import identify_model, load_calibration
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import expand_auto, resolve_kv_classes
from kvcache.codecs.calibration import FILE_NAME, Calibration, CodecQuality, write_calibration
from services.host.model_probe import ProbedModel, ProbeRequest, probe_model
from worker.resolve_model import resolve_model

TINY = Path(__file__).parents[3] / "models" / "tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A copy of the embedded model without its calibration."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns(FILE_NAME))
    return Checkpoint.resolve(str(folder))


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    found = load_calibration(Checkpoint.resolve(str(TINY)))
    assert found is not None and found.quality is not None
    return found


def probe(
    codecs: str, budget: float | None = None, path: Path = TINY, calibration: str = "", **more: Any
) -> ProbedModel:
    sized: dict[str, Any] = {"revision": None, "max_model_len": None, "kv_bytes": 256 << 20, "num_workers": 1}
    named = {
        "kv_cache_codec": codecs,
        "kv_quality_budget": budget,
        "kv_cache_calibration": calibration,
    }
    return probe_model(ProbeRequest(str(path), **sized | named | more))


def refused(codecs: str, budget: float | None = None, **more: Any) -> str:
    with pytest.raises(DiptychError) as caught:
        probe(codecs, budget, **more)
    lines = caught.value.lines()
    assert 1 <= len(lines) <= 6 and all(len(line) < 400 for line in lines)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("budget", "lightest"),
    [
        (None, "nuq4-1%.g128@"),
        (0.0, "bf16"),
        (0.1, "int8.g32"),
        (2.0, "nuq4.g128@"),
        (3.0, "nuq3-1%.g128@"),
        (15.0, "nuq2-1%.g128@"),
    ],
)
def test_auto_is_raw_and_the_lightest_class_within_the_budget(budget: float | None, lightest: str) -> None:
    codecs = probe("auto", budget).kv_cache_codec
    auto, raw, light = codecs.split(",")
    assert (auto, raw) == ("auto", "raw:0.25") and light.startswith(lightest) and light.endswith(":0.75")


def test_of_equal_bytes_it_is_the_one_that_loses_less(
    model: Checkpoint, calibration: Calibration, tmp_path: Path
) -> None:
    """`nuq4-1%` and `tq4` have equal bytes; in this file `tq4` is the better one."""
    quality = calibration.quality
    assert quality is not None
    losses = {
        name: CodecQuality(quality.codecs[name].bits, loss, (0.0, 0.0))
        for name, loss in (("nuq4-1%", 0.6), ("tq4", 0.5), ("int8", 0.1))
    }
    path = tmp_path / "measured.safetensors"
    write_calibration(replace(calibration, quality=replace_codecs(quality, losses)), path)
    assert expand_auto(model, "auto", str(path)) == "auto,raw:0.25,tq4"
    with pytest.raises(ConfigError, match="within --kv-quality-budget 0.05%"):
        expand_auto(model, "auto", str(path), 0.05)
    shown = probe("auto", path=model.path, calibration=str(path)).kv_cache_codec
    assert shown == "auto,raw:0.25,tq4.s0:0.75", "the file is that of the losses, too"


def replace_codecs(quality: Any, codecs: dict[str, CodecQuality]) -> Any:
    return type(quality)(quality.windows, quality.tokens, quality.perplexity, codecs)


def test_workers_say_what_the_file_recorded() -> None:
    found = resolve_kv_classes(
        Checkpoint.resolve(str(TINY)),
        "auto,raw:0.2,nuq4-1%:0.2,tq4:0.2,tq4.s7:0.2,int8.g16:0.2",
    )
    losses = [one.loss_pct for one in found]
    assert losses[:3] == pytest.approx([0.0, 0.65, 0.87], abs=0.05)
    assert losses[3:] == [None, None], "measured with another seed, and with other groups"


def test_a_worker_takes_the_list_that_the_probe_wrote() -> None:
    spec = WorkerSpec(
        worker="decode-0",
        role="decode",
        gateway="tcp://127.0.0.1:1",
        keys_dir="keys",
        model=str(TINY),
        kv_cache_codec=probe("auto").kv_cache_codec,
    )
    assert [one.codec.partition("@")[0] for one in resolve_model(spec).classes] == ["", "nuq4-1%.g128"]


def test_a_named_list_may_leave_the_choice_to_the_router() -> None:
    codecs = probe("auto,nuq4-1%,raw:0.5,int8:0.1").kv_cache_codec
    assert codecs.startswith("auto,nuq4-1%.g128@") and codecs.endswith(",raw:0.5,int8.g32:0.1")


@pytest.mark.parametrize(
    ("codecs", "budget", "words"),
    [
        ("auto,raw:0.5,nuq2-1%", None, ("nuq2-1%.g128 14%", "raise the budget")),
        ("auto,raw:0.5,tq4.s7", 50.0, ("tq4.s7 not recorded",)),
        ("auto,nuq4-1%", None, ("no choice",)),
        ("auto,raw", None, ("raw 0%", "two codecs")),
        ("auto:0.5,raw", None, ("first word",)),
        ("raw:0.5,auto", None, ("first word",)),
        ("raw", 1.0, ("--kv-quality-budget", "one codec")),
        ("nuq4-1%", 1.0, ("--kv-quality-budget", "one codec")),
    ],
)
def test_what_leaves_no_choice_is_refused(codecs: str, budget: float | None, words: tuple[str, ...]) -> None:
    text = refused(codecs, budget)
    assert all(word in text for word in words), text


def test_auto_needs_measured_losses(model: Checkpoint, calibration: Calibration, tmp_path: Path) -> None:
    assert "diptych calibrate" in refused("auto", path=model.path)
    path = tmp_path / "unmeasured.safetensors"
    write_calibration(replace(calibration, quality=None), path)
    assert "measured losses" in refused("auto", path=model.path, calibration=str(path))


def test_auto_says_what_is_wrong_with_a_file_that_was_named(model: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(b"damaged")
    assert str(path) in refused("auto", path=model.path, calibration=str(path))


def test_a_damaged_file_beside_the_model_does_not_keep_codecs_from_being_used_that_need_none(
    model: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(model.path, folder)
    (folder / FILE_NAME).write_bytes(b"damaged")
    found = resolve_kv_classes(Checkpoint.resolve(str(folder)), "raw:0.5,tq4")
    assert [one.loss_pct for one in found] == [0.0, None]


def test_losses_are_those_of_this_model(model: Checkpoint, calibration: Calibration) -> None:
    assert calibration.model == identify_model(model), "the copy has the same weights"
    with pytest.raises(ConfigError, match="measured losses|auto"):
        expand_auto(model, "auto")


def test_ranks_that_would_cut_a_group_are_refused() -> None:
    """The embedded model's calibration has one group of all heads."""
    assert "--decode-tp" in refused("auto", splits={"decode": (2, 1)})
