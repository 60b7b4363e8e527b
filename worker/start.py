"""How a worker process begins, speaks to its supervisor and ends. No torch here, so it can be imported first.

    standard input    one line: the `WorkerSpec` as JSON
    standard output   JSON lines only: {"phase", "done", "total"} while starting, {"role"} when it changes pool,
                      {"error": {"what", "why", "fix"}} when it ends in an error
    exit status       0 drained after SIGTERM; 1 the engine failed, restart it; 3 an expected error;
                      4 drained because the gateway asked for it: it is not wanted any more

Whatever libraries print to file descriptor 1 goes to standard error instead, so that a program can read the
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

from diptych.config import WorkerSpec
from diptych.errors import ConfigError, DiptychError, StartError

EXPECTED, FATAL, RETIRED = 3, 1, 4
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def prepare() -> None:
    """What must be so before torch is imported, which takes seconds; then the first word to the supervisor."""
    settle()
    Voice(sys.stdout).tell("load", 0)


def settle() -> None:
    """Tie this process to the one that started it, and let it compute with one thread.

    On a shared 2-core machine a decode step of a 42 M-parameter model took 43 ms with one OpenMP thread and 498 ms
    with two. A supervisor that wants more threads sets `OMP_NUM_THREADS` for the process; what it set is kept.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; ending is the supervisor's
    die_with_parent()
    for name in THREADS:
        os.environ.setdefault(name, os.environ.get("OMP_NUM_THREADS", "1"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Voice:
    """The line to the supervisor: progress and one error, each as a JSON line."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def tell(self, phase: str, done: int = 1, total: int = 1) -> None:
        """Report that `done` of `total` of `phase` ("load", "warm", "link", "ready") is behind us."""
        self._line({"phase": phase, "done": done, "total": total})

    def become(self, role: str) -> None:
        """Report that this worker is in the other pool from now on; it stays so when it is started again."""
        self._line({"role": role})

    def fail(self, error: DiptychError) -> None:
        """Say why the process ends."""
        self._line({"error": {"what": error.what, "why": error.why, "fix": error.fix}})

    def _line(self, content: object) -> None:
        print(json.dumps(content), file=self._out, flush=True)


def supervised(main: Callable[[WorkerSpec, Voice], int | None]) -> int:
    """Run `main` with the specification from standard input; returns the exit status, shows no traceback.

    What `main` returns is the exit status of an orderly end; None is 0.
    """
    voice = Voice(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    try:
        spec = read_spec(sys.stdin.buffer)
        logging.basicConfig(level=spec.log_level.upper(), format=f"%(levelname)s {spec.worker} %(message)s")
        return main(spec, voice) or 0
    except DiptychError as error:
        voice.fail(error)
        return EXPECTED
    except Exception as error:  # the supervisor starts another process; here the cause is told once
        log.debug("the worker failed", exc_info=error)
        voice.fail(_told(error))
        return FATAL


def read_spec(stream: IO[bytes]) -> WorkerSpec:
    """The `WorkerSpec` in the first line of `stream`.

    Raises:
        ConfigError: it is not JSON, or not such a structure.
    """
    try:
        return msgspec.json.decode(stream.readline(), type=WorkerSpec)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            "the worker's specification cannot be read", str(error), "start workers with `diptych serve`"
        ) from None


def die_with_parent() -> None:
    """Never outlive the supervisor: the kernel kills this process when the thread that started it ends."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise StartError("cannot tie the worker to its supervisor", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(FATAL)


def pin(core: int | None) -> None:
    """Pin the calling thread, the one that computes, to `core`.

    Call it last: threads started before keep the whole machine, so neither the channel's I/O thread
    (heartbeats) nor the threads that pull KV wait for a core that is busy with a long step.
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


def core_of(first: int | None, rank: int) -> int | None:
    """The core of a rank of a worker whose rank 0 has the core `first`: the next ones, in turn. None: wherever."""
    if first is None:
        return None
    usable = sorted(os.sched_getaffinity(0))
    return usable[(usable.index(first) + rank) % len(usable)] if first in usable else first


def give_up(voice: Voice, error: DiptychError) -> NoReturn:
    """End the whole process from whatever thread this is, saying why; the supervisor starts another."""
    voice.fail(error)
    os._exit(FATAL)


def _told(error: Exception) -> DiptychError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    where = f"{'/'.join(last.filename.split('/')[-2:])}:{last.lineno} in {last.name}"
    return DiptychError("the worker failed", f"{text} (at {where})", "it is restarted by its supervisor")
