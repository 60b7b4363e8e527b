"""Leaves out what numba does in vain when a process compiles one kernel and ends (`diptych.kernels.cache`).

Numba generates machine code for every function that a kernel calls. But the kernel has their optimised code in its own
module, which is compiled as a whole, and nobody calls them but the kernel. So their machine code is never run, and
takes a fourth of the time. The kernel's own machine code stays as it is.
"""

from __future__ import annotations

from typing import Any

from numba.core import codegen

# How the names of functions begin that Python calls.
_ENTRY_PREFIX = "_ZN7cpython"


def skip_inner_code() -> None:
    """From now on, generate no machine code in this process for functions that only kernels call."""
    library, target = codegen.JITCodeLibrary, codegen.JITCPUCodegen
    finalize: Any = library._finalize_final_module
    set_env: Any = target.set_env
    # The engine keeps what it has; others may still be named by what has it.
    kept: list[Any] = []

    def finalize_called(self: Any) -> None:
        if any(one.name.startswith(_ENTRY_PREFIX) for one in self.get_defined_functions()):
            finalize(self)
            return
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True
        kept.append(self)

    def set_called_env(self: Any, env_name: str, env: Any) -> None:
        # Only code in the engine has an environment.
        if self._engine.is_symbol_defined(env_name):
            set_env(self, env_name, env)

    library._finalize_final_module = finalize_called  # type: ignore[method-assign]
    target.set_env = set_called_env  # type: ignore[method-assign]
