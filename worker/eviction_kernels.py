"""Compiles the kernels that evict KV after the start: a start for which nobody asked for eviction does not load them.

    ready ───────────────────▶ missing on disk? a child process compiles them, at the lowest priority
    first request that evicts ▶ still missing? a child process at normal priority; then a thread loads them

Meanwhile a request that evicts waits in the engine (`engine.sequence.Sequence.ready`), until its deadline at most, and
all others go on: a kernel that is compiled on the engine's thread stops every step for seconds. Whatever fails here
costs just that: the engine's thread then compiles what is missing at its first use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from diptych.kernels.cache import is_stored, load_stored
from engine.model.memory_plan import available_memory
from worker.ranks import RankSpec

LOWEST_PRIORITY = 19
# Bytes of memory that must be free for a compiler that nobody waits for; it takes about 0.4 GiB.
MIN_FREE_BYTES = 1 << 30
# The kernel's first choice if memory runs out.
COMPILER_OOM_SCORE = 1000

log = logging.getLogger(__name__)


def compiler_command() -> list[str]:
    """The command of a child process that reads a `RankSpec` from its standard input and compiles its kernels."""
    return [sys.executable, "-m", "worker.precompile", "eviction", str(os.getpid())]


class EvictionKernels:
    """The kernels with which one worker evicts (`engine.protocols.Preparation`). Its methods return at once.

    Create it before the calling thread is pinned to a core: its thread takes over the cores of now.
    """

    def __init__(
        self,
        spec: RankSpec,
        find_kernels: Callable[[], Sequence[Any]],
        command: Sequence[str] | None = None,
        available: Callable[[], int] = available_memory,
    ) -> None:
        """`spec` says what they are compiled for; `find_kernels` returns them, as they are, loaded or not.

        `available` returns the bytes that the system, or this control group, can still give.
        """
        self._spec, self._find_kernels, self._available = spec, find_kernels, available
        self._command = list(command or compiler_command())
        self._cores = os.sched_getaffinity(0)
        self._wake: Callable[[], None] = lambda: None
        self._wanted, self._ready, self._closed = threading.Event(), threading.Event(), False
        # Guards the attributes below, and `_wanted` until it is set.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def ready(self) -> bool:
        """Whether they are loaded, or cannot be."""
        return self._ready.is_set()

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, when they are ready."""
        self._wake = wake

    def start(self) -> None:
        """The worker serves: compile what is missing. Later calls do nothing."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._prepare, name="eviction kernels", daemon=True)
                self._thread.start()

    def request(self) -> None:
        """A sequence waits for them. A compiler of the lowest priority might never end on a busy machine."""
        if self._wanted.is_set():
            return
        with self._lock:
            self._wanted.set()
            if self._child is not None:
                self._child.kill()
        self.start()

    def close(self) -> None:
        """End the child process and the thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._wanted.set()
            if self._child is not None:
                self._child.kill()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _prepare(self) -> None:
        """The thread: let them be compiled, wait until they are wanted, and load them."""
        os.sched_setaffinity(0, self._cores)
        try:
            kernels = self._find_kernels()
            while not all(map(is_stored, kernels)) and self._compile_missing():
                pass
            self._wanted.wait()
            for kernel in kernels if not self._closed else ():
                load_stored(kernel)
        except Exception as error:  # numba and the system may raise anything
            log.warning("the kernels that evict KV are compiled at their first use: %r", error)
        self._ready.set()
        self._wake()

    def _compile_missing(self) -> bool:
        """Run a child process that compiles what is missing. Returns whether it is worth a second look."""
        if not self._wanted.is_set() and self._available() < MIN_FREE_BYTES:
            log.info("kernels that evict KV are compiled when they are needed: free memory is short")
            self._wanted.wait()
        with self._lock:
            if self._closed:
                return False
            hurried = self._wanted.is_set()
            child = self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        _yield_to_others(child.pid, lowest=not hurried)
        child.communicate(msgspec.json.encode(self._spec))
        with self._lock:
            self._child = None
            interrupted = not hurried and self._wanted.is_set()
        if child.returncode and not interrupted:
            log.warning("the process that compiles kernels ended with status %d", child.returncode)
        return interrupted


def _yield_to_others(pid: int, *, lowest: bool) -> None:
    """Let a process go first if memory runs out, and with `lowest` last where others want the cores.

    The priority cannot be raised again without privileges.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(COMPILER_OOM_SCORE))
    if lowest:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, LOWEST_PRIORITY)
        with contextlib.suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
