"""Compiled kernels of every codec: codes and expanded pages are those of NumPy to the bit, attention agrees."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from diptych.kernels.cache import kernel_source_stamp
from engine.batching.batch import pack_batch
from engine.cpu.attention import worthwhile_plan
from engine.cpu.coded import page_factory
from engine.cpu.coded.compiled_attention import CompiledAttention, build_angles
from engine.cpu.coded.families import (
    grouped_kernels,
    nuq_encode,
    nuq_expand,
    nuq_frames,
    plain_kernels,
    turbo_kernels,
)
from engine.cpu.coded.packed import load_half, round_half
from engine.cpu.coded.page_kernels import _FUNCTIONS
from engine.cpu.jit import jit
from engine.model.memory_plan import angle_table_bytes
from engine.step_work import StepWork
from kvcache.codecs.page import to_half
from tests.engine.cpu.coded_pages import LAYER, NO_NORMS, QUERIES, make_pair, make_qkv, write

CALIBRATED_NAMES = ("nuq4-1%", "nuq4", "nuq3-1%", "nuq3", "nuq2-1%", "nuq2")
# The embedded model's width wherever the width does not matter, since compiling takes seconds for each width. Heads of
# 64 are rotated by several vectors, heads of 4 by none.
CALIBRATED_SHAPES = ((1, 32), (4, 32), (3, 4), (6, 4), (2, 64), (8, 64))
NAMES = ("fp16", "bf16", "fp8", "int8", "tq4", "tq3", "tq-k8v4")
# Groups that are whole vectors and groups that are not; heads that are rotated whole, and in blocks.
GRID = (
    *((name, *shape) for name in CALIBRATED_NAMES for shape in CALIBRATED_SHAPES),
    *((name, 2, 32) for name in (*NAMES, "int4.g8", "tq4.s7", "int4@", "tq3@")),
    *((name, *shape) for name in ("tq4", "tq3") for shape in ((3, 24), (1, 48))),
    ("tq-k8v4", 1, 48),
)


@pytest.mark.parametrize(("name", "heads", "width"), GRID)
def test_codes_and_numbers_are_those_of_the_codec(name: str, heads: int, width: int) -> None:
    slow, fast = make_pair(name, heads, width)
    qkv = make_qkv(heads, width, 100, extreme=True)
    work = [StepWork([5] * 100, 50, [7, 2, 4], "none")]  # begins and ends within a page
    rows = [write(pages, qkv, work).numpy() for pages in (slow, fast)]
    queries = [part[:, : QUERIES * heads * width] for part in rows]
    assert np.array_equal(queries[0], queries[1])
    assert np.array_equal(slow._pages, fast._pages)
    codecs = slow._codecs[LAYER]
    scratch = np.empty((3, heads, 2, 64, width), np.float32)
    ones = np.ones(64 * 8 * width, np.float32)
    fast._angles = ones, np.zeros_like(ones)  # angles of zero
    fast._kernels.expand(
        np.array([7, 2, 4]), 1, 1000, np.empty((2, heads, width), np.float32), fast._place(LAYER),
        fast._read_angles, scratch.reshape(-1),
    )  # fmt: skip
    for slab, found in zip((7, 2, 4), scratch, strict=True):
        expanded = [
            codec.expand_stored(page) for codec, page in zip(codecs, slow._pages[slab, LAYER], strict=True)
        ]
        for side, expected in enumerate(
            np.concatenate(parts, axis=1) for parts in zip(*expanded, strict=True)
        ):
            same = np.ascontiguousarray(found[:, side].transpose(1, 0, 2))
            assert np.array_equal(same.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("name", "shape", "groups"), [
    ("nuq4-1%", (4, 32), 1), ("nuq4-1%", (2, 64), 2), ("nuq3-1%", (1, 32), 2), ("nuq2", (6, 4), 1),
    *((name, (2, 32), 1) for name in ("fp16", "bf16", "fp8", "int8", "int4@", "tq4@", "tq3", "tq-k8v4")),
])  # fmt: skip
def test_attention_is_that_of_the_slow_path(
    name: str, shape: tuple[int, int], groups: int, window: int
) -> None:
    """Prefill in two spans, decode, and decodes that share chunks, with several first tokens."""
    heads, width = shape
    found = []
    for pages in make_pair(name, heads, width, groups):
        outs = []
        for count, works in (
            (150, [StepWork([5] * 150, 0, [7, 2, 4], "none")]),
            (110, [StepWork([5] * 110, 150, [7, 2, 4, 1, 9], "none")]),
            (140, [StepWork([5] * 70, 0, [3, 5], "none"), StepWork([5] * 70, 5, [0, 6], "none")]),
            (18, [*[StepWork([5], 259 - n, [7, 2, 4, 1, 9 + n // 9], "none") for n in range(17)],
                  StepWork([5], 69, [3, 5], "none")]),
        ):  # fmt: skip
            sinks = [2] * 17 + [1] if len(works) > 2 else [2, 1][: len(works)]
            batch = pack_batch(works, sinks)
            rows, out = (
                make_qkv(heads * groups, width, count),
                torch.zeros(count, QUERIES * heads * groups * width),
            )
            pages.write(LAYER, rows, batch, NO_NORMS, NO_NORMS, 1e-5)
            pages.decode(LAYER, rows, batch, window, out)
            for span in batch.spans:
                pages.prefill(LAYER, rows, span, window, out)
            outs.append(out)
        found.append(outs)
    for slow, fast in zip(*found, strict=True):
        scale = max(1.0, float(slow.abs().max()))
        assert float((slow - fast).abs().max()) <= 1e-5 * scale


# First chunk, end chunk, first row and end row of each run that the rows of the tests below share.
ONE_RUN = [[0, 9, 0, 8]]
BRANCHES = [[0, 2, 0, 15], [2, 8, 0, 8], [2, 7, 8, 15]]


@pytest.mark.parametrize("runs", [ONE_RUN, BRANCHES], ids=["nine chunks", "branches"])
@pytest.mark.parametrize(("name", "shape", "groups"), [
    ("nuq4-1%", (4, 32), 1), ("nuq3-1%", (1, 32), 2), ("nuq2", (6, 4), 1),
    *((name, (2, 32), 1) for name in ("bf16", "int8", "int4@", "tq4@", "tq-k8v4")),
])  # fmt: skip
def test_shared_chunks_are_read_in_pieces_and_by_branches(
    name: str, shape: tuple[int, int], groups: int, runs: list[list[int]]
) -> None:
    """A run of more chunks than are expanded at once, and runs that continue other runs."""
    heads, width = shape
    count, slabs = runs[0][3], list[list[int]]()
    shared = [
        [chunk + 10 * number for chunk in range(last - first)]
        for number, (first, last, *_) in enumerate(runs)
    ]
    for n in range(count):
        own = [slab for run, part in zip(runs, shared, strict=True) if run[2] <= n < run[3] for slab in part]
        slabs.append([*own, 30 + n])
    works = [StepWork([5], 64 * len(row) - 64 + n % 3, row, "none") for n, row in enumerate(slabs)]
    longest = [slabs[run[2]][: run[1]] for run in runs]
    found = []
    for pages in make_pair(name, heads, width, groups, chunks=50, max_len=10 * 64):
        for number, row in enumerate(longest):
            tokens = 64 * len(row)
            text = make_qkv(heads * groups, width, tokens + number)[:tokens]
            write(pages, text, [StepWork([5] * tokens, 0, row, "none")])
        batch = pack_batch(works, [1] * count)
        rows, out = (
            make_qkv(heads * groups, width, count),
            torch.zeros(count, QUERIES * heads * groups * width),
        )
        pages.write(LAYER, rows, batch, NO_NORMS, NO_NORMS, 1e-5)
        if isinstance(pages, CompiledAttention):
            assert worthwhile_plan(batch, 0, pages.alone, QUERIES).runs.tolist() == runs
        pages.decode(LAYER, rows, batch, 0, out)
        found.append(out)
    slow, fast = found
    assert float((slow - fast).abs().max()) <= 1e-5 * max(1.0, float(slow.abs().max()))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_writes_nothing(bad: float) -> None:
    for pages in make_pair("nuq4-1%", 2, 32):
        qkv = make_qkv(2, 32, 20)
        qkv[19, -1] = bad
        with pytest.raises(ValueError, match="finite"):
            write(pages, qkv, [StepWork([5] * 20, 0, [7], "none")])
        assert not pages._pages.any()


@pytest.mark.parametrize("name", [*NAMES, "nuq4-1%", "nuq2"])
def test_finite_numbers_are_never_refused(name: str) -> None:
    """Rotation takes keys beyond half of float32's range out of it. They are clamped like other large numbers."""
    slow, fast = make_pair(name, 2, 32)
    qkv, largest = make_qkv(2, 32, 70), float(np.finfo(np.float32).max)
    start = QUERIES * 2 * 32
    for row, (size, every) in enumerate([(largest, 1), (-largest, 1), (1.8e38, 2), (-largest, 5), (7e4, 3)]):
        qkv[10 * row + 3 : 10 * row + 9, start::every] = size
    work = [StepWork([5] * 70, 0, [7, 2], "none")]
    for pages in (slow, fast):
        write(pages, qkv, work)
    assert slow._pages.any() and np.array_equal(slow._pages, fast._pages)
    for slab in (7, 2):
        for codec, page in zip(slow._codecs[LAYER], slow._pages[slab, LAYER], strict=True):
            assert all(np.isfinite(side).all() for side in codec.expand_page(page))


def test_the_table_of_angles_is_made_once_and_ends_with_a_chunk() -> None:
    frequencies = 10000.0 ** -(np.arange(8) / 8)
    cos, sin = build_angles(frequencies, 5000)
    angles = np.arange(5056)[:, None] * frequencies
    assert len(cos) == len(sin) == 5056 * 8 and cos.nbytes + sin.nbytes == angle_table_bytes(16, 5000)
    assert np.array_equal(cos, np.cos(angles).astype(np.float32).reshape(-1))
    assert np.array_equal(sin, np.sin(angles).astype(np.float32).reshape(-1))


def test_halves_are_those_of_numpy() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    finite = patterns[np.isfinite(patterns.view(np.float16))]

    @jit
    def read(data: Any, out: Any) -> None:
        for i in range(out.shape[0]):
            out[i] = load_half(data, 2 * i)

    @jit
    def round_all(numbers: Any, out: Any) -> None:
        for i in range(out.shape[0]):
            out[i] = round_half(numbers[i])

    numbers = np.empty(len(finite), np.float32)
    read(finite.view(np.uint8), numbers)
    assert np.array_equal(numbers, finite.view(np.float16).astype(np.float32))
    middles = (numbers[1:] + numbers[:-1]) * np.float32(0.5)
    bits = np.random.default_rng(2).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    every = np.concatenate([numbers, middles, bits[np.isfinite(bits)]])
    rounded = np.empty(len(every), np.int32)
    round_all(every, rounded)
    assert np.array_equal(rounded, to_half(every).view(np.uint16))


@pytest.mark.parametrize(
    "family", [plain_kernels, grouped_kernels, nuq_encode, nuq_expand, nuq_frames, turbo_kernels]
)
def test_a_family_that_has_changed_makes_kernels_new(
    family: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels have its number only, which stays."""
    before = kernel_source_stamp(page_factory)
    monkeypatch.setattr(family, "CHANGED", 1, raising=False)
    assert kernel_source_stamp(page_factory) != before


def test_functions_of_variants_have_names_of_their_own() -> None:
    """Those of one name and type would be taken for each other in kernels that are loaded from disk."""
    made = {*_FUNCTIONS.values()}
    for functions in (
        {one.expand_side.py_func for one in made},
        {one.encode_row.py_func for one in made},
    ):
        assert len({(one.__module__, one.__qualname__) for one in functions}) == len(functions)
    assert len({one.expand_side for one in made}) == len(_FUNCTIONS)
