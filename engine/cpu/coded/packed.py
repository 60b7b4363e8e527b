"""Numbers as kernels store them: float16, bfloat16, e4m3 and codes of 2 to 8 bits, sixteen at a time.

Numba has no float16 on the CPU, so what it is comes from its bits, or from the instructions that CPUs have for it.
Codes of up to 4 bits are looked up in a table in registers: one instruction with AVX-512, few with AVX2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.coded.exact import MAX_HALF, bits_of_float, jit_exact
from engine.cpu.jit import float_of_bits
from engine.cpu.simd import FLOAT_VECTOR, LANES

_WORDS = ir.VectorType(ir.IntType(32), LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
CODES_PER_WORD = 8

_HALF_OF_ONE, _EXPONENT_SHIFT = np.float32(0.5), np.float32(2.0**112)
_LEAST_NORMAL, _REBIAS, _MAGIC = np.int32(113 << 23), np.int32(112 << 23), np.int32(126 << 23)


def _lookup(typing: Any, codes: Any, at: Any, bits: Any, table: Any) -> Any:
    """Intrinsic `lookup`: the numbers of a table of sixteen that the sixteen packed codes at codes[at:] stand for.

    Each half of the codes is `bits` bytes; a word of four bytes is read for it, so up to two bytes after the codes are
    read too, and ignored.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, mask, width = _unpack(context, builder, signature, arguments)
        return _pick(context, builder, arguments[3], words, mask, width)

    return FLOAT_VECTOR(codes, types.intp, types.intp, FLOAT_VECTOR), emit


def _load_codes(typing: Any, codes: Any, at: Any, bits: Any) -> Any:
    """Intrinsic `load_codes`: the sixteen packed codes at codes[at:] themselves, as numbers; reads as `lookup` does."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, mask, _ = _unpack(context, builder, signature, arguments)
        return builder.sitofp(builder.and_(words, mask), _FLOATS)

    return FLOAT_VECTOR(codes, types.intp, types.intp), emit


def _unpack(context: Any, builder: Any, signature: Any, arguments: Any) -> tuple[Any, Any, Any]:
    """Words whose lowest bits are the codes at codes[at:], the mask of these bits, and how many they are."""
    packed, place, width = arguments[:3]
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
    return builder.lshr(words, distance), mask, width


def _load_word(builder: Any, data: Any, place: Any) -> Any:
    """Four bytes at any address, little-endian."""
    return builder.load(builder.bitcast(builder.gep(data, [place]), ir.IntType(32).as_pointer()), align=1)


def _spread_word(builder: Any, word: Any) -> Any:
    """A vector with `word` in every lane."""
    empty = ir.Constant(_WORDS, ir.Undefined)
    one = builder.insert_element(empty, word, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, empty, ir.Constant(_WORDS, [0] * LANES))


def _has(context: Any, feature: str) -> bool:
    """Whether kernels are compiled for a CPU with a feature."""
    return f"+{feature}" in context.codegen()._tm_features.split(",")


def _pick(context: Any, builder: Any, numbers: Any, words: Any, mask: Any, bits: Any) -> Any:
    """The numbers that the lowest `bits` bits of the words stand for, lane by lane: one instruction with AVX-512; with
    AVX2 one per eight lanes and eight numbers; else sixteen loads.
    """
    insert: Any = cgutils.get_or_insert_function
    picks = builder.and_(words, mask)
    if _has(context, "avx512f"):
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS])
        return builder.call(insert(builder.module, kind, "llvm.x86.avx512.permvar.sf.512"), [numbers, picks])
    if _has(context, "avx2"):
        # The instruction reads the lowest three bits of a word, so only shorter codes have to be masked.
        short = builder.icmp_signed("<", bits, ir.Constant(bits.type, 3))
        return _pick_by_eight(builder, insert, numbers, builder.select(short, picks, words), bits)
    table = cgutils.alloca_once_value(builder, numbers)  # type: ignore[no-untyped-call]
    first = builder.bitcast(table, ir.FloatType().as_pointer())
    picked = ir.Constant(_FLOATS, ir.Undefined)
    for lane in range(LANES):
        index = ir.Constant(ir.IntType(32), lane)
        number = builder.load(builder.gep(first, [builder.extract_element(picks, index)]))
        picked = builder.insert_element(picked, number, index)
    return picked


def _pick_by_eight(builder: Any, insert: Any, numbers: Any, words: Any, bits: Any) -> Any:
    """`_pick` with AVX2: the lowest three bits pick one of eight numbers, the fourth says of which eight."""
    floats, ints = (ir.VectorType(kind, 8) for kind in (ir.FloatType(), ir.IntType(32)))
    lanes = [ir.Constant(ints, [*range(first, first + 8)]) for first in (0, 8)]
    tables = [builder.shuffle_vector(numbers, numbers, order) for order in lanes]
    permute = insert(builder.module, ir.FunctionType(floats, [floats, ints]), "llvm.x86.avx2.permps")
    few = builder.icmp_signed("<=", bits, ir.Constant(bits.type, 3))
    halves = []
    for order in lanes:
        pick = builder.shuffle_vector(words, words, order)
        low, high = (builder.call(permute, [table, pick]) for table in tables)
        fourth = builder.shl(pick, ir.Constant(ints, [28] * 8))
        both = builder.select(builder.icmp_signed("<", fourth, ir.Constant(ints, [0] * 8)), high, low)
        halves.append(builder.select(few, low, both))
    return builder.shuffle_vector(*halves, ir.Constant(_WORDS, [*range(LANES)]))


def _words_at(context: Any, builder: Any, array_type: Any, arguments: Any, count: int) -> Any:
    """Pointer to array[index : index + count], an array of int32, as a vector; both are the first arguments."""
    data = context.make_array(array_type)(context, builder, arguments[0]).data
    return builder.bitcast(
        builder.gep(data, [arguments[1]]), ir.VectorType(ir.IntType(32), count).as_pointer()
    )


def _store_integers(name: str) -> Callable[..., Any]:
    """An intrinsic for words[at : at + 16] = x, made whole numbers by the LLVM instruction `name`."""

    def typed(typing: Any, words: Any, at: Any, x: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = _words_at(context, builder, signature.args[0], arguments, LANES)
            builder.store(getattr(builder, name)(arguments[2], _WORDS), place, align=4)
            return context.get_dummy_value()

        return types.void(words, types.intp, FLOAT_VECTOR), emit

    return typed


def _look_up(typing: Any, words: Any, at: Any, table: Any) -> Any:
    """Intrinsic `look_up`: the numbers of a table of sixteen that the codes words[at : at + 16] stand for."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _words_at(context, builder, signature.args[0], arguments, LANES)
        words, bits = builder.load(place, align=4), ir.Constant(ir.IntType(32), 4)
        return _pick(context, builder, arguments[2], words, _constant(15), bits)

    return FLOAT_VECTOR(words, types.intp, FLOAT_VECTOR), emit


def _pack_codes(typing: Any, words: Any, at: Any, bits: Any) -> Any:
    """Intrinsic `pack_codes`: the codes words[at : at + 8], of up to 4 bits each, as one number, lowest bits first."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        wide = ir.VectorType(word, CODES_PER_WORD)
        place = _words_at(context, builder, signature.args[0], arguments, CODES_PER_WORD)
        empty = ir.Constant(wide, ir.Undefined)
        one = builder.insert_element(empty, builder.trunc(arguments[2], word), ir.Constant(word, 0))
        spread = builder.shuffle_vector(one, empty, ir.Constant(wide, [0] * CODES_PER_WORD))
        distance = builder.mul(spread, ir.Constant(wide, list(range(CODES_PER_WORD))))
        insert: Any = cgutils.get_or_insert_function
        reduce = insert(
            builder.module, ir.FunctionType(word, [wide]), f"llvm.vector.reduce.or.v{CODES_PER_WORD}i32"
        )
        packed = builder.call(reduce, [builder.shl(builder.load(place, align=4), distance)])
        return builder.zext(packed, ir.IntType(64))

    return types.int64(words, types.intp, types.int64), emit


def _store_word(typing: Any, data: Any, at: Any, number: Any) -> Any:
    """Intrinsic `store_word`: the lowest four bytes of a number to data[at : at + 4], the lowest first."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        place = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(place, [arguments[1]]), word.as_pointer())
        builder.store(builder.trunc(arguments[2], word), place, align=1)
        return context.get_dummy_value()

    return types.void(data, types.intp, types.int64), emit


def _store_bytes(typing: Any, data: Any, at: Any, x: Any) -> Any:
    """Intrinsic `store_bytes`: data[at : at + 16] = the whole numbers x of 0 to 255."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _vector_at(context, builder, signature.args[0], arguments, ir.IntType(8))
        codes = builder.trunc(builder.fptosi(arguments[2], _WORDS), ir.VectorType(ir.IntType(8), LANES))
        builder.store(codes, place, align=1)
        return context.get_dummy_value()

    return types.void(data, types.intp, FLOAT_VECTOR), emit


def _vector_at(context: Any, builder: Any, array_type: Any, arguments: Any, kind: Any) -> Any:
    """Pointer to sixteen numbers of a kind at any address in an array of bytes; array and index come first."""
    data = context.make_array(array_type)(context, builder, arguments[0]).data
    return builder.bitcast(builder.gep(data, [arguments[1]]), ir.VectorType(kind, LANES).as_pointer())


def _load_vector(context: Any, builder: Any, array_type: Any, arguments: Any, bits: int) -> Any:
    """Sixteen little-endian numbers of `bits` bits at any address in an array of bytes, as 32-bit integers."""
    place = _vector_at(context, builder, array_type, arguments, ir.IntType(bits))
    return builder.zext(builder.load(place, align=1), _WORDS)


def _constant(number: int) -> Any:
    return ir.Constant(_WORDS, [number] * LANES)


def _load_bytes(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic `load_bytes`: the sixteen bytes at data[at:], as numbers."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sitofp(_load_vector(context, builder, signature.args[0], arguments, 8), _FLOATS)

    return FLOAT_VECTOR(data, types.intp), emit


def _load_halves(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic `load_halves`: the sixteen float16 at data[at:], finite, as `load_half` reads them."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _vector_at(context, builder, signature.args[0], arguments, ir.IntType(16))
        return _widen_halves(context, builder, builder.load(place, align=1))

    return FLOAT_VECTOR(data, types.intp), emit


def _load_bfloats(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic `load_bfloats`: the sixteen bfloat16 at data[at:]."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = _load_vector(context, builder, signature.args[0], arguments, 16)
        return builder.bitcast(builder.shl(words, _constant(16)), _FLOATS)

    return FLOAT_VECTOR(data, types.intp), emit


def _byte_at(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic `byte_at`: data[at], of an array of bytes; a negative index does not count from the end."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.zext(builder.load(builder.gep(place, [arguments[1]])), ir.IntType(64))

    return types.int64(data, types.intp), emit


def _load_eighths(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic `load_eighths`: the sixteen numbers of 8 bits (e4m3) at data[at:], finite.

    With seven more bits they are float16 of another bias, which spares CPUs numbers without a leading one.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shorts = ir.VectorType(ir.IntType(16), LANES)
        place = _vector_at(context, builder, signature.args[0], arguments, ir.IntType(8))
        wide = builder.shl(
            builder.sext(builder.load(place, align=1), shorts), ir.Constant(shorts, [7] * LANES)
        )
        halves = builder.and_(wide, ir.Constant(shorts, [0xBF80] * LANES))
        numbers = _widen_halves(context, builder, halves)
        return builder.fmul(numbers, ir.Constant(_FLOATS, [256.0] * LANES))

    return FLOAT_VECTOR(data, types.intp), emit


def _store_halves(typing: Any, data: Any, at: Any, x: Any) -> Any:
    """Intrinsic `store_halves`: x as sixteen float16 to data[at:], as `round_half` rounds; no lane is NaN."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        most, least = (ir.Constant(_FLOATS, [sign * float(MAX_HALF)] * LANES) for sign in (1.0, -1.0))
        x = arguments[2]
        x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
        x = builder.select(builder.fcmp_ordered(">", x, most), most, x)
        if _has(context, "f16c"):
            halves = builder.fptrunc(x, ir.VectorType(ir.HalfType(), LANES))
            place = _vector_at(context, builder, signature.args[0], arguments, ir.HalfType())
        else:
            halves, place = (
                _narrow_floats(builder, x),
                _vector_at(context, builder, signature.args[0], arguments, ir.IntType(16)),
            )
        builder.store(halves, place, align=1)
        return context.get_dummy_value()

    return types.void(data, types.intp, FLOAT_VECTOR), emit


def _narrow_floats(builder: Any, x: Any) -> Any:
    """Bits of sixteen float16, from floats within their range: the arithmetic of `round_half`."""
    bits = builder.bitcast(x, _WORDS)
    size = builder.and_(bits, _constant(0x7FFFFFFF))
    small = builder.fadd(builder.bitcast(size, _FLOATS), ir.Constant(_FLOATS, [0.5] * LANES))
    small = builder.sub(builder.bitcast(small, _WORDS), _constant(int(_MAGIC)))
    odd = builder.and_(builder.lshr(size, _constant(13)), _constant(1))
    normal = builder.add(builder.add(size, _constant(0xFFF)), odd)
    normal = builder.lshr(builder.sub(normal, _constant(int(_REBIAS))), _constant(13))
    half = builder.select(builder.icmp_signed("<", size, _constant(int(_LEAST_NORMAL))), small, normal)
    sign = builder.and_(builder.lshr(bits, _constant(16)), _constant(0x8000))
    return builder.trunc(builder.or_(half, sign), ir.VectorType(ir.IntType(16), LANES))


def _widen_halves(context: Any, builder: Any, shorts: Any) -> Any:
    """Sixteen float16, finite, as floats."""
    if _has(context, "f16c"):
        return builder.fpext(builder.bitcast(shorts, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)
    words = builder.zext(shorts, _WORDS)
    size = builder.shl(builder.and_(words, _constant(0x7FFF)), _constant(13))
    shift = ir.Constant(_FLOATS, [float(_EXPONENT_SHIFT)] * LANES)
    number = builder.bitcast(builder.fmul(builder.bitcast(size, _FLOATS), shift), _WORDS)
    sign = builder.shl(builder.and_(words, _constant(0x8000)), _constant(16))
    return builder.bitcast(builder.or_(number, sign), _FLOATS)


# Of `count_above`, and of numbers.
store_counts: Any = intrinsic(_store_integers("bitcast"))
store_whole: Any = intrinsic(_store_integers("fptosi"))
look_up: Any = intrinsic(_look_up)
pack_codes: Any = intrinsic(_pack_codes)
store_word: Any = intrinsic(_store_word)
store_bytes: Any = intrinsic(_store_bytes)
byte_at: Any = intrinsic(_byte_at)
lookup: Any = intrinsic(_lookup)
load_codes: Any = intrinsic(_load_codes)
load_bytes: Any = intrinsic(_load_bytes)
load_halves: Any = intrinsic(_load_halves)
load_bfloats: Any = intrinsic(_load_bfloats)
load_eighths: Any = intrinsic(_load_eighths)
store_halves: Any = intrinsic(_store_halves)


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
