"""Arithmetic for kernels that must give the bits of NumPy: one rounding per operation, no multiply-add, no reordering.

Also float16 as bits, since numba has no float16 on the CPU, and codes of 2 to 4 bits looked up sixteen at a time, and
the Walsh-Hadamard transform of sixteen lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import NO_WRAPPERS, float_of_bits
from engine.cpu.simd import FLOAT_VECTOR, LANES

F = TypeVar("F", bound=Callable[..., Any])

_WORDS = ir.VectorType(ir.IntType(32), LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
CODES_PER_WORD = 8

MAX_HALF = np.float32(65504)
_HALF_OF_ONE, _EXPONENT_SHIFT = np.float32(0.5), np.float32(2.0**112)
_LEAST_NORMAL, _REBIAS, _MAGIC = np.int32(113 << 23), np.int32(112 << 23), np.int32(126 << 23)


def jit_exact(function: F) -> F:
    """As `engine.cpu.jit.jit_inner`, but every float operation rounds as written.

    Without the explicit `fastmath=False` numba would take that of the kernel that calls it.
    """
    return cast(F, numba.njit(error_model="numpy", fastmath=False, forceinline=True, **NO_WRAPPERS)(function))


def _bits_of_float(typing: Any, number: Any) -> Any:
    """Numba intrinsic: the IEEE bits of a float32 as an int32."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), emit


def _exact(name: str) -> Callable[..., Any]:
    """An intrinsic for the LLVM instruction `name` on two vectors, which is never fused with another."""

    def typed(typing: Any, x: Any, y: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments)

        return FLOAT_VECTOR(FLOAT_VECTOR, FLOAT_VECTOR), emit

    return typed


def _lookup(typing: Any, codes: Any, at: Any, bits: Any, table: Any) -> Any:
    """Intrinsic `lookup`: the numbers of a table of sixteen that the sixteen packed codes at codes[at:] stand for.

    Each half of the codes is `bits` bytes; a word of four bytes is read for it, so up to two bytes after the codes are
    read too, and ignored.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        packed, place, width, numbers = arguments
        data = context.make_array(signature.args[0])(context, builder, packed).data
        width = builder.trunc(width, ir.IntType(32))
        first = _load_word(builder, data, place)
        second = _load_word(builder, data, builder.add(place, builder.zext(width, place.type)))
        halves = ir.Constant(_WORDS, [0] * CODES_PER_WORD + [1] * CODES_PER_WORD)
        pair = ir.Constant(ir.VectorType(ir.IntType(32), 2), ir.Undefined)
        for index, word in enumerate((first, second)):
            pair = builder.insert_element(pair, word, ir.Constant(ir.IntType(32), index))
        words = builder.shuffle_vector(pair, pair, halves)
        distance = builder.mul(_spread_word(builder, width), ir.Constant(_WORDS, list(range(8)) * 2))
        one = ir.Constant(ir.IntType(32), 1)
        mask = _spread_word(builder, builder.sub(builder.shl(one, width), one))
        picks = builder.and_(builder.lshr(words, distance), mask)
        return _pick(context, builder, numbers, picks)

    return FLOAT_VECTOR(codes, types.intp, types.intp, FLOAT_VECTOR), emit


def _load_word(builder: Any, data: Any, place: Any) -> Any:
    """Four bytes at any address, little-endian."""
    return builder.load(builder.bitcast(builder.gep(data, [place]), ir.IntType(32).as_pointer()), align=1)


def _spread_word(builder: Any, word: Any) -> Any:
    """A vector with `word` in every lane."""
    empty = ir.Constant(_WORDS, ir.Undefined)
    one = builder.insert_element(empty, word, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, empty, ir.Constant(_WORDS, [0] * LANES))


def _pick(context: Any, builder: Any, numbers: Any, picks: Any) -> Any:
    """numbers[picks], lane by lane: one instruction with AVX-512, else sixteen loads."""
    if "+avx512f" in context.codegen()._tm_features.split(","):
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS])
        insert: Any = cgutils.get_or_insert_function
        return builder.call(insert(builder.module, kind, "llvm.x86.avx512.permvar.sf.512"), [numbers, picks])
    table = cgutils.alloca_once_value(builder, numbers)  # type: ignore[no-untyped-call]
    first = builder.bitcast(table, ir.FloatType().as_pointer())
    picked = ir.Constant(_FLOATS, ir.Undefined)
    for lane in range(LANES):
        index = ir.Constant(ir.IntType(32), lane)
        number = builder.load(builder.gep(first, [builder.extract_element(picks, index)]))
        picked = builder.insert_element(picked, number, index)
    return picked


def _load_vector(context: Any, builder: Any, array_type: Any, arguments: Any, bits: int) -> Any:
    """Sixteen little-endian numbers of `bits` bits at any address in an array of bytes, as 32-bit integers."""
    data = context.make_array(array_type)(context, builder, arguments[0]).data
    stored = ir.VectorType(ir.IntType(bits), LANES)
    place = builder.bitcast(builder.gep(data, [arguments[1]]), stored.as_pointer())
    return builder.zext(builder.load(place, align=1), _WORDS)


def _constant(number: int) -> Any:
    return ir.Constant(_WORDS, [number] * LANES)


def _load_bytes(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic `load_bytes`: the sixteen bytes at data[at:], as numbers."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.uitofp(_load_vector(context, builder, signature.args[0], arguments, 8), _FLOATS)

    return FLOAT_VECTOR(data, types.intp), emit


def _load_halves(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic `load_halves`: the sixteen float16 at data[at:], finite, as `load_half` reads them."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = _load_vector(context, builder, signature.args[0], arguments, 16)
        size = builder.shl(builder.and_(words, _constant(0x7FFF)), _constant(13))
        shift = ir.Constant(_FLOATS, [float(_EXPONENT_SHIFT)] * LANES)
        number = builder.bitcast(builder.fmul(builder.bitcast(size, _FLOATS), shift), _WORDS)
        sign = builder.shl(builder.and_(words, _constant(0x8000)), _constant(16))
        return builder.bitcast(builder.or_(number, sign), _FLOATS)

    return FLOAT_VECTOR(data, types.intp), emit


def _load_bfloats(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic `load_bfloats`: the sixteen bfloat16 at data[at:]."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = _load_vector(context, builder, signature.args[0], arguments, 16)
        return builder.bitcast(builder.shl(words, _constant(16)), _FLOATS)

    return FLOAT_VECTOR(data, types.intp), emit


def _transform_lanes(typing: Any, x: Any) -> Any:
    """Intrinsic `transform_lanes`: the Walsh-Hadamard transform of sixteen lanes, neighbours first, not scaled."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (mixed,), empty = arguments, ir.Constant(_FLOATS, ir.Undefined)
        for distance in (1, 2, 4, 8):
            partners = ir.Constant(_WORDS, [lane ^ distance for lane in range(LANES)])
            other = builder.shuffle_vector(mixed, empty, partners)
            # The first of a pair becomes the sum; the second becomes the first less itself.
            picks = [LANES + lane if lane & distance else lane for lane in range(LANES)]
            both = builder.fadd(mixed, other), builder.fsub(other, mixed)
            mixed = builder.shuffle_vector(*both, ir.Constant(_WORDS, picks))
        return mixed

    return FLOAT_VECTOR(FLOAT_VECTOR), emit


bits_of_float: Any = intrinsic(_bits_of_float)
exact_add: Any = intrinsic(_exact("fadd"))
exact_sub: Any = intrinsic(_exact("fsub"))
exact_mul: Any = intrinsic(_exact("fmul"))
lookup: Any = intrinsic(_lookup)
load_bytes: Any = intrinsic(_load_bytes)
load_halves: Any = intrinsic(_load_halves)
load_bfloats: Any = intrinsic(_load_bfloats)
transform_lanes: Any = intrinsic(_transform_lanes)


@jit_exact
def load_half(data: Any, at: Any) -> Any:
    """The float16 in two bytes of `data`, finite, as a float32."""
    bits = np.int32(data[at]) | (np.int32(data[at + 1]) << np.int32(8))
    number = float_of_bits(np.int32((bits & np.int32(0x7FFF)) << np.int32(13))) * _EXPONENT_SHIFT
    return -number if bits & np.int32(0x8000) else number


@jit_exact
def round_half(number: Any) -> Any:
    """Bits of the nearest float16, ties to even; what is too large becomes the largest float16."""
    number = min(max(number, -MAX_HALF), MAX_HALF)
    bits = bits_of_float(number)
    size = np.int32(bits & np.int32(0x7FFFFFFF))
    if size < _LEAST_NORMAL:
        half = np.int32(bits_of_float(np.float32(abs(number) + _HALF_OF_ONE)) - _MAGIC)
    else:
        rounded = np.int32(size + np.int32(0xFFF) + ((size >> np.int32(13)) & np.int32(1)))
        half = np.int32((rounded - _REBIAS) >> np.int32(13))
    return np.int32(half | ((bits >> np.int32(16)) & np.int32(0x8000)))


@jit_exact
def store_half(data: Any, at: Any, number: Any) -> Any:
    """Store `number` as float16 in two bytes of `data`; returns what a reader gets."""
    bits = round_half(number)
    data[at], data[at + 1] = np.uint8(bits & np.int32(0xFF)), np.uint8((bits >> np.int32(8)) & np.int32(0xFF))
    return load_half(data, at)
