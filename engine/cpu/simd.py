"""A numba type for sixteen floats in a register, for kernels whose loops LLVM does not vectorise reliably.

LLVM maps sixteen lanes to one AVX-512 register, two of AVX, or four of SSE or NEON. Lane i of a result depends only on
lane i of the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
# With the flag "contract", a product and a sum become one fused instruction where the CPU has it.
_FAST = (
    "contract",
    "nsz",
    "arcp",
)


class FloatVector(types.Type):
    """The numba type of sixteen float32 values."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


FLOAT_VECTOR = FloatVector()


@register_model(FloatVector)
class FloatVectorModel(models.PrimitiveModel):
    """Tells numba to represent a `FloatVector` as one LLVM vector."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)  # type: ignore[no-untyped-call]


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Pointer to array[index : index + 16] as a vector."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _FLOATS.as_pointer())


def _load(typing: Any, array: Any, index: Any) -> Any:
    """Intrinsic `load`: array[index : index + 16] as a vector."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_place(context, builder, signature.args[0], *arguments), align=4)

    return FLOAT_VECTOR(array, types.intp), emit


def _store(typing: Any, array: Any, index: Any, x: Any) -> Any:
    """Intrinsic `store`: array[index : index + 16] = x."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature.args[0], *arguments[:2])
        builder.store(arguments[2], place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, FLOAT_VECTOR), emit


def _splat(typing: Any, x: Any) -> Any:
    """Intrinsic `splat`: a vector with the number x in every lane."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, arguments[0])

    return FLOAT_VECTOR(types.float32), emit


def _from(typing: Any, array: Any, index: Any) -> Any:
    """Intrinsic `spread`: a vector with array[index] in every lane; a negative index does not count from the end."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return _spread(builder, builder.load(builder.gep(data, [arguments[1]])))

    return FLOAT_VECTOR(array, types.intp), emit


def _spread(builder: Any, value: Any) -> Any:
    """A vector with the LLVM value `value` in every lane."""
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    order = ir.Constant(_INTS, [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), order)


def _binary(name: str) -> Callable[..., Any]:
    """An intrinsic for the LLVM instruction `name` on two vectors."""

    def typed(typing: Any, x: Any, y: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments, flags=_FAST)

        return FLOAT_VECTOR(FLOAT_VECTOR, FLOAT_VECTOR), emit

    return typed


def _extreme(order: str) -> Callable[..., Any]:
    """An intrinsic for x where `x order y`, else y, in every lane."""

    def typed(typing: Any, x: Any, y: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.select(builder.fcmp_ordered(order, *arguments), *arguments)

        return FLOAT_VECTOR(FLOAT_VECTOR, FLOAT_VECTOR), emit

    return typed


def _sum_four(typing: Any, array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Intrinsic `sum_four`: array[index : index + 4] = the sums over the lanes of a, b, c and d."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Neighbours are added pairwise: 16 lanes of one vector become 8, then 8 of two, four and at last all of four.
        def pairs(x: Any, y: Any, orders: tuple[list[int], list[int]]) -> Any:
            kind = ir.VectorType(ir.IntType(32), len(orders[0]))
            one, other = (builder.shuffle_vector(x, y, ir.Constant(kind, order)) for order in orders)
            return builder.fadd(one, other, flags=_FAST)

        halves = [pairs(x, x, ([*range(8)], [*range(8, LANES)])) for x in arguments[2:]]
        neighbours = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
        both = [pairs(halves[at], halves[at + 1], neighbours) for at in (0, 2)]
        four = pairs(both[0], both[1], neighbours)
        sums = pairs(four, four, ([*range(4)], [*range(4, 8)]))
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        builder.store(
            sums, builder.bitcast(builder.gep(data, [arguments[1]]), sums.type.as_pointer()), align=4
        )
        return context.get_dummy_value()

    return types.void(array, types.intp, *[FLOAT_VECTOR] * 4), emit


def _within(typing: Any, x: Any, low: Any, t: Any, high: Any, other: Any) -> Any:
    """Intrinsic `within`: x where low <= t <= high, else `other`, lane by lane."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, low, t, high, other = arguments
        above, below = builder.fcmp_ordered("<=", low, t), builder.fcmp_ordered("<=", t, high)
        return builder.select(builder.and_(above, below), x, other)

    return FLOAT_VECTOR(*[FLOAT_VECTOR] * 5), emit


def _floor(typing: Any, x: Any) -> Any:
    """Intrinsic `floor`: every lane rounded down."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS])
        insert: Any = cgutils.get_or_insert_function
        return builder.call(insert(builder.module, kind, f"llvm.floor.v{LANES}f32"), arguments)

    return FLOAT_VECTOR(FLOAT_VECTOR), emit


def _power(typing: Any, x: Any) -> Any:
    """Intrinsic `power`: 2**x for whole numbers x within -126..127, by setting the exponent's bits."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = builder.fptosi(arguments[0], _INTS)
        biased = builder.add(whole, ir.Constant(_INTS, [127] * LANES))
        return builder.bitcast(builder.shl(biased, ir.Constant(_INTS, [23] * LANES)), _FLOATS)

    return FLOAT_VECTOR(FLOAT_VECTOR), emit


load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
splat: Any = intrinsic(_splat)
spread: Any = intrinsic(_from)
add: Any = intrinsic(_binary("fadd"))
sub: Any = intrinsic(_binary("fsub"))
mul: Any = intrinsic(_binary("fmul"))
within: Any = intrinsic(_within)
larger: Any = intrinsic(_extreme(">"))
smaller: Any = intrinsic(_extreme("<"))
sum_four: Any = intrinsic(_sum_four)
floor: Any = intrinsic(_floor)
power: Any = intrinsic(_power)
