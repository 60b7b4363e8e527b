"""Addresses of segments, and which segments a prompt can have."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from diptych.eviction_spec import KeepSpec
from kvcache.eviction.kept_segments import (
    KeptSegment,
    are_in_order,
    count_segment_slabs,
    kept_begin,
    segment_keys,
)
from kvcache.prefix_tree import chunk_keys, root_key

ROOT = root_key("model", "scope", "codec")
TOKENS = list(range(64 * 16))
KEYS = chunk_keys(TOKENS, ROOT)
ZAP = "zap@0123456789abcdef"
SPEC = KeepSpec(0.5, 64, ZAP)
SEGMENTS = (KeptSegment(5, 2, b"a" * 16), KeptSegment(8, 1, b"b" * 16), KeptSegment(12, 2, b"c" * 16))


def addresses(**other: Any) -> list[bytes]:
    terms: dict[str, Any] = {"root": ROOT, "keys": KEYS, "spec": SPEC, "segments": SEGMENTS} | other
    return segment_keys(**terms)


def test_every_slab_has_an_address_of_its_own() -> None:
    keys = addresses()
    assert len(set(keys) | set(KEYS)) == count_segment_slabs(SEGMENTS) + len(KEYS) == 5 + 16
    assert kept_begin(SPEC, SEGMENTS) == 12 * 64 and kept_begin(SPEC, ()) == 64


def test_equal_beginnings_have_equal_addresses() -> None:
    """Whatever comes behind: other tokens, more segments."""
    keys, other = addresses(), chunk_keys([*TOKENS[: 8 * 64], *reversed(TOKENS)], ROOT)
    assert addresses(segments=SEGMENTS[:2]) == addresses(segments=SEGMENTS[:2], keys=other) == keys[:3]
    assert addresses(keys=other)[3:] != keys[3:]


@pytest.mark.parametrize(
    "other",
    [
        {"root": root_key("model", "other", "codec"), "spec": KeepSpec(0.5, 0, ZAP)},
        {"spec": KeepSpec(0.49, 64, ZAP)},
        {"spec": KeepSpec(0.5, 128, ZAP)},
        {"spec": KeepSpec(0.5, 0, ZAP)},
        {"spec": KeepSpec(0.5, 64, "zap@fedcba9876543210")},
        {"keys": chunk_keys([1, *TOKENS[1:]], ROOT)},
        {"segments": (msgspec.structs.replace(SEGMENTS[0], digest=b"x" * 16), *SEGMENTS[1:])},
        {"segments": (msgspec.structs.replace(SEGMENTS[0], end=6), *SEGMENTS[1:])},
    ],
)
def test_what_kept_rows_depend_on_is_in_all_addresses(other: dict[str, Any]) -> None:
    assert not set(addresses(**other)) & set(addresses())


def test_without_addresses_of_chunks_there_are_none() -> None:
    assert addresses(root=b"") == addresses(segments=()) == []


def test_segments_follow_the_boundary_and_each_other_and_save_something() -> None:
    assert are_in_order(SPEC, SEGMENTS, 12 * 64) and are_in_order(SPEC, (), 64)
    assert not are_in_order(SPEC, SEGMENTS, 12 * 64 - 1)
    for one, other in pairwise(SEGMENTS):
        assert not are_in_order(SPEC, (other, one), 10_000)
    assert not are_in_order(SPEC, (KeptSegment(3, 2, b"a" * 16),), 10_000), "as many chunks as slabs"
    assert are_in_order(SPEC, (KeptSegment(3, 1, b"a" * 16),), 10_000)
