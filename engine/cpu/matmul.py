"""The matrix product of the CPU engine: a register-blocked kernel, written as LLVM code, over weights packed in panels.

    panel ──▶ [depth, PANEL]    `PANEL_OUTPUTS` outputs side by side. A step of the inner loop reads one line
                                of it, multiplies it with one number of each of up to `TILE_ROWS` rows, and
                                adds the products to sums that stay in vector registers from the first step to the last.

Every sum starts at the bias and adds its products in the order of `depth`, each rounded once. So a row is the same to
the last bit whatever the number of rows; libraries choose another order for another number. The kernel is also faster
than oneDNN's product, most of all for few rows (`docs/benchmarks.md`).

A panel is one stream through memory, which processors prefetch by themselves; explicit prefetching made it slower.

Weights that fit into 16 bits without loss (most checkpoints are stored that way) stay in 16 bits and are widened in
registers, which is exact: the result is that of float32 weights, at half the memory traffic. bfloat16 is stored in
pairs: the first half of a line in the low halves of 32-bit words, the second half in the high ones, so that widening is
one instruction.
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


def _sum_products(
    builder: Any, rows: int, x: list[Any], weight: Any, begin: Any, depth: Any, kind: Any, start: list[Any]
) -> list[list[Any]]:
    """Emit the inner loop for a fixed number of rows; returns their sums, [rows][VECTORS], in registers."""
    function: Any = cgutils.get_or_insert_function
    fma = function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{LANES}f32")
    before, body = builder.block, builder.append_basic_block(f"rows{rows}")
    after = builder.append_basic_block(f"after{rows}")
    builder.branch(body)
    builder.position_at_end(body)
    step = builder.phi(_I64)
    sums = [[builder.phi(_FLOATS) for _ in range(VECTORS)] for _ in range(rows)]
    place = builder.add(begin, builder.mul(step, ir.Constant(_I64, line_items(kind))))
    line = _load_line(builder, weight, place, kind)
    grown = []
    for row, held in zip(x, sums, strict=True):
        factor = _broadcast_element(builder, builder.load(builder.gep(row, [step])))
        grown.append(
            [builder.call(fma, [factor, part, total]) for part, total in zip(line, held, strict=True)]
        )
    following = builder.add(step, ir.Constant(_I64, 1))
    step.add_incoming(ir.Constant(_I64, 0), before)
    step.add_incoming(following, body)
    for held, more in zip(sums, grown, strict=True):
        for total, first, sum_ in zip(held, start, more, strict=True):
            total.add_incoming(first, before)
            total.add_incoming(sum_, body)
    builder.cbranch(builder.icmp_signed("<", following, depth), body, after)
    builder.position_at_end(after)
    return grown


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
        for rows in range(1, TILE_ROWS + 1):
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
            sums = _sum_products(builder, rows, mine, weights, w_at, depth, kind, start)
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
    x: Any, depth: int, weight: Any, items: int, bias: Any, begin: int, end: int, columns: int, out: Any
) -> None:
    """Compute some outputs of a product: out[:, begin:end] = (x @ weight.T + bias)[:, begin:end].

    x, out: flat float32 arrays with rows of `depth` and of `columns` elements; weight: panels of `depth` lines of
    `items` items, from `pack_panels`; bias: padded to whole panels; begin: a multiple of `PANEL_OUTPUTS`.
    """
    rows = x.shape[0] // depth
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    # Receives the whole lines of a last, partial panel.
    edge = np.empty(TILE_ROWS * PANEL_OUTPUTS, np.float32)
    for first in range(begin, end, PANEL_OUTPUTS):
        panel, row = first // PANEL_OUTPUTS * depth * items, 0
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


def packed_items(kind: str, width: int, depth: int) -> int:
    """The items of the flat array that `pack_panels` makes of `width` outputs, whole panels, with `depth` inputs."""
    return width // PANEL_OUTPUTS * depth * PACKED_VIEWS[kind]


def _bfloat16(panels: Any) -> Any:
    """Pack float32 panels as pairs of bfloat16 in 32-bit words (see the module's description)."""
    bits = (panels.view(np.uint32) >> 16).reshape(-1, 2, PANEL_OUTPUTS // 2)
    return (bits[:, 0] | bits[:, 1] << 16).reshape(-1)


PACKED: dict[str, Callable[[Any], Any]] = {
    "float32": lambda panels: panels.reshape(-1),
    "float16": lambda panels: panels.astype(np.float16).view(np.int16).reshape(-1),
    "bfloat16": _bfloat16,
}
PACKED_VIEWS = {"float32": PANEL_OUTPUTS, "float16": PANEL_OUTPUTS, "bfloat16": PANEL_OUTPUTS // 2}
