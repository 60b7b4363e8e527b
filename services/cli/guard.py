"""Nothing is left behind: a small parent process that ends every descendant when the real one has ended.

    guard (this process)      waits; adopts orphans (PR_SET_CHILD_SUBREAPER); at the end kills what is left
      └── diptych serve       does the work, and stops everything in order by itself
            ├── gateway, Ray  die with it (PR_SET_PDEATHSIG)
            └── ...           Ray's agents do not: they become the guard's children and are ended here

kill -9 of either is survived: when the guard dies, `serve` gets SIGTERM and stops in order; when `serve` dies, the
guard cleans up. Only both at once would leave Ray's two agents, which give up by themselves within 30 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST_TEMP = 30  # Ray's socket paths, which begin with ours, have 107 characters at most


def guarded(run: Callable[[Path], int]) -> int:
    """Run `run(folder)` in a child process; `folder` is private (0700) and removed at the end. Returns its exit status.

    Call it before threads are started: the child is a fork.
    """
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="diptych-", dir=base if len(base) <= LONGEST_TEMP else "/tmp"))
    guard = os.getpid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard:
            os._exit(1)
        try:
            return run(folder)
        finally:
            if os.getppid() != guard:  # it was killed, and cannot remove the folder any more
                shutil.rmtree(folder, ignore_errors=True)
    for name in FORWARDED:
        signal.signal(name, lambda number, _frame: _forward(child, number))
    try:
        return _outlive(child)
    finally:
        sweep()
        shutil.rmtree(folder, ignore_errors=True)


def _forward(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _outlive(child: int) -> int:
    """Reap until `child` has ended, adopted orphans included; its exit status as a shell would give it."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def sweep(rounds: int = 50) -> list[str]:
    """Kill all descendants of this process, those included that appear meanwhile; returns their command lines."""
    ended: dict[int, str] = {}
    for _ in range(rounds):
        left = psutil.Process().children(recursive=True)
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error):
                ended.setdefault(process.pid, " ".join(process.cmdline()))
                process.kill()
        psutil.wait_procs(left, timeout=0.2)
    return list(ended.values())


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
