"""Measures what a block of bulk work costs on this machine: units of a layer, steps, attention, copies, the disk.

Nothing but the first layer of the model is read, so that it can be measured for models that do not fit into memory.
The weights of the layer are held several times, so that they are read from memory as in a block and not from the cache.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError, ModelError
from engine.batching.batch import ForwardBatch, pack_batch
from engine.cpu.attention import CpuAttention, PagedAttention
from engine.cpu.coded.attention import CodedPool
from engine.cpu.coded.compiled_attention import CompiledAttention, build_angles
from engine.cpu.coded.sink_table import SinkTable
from engine.cpu.decoder import CpuDecoder
from engine.cpu.linear import PackedLinear, PackedMatrix
from engine.cpu.offload.block_kv import build_coding
from engine.cpu.offload.disk_file import PIECE_BYTES, DirectFile, allocate_memory
from engine.cpu.offload.step_probe import StepProbe
from engine.cpu.weights.decoder_weights import (
    CpuLayer,
    DecoderWeights,
    SectionReader,
    WeightSection,
    build_layer,
    layer_section,
)
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.model.rope import rope_frequencies
from engine.model.weights import WeightReader
from engine.offload.sizes import DISK_BLOCK
from engine.step_work import StepWork
from kvcache.layout import KvLayout

# The bytes of weights over which a measurement goes, at least, unless the layer alone has more.
COLD_BYTES = 96 << 20
MAX_COPIES = 64
# Up to this many rows a unit is one of decoding rows, from it on one of prompts.
MAX_DECODE_ROWS = 64
ATTENDING_ROWS = 8
KV_CODEC = "int4"
Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """How much is measured. Sizes are in tokens, rows and bytes; each measurement is the best of `rounds`."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    contexts: tuple[int, ...] = (64, 256, 1024)
    prompts: tuple[int, ...] = (64, 128, 512)
    disk_bytes: int = 256 << 20
    copy_bytes: int = 64 << 20
    rounds: int = 5


@dataclass(slots=True)
class MeasuredRates:
    """What was measured: (amount, seconds), as `planner.offload.rate_fit.RatePoints` explains."""

    layer_weights: int
    logit_row_s: float
    disk_direct: bool
    products: dict[str, list[Point]] = field(default_factory=dict)
    prompts: dict[str, list[Point]] = field(default_factory=dict)
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    attention: list[Point] = field(default_factory=list)
    prompt_attention: list[Point] = field(default_factory=list)
    coded_attention: list[Point] = field(default_factory=list)
    coded_rows: list[Point] = field(default_factory=list)
    copies: list[Point] = field(default_factory=list)
    reads: list[Point] = field(default_factory=list)
    writes: list[Point] = field(default_factory=list)


def measure_rates(
    checkpoint: Checkpoint,
    folder: Path,
    threads: int,
    say: Callable[[str], None],
    sizes: ProbeSizes | None = None,
) -> MeasuredRates:
    """Measure the rates of blocks of `checkpoint` with `threads` threads; the disk is that of `folder`.

    `say` is told what is measured. With one thread, computing is measured in time of the core, so that other programs
    make it less wrong.

    Raises:
        ConfigError: the folder cannot be used, or its disk has too little room.
        ModelError: the checkpoint does not match its config.
    """
    sizes, before = sizes or ProbeSizes(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            return _LayerProbe(checkpoint, threads, sizes).measure(folder, say)
    finally:
        torch.set_num_threads(before)


class _LayerProbe:
    """The measurements of one model."""

    def __init__(self, checkpoint: Checkpoint, threads: int, sizes: ProbeSizes) -> None:
        self.checkpoint, self.sizes, self._threads = checkpoint, sizes, threads
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        longest = max(*sizes.contexts, *sizes.prompts, max(sizes.rows)) + 1
        self._context = min(longest, checkpoint.config.context)
        self.decoder = CpuDecoder(checkpoint.config, DecoderWeights((), None, None, None), self._context)
        self._steps = StepProbe(checkpoint, self._context, self._clock, sizes.rounds)

    def measure(self, folder: Path, say: Callable[[str], None]) -> MeasuredRates:
        config = self.checkpoint.config
        say("products of a layer")
        section = _read_layer(self.checkpoint, None)
        weights = sum(one.outputs * one.inputs for one in section.matrices.values())
        # Of a large vocabulary only a part is in the steps.
        more = config.vocab / self._steps.outputs - 1
        rates = MeasuredRates(weights, more * self._measure_logits(), True)
        self._measure_layers(rates, "exact", section)
        try:
            self._measure_layers(rates, "int4", _read_layer(self.checkpoint, "int4"))
        except ModelError as error:
            say(f"no weights of 4 bits: {error.why}")
        del section
        say("steps")
        rates.steps = self._steps.measure_steps()
        say("attention")
        self._measure_attention(rates, say)
        say("copies and the disk")
        rates.copies = self._measure_copies()
        self._measure_disk(folder, rates)
        return rates

    # ---- products

    def _measure_layers(self, rates: MeasuredRates, kind: str, section: WeightSection) -> None:
        """(rows, seconds) of units in a layer of a kind of weights, which come from memory."""
        window = self.checkpoint.config.windows[0]
        layers = [build_layer(section, window), *_copy_layers(section, window, self.checkpoint.config.layers)]
        rows = self.sizes.rows
        rates.products[kind] = [
            (count, self._steps.measure_decode(layers, count)) for count in rows if count <= MAX_DECODE_ROWS
        ]
        rates.prompts[kind] = [
            (count, self._steps.measure_prompts(layers, count)) for count in rows if count >= MAX_DECODE_ROWS
        ]

    def _measure_logits(self) -> float:
        """Seconds of a row's logits, of as many outputs as steps have."""
        weight = (
            torch.randn(self._steps.outputs, self.checkpoint.config.hidden)
            .to(torch.bfloat16)
            .to(torch.float32)
        )
        product, rows = PackedLinear.pack(weight), 16
        x = torch.randn(rows, self.checkpoint.config.hidden)
        return self._best_s(lambda: product(x)) / rows

    # ---- attention

    def _measure_attention(self, rates: MeasuredRates, say: Callable[[str], None]) -> None:
        raw = replace(self.checkpoint.layout(), layers=1)
        attention = self._raw_pages(raw)
        for context in self._contexts():
            read = ATTENDING_ROWS * context * raw.layer_bytes // CHUNK_TOKENS
            rates.attention.append((read, self._decode_s(attention, context)))
        config = self.checkpoint.config
        prompts = {count: self._prompt_s(attention, count) for count in self._prompts()}
        for count, seconds in prompts.items():
            flops = count * (count + 1) // 2 * 4 * config.heads * config.head_dim
            rates.prompt_attention.append((flops, seconds))
        try:
            coded, stored = self._coded_pages()
        except (ConfigError, ModelError) as error:
            say(f"no KV of 4 bits: {error.why}")
            return
        for context in self._contexts():
            read = ATTENDING_ROWS * context * stored.layer_bytes // CHUNK_TOKENS
            rates.coded_attention.append((read, self._decode_s(coded, context)))
        for count, seconds in prompts.items():
            rates.coded_rows.append((count, self._prompt_s(coded, count) - seconds))

    def _contexts(self) -> list[int]:
        return sorted({min(one, self._context - 1) for one in self.sizes.contexts})

    def _prompts(self) -> list[int]:
        return sorted({min(one, self._context - 1) for one in self.sizes.prompts})

    @property
    def _chunks(self) -> int:
        """Chunks of the pools: those of all rows at the longest context."""
        return ATTENDING_ROWS * -(-self._context // CHUNK_TOKENS)

    def _raw_pages(self, layout: KvLayout) -> PagedAttention:
        data = torch.randn(self._chunks, *layout.chunk_shape)
        return CpuAttention(layout, data, self.checkpoint.config.heads)

    def _coded_pages(self) -> tuple[PagedAttention, KvLayout]:
        """Attention over a pool of KV in 4 bits, and its layout. Raises ConfigError or ModelError."""
        config = self.checkpoint.config
        codec, calibration = resolve_kv_codec(self.checkpoint, KV_CODEC)
        layout = replace(self.checkpoint.layout(codec=codec), layers=1)
        frequencies = rope_frequencies(config.rope, layout.head_dim).double().numpy()
        sinks = SinkTable(layout)
        angles = build_angles(frequencies, self._context)
        coding = build_coding(layout, calibration, frequencies, angles, sinks)
        data = torch.zeros(self._chunks, 1, layout.pages_per_layer, layout.page_bytes, dtype=torch.uint8)
        pool = CodedPool(layout, data, coding.codecs, frequencies, sinks)
        return CompiledAttention(pool, config.heads, angles), layout

    def _decode_s(self, attention: PagedAttention, context: int) -> float:
        """Seconds for which rows at a context are attended to."""
        chunks = -(-context // CHUNK_TOKENS)
        works = [
            StepWork([1], context - 1, list(range(row * chunks, (row + 1) * chunks)), "none", 1)
            for row in range(ATTENDING_ROWS)
        ]
        batch = pack_batch(works)
        self._fill_pages(attention, works, context)
        qkv = self._random_qkv(ATTENDING_ROWS)
        mixed = torch.zeros(ATTENDING_ROWS, self.checkpoint.config.heads * self.checkpoint.config.head_dim)
        return self._best_s(lambda: attention.decode(0, qkv, batch, 0, mixed))

    def _fill_pages(self, attention: PagedAttention, works: list[StepWork], context: int) -> None:
        """Write the keys and values of all rows."""
        for work in works:
            batch = pack_batch([StepWork([1] * context, 0, work.slabs, "none", 1)])
            self._write(attention, self._random_qkv(context), batch)

    def _prompt_s(self, attention: PagedAttention, count: int) -> float:
        """Seconds of writing and attending to a prompt of `count` tokens."""
        batch = pack_batch([StepWork([1] * count, 0, list(range(-(-count // CHUNK_TOKENS))), "none", 1)])
        qkv, config = self._random_qkv(count), self.checkpoint.config
        mixed = torch.zeros(count, config.heads * config.head_dim)

        def attend() -> None:
            self._write(attention, qkv, batch)
            for span in batch.spans:
                attention.prefill(0, qkv, span, 0, mixed)

        return self._best_s(attend)

    def _write(self, attention: PagedAttention, qkv: torch.Tensor, batch: ForwardBatch) -> None:
        none = np.empty(0, np.float32)
        attention.write(
            0, qkv, batch, (self.decoder.cos, self.decoder.sin), (none, none), self.checkpoint.config.eps
        )

    def _random_qkv(self, rows: int) -> torch.Tensor:
        config = self.checkpoint.config
        return torch.randn(rows, (config.heads + 2 * config.kv_heads) * config.head_dim)

    # ---- memory and disk

    def _measure_copies(self) -> list[Point]:
        source = torch.ones(self.sizes.copy_bytes, dtype=torch.uint8)
        target = torch.empty_like(source)
        return [(self.sizes.copy_bytes, self._best_s(lambda: target.copy_(source)))]

    def _measure_disk(self, folder: Path, rates: MeasuredRates) -> None:
        """Fill in how fast the disk of `folder` is written and read, piece after piece. Raises ConfigError."""
        size = -(-self.sizes.disk_bytes // PIECE_BYTES) * PIECE_BYTES
        try:
            if shutil.disk_usage(folder).free < 4 * size:
                raise OSError(f"less than {4 * size >> 20} MiB are free")
            file = DirectFile.create_scratch(folder, size)
        except OSError as error:
            fix = "name a folder on the disk that bulk work is to use"
            raise ConfigError(f"the disk of {folder} cannot be measured", str(error), fix) from error
        memory = allocate_memory(PIECE_BYTES)
        memory[:] = os.urandom(DISK_BLOCK) * (PIECE_BYTES // DISK_BLOCK)
        rates.disk_direct = file.direct
        try:
            for points, move in ((rates.writes, file.write_from), (rates.reads, file.read_into)):
                # The first round of writing makes the file's blocks.
                for counted in (False, True):
                    begun_s = time.perf_counter()
                    for start in range(0, size, PIECE_BYTES):
                        move(memory, start)
                    if counted:
                        points.append((size, time.perf_counter() - begun_s))
        except OSError as error:
            fix = "name a folder on another disk"
            raise ConfigError(f"the disk of {folder} cannot be measured", str(error), fix) from error
        finally:
            file.close()

    def _best_s(self, call: Callable[[], object]) -> float:
        """The shortest time of a call, in seconds."""
        call()
        best = math.inf
        for _ in range(self.sizes.rounds):
            begun_s = self._clock()
            call()
            best = min(best, self._clock() - begun_s)
        return max(best, 1e-9)


def _read_layer(checkpoint: Checkpoint, kind: str | None) -> WeightSection:
    """The first layer's weights. Raises ModelError: the checkpoint does not match, or the kind cannot be had."""
    with WeightReader(checkpoint.weights) as weights:
        sections = SectionReader(checkpoint.config, weights, layer_kind=kind).read_sections()
        return next(section for name, section in sections if name == layer_section(0))


def _copy_layers(section: WeightSection, window: int, layers: int) -> Iterator[CpuLayer]:
    """Further copies of a layer, until there are `COLD_BYTES` in all, or as many as the model has layers."""
    count = min(MAX_COPIES, layers - 1, math.ceil(COLD_BYTES / max(1, section.num_bytes)) - 1)
    for _ in range(count):
        matrices = {name: _copy_matrix(one) for name, one in section.matrices.items()}
        yield build_layer(WeightSection(section.arrays, matrices), window)


def _copy_matrix(matrix: PackedMatrix) -> PackedMatrix:
    return replace(matrix, panels=matrix.panels.copy(), bias=matrix.bias.copy())
