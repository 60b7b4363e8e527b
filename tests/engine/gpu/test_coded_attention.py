"""The kernels for coded pages in Triton's interpreter: bytes and expanded numbers are those of the NumPy codecs, and
attention agrees with the reference, which expands every page by its NumPy codec.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip(
    "engine.gpu.attention",
    reason="triton is not installed (it has wheels for Linux only)",
    exc_type=ImportError,
)

from diptych.errors import ConfigError
from engine.batching.batch import ForwardBatch, pack_batch
from engine.cpu.coded.attention import CodedAttention, CodedPool
from engine.cpu.coded.sink_table import SinkTable
from engine.gpu.coded import attention
from engine.gpu.coded.attention import CodedGpuAttention
from engine.gpu.launch import LaunchTuning
from engine.gpu.triton_kernel import INTERPRETED
from engine.step_work import StepWork
from kvcache.layout import KvLayout
from tests.engine.cpu.coded_pages import (
    CHUNKS,
    LAYER,
    LAYERS,
    NO_NORMS,
    QUERIES,
    make_codec,
    make_qkv,
)

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels are compiled here: tests/gpu runs them")

# Groups of powers of two and others, places of 8 and of 16 bits, heads that are rotated whole and in blocks.
GRID = (
    ("nuq4-1%", 4, 32), ("nuq3-1%", 5, 64), ("nuq4", 2, 48), ("nuq3-1%", 2, 16), ("nuq3", 3, 32), ("nuq2-1%", 2, 64),
    ("nuq2", 4, 16), ("int8", 2, 16), ("int4", 1, 128), ("int4.g8", 2, 24), ("tq4", 2, 16), ("tq4.s7", 1, 48),
    ("tq3", 3, 24), ("tq-k8v4", 2, 32), ("fp16", 2, 16), ("bf16", 2, 24),
)  # fmt: skip
NONE = torch.empty(0)
# Slots of the first tokens of sequences.
SINKS = (2, 1, 0)


class CodedBench:
    """One codec's pool for the kernels and one for the reference, both of bytes 255 at first, with equal sinks."""

    def __init__(
        self,
        name: str,
        heads: int,
        width: int,
        groups: int = 1,
        dtype: str = "float32",
        tuning: LaunchTuning | None = None,
    ) -> None:
        codec = make_codec(name, heads, width)
        self.heads, self.width = heads * groups, width
        pages = heads // codec.shape.heads * groups
        layout = KvLayout(LAYERS, self.heads, width, dtype, str(codec.codec_id))
        codecs = ((codec,) * pages,) * LAYERS
        frequencies = 10000.0 ** -(np.arange(width // 2) / (width // 2))
        data = torch.full((CHUNKS, LAYERS, pages, layout.page_bytes), 255, dtype=torch.uint8)
        sinks = SinkTable(layout)
        query_heads = QUERIES * self.heads
        self.reference = CodedAttention(
            CodedPool(layout, data.clone(), codecs, frequencies, sinks), query_heads
        )
        self.pages = CodedGpuAttention(
            layout,
            data,
            query_heads,
            codecs,
            frequencies,
            320,
            len(SINKS),
            tuning or LaunchTuning(1, 0, rows=512),
        )
        rows = torch.from_numpy(
            np.random.default_rng(1).standard_normal((2, 3, self.heads, width), np.float32)
        )
        sinks.write([0, 1, 2], LAYER, *rows.numpy())
        self.pages.keep_sinks(LAYER, torch.arange(3), *rows)

    def fill(self, byte: int) -> None:
        self.pages.data.fill_(byte)
        self.reference._pages.fill(byte)

    def write(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Code a step's rows; returns them with rotated queries."""
        rows = qkv.clone()
        self.pages.write(LAYER, rows, self.pages.load(batch), (NONE, NONE), (NONE, NONE), 1e-5)
        return rows

    def attend(self, rows: torch.Tensor, batch: ForwardBatch, window: int = 0) -> torch.Tensor:
        """Attention of all rows of a step that was written, [tokens, query heads * head_dim]."""
        out = torch.full((len(rows), QUERIES * self.heads * self.width), float("nan")).to(rows.dtype)
        step = self.pages.load(batch)
        self.pages.decode(LAYER, rows, step, window, out)
        self.pages.prefill(LAYER, rows, step, window, out)
        return out[: len(batch.positions)]

    def check(self, qkv: torch.Tensor, batch: ForwardBatch, window: int, tolerance: float) -> None:
        """One step of both, the reference in float32 over the codes of the kernels."""
        rows = self.write(qkv, batch)
        found = self.attend(rows, batch, window).float()
        self.reference._pages[:] = self.pages.data.numpy()
        expected = torch.zeros_like(found)
        self.reference.decode(LAYER, rows.float(), batch, window, expected)
        for span in batch.spans:
            self.reference.prefill(LAYER, rows.float(), span, window, expected)
        assert float((found - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("name", "heads", "width"), GRID)
def test_codes_and_numbers_are_those_of_the_codec(name: str, heads: int, width: int) -> None:
    bench = CodedBench(name, heads, width)
    bench.fill(0)
    qkv = make_qkv(heads, width, 100, extreme=True)
    batch = pack_batch([StepWork([5] * 100, 50, [7, 2, 4], "none")])  # begins and ends within a page
    rows, expected = bench.write(qkv, batch), qkv.clone()
    bench.reference.write(LAYER, expected, batch, NO_NORMS, NO_NORMS, 1e-5)
    queries = slice(QUERIES * heads * width)
    assert torch.equal(rows[:, queries], expected[:, queries])
    assert np.array_equal(bench.pages.data.numpy(), bench.reference._pages)
    assert not bench.pages.broken.any()
    # With angles of zero, expanded chunks are what the codec expands.
    cos, sin = bench.pages._angles
    bench.pages._angles = (torch.ones_like(cos), torch.zeros_like(sin))
    expanded = bench.pages.expand_spans(LAYER, bench.pages.load(batch), 0, torch.float32).numpy()
    bench.reference._frequencies = np.zeros(width // 2)
    for chunk, slab, first, end in ((0, 7, 50, 64), (1, 2, 0, 64), (2, 4, 0, 22)):
        parts = bench.reference._expand_chunk(LAYER, slab, chunk * 64, end, 0)
        for side, numbers in enumerate(parts):
            found = expanded[chunk, :, side, first:end].transpose(1, 0, 2)
            assert np.array_equal(found, numbers[first:end])


def attention_steps(heads: int, width: int) -> list[tuple[torch.Tensor, ForwardBatch]]:
    """A prompt in two spans, another one beside it, and decodes of which two share chunks."""
    steps = (
        [StepWork([5] * 70, 0, [7, 2], "none")],
        [StepWork([5] * 5, 0, [3], "none"), StepWork([5] * 60, 70, [7, 2, 4], "none")],
        [*[StepWork([5], 129 + n, [7, 2, 4], "none") for n in range(2)], StepWork([5], 5, [3], "none")],
    )
    places = ([2], [1, 2], [2, 2, 1])
    return [
        (make_qkv(heads, width, sum(len(work.tokens) for work in works)), pack_batch(works, sinks))
        for works, sinks in zip(steps, places, strict=True)
    ]


@pytest.mark.parametrize(("name", "heads", "width", "groups", "window", "programs"), [
    ("nuq4-1%", 2, 32, 1, 0, 1), ("nuq4-1%", 1, 48, 2, 70, 16), ("nuq3-1%", 2, 16, 1, 70, 1), ("nuq2", 2, 32, 1, 0, 16),
    ("int4", 2, 32, 1, 70, 16), ("tq4", 2, 32, 1, 0, 16), ("tq3", 1, 24, 1, 70, 1), ("tq-k8v4", 1, 64, 1, 0, 1),
    ("fp16", 1, 16, 1, 0, 1), ("bf16", 1, 16, 1, 0, 1),
])  # fmt: skip
def test_attention_is_that_of_the_reference(
    name: str, heads: int, width: int, groups: int, window: int, programs: int
) -> None:
    bench = CodedBench(name, heads, width, groups, tuning=LaunchTuning(programs, 0, rows=512))
    for qkv, batch in attention_steps(heads * groups, width):
        bench.check(qkv, batch, window, 1e-5)


@pytest.mark.parametrize(("name", "dtype", "tolerance"), [
    ("nuq4-1%", "float16", 2e-3), ("tq4", "bfloat16", 2e-2),
])  # fmt: skip
def test_rows_of_16_bits_stay_close(name: str, dtype: str, tolerance: float) -> None:
    bench = CodedBench(name, 1, 32, dtype=dtype)
    for qkv, batch in attention_steps(1, 32):
        qkv[:, : QUERIES * 32] *= 0.1  # outliers make scores large, and with them what rounding the keys does
        bench.check(qkv.to(getattr(torch, dtype)), batch, 0, tolerance)


@pytest.mark.parametrize("name", ["int4", "tq4"])
def test_many_tokens_of_little_weight_add_up_in_float16(name: str) -> None:
    """Small values behind a first token with nearly all attention: float16 has no numbers for weights times scales."""
    width, chunks, gap = 32, 30, 9.9
    bench = CodedBench(name, 1, width, dtype="float16", tuning=LaunchTuning(1, 1 << 60, rows=512))
    rows = torch.zeros(128, (QUERIES + 2) * width)
    values = 0.003 * (1 + np.random.default_rng(0).standard_normal((128, width)))
    rows[:, (QUERIES + 1) * width :] = torch.from_numpy(values)
    bench.write(rows.half(), pack_batch([StepWork([5] * 128, 0, [0, 1], "none")], [0]))
    first = torch.zeros(2, 1, 1, width)
    first[0, 0, 0, 0] = 1.0
    bench.pages.keep_sinks(LAYER, torch.arange(1), *first)
    bench.reference._sinks.write([0], LAYER, *first.numpy())
    batch = pack_batch([StepWork([5], 64 * chunks - 1, [0, *[1] * (chunks - 1)], "none")], [0])
    query = torch.zeros(1, (QUERIES + 2) * width)
    query[0, : QUERIES * width : width] = gap * width**0.5
    found, expected = (torch.zeros(1, QUERIES * width, dtype=kind) for kind in (torch.float16, torch.float32))
    bench.pages.decode(LAYER, query.half(), bench.pages.load(batch), 0, found)
    bench.reference._pages[:] = bench.pages.data.numpy()
    bench.reference.decode(LAYER, query, batch, 0, expected)
    assert float((found.float() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("name", ["nuq3-1%", "tq4"])
def test_a_row_is_the_same_alone_and_among_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and attention, to the bit, where nothing is shared; also with one row per program, as on a GPU."""
    works = [
        StepWork([5] * 3, 60, [0, 1], "none"),
        StepWork([5], 64, [2, 3], "none"),
        StepWork([5], 63, [4], "none"),
    ]
    together = CodedBench(name, 2, 16, tuning=LaunchTuning(1, 1 << 40))
    together.fill(0)
    batch = pack_batch(works)
    qkv = make_qkv(2, 16, 5)
    rows = together.write(qkv, batch)
    expected = together.attend(rows, batch)
    monkeypatch.setattr(attention, "ROWS_PER_PROGRAM", 1)
    alone = CodedBench(name, 2, 16, tuning=LaunchTuning(1, 1 << 40))
    alone.fill(0)
    row = 0
    for work in works:
        part, single = slice(row, row + len(work.tokens)), pack_batch([work])
        assert torch.equal(alone.attend(alone.write(qkv[part], single), single), expected[part])
        row = part.stop
    assert torch.equal(alone.pages.data, together.pages.data)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_number_that_is_not_finite_is_reported_and_its_row_not_stored() -> None:
    odd = {"nuq4-1%": float("inf"), "tq4": float("nan"), "int8": -float("inf"), "bf16": float("nan")}
    for name, number in odd.items():
        bench = CodedBench(name, 2, 16)
        qkv = make_qkv(2, 16, 2)
        qkv[1, -33:] = number  # the last key, and all values
        bench.write(qkv, pack_batch([StepWork([5] * 2, 0, [7], "none")]))
        assert bench.pages.broken.tolist() == [1]
        written = CodedBench(name, 2, 16)
        written.write(qkv[:1], pack_batch([StepWork([5], 0, [7], "none")]))
        assert torch.equal(bench.pages.data[7, LAYER, -1, -128:], written.pages.data[7, LAYER, -1, -128:])


def test_padding_rows_write_nothing() -> None:
    bench = CodedBench("nuq4-1%", 2, 16)
    batch = pack_batch([StepWork([5] * 2, 0, [7], "none")])
    step = bench.pages.load(batch)
    step.slots.fill_(-1)
    bench.pages.write(LAYER, make_qkv(2, 16, 2), step, (NONE, NONE), (NONE, NONE), 1e-5)
    assert (bench.pages.data == 255).all() and not bench.pages.broken.any()


@pytest.mark.parametrize(
    ("name", "heads", "width"),
    [("nuq4", 3, 8), ("raw", 2, 16), ("int8", 2, 12), ("fp8", 2, 16), ("int4@", 2, 16), ("tq4@", 2, 16)],
)
def test_what_the_kernels_cannot_handle_is_refused(name: str, heads: int, width: int) -> None:
    with pytest.raises(ConfigError, match="not available on a GPU") as caught:
        CodedBench(name, heads, width)
    assert len(caught.value.lines()) <= 6 and "--device cpu" in caught.value.fix
