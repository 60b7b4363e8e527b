"""The matrix product of the CPU engine: a register-blocked kernel, written as LLVM code, over weights packed in panels.

    panel ──▶ [depth, PANEL]    `PANEL_OUTPUTS` outputs side by side. A step of the inner loop reads one line
                                of it, multiplies it with one number of each of up to `TILE_ROWS` rows, and
                                adds the products to sums that stay in vector registers from the first step to the last.

Every sum starts at the bias and adds its products in the order of `depth`, each rounded once. So a row is the same to
the last bit whatever the number of rows; libraries choose another order for another number. The kernel is also faster
than oneDNN's product, most of all for few rows (`docs/results/engine.md`).

A panel is one stream through memory, which processors prefetch by themselves; explicit prefetching made it slower.

Weights that fit into 16 bits without loss (most checkpoints are stored that way) stay in 16 bits and are widened in
registers, which is exact: the result is that of float32 weights, at half the memory traffic. bfloat16 is stored in
pairs: the first half of a line in the low halves of 32-bit words, the second half in the high ones, so that widening is
one instruction.

4-bit weights lose precision, so they are made only if asked for. Their panels are groups of 64 lines. A group begins
with the scales of its outputs, then their minima, in float16. 32-bit words follow, each with eight lines of one output.
A weight is widened in registers to `scale * code + minimum`, rounded once; the result is that of these float32 weights
to the last bit.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import jit

_FEATURES = binding.get_host_cpu_features()

# Sizes of a tile. Its sums must fit into the registers, beside the line of weights and spare registers: 6 x 4 sums of
# 16 floats with AVX-512 (32 registers), 6 x 2 sums of 8 floats with AVX2 (16 registers). NEON has 32 registers of 4
# floats.
LANES = 16 if _FEATURES.get("avx512f") else 8
VECTORS = 4 if LANES == 16 else 2
PANEL_OUTPUTS = LANES * VECTORS
TILE_ROWS = 6
# Whether this CPU can convert float16 to float32 in vectors.
HALVES = bool(_FEATURES.get("f16c")) or platform.machine() in ("aarch64", "arm64")

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)

# 4-bit weights: lines of a group, lines in a word, words of a group's scales and minima, and of a whole group.
GROUP_LINES, WORD_LINES = 64, 8
GROUP_HEAD_WORDS = PANEL_OUTPUTS
GROUP_WORDS = GROUP_HEAD_WORDS + GROUP_LINES // WORD_LINES * PANEL_OUTPUTS
# Most rows of a tile of 4-bit weights, whose words, scales and minima take registers, too.
INT4_TILE_ROWS = 4


def line_items(kind: Any) -> int:
    """Array items per line of a panel: one per output for float32 and float16 (as int16), one per two for bfloat16."""
    return PANEL_OUTPUTS // 2 if kind == types.uint32 else PANEL_OUTPUTS


def _element_pointer(builder: Any, base: Any, *offsets: Any) -> Any:
    """Pointer to base[sum of offsets]; an offset that is a plain int becomes a constant."""
    place: Any = ir.Constant(_I64, 0)
    for offset in offsets:
        place = builder.add(place, ir.Constant(_I64, offset) if isinstance(offset, int) else offset)
    return builder.gep(base, [place])


def _load_vector(builder: Any, place: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=2)


def _load_line(builder: Any, weight: Any, place: Any, kind: Any) -> list[Any]:
    """Load one line of a panel as `VECTORS` vectors of float32.

    `kind` is the element type of the packed weights: uint32 (two bfloat16 in each element), int16 (float16) or float32.
    """
    if kind == types.uint32:
        low, high = ir.Constant(_WORDS, [16] * LANES), ir.Constant(_WORDS, [-65536] * LANES)
        words = [
            _load_vector(builder, _element_pointer(builder, weight, place, v * LANES), _WORDS)
            for v in range(VECTORS // 2)
        ]
        pairs = [(builder.shl(word, low), builder.and_(word, high)) for word in words]
        return [builder.bitcast(bits, _FLOATS) for pair in zip(*pairs, strict=True) for bits in pair]
    places = [_element_pointer(builder, weight, place, v * LANES) for v in range(VECTORS)]
    if kind == types.int16:
        return [builder.fpext(_load_vector(builder, place, _HALVES), _FLOATS) for place in places]
    return [_load_vector(builder, place, _FLOATS) for place in places]


def _broadcast_element(builder: Any, scalar: Any) -> Any:
    """A vector with the float32 `scalar` in every lane."""
    empty = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(_WORDS, [0] * LANES))


Sums = list[list[Any]]


def _emit_loop(builder: Any, name: str, count: Any, start: Sums, body: Callable[[Any, Sums], Sums]) -> Sums:
    """Emit a loop of `count` >= 1 steps over sums, [rows][VECTORS], in registers; returns the last ones.

    `body` emits a step: it takes the step's index and the sums so far, and returns the new ones.
    """
    before, block = builder.block, builder.append_basic_block(name)
    builder.branch(block)
    builder.position_at_end(block)
    step = builder.phi(_I64)
    sums = [[builder.phi(_FLOATS) for _ in row] for row in start]
    grown = body(step, sums)
    following, last = builder.add(step, ir.Constant(_I64, 1)), builder.block
    step.add_incoming(ir.Constant(_I64, 0), before)
    step.add_incoming(following, last)
    for held, more, first in zip(sums, grown, start, strict=True):
        for total, sum_, begin in zip(held, more, first, strict=True):
            total.add_incoming(begin, before)
            total.add_incoming(sum_, last)
    after = builder.append_basic_block(f"{name}.after")
    builder.cbranch(builder.icmp_signed("<", following, count), block, after)
    builder.position_at_end(after)
    return grown


def _add_products(builder: Any, fma: Any, x: list[Any], step: Any, line: list[Any], sums: Sums) -> Sums:
    """The sums after number `step` of each row was multiplied with a line."""
    grown = []
    for row, held in zip(x, sums, strict=True):
        factor = _broadcast_element(builder, builder.load(builder.gep(row, [step])))
        grown.append(
            [builder.call(fma, [factor, part, total]) for part, total in zip(line, held, strict=True)]
        )
    return grown


def _sum_products(
    builder: Any, rows: int, x: list[Any], weight: Any, begin: Any, depth: Any, kind: Any, start: Sums
) -> Sums:
    """Emit the inner loop for a fixed number of rows; returns their sums, [rows][VECTORS], in registers."""
    function: Any = cgutils.get_or_insert_function
    fma = function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{LANES}f32")
    if kind == types.int32:
        return _sum_int4_products(builder, fma, rows, x, weight, begin, depth, start)

    def add_line(step: Any, sums: Sums) -> Sums:
        place = builder.add(begin, builder.mul(step, ir.Constant(_I64, line_items(kind))))
        return _add_products(builder, fma, x, step, _load_line(builder, weight, place, kind), sums)

    return _emit_loop(builder, f"rows{rows}", depth, start, add_line)


def _sum_int4_products(
    builder: Any, fma: Any, rows: int, x: list[Any], weight: Any, begin: Any, depth: Any, start: Sums
) -> Sums:
    """`_sum_products` for 4-bit weights: a loop over groups, and in it a loop over the lines of a group."""
    size = ir.Constant(_I64, GROUP_LINES)

    def add_group(group: Any, sums: Sums) -> Sums:
        place = builder.add(begin, builder.mul(group, ir.Constant(_I64, GROUP_WORDS)))
        scales, minima = _load_group_head(builder, weight, place)
        words_at = builder.add(place, ir.Constant(_I64, GROUP_HEAD_WORDS))
        first = builder.mul(group, size)
        left = builder.sub(depth, first)
        count = builder.select(builder.icmp_signed("<", left, size), left, size)

        def add_line(step: Any, held: Sums) -> Sums:
            word = builder.mul(builder.lshr(step, ir.Constant(_I64, 3)), ir.Constant(_I64, PANEL_OUTPUTS))
            codes = _load_codes(builder, weight, builder.add(words_at, word), step)
            line = [builder.call(fma, parts) for parts in zip(scales, codes, minima, strict=True)]
            return _add_products(builder, fma, x, builder.add(first, step), line, held)

        return _emit_loop(builder, f"lines{rows}", count, sums, add_line)

    last = builder.add(depth, ir.Constant(_I64, GROUP_LINES - 1))
    return _emit_loop(builder, f"groups{rows}", builder.sdiv(last, size), start, add_group)


def _load_group_head(builder: Any, weight: Any, place: Any) -> tuple[list[Any], list[Any]]:
    """The scales and minima of the group of 4-bit weights at `place`, as float32, `VECTORS` vectors each."""
    halves = builder.bitcast(weight, ir.HalfType().as_pointer())
    base = builder.mul(place, ir.Constant(_I64, 2))
    places = [_element_pointer(builder, halves, base, v * LANES) for v in range(2 * VECTORS)]
    found = [builder.fpext(_load_vector(builder, each, _HALVES), _FLOATS) for each in places]
    return found[:VECTORS], found[VECTORS:]


def _load_codes(builder: Any, weight: Any, place: Any, step: Any) -> list[Any]:
    """The codes, 0 to 15, of line `step` of a group as float32, from the words at `place`."""
    bits = builder.mul(builder.and_(builder.trunc(step, _I32), _I32(WORD_LINES - 1)), _I32(32 // WORD_LINES))
    empty = ir.Constant(_WORDS, ir.Undefined)
    first = builder.insert_element(empty, bits, ir.Constant(_I32, 0))
    shift = builder.shuffle_vector(first, empty, ir.Constant(_WORDS, [0] * LANES))
    low = ir.Constant(_WORDS, [15] * LANES)
    places = [_element_pointer(builder, weight, place, v * LANES) for v in range(VECTORS)]
    words = [_load_vector(builder, each, _WORDS) for each in places]
    return [builder.sitofp(builder.and_(builder.lshr(word, shift), low), _FLOATS) for word in words]


def _multiply_tile(
    typing: Any, rows: Any, x: Any, x_at: Any, depth: Any, weight: Any, w_at: Any, bias: Any, b_at: Any,
    out: Any, out_at: Any, out_row: Any,
) -> Any:  # fmt: skip
    """Numba intrinsic: multiply up to `TILE_ROWS` rows with one panel: out[r, :PANEL] = bias + x[r] @ panel.

    All arrays are flat; the `_at` arguments are offsets in them. Row r of x begins at x_at + r * depth, row r of out at
    out_at + r * out_row. A whole line of `PANEL_OUTPUTS` outputs is written for each row.
    """
    kind = weight.dtype

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count, _, x_at, depth, _, w_at, _, b_at, _, out_at, out_row = arguments
        xs, weights, biases, outs = (
            context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (1, 4, 6, 8)
        )
        done, other = builder.append_basic_block("done"), builder.append_basic_block("other")
        choice = builder.switch(count, other)
        for rows in range(1, (INT4_TILE_ROWS if kind == types.int32 else TILE_ROWS) + 1):
            block = builder.append_basic_block(f"tile{rows}")
            choice.add_case(ir.Constant(_I64, rows), block)
            builder.position_at_end(block)
            mine = [
                _element_pointer(builder, xs, x_at, builder.mul(depth, ir.Constant(_I64, row)))
                for row in range(rows)
            ]
            start = [
                _load_vector(builder, _element_pointer(builder, biases, b_at, v * LANES), _FLOATS)
                for v in range(VECTORS)
            ]
            sums = _sum_products(builder, rows, mine, weights, w_at, depth, kind, [start] * rows)
            for row, held in enumerate(sums):
                begin = builder.mul(out_row, ir.Constant(_I64, row))
                for v, total in enumerate(held):
                    place = _element_pointer(builder, outs, out_at, begin, v * LANES)
                    builder.store(total, builder.bitcast(place, _FLOATS.as_pointer()), align=4)
            builder.branch(done)
        builder.position_at_end(other)
        builder.unreachable()
        builder.position_at_end(done)
        return context.get_dummy_value()

    kinds = (rows, x, x_at, depth, weight, w_at, bias, b_at, out, out_at, out_row)
    return types.void(*kinds), emit


multiply_tile: Any = intrinsic(_multiply_tile)


@jit
def multiply_panels(
    x: Any,
    depth: int,
    weight: Any,
    items: int,
    tile: int,
    bias: Any,
    begin: int,
    end: int,
    columns: int,
    out: Any,
) -> None:
    """Compute some outputs of a product: out[:, begin:end] = (x @ weight.T + bias)[:, begin:end].

    x, out: flat float32 arrays with rows of `depth` and of `columns` elements; weight: panels of `items` items, from
    `pack_panels`; tile: most rows of a tile; bias: padded to whole panels; begin: a multiple of `PANEL_OUTPUTS`.
    """
    rows = x.shape[0] // depth
    tiles = (rows + tile - 1) // tile
    # Receives the whole lines of a last, partial panel.
    edge = np.empty(TILE_ROWS * PANEL_OUTPUTS, np.float32)
    for first in range(begin, end, PANEL_OUTPUTS):
        panel, row = first // PANEL_OUTPUTS * items, 0
        for t in range(tiles):
            # Rows are divided evenly over tiles: eight rows as four and four, not as six and two.
            count = (rows - row + tiles - t - 1) // (tiles - t)
            if first + PANEL_OUTPUTS <= columns:
                place = row * columns + first
                multiply_tile(count, x, row * depth, depth, weight, panel, bias, first, out, place, columns)
            else:
                multiply_tile(
                    count, x, row * depth, depth, weight, panel, bias, first, edge, 0, PANEL_OUTPUTS
                )
                for r in range(count):
                    for c in range(columns - first):
                        out[(row + r) * columns + first + c] = edge[r * PANEL_OUTPUTS + c]
            row += count


def pack_panels(panels: Any, kind: str) -> Any:
    """Pack panels [panels, depth, PANEL] float32 into the flat array that `multiply_panels` takes, in type `kind`."""
    return PACKED[kind](np.ascontiguousarray(panels))


def panel_items(kind: str, depth: int) -> int:
    """The items of a panel with `depth` inputs in the flat array that `pack_panels` makes."""
    if kind == "int4":
        return PANEL_OUTPUTS * (-(-depth // GROUP_LINES) + -(-depth // WORD_LINES))
    return depth * (PANEL_OUTPUTS // 2 if kind == "bfloat16" else PANEL_OUTPUTS)


def tile_rows(kind: str) -> int:
    """The most rows that the kernel computes together with weights of this kind."""
    return INT4_TILE_ROWS if kind == "int4" else TILE_ROWS


def _bfloat16(panels: Any) -> Any:
    """Pack float32 panels as pairs of bfloat16 in 32-bit words (see the module's description)."""
    bits = (panels.view(np.uint32) >> 16).reshape(-1, 2, PANEL_OUTPUTS // 2)
    return (bits[:, 0] | bits[:, 1] << 16).reshape(-1)


def _int4(panels: Any) -> Any:
    """Pack float32 panels as 4-bit codes with the scales and minima of each group (see the module's description)."""
    return np.stack([_int4_panel(panel) for panel in panels]).reshape(-1)


def _int4_panel(panel: Any) -> Any:
    """Pack one panel [depth, PANEL] into int32 words."""
    parts = []
    for first in range(0, len(panel), GROUP_LINES):
        codes, scales, minima = quantise_group(panel[first : first + GROUP_LINES])
        padded = np.zeros((-(-len(codes) // WORD_LINES) * WORD_LINES, PANEL_OUTPUTS), np.uint32)
        padded[: len(codes)] = codes
        shifts = np.arange(WORD_LINES, dtype=np.uint32)[None, :, None] * np.uint32(32 // WORD_LINES)
        words = padded.reshape(-1, WORD_LINES, PANEL_OUTPUTS) << shifts
        parts += [scales.view(np.int32), minima.view(np.int32)]
        parts.append(np.bitwise_or.reduce(words, axis=1).view(np.int32).reshape(-1))
    return np.concatenate(parts)


def quantise_group(group: Any) -> tuple[Any, Any, Any]:
    """Codes [lines, outputs] of 0 to 15, and scales and minima [outputs] in float16, of float32 weights.

    A weight is about `scale * code + minimum` (FlexGen, section 5: group-wise quantisation). Weights of a group that
    are all equal have scale 0. Weights whose magnitude float16 cannot hold become infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        minima, high = group.min(axis=0).astype(np.float16), group.max(axis=0)
        least = minima.astype(np.float32)
        scales = ((high - least) / np.float32(15)).astype(np.float16)
        wide = scales.astype(np.float32)
        codes = np.rint((group - least) / np.where(wide > 0, wide, np.float32(1)))
        return np.nan_to_num(np.clip(codes, 0, 15)).astype(np.uint32), np.maximum(scales, 0), minima


PACKED: dict[str, Callable[[Any], Any]] = {
    "float32": lambda panels: panels.reshape(-1),
    "float16": lambda panels: panels.astype(np.float16).view(np.int16).reshape(-1),
    "bfloat16": _bfloat16,
    "int4": _int4,
}
