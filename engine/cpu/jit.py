"""How the CPU kernels use numba: single-threaded, without the GIL, compiled once per machine (`diptych.kernels.cache`).

Kernels take flat C-contiguous arrays and compile-time widths, because LLVM only vectorises the inner loops when strides
and trip counts are constants. So a width is a plain int in the closure of an outer kernel (numba's disk cache supports
closures over ints, but not over other kernels), and is passed on to inner kernels as a literal.

`jit` makes a kernel that Python calls. `jit_inner` makes a function that only kernels call: it is compiled into them,
so it needs neither cache files of its own nor an entry point for Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from diptych.kernels.cache import cached

F = TypeVar("F", bound=Callable[..., Any])

LOG2_E = np.float32(1.4426950408889634)
LOWEST = np.float32(-1e30)  # used as minus infinity: differences between such numbers stay finite

# Sums may be reordered into vector lanes (in the same way every time); nan and inf keep their meaning.
FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}
JIT_OPTIONS: dict[str, Any] = {"fastmath": FAST_MATH, "error_model": "numpy"}
NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

_C1, _C2, _C3, _C4 = (np.float32(c) for c in (6.9314718e-1, 2.4022651e-1, 5.5504109e-2, 9.6181291e-3))
_C5, _C6, _C7 = (np.float32(c) for c in (1.3333558e-3, 1.5403530e-4, 1.5252734e-5))
_HALF, _ONE, _LOW, _HIGH = (np.float32(c) for c in (0.5, 1.0, -126.0, 126.0))


def jit(function: F) -> F:
    """Compile `function` at its first call, or load it from the machine's kernel cache."""
    return cast(F, cached(function, **JIT_OPTIONS))


def jit_inner(function: F) -> F:
    """Compile `function` into the kernels that call it. Python cannot call it."""
    return cast(F, numba.njit(**JIT_OPTIONS, **NO_WRAPPERS)(function))


def _float_of_bits(typing: Any, bits: Any) -> Any:
    """Numba intrinsic: the float32 with the IEEE bits of the given int32, which costs no instruction."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), emit


float_of_bits: Any = intrinsic(_float_of_bits)


@jit_inner
def exp2(x: Any) -> Any:
    """2**x for float32 within 2 ulp, clamped to the normal range. Unlike libm's, it can be vectorised."""
    x = min(max(x, _LOW), _HIGH)
    whole = np.floor(x + _HALF)
    y = x - whole
    power = float_of_bits(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))
    tail = _C4 + y * (_C5 + y * (_C6 + y * _C7))
    return (_ONE + y * (_C1 + y * (_C2 + y * (_C3 + y * tail)))) * power


def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Numba intrinsic: prefetch the cache line of array[index], which may lie beyond the array, into the L2 cache."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte.type, i32, i32, i32])
        insert: Any = cgutils.get_or_insert_function
        call = insert(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [byte, i32(0), i32(2), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


prefetch: Any = intrinsic(_prefetch)
