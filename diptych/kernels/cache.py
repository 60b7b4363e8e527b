"""Caches the machine code of the CPU kernels on disk: one process compiles a kernel, all others on the machine load it.

    <folder>/<machine>/<module>-<sources>/   numba's index and data files of each kernel, and a lock file per kernel

`folder` is `NUMBA_CACHE_DIR`, else `~/.cache/diptych/kernels` (`XDG_CACHE_HOME` is honoured). `machine` is a digest of
the versions of Python, numba and llvmlite, and of the CPU and its features. `sources` is a digest of the kernel's
options, of the source of its module and of our modules that it depends on, and of the constants that these modules
import. So clones and installations of the same source share their kernels, and a changed source never loads old
kernels. Folders whose kernels were not loaded for `MAX_UNUSED_S` are removed.

A process that misses a kernel takes its lock, looks again, and lets a child process compile the kernel. So all
processes, including this one, run loaded code. Code compiled in the process itself can differ: the functions that a
kernel calls are then compiled on their own, and may add numbers in another order. Locks belong to the open file
(flock), so a process that dies releases its locks. Files that cannot be loaded are removed and compiled again.

Nothing here prevents a start. If the folder cannot be written, or a lock or a child process cannot be had or takes more
than `MAX_COMPILE_S`, the process compiles for itself. Loaded code is executed, so the folder and its parents must
belong to this user or to root, and nobody else may be able to write there. From a folder that only root may write,
kernels are loaded but not stored.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import hashlib
import importlib
import logging
import os
import platform
import select
import shutil
import signal
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import llvmlite  # type: ignore[import-untyped]
import numba
import numpy as np
from llvmlite import binding
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

from diptych.kernels.addresses import note_addresses
from diptych.kernels.inner_functions import skip_inner_code
from diptych.launch.own_packages import PACKAGES

if "scipy.linalg" not in sys.modules:
    # Numba searches scipy.linalg for a BLAS library for `np.dot` in kernels. Our kernels do not use `np.dot`, and the
    # search takes a third of the time of importing numba.
    sys.modules["scipy.linalg"] = None  # type: ignore[assignment]
    importlib.import_module("numba.np.arraymath")
    del sys.modules["scipy.linalg"]

F = TypeVar("F", bound=Callable[..., Any])
_PR_SET_PDEATHSIG = 1
CONSTANT_TYPES = (bool, int, float, str, np.generic)
# The packages whose changes make kernels new.
OWN_PACKAGES = frozenset(PACKAGES)
# Seconds to wait for one kernel: for its lock, and for its compiler.
MAX_COMPILE_S = 300.0
HEX_PATTERN = "[0-9a-f]" * 16
# Seconds between two attempts to get the lock, since flock has no timeout.
LOCK_POLL_S = 0.05
MAX_UNUSED_S = 30 * 86400.0

log = logging.getLogger(__name__)


def cached(function: F, **options: Any) -> Any:
    """`function` compiled by numba with `options`: loaded from disk, or compiled at its first call with new types."""
    kernel: Any = numba.njit(nogil=True, **options)(function)
    folder = machine_kernel_folder()
    # With NUMBA_DISABLE_JIT, numba returns the function itself, which has no `compile`.
    compiling = getattr(kernel, "compile", None)
    if folder is not None and compiling is not None:
        kernel._cache = _KernelCache(function, folder, options)
        kernel.compile = kernel._cache.guard_compile(compiling)
    if compiling is not None:
        note_addresses(kernel)
    return kernel


def is_stored(kernel: Any) -> bool:
    """Whether a kernel is on disk, for any types. A function that is not compiled needs nothing."""
    found = getattr(kernel, "_cache", None)
    return not isinstance(found, _KernelCache) or bool(found.stored_types(kernel))


def load_stored(kernel: Any) -> None:
    """Load a kernel for all types for which it is on disk, so that its next call does not. Any thread may do this."""
    found = getattr(kernel, "_cache", None)
    for types in found.stored_types(kernel) if isinstance(found, _KernelCache) else ():
        kernel.compile(types)


@cache
def machine_kernel_folder() -> Path | None:
    """The folder of this machine's kernels; None (logged) if none can be used."""
    try:
        base = Path(os.environ.get("NUMBA_CACHE_DIR") or _user_cache() / "diptych" / "kernels").resolve()
        folder = base / _machine_digest()
        # Without write permission, kernels may still be loaded from an existing folder.
        with contextlib.suppress(PermissionError):
            _make_private_folders(folder)
        for place in (folder, *folder.parents):
            _check_trusted(place, shared=place != folder)
    except (OSError, RuntimeError) as error:
        # RuntimeError means that there is no home folder.
        log.warning("every process compiles its own kernels: %s", error)
        return None
    return folder


def _make_private_folders(folder: Path) -> None:
    """Create the folder and its missing parents, all of them private; `Path.mkdir` makes only the last one private."""
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            place.mkdir(mode=0o700, exist_ok=True)


def _check_trusted(place: Path, *, shared: bool) -> None:
    """Check that nobody else can change the code below `place`, which is executed when it is loaded.

    `shared`: others may create files in `place`, but not replace ours (a sticky folder such as /tmp).

    Raises:
        PermissionError: another user could change it.
    """
    at = place.lstat()
    if at.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{place} belongs to somebody else")
    if at.st_mode & 0o022 and not (shared and at.st_mode & stat.S_ISVTX):
        raise PermissionError(f"others may write to {place}")


def _user_cache() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if named.startswith("/") else Path.home() / ".cache"


def _machine_digest() -> str:
    """A digest of everything except the source that machine code depends on."""
    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    parts = (sys.version, platform.machine(), numba.__version__, llvmlite.__version__, cpu, features)
    return _hash_parts(map(str, parts))


def kernel_source_stamp(module: ModuleType, options: dict[str, Any] | None = None) -> str:
    """A digest of everything that a kernel of `module` with these options is compiled from.

    It covers the source and constants of the module and, recursively, of every module of ours that it uses: imported
    modules, modules of the kernels that it calls, and modules that make its kernels.
    """
    ours = OWN_PACKAGES | {module.__name__.partition(".")[0]}
    parts, visited = [_plain_options(options or {})], set[str]()
    for each in (sys.modules[__name__], sys.modules[skip_inner_code.__module__], module):
        parts += _kernel_sources(each, ours, visited)
    return _hash_parts(parts)


def _kernel_sources(module: ModuleType, ours: frozenset[str], visited: set[str]) -> Iterator[str]:
    """The texts that determine the kernels of `module`: sources, constants and options, recursively."""
    if module.__name__ in visited or not getattr(module, "__file__", None):
        return
    visited.add(module.__name__)
    assert module.__file__ is not None
    yield Path(module.__file__).read_text(encoding="utf-8")
    # The modules that this module imports do not matter for kernels.
    if module.__name__ == __name__:
        return
    used = set()
    for name, value in sorted(vars(module).items()):
        if _is_constant(value) and not name.startswith("__"):
            yield f"{name}={value!r}"
        if isinstance(value, Dispatcher):
            yield f"{name}={_plain_options(value.targetoptions)}"
        used |= _module_behind(value, ours)
    for name in sorted(used & sys.modules.keys()):
        yield from _kernel_sources(sys.modules[name], ours, visited)


def _module_behind(value: Any, ours: frozenset[str]) -> set[str]:
    """The module that a kernel depends on through this global value: a set with its name, or empty."""
    if isinstance(value, ModuleType):
        return {value.__name__} if value.__name__.partition(".")[0] in ours else set()
    name = getattr(value, "__module__", None)
    if isinstance(value, (Dispatcher, _Intrinsic)):
        return {str(name)}
    makes = isinstance(value, FunctionType) and getattr(sys.modules.get(str(name)), "cached", None) is cached
    return {str(name)} if makes else set()


def _is_constant(value: Any) -> bool:
    """Whether a module's global is a constant that kernels may compile in."""
    return isinstance(value, CONSTANT_TYPES) or (isinstance(value, tuple) and all(map(_is_constant, value)))


def _plain_options(options: dict[str, Any]) -> str:
    """Options as a text that is the same in every process: sets are sorted, since their order varies."""
    named = sorted(options.items())
    return repr([(k, sorted(v, key=repr) if isinstance(v, (set, frozenset)) else v) for k, v in named])


def _hash_parts(parts: Any) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class _Locator:
    """Tells numba where to find a kernel's files (`numba.core.caching._CacheLocator`)."""

    def __init__(self, function: Callable[..., Any], folder: Path, options: dict[str, Any]) -> None:
        module = sys.modules[function.__module__]
        self._line = function.__code__.co_firstlineno
        self._path = folder / f"{module.__name__}-{kernel_source_stamp(module, options)}"
        self._py_file = module.__file__  # numba names it in warnings

    def ensure_cache_path(self) -> None:
        """Create the folder, and remove folders that are no longer used."""
        if not self._path.is_dir():
            self._path.mkdir(mode=0o700, exist_ok=True)
            prune_unused(self._path.parent.parent)

    def get_cache_path(self) -> str:
        """The folder of the kernel's files."""
        return str(self._path)

    def get_source_stamp(self) -> str:
        """A text that changes with the source, with which numba checks its files."""
        return self._path.name

    def get_disambiguator(self) -> str:
        """A text that distinguishes functions of the same name: the line number."""
        return str(self._line)


class _KernelCache(FunctionCache):
    """Numba's cache of one kernel, in our folder, which one process at a time adds to."""

    # Whether this process may compile kernels into the folder. It becomes False after a lock or a compiler has
    # failed, so that the process does not wait a second time.
    may_compile = True

    def __init__(self, function: Callable[..., Any], folder: Path, options: dict[str, Any]) -> None:
        locator = _Locator(function, folder, options)

        class Here:
            from_function = staticmethod(lambda *_: locator)

        class Files(CompileResultCacheImpl):
            _locator_classes = [Here]  # type: ignore[list-item]

        self._impl_class = Files
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._lock_path = Path(locator.get_cache_path()) / f"{self._impl.filename_base}.lock"
        self._is_child = False

    def stored_types(self, kernel: Any) -> list[Any]:
        """The types of arguments for which the kernel is on disk; none if its files cannot be read."""
        codegen = kernel.targetctx.codegen()
        try:
            stored = self._cache_file._load_index()  # type: ignore[no-untyped-call]
        except Exception as error:  # unpickling damaged files can raise anything
            log.debug("%s cannot be read: %r", self._lock_path.stem, error)
            return []
        return [key[0] for key in stored if key == self._index_key(key[0], codegen)]  # type: ignore[no-untyped-call]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel for these types, compiled by a child process if it is missing. None: the caller compiles it."""
        try:
            found, _ = self._try_load(sig, target_context)
            if found is None and _KernelCache.may_compile:
                found = self._load_or_compile(sig, target_context)
            return found
        except OSError as error:
            _stop_caching(str(error))
            return None

    def _try_load(self, sig: Any, target_context: Any) -> tuple[Any, Exception | None]:
        """The kernel for these types, or None, with the error if its files are damaged."""
        try:
            found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except OSError:
            raise
        except Exception as error:  # unpickling damaged files can raise anything
            return None, error
        if found is not None:
            _mark_used(self._lock_path.parent)
            log.info("loaded %s", self._lock_path.stem)
        return found, None

    def _load_or_compile(self, sig: Any, target_context: Any) -> Any:
        """Under the kernel's lock, load the kernel or let a child process compile it; None if that failed."""
        self._impl.locator.ensure_cache_path()
        with self._lock_path.open("a") as lock:
            if not _lock_within_limit(lock.fileno()):
                _stop_caching(f"{self._lock_path} is held for more than {MAX_COMPILE_S:.0f} s")
                return None
            found, damage = self._try_load(sig, target_context)
            if damage is not None:
                log.warning("%s is compiled again, its files are damaged: %r", self._lock_path.stem, damage)
                self._discard_files()
            if found is not None:
                return found
            child, ended = self._fork_compiler()
            if child == 0:
                # In the child process numba now compiles, and then calls `save_overload`.
                return None
            status = _await_child(child, ended)
        if status:
            _stop_caching(f"a process that compiled {self._lock_path.stem} ended with status {status}")
        else:
            log.info("compiled %s", self._lock_path.stem)
        return self._try_load(sig, target_context)[0]

    def _discard_files(self) -> None:
        """Remove the files of this kernel, for all types."""
        for file in self._lock_path.parent.iterdir():
            if file.name.startswith(f"{self._impl.filename_base}.") and file.suffix in (".nbi", ".nbc"):
                file.unlink(missing_ok=True)

    def save_overload(self, sig: Any, data: Any) -> None:
        """In the child process: write the compiled kernel, and exit. Other processes do not store what they compile."""
        if not self._is_child:
            return
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:  # for example a full disk
            log.warning("%s cannot be kept: %s", self._lock_path.stem, error)
            os._exit(1)
        os._exit(0)

    def guard_compile(self, compile: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `Dispatcher.compile` so that a child process never returns from it."""

        def guard(sig: Any) -> Any:
            try:
                return compile(sig)
            finally:
                if self._is_child:
                    os._exit(1)

        return guard

    def _fork_compiler(self) -> tuple[int, int]:
        """Fork a child process that ends with this one; returns its id and a pipe that closes when the child ends.

        Only numba runs in the child, while numba's lock is held.
        """
        parent, (ended, alive) = os.getpid(), os.pipe()
        try:
            with warnings.catch_warnings():
                # Python 3.12 and later warn about forks in a process with several threads.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
        except OSError:
            os.close(ended)
            os.close(alive)
            raise
        if child == 0:
            self._is_child = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            # What the parent holds must not be collected here: its destructors may need threads that only it has.
            gc.freeze()
            skip_inner_code()
        else:
            os.close(alive)
        return child, ended


def _stop_caching(why: str) -> None:
    """After a failure, compile in this process from now on, and log why once."""
    if _KernelCache.may_compile:
        _KernelCache.may_compile = False
        log.warning("this process compiles kernels that are not on disk by itself: %s", why)


def _lock_within_limit(lock: int) -> bool:
    """Take the lock of an open file; False if that takes longer than `MAX_COMPILE_S`."""
    end_s = time.monotonic() + MAX_COMPILE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end_s:
                return False
            time.sleep(LOCK_POLL_S)


def _await_child(child: int, ended: int) -> int:
    """Wait for a child and return its wait status; kills the child if the pipe `ended` is not closed in time."""
    try:
        watch = select.poll()
        watch.register(ended, select.POLLIN)
        if not watch.poll(MAX_COMPILE_S * 1000):
            os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1]
    except ChildProcessError:  # where SIGCHLD is ignored, the kernel keeps no status
        return 0
    finally:
        os.close(ended)


def _mark_used(folder: Path) -> None:
    """Note in the folder's time stamp that its kernels are in use; at most once a day."""
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime > MAX_UNUSED_S / 30:
            os.utime(folder)


def prune_unused(base: Path) -> None:
    """Remove the kernels below `base`, of all machines, that were not loaded for `MAX_UNUSED_S`."""
    with contextlib.suppress(OSError):
        for folder in base.glob(f"{HEX_PATTERN}/*-{HEX_PATTERN}"):
            if time.time() - folder.stat().st_mtime > MAX_UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)
