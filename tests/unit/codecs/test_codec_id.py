"""Ids of codecs: what is accepted, what the canonical form is, and what is refused with a reason."""

from __future__ import annotations

import pytest

from diptych.errors import ConfigError
from kvcache.codecs.codec_id import CODE_BITS, CodecId, complete_codec_id, parse_codec_id

HASH = "0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("raw", "raw"),
        ("bf16", "bf16"),
        ("int4", "int4.g32"),
        ("int8.g16", "int8.g16"),
        ("nuq4-1%", f"nuq4-1%.g128@{HASH}"),
        ("nuq2.g64", f"nuq2.g64@{HASH}"),
        (f"nuq3@{HASH}", f"nuq3.g128@{HASH}"),
        ("tq-k8v4", "tq-k8v4.s0"),
        ("tq3.s17", "tq3.s17"),
        (f"tq4@{HASH}", f"tq4.s0@{HASH}"),
        (f"int4@{HASH}", f"int4.g32@{HASH}"),
    ],
)
def test_what_was_left_out_is_filled_in_for_the_model(text: str, canonical: str) -> None:
    digest = HASH if "@" in canonical else None
    complete = complete_codec_id(parse_codec_id(text), 4, 32, digest)
    assert str(complete) == canonical
    assert parse_codec_id(canonical) == complete == complete_codec_id(complete, 4, 32, digest)


def test_groups_of_int_are_those_of_flexgen_where_heads_are_larger() -> None:
    assert str(complete_codec_id(CodecId("int4"), 8, 128)) == "int4.g64"


@pytest.mark.parametrize("name", CODE_BITS)
def test_every_name_is_an_id(name: str) -> None:
    assert str(parse_codec_id(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "", "nuq5", "NUQ4", "nuq4-2%", "int4-1%", "nuq4.g0", "nuq4.g", "nuq4@", "nuq4@0123", "nuq4@" + "G" * 16,
        "nuq4 ", "tq4.s01", "tq4.s-1", "nuq4.s1.g64", "x" * 100_000, "raw\n", f"nuq4@{HASH}@{HASH}", "nuq4.g٣",
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a KV codec") as caught:
        parse_codec_id(text)
    assert len(caught.value.lines()) == 3 and max(map(len, caught.value.lines())) < 200


@pytest.mark.parametrize("text", ["raw.g64", "tq4.g32", "int4.s1", "nuq4.s1", f"fp8@{HASH}", f"raw@{HASH}"])
def test_a_parameter_that_would_do_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has no parameter"):
        parse_codec_id(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int4.g48", "cannot divide"),
        ("nuq4.g48", "cannot divide"),
        ("nuq4.g16", "cannot divide"),
        ("nuq4.g96", "cannot divide"),
        ("nuq4.g99999", "too large"),
        ("nuq4@fedcba9876543210", "another calibration"),
    ],
)
def test_a_group_or_calibration_that_does_not_fit_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        complete_codec_id(parse_codec_id(text), 4, 32, HASH)


def test_a_calibrated_codec_needs_a_calibration() -> None:
    with pytest.raises(ConfigError, match="needs a calibration") as caught:
        complete_codec_id(parse_codec_id("nuq4"), 4, 32)
    assert "tq4" in caught.value.fix
