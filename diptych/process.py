"""How a worker process starts, reports to its supervisor, and ends. Imports no torch, so it can be imported first.

    standard input    one line: the `WorkerSpec` as JSON
    standard output   JSON lines only: {"phase", "done", "total"} while starting, {"role"} when it changes its role,
                      {"error": {"what", "why", "fix"}} when it ends with an error
    exit status       0 drained after SIGTERM; 1 the engine failed, restart it; 3 an expected error;
                      4 drained because the gateway asked for it: it is not needed any more; 5 the gateway rejected
                      it, with an error: do not start it again; 6 its device failed: restart it, no request is to blame

Text that libraries print to file descriptor 1 goes to standard error instead, so that the supervisor can parse the
lines.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import IO, NoReturn

import msgspec

from diptych.errors import ConfigError, DeviceLost, DiptychError, StartError, WorkerRejected, find_device_loss
from diptych.logs.log_format import configure_logging
from diptych.specs import WorkerSpec

EXIT_EXPECTED, EXIT_FATAL, EXIT_RETIRED, EXIT_REJECTED, EXIT_LOST = 3, 1, 4, 5, 6
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def configure_and_report() -> None:
    """Set up the process before torch is imported, which takes seconds, and report that loading has begun."""
    configure_process()
    SupervisorPipe(sys.stdout).report_progress("load", 0)


def configure_process() -> None:
    """Let this process end with its parent, and limit its libraries to one thread each.

    On a shared 2-core machine a decode step of a 42 M-parameter model took 43 ms with one OpenMP thread and 498 ms
    with two. A supervisor that wants more threads sets `OMP_NUM_THREADS` for the process; that value is kept.
    """
    # Ctrl-C reaches the whole process group, but it is the supervisor that ends workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, os.environ.get("OMP_NUM_THREADS", "1"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class SupervisorPipe:
    """Reports to the supervisor, as JSON lines: progress, changes of role, and one error."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def report_progress(self, phase: str, done: int = 1, total: int = 1) -> None:
        """Report that `done` of `total` steps of `phase` ("load", "warm", "link", "ready") are complete."""
        self._write_line({"phase": phase, "done": done, "total": total})

    def report_role(self, role: str) -> None:
        """Report the worker's new role; the supervisor starts it in this role from now on."""
        self._write_line({"role": role})

    def report_error(self, error: DiptychError) -> None:
        """Report the error with which the process ends."""
        self._write_line({"error": {"what": error.what, "why": error.why, "fix": error.fix}})

    def _write_line(self, content: object) -> None:
        print(json.dumps(content), file=self._out, flush=True)


def run_supervised(main: Callable[[WorkerSpec, SupervisorPipe], int | None]) -> int:
    """Run `main` with the specification from standard input; returns the exit status, and shows no traceback.

    `main` returns the exit status of a normal end; None means 0.
    """
    pipe = SupervisorPipe(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    try:
        spec = read_spec(sys.stdin.buffer)
        configure_logging(spec.log_level, spec.log_format, spec.worker)
        return main(spec, pipe) or 0
    except DiptychError as error:
        pipe.report_error(error)
        return EXIT_REJECTED if isinstance(error, WorkerRejected) else EXIT_EXPECTED
    except (DeviceLost, Exception) as error:
        if (lost := find_device_loss(error)) is not None:
            exit_lost(pipe, lost)
        # The supervisor starts another process and reports the cause once.
        log.debug("the worker failed", exc_info=error)
        pipe.report_error(_as_diptych_error(error))
        return EXIT_FATAL


def read_spec(stream: IO[bytes]) -> WorkerSpec:
    """The `WorkerSpec` in the first line of `stream`.

    Raises:
        ConfigError: the line is not JSON, or not a `WorkerSpec`.
    """
    try:
        return msgspec.json.decode(stream.readline(), type=WorkerSpec)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            "the worker's specification cannot be read", str(error), "start workers with `diptych serve`"
        ) from None


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal to this process when the thread that started it ends.

    Raises StartError if the kernel refuses. If the parent has ended already, the process exits at once.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise StartError("cannot tie the worker to its supervisor", os.strerror(ctypes.get_errno()))
    # A different parent means that the parent ended before the call took effect.
    if os.getppid() != parent:
        os._exit(EXIT_FATAL)


def pin_to_core(core: int | None) -> None:
    """Pin the calling thread, which computes, to `core` (None: do nothing).

    Call it after other threads were started, which then keep all cores: neither heartbeats (the channel's I/O thread)
    nor KV pulls should wait for a core that is busy with a long step.

    Raises:
        ConfigError: this process may not use `core`.
    """
    if core is None:
        return
    if core not in os.sched_getaffinity(0):
        raise ConfigError(
            f"core {core} cannot be used by this process",
            f"it may run on {sorted(os.sched_getaffinity(0))}",
            "start fewer workers, or give the process more cores",
        )
    os.sched_setaffinity(0, {core})


def core_of_rank(first: int | None, rank: int) -> int | None:
    """The core of a rank, if rank 0 has the core `first`: ranks take consecutive cores. None: any core."""
    if first is None:
        return None
    usable = sorted(os.sched_getaffinity(0))
    return usable[(usable.index(first) + rank) % len(usable)] if first in usable else first


def exit_fatally(pipe: SupervisorPipe, error: DiptychError) -> NoReturn:
    """End the whole process, from any thread, and report the error; the supervisor starts another process."""
    pipe.report_error(error)
    os._exit(EXIT_FATAL)


def exit_lost(pipe: SupervisorPipe, lost: DeviceLost) -> NoReturn:
    """End the whole process, whose device failed, at once: ending in order calls a driver that may never return."""
    pipe.report_error(lost.error)
    os._exit(EXIT_LOST)


def _as_diptych_error(error: BaseException) -> DiptychError:
    """An unexpected exception as an error for the supervisor, with the place where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    where = f"{'/'.join(last.filename.split('/')[-2:])}:{last.lineno} in {last.name}"
    return DiptychError("the worker failed", f"{text} (at {where})", "it is restarted by its supervisor")
