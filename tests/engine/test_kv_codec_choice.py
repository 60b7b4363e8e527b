"""The codec of a deployment's KV: what a name comes to for a model, and what is refused before anything starts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load

from diptych.config.options import Config
from diptych.errors import ConfigError, DiptychError, ModelError
from diptych.specs import WorkerSpec
from engine.calibration.fitting import fit_layer
from engine.model.calibration_file import identify_model
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import check_device_codec, resolve_kv_classes, resolve_kv_codec
from kvcache.codecs.calibration import (
    FILE_NAME,
    MAX_FILE_BYTES,
    Calibration,
    CodecQuality,
    MeasuredQuality,
    write_calibration,
)
from kvcache.codecs.codec_id import parse_codec_id
from kvcache.codecs.datatype import LayerFactors
from services.cli.serve.specs import worker_spec
from services.host.model_probe import ProbeRequest, calibration_path, probe_model
from tests.unit.codecs.oracles import random_sample
from worker.resolve_model import resolve_model

TINY = Path(__file__).parents[2] / "models" / "tiny"
# A chunk of the embedded model: 6 layers of 4 heads of 32, in 64 tokens.
NUMBERS = 6 * 2 * 4 * 32 * 64


def fit(model: Checkpoint, group: int) -> Calibration:
    """Constants of `nuq4-1%` from random numbers, as if they were the model's."""
    rng, shape, codec_id = np.random.default_rng(1), model.config, parse_codec_id("nuq4-1%")
    layers = [
        fit_layer(random_sample(rng, 64, shape.kv_heads, shape.head_dim), [codec_id], group)[codec_id.name]
        for _ in range(shape.layers)
    ]
    return Calibration(identify_model(model), group, 64, {codec_id.name: tuple(layers)})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A copy of the embedded model without a calibration."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns(FILE_NAME))
    return Checkpoint.resolve(str(folder))


@pytest.fixture(scope="module")
def fitted(model: Checkpoint) -> Calibration:
    return fit(model, 128)


@pytest.fixture
def file(fitted: Calibration, tmp_path: Path) -> Path:
    """A calibration of the model, somewhere else."""
    path = tmp_path / "mine.safetensors"
    write_calibration(fitted, path)
    return path


def worker(model: Checkpoint, codec: str, **changes: object) -> WorkerSpec:
    fields: dict[str, object] = {
        "worker": "decode-0",
        "role": "decode",
        "gateway": "tcp://127.0.0.1:1",
        "keys_dir": "keys",
        "model": str(model.path),
        "kv_cache_codec": codec,
    }
    return WorkerSpec(**(fields | changes))  # type: ignore[arg-type]


def refused(model: Checkpoint, codec: str, file: Path | str = "", **more: Any) -> str:
    """The refusal of `diptych serve`, which is that of a worker too."""
    calibration = {"kv_cache_codec": codec, "kv_cache_calibration": str(file)}
    sized: dict[str, Any] = {"revision": None, "max_model_len": None, "kv_bytes": None, "num_workers": 1}
    with pytest.raises((ModelError, ConfigError)) as caught:
        probe_model(ProbeRequest(str(model.path), **sized | calibration | more))
    tp, _ = more.get("splits", {}).get("decode", (1, 1))
    with pytest.raises(DiptychError) as by_worker:
        resolve_model(
            worker(
                model,
                codec,
                kv_cache_calibration=str(file),
                kv_bytes=more.get("kv_bytes", 64 << 20),
                tp=tp,
            )
        )
    assert by_worker.value.what == caught.value.what
    lines = caught.value.lines()
    assert 1 <= len(lines) <= 6 and all(len(line) < 400 for line in lines)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("asked", "codec", "bits"),
    [
        ("raw", "", 32),
        ("fp16", "fp16", 16),
        ("bf16", "bf16", 16),
        ("fp8", "fp8", 8),
        ("int8", "int8.g32", 9),
        ("int4", "int4.g32", 5),
        ("tq4", "tq4.s0", 4.5),
        ("tq3.s7", "tq3.s7", 3.5),
        ("tq-k8v4", "tq-k8v4.s0", 6.5),
    ],
)
def test_a_name_becomes_the_layout_of_the_pool(
    model: Checkpoint, asked: str, codec: str, bits: float
) -> None:
    found = resolve_model(worker(model, asked, kv_bytes=64 << 20))
    assert (found.layout.codec, found.calibration) == (codec, None)
    assert found.layout.chunk_bytes == NUMBERS * bits / 8
    assert found.plan.num_slabs == (64 << 20) // found.layout.chunk_bytes
    assert found.pool_sizes == [found.plan.num_slabs * found.layout.chunk_bytes]


def test_a_calibration_is_found_beside_the_model_or_where_it_is_named(
    model: Checkpoint, fitted: Calibration, file: Path
) -> None:
    codec = f"nuq4-1%.g128@{fitted.digest}"
    named = resolve_model(worker(model, "nuq4-1%", kv_cache_calibration=str(file)))
    assert named.layout.codec == codec and named.calibration is not None
    assert named.calibration.digest == fitted.digest
    beside = model.path / FILE_NAME
    shutil.copy(file, beside)
    try:
        found = resolve_model(worker(model, "nuq4-1%"))
    finally:
        beside.unlink()
    assert found.layout == named.layout and found.layout.page_heads == 4
    assert found.layout.chunk_bytes == NUMBERS * 4.5 / 8


def test_an_id_that_names_the_calibration_pins_it(model: Checkpoint, fitted: Calibration, file: Path) -> None:
    pinned = f"nuq4-1%@{fitted.digest}"
    assert resolve_kv_codec(model, pinned, str(file))[0] == f"nuq4-1%.g128@{fitted.digest}"
    message = refused(model, "nuq4-1%@0123456789abcdef", file)
    assert "made with another calibration" in message and fitted.digest in message


def test_a_name_alone_takes_the_factors_of_a_calibration_and_a_full_id_what_it_says(
    model: Checkpoint, fitted: Calibration, file: Path
) -> None:
    ones = np.ones(4 * 32, np.float32)
    layers = tuple(LayerFactors(2 * ones, ones) for _ in range(6))
    factored = replace(fitted, factors={"int4": layers})
    write_calibration(factored, file)
    full = f"int4.g32@{factored.factors_digest}"
    assert resolve_kv_codec(model, "int4", str(file))[0] == full
    assert (
        resolve_model(worker(model, "raw:0.5,int4", kv_cache_calibration=str(file))).layouts[1].codec == full
    )
    shutil.copy(file, model.path / FILE_NAME)
    try:
        for asked, codec in (
            ("int4", full),
            (full, full),
            ("int4.g32", "int4.g32"),
            ("tq4", "tq4.s0"),
            ("fp8", "fp8"),
        ):
            assert resolve_kv_codec(model, asked)[0] == codec
    finally:
        (model.path / FILE_NAME).unlink()
    assert resolve_kv_codec(model, "int4") == ("int4.g32", None)
    with pytest.raises(ConfigError, match="made with another calibration"):
        resolve_kv_codec(model, full)
    for asked, why in (
        ("tq4", "has no factors for tq4"),
        ("tq4", "which has factors for int4"),
        ("int4.g32", "or name int4 alone"),
        ("fp8", "takes no calibration"),
    ):
        assert why in refused(model, asked, file)


def test_a_calibration_that_no_class_uses_is_refused(
    model: Checkpoint, fitted: Calibration, file: Path, tmp_path: Path
) -> None:
    ones = np.ones(4 * 32, np.float32)
    path, layers = tmp_path / "factors", tuple(LayerFactors(2 * ones, ones) for _ in range(6))
    write_calibration(replace(fitted, factors={"int4": layers}), path)
    sized: dict[str, Any] = {"kv_bytes": 64 << 20}
    for codecs, given in (("raw:0.5,fp8", path), ("int4.g32:0.5,tq4", path), ("int4:0.5,tq4", file)):
        message = refused(model, codecs, given, **sized)
        assert (
            "none of the KV codecs takes anything from the calibration" in message and str(given) in message
        )
    assert [bool(one.calibration) for one in resolve_kv_classes(model, "tq4:0.5,int4", str(path))] == [
        False,
        True,
    ]


def test_a_loss_is_that_of_the_class_that_was_measured(
    model: Checkpoint, fitted: Calibration, tmp_path: Path
) -> None:
    """The file has factors for `int4`, so it was measured with them: what `int4.g32` loses, it does not say."""
    ones = np.ones(4 * 32, np.float32)
    path, layers = tmp_path / "measured", tuple(LayerFactors(2 * ones, ones) for _ in range(6))
    row = CodecQuality(5.0, 0.5, (0.4, 0.6))
    quality = MeasuredQuality(2, 64, 3.0, {"int4": row, "tq4": row, "nuq4-1%": row})
    write_calibration(replace(fitted, factors={"int4": layers}, quality=quality), path)
    for codecs, losses in (
        ("nuq4-1%:0.5,int4.g32:0.25,int4:0.25", [0.5, None, 0.5]),
        ("nuq4-1%:0.5,tq4:0.25,tq4.s1:0.25", [0.5, 0.5, None]),
    ):
        found = resolve_kv_classes(model, codecs, str(path))
        assert [one.loss_pct for one in found] == losses


@pytest.mark.parametrize(
    ("codec", "fix"),
    [
        ("fp8", "int8 or fp16"),
        ("int4.g32@0123456789abcdef", "--kv-cache-codec int4.g32,"),
        ("tq4.s0@0123456789abcdef", "--kv-cache-codec tq4.s0,"),
    ],
)
def test_what_kernels_for_gpus_lack_is_refused(codec: str, fix: str) -> None:
    with pytest.raises(ConfigError, match="not available on a GPU") as caught:
        check_device_codec(codec)
    lines = caught.value.lines()
    assert len(lines) <= 6 and fix in lines[-1] and "--device cpu" in lines[-1]
    for other in ("", "int4.g32", "tq4.s0", "nuq4-1%.g128@0123456789abcdef"):
        check_device_codec(other)


def test_a_calibration_that_was_replaced_on_disk_is_refused_at_the_next_start(
    model: Checkpoint, fitted: Calibration, file: Path
) -> None:
    """Workers get the canonical id that `diptych serve` found, so that one that starts again has the same class."""
    asked = Config(kv_cache_codec="nuq4-1%", kv_cache_calibration=file)
    sized: dict[str, Any] = {"revision": None, "max_model_len": None, "kv_bytes": 64 << 20, "num_workers": 1}
    sized |= {"kv_cache_codec": "nuq4-1%", "kv_cache_calibration": calibration_path(asked)}
    found = probe_model(ProbeRequest(str(model.path), **sized))
    spec = worker_spec(asked, found, "decode", "decode-0", "tcp://127.0.0.1:1", "keys", None)
    assert spec.kv_cache_codec == f"nuq4-1%.g128@{fitted.digest}"
    assert resolve_model(spec).codec == spec.kv_cache_codec
    first, *rest = fitted.constants["nuq4-1%"]
    newer = replace(fitted, constants={"nuq4-1%": (replace(first, key_scales=2 * first.key_scales), *rest)})
    write_calibration(newer, file)
    with pytest.raises(ConfigError) as caught:
        resolve_model(spec)
    lines = caught.value.lines()
    assert len(lines) <= 6 and newer.digest != fitted.digest
    assert fitted.digest in lines[0] and newer.digest in "".join(lines)


def test_two_ranks_can_share_groups_of_half_the_heads(model: Checkpoint, tmp_path: Path) -> None:
    """The group is that of the calibration, unless the id says otherwise."""
    path = tmp_path / FILE_NAME
    write_calibration(fit(model, 64), path)
    found = resolve_model(worker(model, "nuq4-1%", kv_cache_calibration=str(path), tp=2))
    assert found.layout.codec.startswith("nuq4-1%.g64@") and len(found.pool_sizes) == 2
    assert found.layout.page_heads == 2 and len({*found.pool_sizes}) == 1


def test_every_class_is_split_over_the_ranks(model: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    write_calibration(fit(model, 64), path)
    asked = worker(model, "raw:0.5,nuq4-1%.g64", kv_cache_calibration=str(path), tp=2, kv_bytes=64 << 20)
    found = resolve_model(asked)
    whole = sum(count * layout.chunk_bytes for layout, count in found.sized_layouts)
    assert found.pool_sizes == [whole // 2] * 2 and len(found.class_slabs) == 2


def test_the_codec_is_no_part_of_the_fingerprint(model: Checkpoint, file: Path) -> None:
    """So that a new calibration can be rolled out: workers are paired on classes."""
    found = [resolve_model(worker(model, codec)) for codec in ("raw", "tq4")]
    assert len({one.checkpoint.fingerprint(one.dtype)[0] for one in found}) == 1


def test_the_room_of_a_pool_is_counted_in_coded_bytes(model: Checkpoint) -> None:
    sized: dict[str, Any] = {"revision": None, "max_model_len": 2048, "kv_bytes": None, "num_workers": 1}
    plain, coded = (
        probe_model(ProbeRequest(str(model.path), **sized, kv_cache_codec=codec)).kv_bytes
        for codec in ("raw", "tq4")
    )
    assert plain / coded == 32 / 4.5


def test_classes_share_the_pool_in_bytes(model: Checkpoint) -> None:
    """A worker splits what the probe found, in the same way."""
    asked = "raw:0.25,tq4:0.5"
    sized: dict[str, Any] = {"revision": None, "max_model_len": 128, "kv_bytes": 64 << 20, "num_workers": 1}
    probed = probe_model(ProbeRequest(str(model.path), **sized, kv_cache_codec=asked))
    assert probed.kv_cache_codec == "raw:0.25,tq4.s0:0.5"
    for codecs in (asked, probed.kv_cache_codec):
        found = resolve_model(worker(model, codecs, kv_bytes=probed.kv_bytes, max_model_len=128))
        shares = [count * layout.chunk_bytes / probed.kv_bytes for layout, count in found.sized_layouts]
        assert shares == pytest.approx([0.25, 0.5], abs=0.01)
        assert found.layout.codec == "" and found.layouts[1].codec == "tq4.s0"
        assert found.plan.sink_slots > 0, "for the coded class"
        assert found.num_slabs == sum(found.class_slabs)
        assert found.pool_sizes == [sum(n * one.chunk_bytes for one, n in found.sized_layouts)]


# ---- what is refused


@pytest.mark.parametrize(
    ("codecs", "why"),
    [
        ("raw:0.6,tq4:0.5", "add up to 1.1"),
        ("raw:0.5,zip", "zip"),
        ("tq4:0.5,tq4.s0", "tq4.s0 is named twice"),
        ("raw:0.01,tq4", "the share of raw in the KV pool"),
    ],
)
def test_classes_that_cannot_share_the_pool_are_refused(model: Checkpoint, codecs: str, why: str) -> None:
    assert why in refused(model, codecs, kv_bytes=64 << 20)


def test_an_unknown_codec_is_refused_with_those_there_are(model: Checkpoint) -> None:
    for name in ("zip", "nuq5", "raw;nuq4-1%", "int4.s1", "x" * 500):
        message = refused(model, name)
        assert message.startswith("error: ") and (
            "known codecs: raw, bf16" in message or "no parameter" in message
        )


def test_a_codec_that_needs_a_calibration_names_the_ways_out(model: Checkpoint) -> None:
    message = refused(model, "nuq4-1%")
    assert "needs a calibration of this model, and there is none" in message
    assert (
        f"diptych calibrate {model.path}" in message
        and "tq4" in message
        and "--kv-cache-calibration" in message
    )


def test_a_calibration_that_nothing_uses_is_refused(model: Checkpoint, file: Path) -> None:
    assert "the KV codec raw takes no calibration" in refused(model, "raw", file)
    message = refused(model, "tq4", file)
    assert "has no factors for tq4" in message and "factors for no codec" in message


def test_a_calibration_of_another_model(model: Checkpoint, fitted: Calibration, tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    other = msgspec.structs.replace(fitted.model, fingerprint="0" * 64)
    write_calibration(replace(fitted, model=other), path)
    message = refused(model, "nuq4-1%", path)
    assert (
        "belongs to another model" in message and fitted.model.fingerprint in message and "0" * 64 in message
    )


def test_a_calibration_that_is_damaged(model: Checkpoint, fitted: Calibration, file: Path) -> None:
    whole = file.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert "is not a calibration of KV codecs" in refused(model, "nuq4-1%", file)
    layers = fitted.constants["nuq4-1%"]
    spoilt = replace(layers[2], key_scales=np.full_like(layers[2].key_scales, np.nan))
    write_calibration(
        replace(fitted, constants={"nuq4-1%": (*layers[:2], spoilt, *layers[3:])}),
        file,
    )
    assert "not finite" in refused(model, "nuq4-1%", file)
    assert load(file.read_bytes())


def test_a_calibration_that_is_too_large_or_not_there(model: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as huge:
        huge.truncate(MAX_FILE_BYTES + 1)
    assert f"it has more than {MAX_FILE_BYTES} bytes" in refused(model, "nuq4-1%", path)
    assert "cannot be read" in refused(model, "nuq4-1%", tmp_path / "absent")
    assert "cannot be read" in refused(model, "nuq4-1%", tmp_path)


def test_a_codec_that_the_calibration_does_not_have(model: Checkpoint, file: Path) -> None:
    assert "has no constants for nuq2" in refused(model, "nuq2", file)
    message = refused(model, "nuq4-1%.g64", file)
    assert "made for groups of 128" in message and "--group 64" in message and "nuq4-1%.g128" in message


def test_ranks_that_would_cut_a_group(model: Checkpoint, file: Path) -> None:
    message = refused(model, "nuq4-1%", file, splits={"decode": (2, 1)})
    assert "2 ranks cannot share KV that is coded as nuq4-1%.g128@" in message
    assert (
        "nuq4-1%.g64" in message and "--group 64" in message and "tq4" in message and "--decode-tp" in message
    )
    assert "tp of 1, 2, 4" in refused(model, "nuq4-1%", file, splits={"decode": (3, 1)})
    behind_raw = refused(model, "raw:0.5,nuq4-1%", file, splits={"decode": (2, 1)})
    assert (
        "2 ranks cannot share KV that is coded as nuq4-1%.g128@" in behind_raw and "nuq4-1%.g64" in behind_raw
    )


def test_a_pool_too_small_for_one_request_shows_coded_bytes(model: Checkpoint) -> None:
    message = refused(model, "tq4", kv_bytes=1 << 20)
    assert "KV pool 1.00 MiB" in message and "32 chunks x 54.00 KiB = 1.69 MiB of KV" in message
    assert "the largest context that fits is 1152 tokens" in message


def test_the_path_that_workers_get_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert calibration_path(Config()) == ""
    assert calibration_path(Config(kv_cache_calibration=Path("own"))) == str(tmp_path / "own")
