"""Calls kernels from within a kernel by their addresses, with arrays that are described by numbers.

A kernel that is called so is the very machine code that Python calls: nothing is compiled into the caller, so no sum is
added up in another order. Its address (`diptych.kernels.addresses`) and the types of its arguments are those of one
compiled version.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

# Numba's helpers have no types.
_cgutils: Any = cgutils


def array_address(array: NDArray[Any]) -> int:
    """Where the first element of a contiguous array is."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def _call_kernel(typing: Any, address: Any, arguments: Any) -> Any:
    """Numba intrinsic: call the kernel at `address`, which returns nothing, with a tuple of arguments."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = list(signature.args[1])
        place = builder.inttoptr(
            values[0], context.call_conv.get_function_type(types.none, kinds).as_pointer()
        )
        parts = _cgutils.unpack_tuple(builder, values[1])
        status, _ = context.call_conv.call_function(builder, place, types.none, kinds, parts)
        with _cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(address, arguments), emit


call_kernel: Any = intrinsic(_call_kernel)


def _floats_at(typing: Any, address: Any, count: Any) -> Any:
    """Numba intrinsic: the flat float32 array of `count` elements at `address`, whose memory somebody else keeps."""
    kind = types.Array(types.float32, 1, "C")

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(kind)(context, builder)
        size = context.get_constant(types.intp, np.dtype(np.float32).itemsize)
        context.populate_array(
            array,
            data=builder.inttoptr(values[0], ir.FloatType().as_pointer()),
            shape=_cgutils.pack_array(builder, [values[1]]),
            strides=_cgutils.pack_array(builder, [size]),
            itemsize=size,
            meminfo=None,
        )
        return array._getvalue()

    return kind(types.intp, types.intp), emit


floats_at: Any = intrinsic(_floats_at)
