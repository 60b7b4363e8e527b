"""Where the machine code of a compiled kernel is, for kernels that call others (`engine.cpu.native_calls`)."""

from __future__ import annotations

from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

# Numba's own functions have no types.
_typeof: Any = numba.typeof


def note_addresses(kernel: Any) -> None:
    """Note the address of each version of a kernel when it is compiled or loaded.

    It cannot be asked for later: numba finds code by names, which kernels of other processes may have, too.
    """
    compiling, noted = kernel.compile, dict[Any, int]()

    def compile_and_note(kinds: Any) -> Any:
        # Nothing else may be loaded in between.
        with global_compiler_lock:
            entry = compiling(kinds)
            for known, found in kernel.overloads.items():
                if known not in noted:
                    noted[known] = found.library.get_pointer_to_function(found.fndesc.llvm_func_name)
        return entry

    kernel.compile, kernel.addresses = compile_and_note, noted


def is_compiled(kernel: Any) -> bool:
    """Whether a kernel is machine code; with `NUMBA_DISABLE_JIT` it is the Python function."""
    return hasattr(kernel, "addresses")


def kernel_address(kernel: Any, arguments: tuple[Any, ...]) -> int:
    """The address of the version of a kernel that these arguments take, which is compiled or loaded if need be.

    It stays valid as long as the kernel lives.
    """
    kinds = tuple(map(_typeof, arguments))
    kernel.compile(kinds)
    return int(kernel.addresses[kinds])
