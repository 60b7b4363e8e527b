"""The map of kept rows: every frame has one owner, and nothing that comes from elsewhere is believed."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcache.eviction.kept_rows import (
    FRAME_TOKENS,
    FrameFormat,
    KeptRows,
    count_frames,
    frame_bytes,
    frames_per_slab,
    map_frames,
    most_bag_slabs,
    most_extra_slabs,
)
from kvcache.eviction.policies import FULL, LAST_POLICY, KeepRule, kept_mask
from kvcache.layout import KvLayout

EMBEDDED = KvLayout(layers=6, kv_heads=4, head_dim=32, dtype="float32")
SMALL = KvLayout(layers=2, kv_heads=3, head_dim=4, dtype="float16")
GROUPED = KvLayout(6, 4, 32, "float32", "nuq4-1%.g128@0123456789abcdef")


def random_rows(
    rng: np.random.Generator, layout: KvLayout, boundary: int, length: int
) -> tuple[NDArray[np.uint8], list[NDArray[np.int32]]]:
    """A policy and kept positions per head; every policy but a full one may keep anything."""
    shape = (layout.layers, layout.kv_heads)
    policies, positions = rng.integers(0, FULL + 1, shape).astype(np.uint8), list[NDArray[np.int32]]()
    for policy in policies.reshape(-1):
        share = 1.0 if policy == FULL else rng.choice([0, 0.05, 0.5, 1])
        mask = rng.random(length - boundary) < share
        positions.append((np.flatnonzero(mask) + boundary).astype(np.int32))
    return policies, positions


layouts = st.sampled_from([EMBEDDED, SMALL, GROUPED, KvLayout(1, 1, 1, "bfloat16")])


@given(layouts, st.integers(0, 3), st.integers(0, 400), st.integers(0, 2**31))
def test_every_frame_has_one_owner_and_the_map_comes_back(
    layout: KvLayout, chunks: int, more: int, seed: int
) -> None:
    boundary = 64 * chunks
    length = boundary + more
    policies, positions = random_rows(np.random.default_rng(seed), layout, boundary, length)
    kept = KeptRows.from_heads(layout, boundary, length, policies, positions)
    kept.check()
    form, first = FrameFormat.of_layout(layout), kept.lead
    for number, rows in enumerate(positions):
        layer, head = divmod(number, layout.kv_heads)
        assert kept.head_positions(layer, head).tolist() == rows.tolist()
        assert kept.first_frame(layer, head) == first
        first += -(-len(rows) // FRAME_TOKENS)
    assert kept.table_frame == first and kept.num_rows == sum(map(len, positions))
    assert kept.all_rows == policies.size * more
    if form.is_split:
        tokens = {
            (number // layout.page_heads, int(position))
            for number, rows in enumerate(positions)
            for position in rows
        }
        numbers = {key: number for number, key in enumerate(sorted(tokens))}
        rows_of = [(number // layout.page_heads, int(p)) for number, one in enumerate(positions) for p in one]
        assert kept.number_tokens().tolist() == [numbers[key] for key in rows_of]
        first += form.table_frames(len(tokens))
    assert kept.num_frames == kept.outlier_frame == first
    slabs = kept.num_slabs
    assert slabs <= most_bag_slabs(layout, length) + boundary // 64
    assert (slabs - 1) * frames_per_slab(layout) < first <= slabs * frames_per_slab(layout)
    data = kept.encode()
    assert len(data) == kept.lead * frame_bytes(layout)
    assert map_frames(data[: frame_bytes(layout)], layout, slabs) == kept.lead
    again = KeptRows.decode(data, layout)
    again.check()
    assert (again.boundary, again.length) == (boundary, length)
    assert again.policies.tolist() == policies.tolist() and again.counts.tolist() == kept.counts.tolist()
    assert again.positions.tolist() == kept.positions.tolist() and again.encode() == data


def test_sizes_of_the_embedded_model() -> None:
    assert frame_bytes(EMBEDDED) == 4096 and frames_per_slab(EMBEDDED) == 96
    assert frame_bytes(EMBEDDED) * frames_per_slab(EMBEDDED) == EMBEDDED.chunk_bytes
    # Codes of 16 keys and 16 values of 16 bytes, 2 · 2 bits for how many outliers a row has, and the first one.
    assert frame_bytes(GROUPED) == 16 * 32 + 8 + 4 and frames_per_slab(GROUPED) == GROUPED.chunk_bytes // 524
    assert [count_frames(rows) for rows in (0, 1, 16, 17)] == [0, 1, 1, 2]
    everything = KeptRows.from_heads(
        EMBEDDED, 64, 1024, np.full((6, 4), FULL, np.uint8), [np.arange(64, 1024, dtype=np.int32)] * 24
    )
    assert (everything.lead, everything.num_frames, everything.num_slabs) == (1, 1441, 16)


@pytest.mark.parametrize(
    "layout", [EMBEDDED, GROUPED, KvLayout(1, 1, 32, "float32", "nuq4-1%.g32@0123456789abcdef")]
)
def test_no_shorter_sequence_needs_more_slabs_than_are_counted(layout: KvLayout) -> None:
    """One that ends with a full chunk needs most: the first token of the next one is a whole slab without eviction."""
    most = 0
    for tokens in range(1, 3000):
        most = max(most, 1 + most_bag_slabs(layout, tokens) - layout.num_chunks(tokens))
        if tokens % 64 in (0, 1, 2, 63):
            assert most_extra_slabs(layout, tokens) == max(2, most), tokens


def test_a_head_per_policy_takes_what_it_keeps() -> None:
    """Over 20 decision points the bag stays compact, and its map describes it."""
    rng, rule, prompt = np.random.default_rng(5), KeepRule(), 300
    policies = np.arange(6, dtype=np.uint8).reshape(2, 3) % 5
    rows = [np.arange(64, prompt) for _ in range(6)]
    for length in range(prompt, prompt + 20 * 64, 64):
        for number, positions in enumerate(rows):
            kinds, scores = (positions % 5 == 0).astype(np.uint8) * 2, rng.random(len(positions))
            policy = int(policies.reshape(-1)[number])
            mask = kept_mask(policy, kinds, positions, scores, length, prompt, 64, rule)
            rows[number] = positions[mask]
        kept = KeptRows.from_heads(SMALL, 64, length, policies, [one.astype(np.int32) for one in rows])
        kept.check()
        assert KeptRows.decode(kept.encode(), SMALL).positions.tolist() == np.concatenate(rows).tolist()
        rows = [np.concatenate((one, np.arange(length, length + 64))) for one in rows]


@pytest.fixture
def kept() -> KeptRows:
    policies, positions = random_rows(np.random.default_rng(1), SMALL, 64, 1200)
    policies[0, 0], positions[0] = FULL, np.arange(64, 1200, dtype=np.int32)
    policies[1, 2], positions[5] = 0, np.arange(70, 100, dtype=np.int32)
    return KeptRows.from_heads(SMALL, 64, 1200, policies, positions)


def test_a_hostile_map_is_refused(kept: KeptRows) -> None:
    data = kept.encode()
    frame = frame_bytes(SMALL)
    for size in (0, 1, 27, 28, frame, len(data) - frame, len(data) - 1):
        with pytest.raises(ValueError, match="map of kept rows"):
            KeptRows.decode(data[:size], SMALL)
    with pytest.raises(ValueError, match="has"):
        KeptRows.decode(data + bytes(frame), SMALL)
    with pytest.raises(ValueError, match="layout"):
        KeptRows.decode(data, EMBEDDED)

    def changed(place: int, form: str, value: int) -> bytes:
        copy = bytearray(data)
        struct.pack_into(form, copy, place, value)
        return bytes(copy)

    heads, counts, bits = 28, 28 + 6, 28 + 6 + 24
    hostile = {
        "no map": changed(0, "<I", 0),
        "version": changed(4, "<H", 1),
        "layers": changed(6, "<H", 200),
        "heads": changed(8, "<H", 0),
        "reserved": changed(10, "<H", 1),
        "boundary between chunks": changed(12, "<I", 65),
        "boundary beyond the length": changed(12, "<I", 1216),
        "longer": changed(16, "<I", 1201),
        "much longer": changed(16, "<I", 2**32 - 1),
        "shorter": changed(16, "<I", 1199),
        "outliers of a codec without": changed(24, "<I", 1),
        "more rows": changed(20, "<I", kept.num_rows + 1),
        "no such policy": changed(heads, "<B", LAST_POLICY + 1),
        "a full head that lacks rows": changed(heads + 5, "<B", FULL),
        "a count too high": changed(counts + 4, "<I", int(kept.counts[0, 1]) + 1),
        "a count of 4 billion": changed(counts + 4, "<I", 2**32 - 1),
        "a position more": changed(bits + 5 * 142, "<B", 1),
        "another position fewer": changed(bits, "<B", 0xFE),
        "something behind the map": changed(len(data) - 1, "<B", 1),
    }
    for reason, wrong in hostile.items():
        with pytest.raises(ValueError, match=r"map|policies|everything|positions|outliers"):
            KeptRows.decode(wrong, SMALL)
            pytest.fail(reason)


def test_a_map_that_miscounts_outliers_of_a_page_is_refused() -> None:
    policies, positions = random_rows(np.random.default_rng(1), GROUPED, 0, 300)
    plain = KeptRows.from_heads(GROUPED, 0, 300, policies, positions)
    most = tuple(2 * 2 * tokens for tokens in plain.page_tokens)
    kept = replace(plain, page_outliers=most)
    kept.check()
    data, place = kept.encode(), 28 + 24 * (1 + 4 + 38)
    again = KeptRows.decode(data, GROUPED)
    assert (
        again.page_outliers == most and again.outliers == sum(most) == struct.unpack_from("<I", data, 24)[0]
    )
    for counts in ((most[0] + 1, most[1] - 1), (most[0], most[1] - 1), (2**32 - 1, most[1])):
        copy = bytearray(data)
        struct.pack_into("<2I", copy, place, *counts)
        with pytest.raises(ValueError, match="contradicts itself|cannot have"):
            KeptRows.decode(bytes(copy), GROUPED)
    for wrong in (most[1:], (-1, *most[1:])):
        with pytest.raises(AssertionError, match="outliers"):
            replace(plain, page_outliers=wrong).check()


def test_bits_behind_the_last_position_are_refused() -> None:
    layout = KvLayout(1, 1, 4, "float16")
    kept = KeptRows.from_heads(layout, 0, 13, np.zeros((1, 1), np.uint8), [np.arange(3, dtype=np.int32)])
    data = bytearray(kept.encode())
    data[28 + 1 + 4 + 1] = 0x80
    with pytest.raises(ValueError, match="zeros"):
        KeptRows.decode(bytes(data), layout)


def test_a_map_larger_than_its_bag_is_refused() -> None:
    layout = KvLayout(1, 1, 1, "float16")
    kept = KeptRows.from_heads(layout, 0, 4096, np.zeros((1, 1), np.uint8), [np.zeros(0, np.int32)])
    frame = kept.encode()[: frame_bytes(layout)]
    assert map_frames(frame, layout, kept.num_slabs) == kept.lead == kept.num_frames
    with pytest.raises(ValueError, match="more than a bag"):
        map_frames(frame, layout, kept.num_slabs - 1)
    with pytest.raises(ValueError, match="cut off"):
        map_frames(frame[:20], layout, 9)


@given(st.binary(max_size=400))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="map of kept rows"):
        KeptRows.decode(b"KEPT" + data, SMALL)


def test_what_contradicts_itself_is_not_built(kept: KeptRows) -> None:
    with pytest.raises(ValueError, match="policies"):
        KeptRows.from_heads(SMALL, 64, 1200, kept.policies, [kept.positions])
    for change, error in (
        ({"boundary": 128}, "within|lacks"),
        ({"length": 1199}, "within|lacks"),
        ({"length": 10}, "cannot be"),
        ({"layout": EMBEDDED}, "layout"),
        ({"policies": kept.policies + 5}, "policies"),
        ({"positions": kept.positions[:-1]}, "counted"),
        ({"positions": kept.positions[::-1].copy()}, "ascend"),
        ({"counts": -kept.counts}, "counted"),
    ):
        with pytest.raises(AssertionError, match=error):
            replace(kept, **change).check()
