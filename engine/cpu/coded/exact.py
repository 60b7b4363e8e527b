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
        halves = ir.Constant(_WORDS, [*range(CODES_PER_WORD), *range(LANES + CODES_PER_WORD, 2 * LANES)])
        spread = _spread_word(builder, first), _spread_word(builder, second)
        words = builder.shuffle_vector(*spread, halves)
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


def _clip(typing: Any, x: Any, limit: Any) -> Any:
    """Intrinsic `clip`: x, or the end of ±limit beyond which it lies, lane by lane; no lane is NaN."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, most = arguments
        least = builder.fneg(most)
        raised = builder.select(builder.fcmp_ordered("<", number, least), least, number)
        return builder.select(builder.fcmp_ordered(">", raised, most), most, raised)

    return FLOAT_VECTOR(FLOAT_VECTOR, FLOAT_VECTOR), emit


def _count_above(typing: Any, count: Any, x: Any, y: Any) -> Any:
    """Intrinsic `count_above`: count, and one more where x > y, lane by lane."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counted, left, right = arguments
        more = builder.fadd(counted, ir.Constant(_FLOATS, [1.0] * LANES))
        return builder.select(builder.fcmp_ordered(">", left, right), more, counted)

    return FLOAT_VECTOR(FLOAT_VECTOR, FLOAT_VECTOR, FLOAT_VECTOR), emit


def _mask_above(typing: Any, x: Any, y: Any) -> Any:
    """Intrinsic `mask_above`: bit i of a number says whether x > y in lane i."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        above = builder.fcmp_ordered(">", *arguments)
        return builder.zext(builder.bitcast(above, ir.IntType(LANES)), ir.IntType(64))

    return types.int64(FLOAT_VECTOR, FLOAT_VECTOR), emit


def _words_at(context: Any, builder: Any, array_type: Any, arguments: Any, count: int) -> Any:
    """Pointer to array[index : index + count], an array of int32, as a vector; both are the first arguments."""
    data = context.make_array(array_type)(context, builder, arguments[0]).data
    return builder.bitcast(
        builder.gep(data, [arguments[1]]), ir.VectorType(ir.IntType(32), count).as_pointer()
    )


def _store_counts(typing: Any, words: Any, at: Any, x: Any) -> Any:
    """Intrinsic `store_counts`: words[at : at + 16] = the whole numbers x."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _words_at(context, builder, signature.args[0], arguments, LANES)
        builder.store(builder.fptosi(arguments[2], _WORDS), place, align=4)
        return context.get_dummy_value()

    return types.void(words, types.intp, FLOAT_VECTOR), emit


def _look_up(typing: Any, words: Any, at: Any, table: Any) -> Any:
    """Intrinsic `look_up`: the numbers of a table of sixteen that the codes words[at : at + 16] stand for."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _words_at(context, builder, signature.args[0], arguments, LANES)
        return _pick(context, builder, arguments[2], builder.load(place, align=4))

    return FLOAT_VECTOR(words, types.intp, FLOAT_VECTOR), emit


def _pack_codes(typing: Any, words: Any, at: Any, bits: Any) -> Any:
    """Intrinsic `pack_codes`: the codes words[at : at + 8], of `bits` bits each, as one number, lowest bits first."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        long = ir.IntType(64)
        wide = ir.VectorType(long, CODES_PER_WORD)
        place = _words_at(context, builder, signature.args[0], arguments, CODES_PER_WORD)
        codes = builder.zext(builder.load(place, align=4), wide)
        empty = ir.Constant(wide, ir.Undefined)
        one = builder.insert_element(empty, arguments[2], ir.Constant(ir.IntType(32), 0))
        order = ir.Constant(ir.VectorType(ir.IntType(32), CODES_PER_WORD), [0] * CODES_PER_WORD)
        distance = builder.mul(
            builder.shuffle_vector(one, empty, order), ir.Constant(wide, list(range(CODES_PER_WORD)))
        )
        insert: Any = cgutils.get_or_insert_function
        kind = ir.FunctionType(long, [wide])
        reduce = insert(builder.module, kind, f"llvm.vector.reduce.or.v{CODES_PER_WORD}i64")
        return builder.call(reduce, [builder.shl(codes, distance)])

    return types.int64(words, types.intp, types.int64), emit


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


def _byte_at(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic `byte_at`: data[at], of an array of bytes; a negative index does not count from the end."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.zext(builder.load(builder.gep(place, [arguments[1]])), ir.IntType(64))

    return types.int64(data, types.intp), emit


def _add_at(typing: Any, array: Any, at: Any, numbers: Any, index: Any) -> Any:
    """Intrinsic `add_at`: array[at] += numbers[index]; a negative index does not count from the end."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = []
        for first in (0, 2):
            data = context.make_array(signature.args[first])(context, builder, arguments[first]).data
            places.append(builder.gep(data, [arguments[first + 1]]))
        target, source = places
        builder.store(builder.fadd(builder.load(target), builder.load(source)), target)
        return context.get_dummy_value()

    return types.void(array, types.intp, numbers, types.intp), emit


bits_of_float: Any = intrinsic(_bits_of_float)
exact_add: Any = intrinsic(_exact("fadd"))
exact_sub: Any = intrinsic(_exact("fsub"))
exact_mul: Any = intrinsic(_exact("fmul"))
exact_div: Any = intrinsic(_exact("fdiv"))
clip: Any = intrinsic(_clip)
count_above: Any = intrinsic(_count_above)
mask_above: Any = intrinsic(_mask_above)
store_counts: Any = intrinsic(_store_counts)
look_up: Any = intrinsic(_look_up)
pack_codes: Any = intrinsic(_pack_codes)
byte_at: Any = intrinsic(_byte_at)
add_at: Any = intrinsic(_add_at)
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
