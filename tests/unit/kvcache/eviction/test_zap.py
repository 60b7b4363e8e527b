"""The weights of `zap`: scores number by number, thresholds, and what files are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.errors import ModelError
from kvcache.codecs.calibration import CalibratedModel
from kvcache.eviction.zap import (
    NUM_THRESHOLDS,
    Angles,
    KeepSurrogate,
    parse_surrogate,
    read_surrogate,
    serialise_surrogate,
    surrogate_path,
    write_surrogate,
)
from kvcache.layout import Shard

MODEL = CalibratedModel("f" * 16, 2, 3, 4)
FREQUENCIES = np.array([1.0, 0.1])


def make_surrogate(seed: int = 0) -> KeepSurrogate:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((2, 3, 11)).astype(np.float32)
    return KeepSurrogate(MODEL, weights, -np.arange(NUM_THRESHOLDS, dtype=np.float32), 640, 0.5)


def rotate(key: list[float], position: int) -> list[float]:
    """A key of four numbers at its position, as readers of KV see it."""
    turned = [0.0] * 4
    for pair, frequency in enumerate(FREQUENCIES):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        low, high = key[pair], key[pair + 2]
        turned[pair], turned[pair + 2] = low * cos - high * sin, high * cos + low * sin
    return turned


def test_scores_are_linear_in_unrotated_keys_values_and_their_norms() -> None:
    rng, surrogate = np.random.default_rng(1), make_surrogate()
    keys, values = rng.standard_normal((6, 4)), rng.standard_normal((6, 4))
    values[2] = 0
    positions = np.array([0, 1, 7, 90, 1000, 20000])
    rotated = np.array([rotate(key, p) for key, p in zip(keys.tolist(), positions.tolist(), strict=True)])
    found = surrogate.score_rows(1, 2, rotated, values, Angles(positions, FREQUENCIES))
    for n in range(6):
        norms = [math.log(max(1e-6, math.sqrt(sum(x * x for x in row[n])))) for row in (keys, values)]
        features = [*keys[n], *values[n], *norms, 1.0]
        expected = sum(w * x for w, x in zip(surrogate.weights[1, 2].tolist(), features, strict=True))
        assert found[n] == pytest.approx(expected, abs=1e-9)


def test_a_row_has_the_same_score_to_the_bit_whatever_is_beside_it() -> None:
    rng, surrogate = np.random.default_rng(2), make_surrogate()
    keys, values = (rng.standard_normal((200, 4)).astype(np.float32) for _ in range(2))
    positions = np.arange(200)
    every = surrogate.score_rows(0, 0, keys, values, Angles(positions, FREQUENCIES))
    for some in (slice(3, 4), slice(100, 200), slice(0, 200, 7)):
        angles = Angles(positions[some], FREQUENCIES)
        assert np.array_equal(surrogate.score_rows(0, 0, keys[some], values[some], angles), every[some])


def test_a_ranks_weights_are_those_of_its_heads() -> None:
    part = make_surrogate().take_shard(Shard((1, 2), (1, 3)))
    assert np.array_equal(part.weights, make_surrogate().weights[1:, 1:])


def test_thresholds_are_lines_between_hundredths() -> None:
    surrogate = make_surrogate()
    assert surrogate.find_threshold(0.01) == 0 and surrogate.find_threshold(0.75) == pytest.approx(-74)
    assert surrogate.find_threshold(0.755) == pytest.approx(-74.5)


def test_beyond_the_last_hundredth_more_stays_and_at_last_all() -> None:
    surrogate = make_surrogate()
    found = [surrogate.find_threshold(share) for share in (0.99, 0.995, 0.999, 1.0)]
    assert found == pytest.approx([-98, -98 + math.log(0.5), -98 + math.log(0.1), -math.inf])


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path, surrogate = surrogate_path(tmp_path / "mine.safetensors"), make_surrogate()
    write_surrogate(surrogate, path)
    assert [one.name for one in tmp_path.iterdir()] == ["mine.zap"]
    found = read_surrogate(path, MODEL)
    assert np.array_equal(found.weights, surrogate.weights) and found.rule == surrogate.rule
    assert (found.tokens, found.r2, found.digest) == (640, 0.5, surrogate.digest)
    assert serialise_surrogate(found) == path.read_bytes()
    assert make_surrogate(1).digest != found.digest
    with pytest.raises(ModelError, match="cannot be read"):
        read_surrogate(tmp_path / "absent", MODEL)


def edited(change: Callable[[dict[str, Any], bytearray], None]) -> bytes:
    """A file whose header and numbers are changed."""
    content = serialise_surrogate(make_surrogate())
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    change(header, data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def infinite(header: dict[str, Any], data: bytearray) -> None:
    data[:4] = np.float32(np.inf).tobytes()


def ascending(header: dict[str, Any], data: bytearray) -> None:
    data[-4:] = np.float32(5).tobytes()


def flipped(header: dict[str, Any], data: bytearray) -> None:
    data[0] ^= 1


REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "header"),
    "cut off": (serialise_surrogate(make_surrogate())[:-5], ""),
    "noise": (b"\x30" + b"\0" * 7 + b"{" * 60, ""),
    "another format": (edited(lambda h, _: h["__metadata__"].update(format="diptych kvzap 0")), "kvzap 0"),
    "another model": (edited(lambda h, _: h["__metadata__"].update(model="0" * 16)), "another model"),
    "other layers": (edited(lambda h, _: h["__metadata__"].update(layers="9")), "layers is 9"),
    "flipped": (edited(flipped), "digest"),
    "infinite": (edited(infinite), "not finite"),
    "ascending": (edited(ascending), "ascend"),
    "no number": (edited(lambda h, _: h["__metadata__"].update(r2="nan")), "nan"),
    "another tensor": (edited(lambda h, _: h.update(bias=h.pop("thresholds"))), "bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_right_is_refused_with_the_fix(name: str) -> None:
    content, said = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        parse_surrogate(content, MODEL, "x.zap")
    lines = caught.value.lines()
    assert len(lines) <= 6 and "x.zap" in lines[0] and "calibrate this model again" in "\n".join(lines)
    assert said in "\n".join(lines)
