"""Several codecs in one setting, with their shares of the pool."""

from __future__ import annotations

import pytest

from diptych.errors import ConfigError
from kvcache.class_shares import parse_class_shares

FULL = "nuq4-1%.g128@0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("raw", [("raw", 1.0)]),
        ("raw:1", [("raw", 1.0)]),
        ("nuq4-1%", [("nuq4-1%", 1.0)]),
        ("raw:0.25,nuq4-1%", [("raw", 0.25), ("nuq4-1%", 0.75)]),
        ("tq4, raw:0.5", [("tq4", 0.5), ("raw", 0.5)]),
        ("raw:0.5,tq4:.25", [("raw", 0.5), ("tq4", 0.25)]),
        (f"raw:0.2,int8.g32:0.3,{FULL}", [("raw", 0.2), ("int8.g32", 0.3), (FULL, 0.5)]),
    ],
)
def test_shares_are_those_given_and_the_rest(text: str, wanted: list[tuple[str, float]]) -> None:
    found = parse_class_shares(text)
    assert [str(one.codec_id) for one in found] == [name for name, _ in wanted]
    assert [one.share for one in found] == pytest.approx([share for _, share in wanted])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raw,zip", "zip"),
        ("", "codec"),
        ("raw:0.5,", "codec"),
        ("raw:0.5,tq4:0.25,raw", "raw is named twice"),
        ("raw:0.6,tq4:0.5", "add up to 1.1"),
        ("raw:1,tq4", "1 classes have none"),
        ("raw,tq4", "2 classes have none"),
        ("raw:0.5", "the only KV codec, raw, has the share 0.5"),
        ("raw:0,tq4", "'0' is not a share"),
        ("raw:-1,tq4", "'-1' is not a share"),
        ("raw:nan,tq4", "'nan' is not a share"),
        ("raw:half,tq4", "'half' is not a share"),
        ("raw:,tq4", "'' is not a share"),
        ("auto", "auto is no KV codec"),
        ("auto,raw:0.5,tq4", "auto is no KV codec"),
        ("raw:0.5,auto", "auto is no KV codec"),
    ],
)
def test_what_does_not_add_up_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_class_shares(text)
    lines = caught.value.lines()
    assert why in lines[0] or why in " ".join(lines)
    assert len(lines) <= 6 and all(len(line) < 200 for line in lines)
