"""Calibration files: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load, save

from diptych.errors import ConfigError, ModelError
from engine.calibration.fitting import fit_layer
from kvcache.codecs import calibration as module
from kvcache.codecs.calibration import (
    FILE_NAME,
    CalibratedModel,
    Calibration,
    CodecQuality,
    MeasuredQuality,
    read_calibration,
    serialise_calibration,
    write_calibration,
)
from kvcache.codecs.codec_id import complete_codec_id, parse_codec_id
from kvcache.codecs.datatype import LayerFactors
from kvcache.codecs.registry import build_codec
from tests.unit.codecs.oracles import random_sample

MODEL = CalibratedModel("f" * 64, 2, 2, 16)
Change = Callable[[dict[str, Any], dict[str, str]], None]


@pytest.fixture(scope="module")
def fitted() -> Calibration:
    rng = np.random.default_rng(1)
    ids = [parse_codec_id(name) for name in ("nuq4-1%", "nuq2")]
    layers = [fit_layer(random_sample(rng, 100, 2, 16), ids, 32) for _ in range(2)]
    return Calibration(MODEL, 32, 100, {str(one): tuple(layer[one.name] for layer in layers) for one in ids})


def changed(path: Path, fitted: Calibration, change: Change) -> Path:
    """A file in which `change` was applied to the tensors and the metadata."""
    write_calibration(fitted, path)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors, metadata = dict(load(content)), dict(header["__metadata__"])
    change(tensors, metadata)
    path.write_bytes(save(tensors, metadata))
    return path


def refused(path: Path, model: CalibratedModel = MODEL) -> str:
    """The lines of the refusal."""
    with pytest.raises(ModelError) as caught:
        read_calibration(path, model)
    lines = caught.value.lines()
    assert 3 <= len(lines) <= 6 and all(len(line) < 400 for line in lines) and str(path) in lines[0]
    assert lines[1].startswith("  why: ") and "fp8" in lines[-1]
    return "\n".join(lines)


def test_what_is_written_is_read_back(tmp_path: Path, fitted: Calibration) -> None:
    path = tmp_path / FILE_NAME
    write_calibration(fitted, path)
    found = read_calibration(path, MODEL)
    assert (found.digest, found.group, found.tokens) == (fitted.digest, 32, 100)
    assert found.constants.keys() == {"nuq4-1%", "nuq2"} and list(tmp_path.iterdir()) == [path]
    for name, layers in fitted.constants.items():
        for layer, one in enumerate(layers):
            cut = found.group_constants(name, layer, 0)
            assert cut.key_scales.tobytes() == one.key_scales.tobytes()
            assert cut.keys.levels.tobytes() == one.keys.levels.tobytes()
            assert cut.values.centroids.tobytes() == one.values.centroids.tobytes()
    with pytest.raises(ModelError, match="no constants for nuq3"):
        found.group_constants("nuq3", 0, 0)


def test_quality_is_kept_outside_the_hash_and_the_file_has_one_form(
    tmp_path: Path, fitted: Calibration
) -> None:
    quality = MeasuredQuality(8, 512, 20.47, {"nuq2": CodecQuality(2.25, 15.8, (13.0, 18.5))})
    measured, path = replace(fitted, quality=quality), tmp_path / FILE_NAME
    write_calibration(measured, path)
    found = read_calibration(path, MODEL)
    assert found.quality == quality and found.digest == fitted.digest
    assert path.read_bytes() == serialise_calibration(found) != serialise_calibration(fitted)


def test_another_number_is_noticed_by_the_hash(tmp_path: Path, fitted: Calibration) -> None:
    """A file whose numbers are all possible, but not those that it was written with."""
    path = tmp_path / FILE_NAME
    write_calibration(fitted, path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    lines = refused(path)
    assert "is damaged" in lines and f"its digest is {fitted.digest}, and that of its content" in lines


def test_the_hash_names_everything_that_codes_depend_on(fitted: Calibration) -> None:
    assert len(fitted.digest) == 16 and replace(fitted, tokens=7).digest == fitted.digest
    one = fitted.constants["nuq2"]
    moved = replace(one[0], key_zeros=one[0].key_zeros + np.float16(1))
    others = [
        replace(fitted, group=16),
        replace(fitted, model=msgspec.structs.replace(MODEL, fingerprint="e" * 64)),
        replace(fitted, constants={"nuq2": one}),
        replace(fitted, constants=fitted.constants | {"nuq2": (moved, one[1])}),
        replace(fitted, constants=fitted.constants | {"nuq2": one[::-1]}),
    ]
    assert len({fitted.digest, *(other.digest for other in others)}) == 6


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"fingerprint": "e" * 64}, "model is fff"),
        ({"layers": 3}, "layers is 2 in the file and 3 here"),
        ({"kv_heads": 4}, "kv_heads is 2 in the file and 4 here"),
        ({"head_dim": 32}, "head_dim is 16 in the file and 32 here"),
    ],
)
def test_the_file_of_another_model_is_refused(
    tmp_path: Path, fitted: Calibration, other: dict[str, Any], named: str
) -> None:
    write_calibration(fitted, tmp_path / FILE_NAME)
    lines = refused(tmp_path / FILE_NAME, msgspec.structs.replace(MODEL, **other))
    assert "belongs to another model" in lines and named in lines


def set_number(name: str, number: float) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][1, 2] = number

    return change


def set_tensor(name: str, make: Callable[[np.ndarray], np.ndarray | None]) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        made = make(tensors.pop(name, np.zeros((2, 4), np.float32)))
        if made is not None:
            tensors[name] = np.ascontiguousarray(made)

    return change


def set_metadata(name: str, text: str) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata[name] = text

    return change


def set_quality(codec: str, delta: str) -> Change:
    row = f'{{"bits": 2, "ppl_delta_pct": {delta}, "interval": [0, 1]}}'
    return set_metadata(
        "quality", f'{{"windows": 1, "tokens": 2, "perplexity": 3, "codecs": {{"{codec}": {row}}}}}'
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_number("nuq2.key_scales", np.nan), "not finite"),
        (set_number("nuq2.key_zeros", np.inf), "not finite"),
        (set_number("nuq2.value_levels", -np.inf), "not finite"),
        (set_number("nuq2.key_scales", 0), "scales below"),
        (set_number("nuq2.key_scales", -1), "scales below"),
        (set_number("nuq2.key_centroids", -1), "not ascending"),
        (set_number("nuq2.value_levels", 1e9), "not ascending"),
        (set_tensor("nuq2.key_scales", lambda one: None), "missing: nuq2.key_scales"),
        (set_tensor("nuq2.key_scales", lambda one: one.astype(np.float32)), "is float32"),
        (set_tensor("nuq2.key_levels", lambda one: one[:, :-1]), "is float32[2, 3]"),
        (set_tensor("nuq2.key_levels", lambda one: one[:1]), "is float32[1, 4]"),
        (set_tensor("nuq5.key_levels", lambda one: one), "unknown or missing: nuq5.key_levels"),
        (set_tensor("model.embed", lambda one: one), "unknown or missing: model.embed"),
        (lambda tensors, metadata: tensors.clear(), "missing: all"),
        (set_metadata("group", "24"), "do not divide"),
        (set_metadata("group", "0"), "not a positive number"),
        (set_metadata("tokens", "many"), "not a positive number"),
        (set_metadata("tokens", "9" * 5000), "not a positive number"),
        (set_metadata("digest", "0" * 16), "its digest is 0000000000000000"),
        (set_metadata("quality", "{"), "truncated"),
        (set_metadata("quality", '{"windows": 1}'), "missing required field"),
        (set_quality("nuq2", "1e999"), "out of range"),
        (set_quality("nuq9", "1"), "unknown codecs"),
        (set_metadata("format", "diptych kvquant 2"), "its format is diptych kvquant 2, which does not fit"),
        (set_metadata("format", "diptych kvquant 3"), "its format is diptych kvquant 3, not"),
        (lambda tensors, metadata: metadata.clear(), "its format is not given"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, fitted: Calibration, change: Change, reason: str) -> None:
    assert reason in refused(changed(tmp_path / FILE_NAME, fitted, change))


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, fitted: Calibration) -> None:
    path = tmp_path / FILE_NAME
    write_calibration(fitted, path)
    content = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert "is not a calibration of KV codecs" in refused(path)
    path.write_bytes(content + b"\0")
    assert "is not a calibration of KV codecs" in refused(path)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (14).to_bytes(8, "little") + b'{"a": "\xff\xfe\xfd"}  ',
        (24).to_bytes(8, "little") + b'{"__metadata__": {"a":1}}',
        b"{" * 100_000,
        (100_010).to_bytes(8, "little") + b'{"a": ' + b"[" * 50_002 + b"]" * 50_001 + b"}",
    ],
)
def test_what_is_no_calibration_at_all_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(content)
    assert "is not a calibration of KV codecs" in refused(path)


def test_a_file_that_is_too_large_is_not_read_whole(
    tmp_path: Path, fitted: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / FILE_NAME
    write_calibration(fitted, path)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", path.stat().st_size)
    assert read_calibration(path, MODEL).digest == fitted.digest
    monkeypatch.setattr(module, "MAX_FILE_BYTES", path.stat().st_size - 1)
    assert "more than" in refused(path)


def test_no_more_is_read_than_the_limit(
    tmp_path: Path, fitted: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sizes = tmp_path / FILE_NAME, list[int]()
    write_calibration(fitted, path)

    class CountedFile(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            sizes.append(-1 if size is None else size)
            return super().read(size)

    content = path.read_bytes()
    monkeypatch.setattr(Path, "open", lambda self, mode: CountedFile(content))
    assert read_calibration(path, MODEL).digest == fitted.digest
    assert sizes == [module.MAX_FILE_BYTES + 1]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / FILE_NAME)
    assert "cannot be read" in refused(tmp_path)


def test_a_write_that_fails_leaves_the_file_before_it(
    tmp_path: Path, fitted: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / FILE_NAME
    write_calibration(fitted, path)
    before = path.read_bytes()

    def fail(self: Path, target: Path) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        write_calibration(replace(fitted, tokens=8), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def factored(fitted: Calibration) -> Calibration:
    """With factors for `int4`, which differ from pair to pair."""
    pairs = np.tile(2.0 ** np.arange(-4, 4, dtype=np.float32), 4)
    layers = tuple(LayerFactors(pairs, np.flip(pairs) + layer) for layer in range(2))
    return replace(fitted, factors={"int4": layers})


def test_factors_are_read_back_and_leave_the_ids_of_constants_as_they_were(
    tmp_path: Path, fitted: Calibration, factored: Calibration
) -> None:
    path = tmp_path / FILE_NAME
    write_calibration(factored, path)
    found = read_calibration(path, MODEL)
    assert found.digest == fitted.digest == found.digest_for("nuq2") and found.digest_for("tq4") is None
    assert found.digest_for("int4") == factored.factors_digest != found.digest
    basis, whole = found.head_basis("int4", 1, 1, None), factored.factors["int4"][1]
    assert basis.key_factors is not None and basis.value_factors is not None
    assert basis.key_factors.tobytes() == whole.keys[16:].tobytes()
    assert basis.value_factors.tobytes() == whole.values[16:].tobytes()
    assert path.read_bytes().count(b"kvquant 2") == 1
    write_calibration(fitted, path)
    assert path.read_bytes().count(b"kvquant 1") == 1, "as it was before there were factors"


def set_factor(side: str, number: float) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[f"int4.{side}_factors"] = np.array(tensors[f"int4.{side}_factors"])
        tensors[f"int4.{side}_factors"][1, 3] = number

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_factor("value", 0), "beyond"),
        (set_factor("value", -1), "beyond"),
        (set_factor("value", 2.0**13), "beyond"),
        (set_factor("value", float("inf")), "not finite"),
        (set_factor("key", float("nan")), "not finite"),
        (set_factor("key", 3), "two factors for one rotary pair"),
        (set_factor("value", 3), "its factors_digest is"),
        (set_metadata("factors_digest", "0" * 16), "its factors_digest is 0000000000000000"),
        (set_metadata("format", "diptych kvquant 1"), "does not fit its tensors"),
        (lambda tensors, metadata: tensors.pop("int4.key_factors"), "unknown or missing: int4.key_factors"),
    ],
)
def test_factors_that_cannot_be_right_are_refused(
    tmp_path: Path, factored: Calibration, change: Change, reason: str
) -> None:
    assert reason in refused(changed(tmp_path / FILE_NAME, factored, change))


def test_a_codec_of_other_factors_is_refused(factored: Calibration) -> None:
    codec_id = complete_codec_id(parse_codec_id("int4"), 2, 16, factored.digest_for("int4"))
    assert str(codec_id) == f"int4.g16@{factored.factors_digest}"
    build_codec(codec_id, 16, factored, 1, 1)
    for other in (None, replace(factored, factors={})):
        with pytest.raises(ConfigError, match="of another calibration"):
            build_codec(codec_id, 16, other)
    with pytest.raises(ConfigError, match="made with another calibration"):
        complete_codec_id(codec_id, 2, 16, "0" * 16)
    with pytest.raises(ConfigError, match="no parameter a calibration"):
        parse_codec_id(f"fp8@{factored.factors_digest}")
