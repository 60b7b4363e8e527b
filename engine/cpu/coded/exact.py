"""Arithmetic for kernels that must give the bits of NumPy: one rounding per operation, no multiply-add, no reordering.

Also the Walsh-Hadamard transform of sixteen lanes, and what is folded over them in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from engine.cpu.jit import NO_WRAPPERS
from engine.cpu.simd import FLOAT_VECTOR, LANES

F = TypeVar("F", bound=Callable[..., Any])

_WORDS = ir.VectorType(ir.IntType(32), LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)

MAX_HALF = np.float32(65504)


def jit_exact(function: F) -> F:
    """As `engine.cpu.jit.jit_inner`, but every float operation rounds as written.

    Without the explicit `fastmath=False` numba would take that of the kernel that calls it.
    """
    return cast(F, numba.njit(error_model="numpy", fastmath=False, forceinline=True, **NO_WRAPPERS)(function))


def jit_exact_part(function: F) -> F:
    """As `jit_exact`, for large functions: kernels call them, which takes less time to compile than to repeat them."""
    return cast(F, numba.njit(error_model="numpy", fastmath=False, **NO_WRAPPERS)(function))


def jit_exact_variant(*constants: int) -> Callable[[F], F]:
    """As `jit_exact_part`, for a function within another that takes these `constants` from it.

    They become part of its name. Numba takes functions of one name and one type for the same function when kernels that
    contain them were compiled by several processes and are loaded by one.
    """

    def compile_variant(function: F) -> F:
        function.__qualname__ += "".join(f"_{constant}" for constant in constants)
        return jit_exact_part(function)

    return compile_variant


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


def _clip(typing: Any, x: Any, limit: Any) -> Any:
    """Intrinsic `clip`: x, or the end of ±limit beyond which it lies, lane by lane; no lane is NaN."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, most = arguments
        least = builder.fneg(most)
        raised = builder.select(builder.fcmp_ordered("<", number, least), least, number)
        return builder.select(builder.fcmp_ordered(">", raised, most), most, raised)

    return FLOAT_VECTOR(FLOAT_VECTOR, FLOAT_VECTOR), emit


def _fold_lanes(order: str) -> Callable[..., Any]:
    """An intrinsic for the first number of a vector in an order, where no lane is NaN; without an order, for the sum.
    One half is folded onto the other, until one lane is left.
    """

    def typed(typing: Any, x: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (left,), lanes = arguments, LANES
            while lanes > 1:
                lanes //= 2
                kind = ir.VectorType(ir.IntType(32), lanes)
                halves = [
                    builder.shuffle_vector(left, left, ir.Constant(kind, [*range(at, at + lanes)]))
                    for at in (0, lanes)
                ]
                first = builder.fcmp_ordered(order, *halves) if order else None
                left = builder.fadd(*halves) if first is None else builder.select(first, *halves)
            return builder.extract_element(left, ir.Constant(ir.IntType(32), 0))

        return types.float32(FLOAT_VECTOR), emit

    return typed


def _count_above(typing: Any, count: Any, x: Any, y: Any) -> Any:
    """Intrinsic `count_above`: count, and one more where x > y, lane by lane; a count is a whole number's bits."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counted, left, right = arguments
        more = builder.sext(builder.fcmp_ordered(">", left, right), _WORDS)  # −1 where it is
        return builder.bitcast(builder.sub(builder.bitcast(counted, _WORDS), more), _FLOATS)

    return FLOAT_VECTOR(FLOAT_VECTOR, FLOAT_VECTOR, FLOAT_VECTOR), emit


def _mask_above(typing: Any, x: Any, y: Any) -> Any:
    """Intrinsic `mask_above`: bit i of a number says whether x > y in lane i."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        above = builder.fcmp_ordered(">", *arguments)
        return builder.zext(builder.bitcast(above, ir.IntType(LANES)), ir.IntType(64))

    return types.int64(FLOAT_VECTOR, FLOAT_VECTOR), emit


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
least_lane: Any = intrinsic(_fold_lanes("<"))
largest_lane: Any = intrinsic(_fold_lanes(">"))
sum_lanes: Any = intrinsic(_fold_lanes(""))
add_at: Any = intrinsic(_add_at)
transform_lanes: Any = intrinsic(_transform_lanes)
