"""Runs the guard: a small parent process of `diptych serve` that ends every process which `serve` leaves behind.

    guard (this process)      waits; adopts orphans (PR_SET_CHILD_SUBREAPER); at the end kills what is left
      └── diptych serve       does the work, and stops everything in order by itself
            ├── gateway, Ray  die with it (PR_SET_PDEATHSIG)
            └── ...           a process that survives becomes the guard's child, and is ended here

A kill -9 of either process leaves nothing behind: if the guard dies, `serve` gets SIGTERM and stops in order; if
`serve` dies, the guard cleans up. `serve` has a session of its own, so a kill of the guard's process group (by a shell
or a service manager) hits the guard alone. If both are killed at once by their process ids, the temporary folder
remains.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from diptych.errors import ConfigError

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# A program that becomes the command in its arguments; that command gets SIGTERM when the thread that started it ends.
TIED_PROGRAM = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Most characters of the temporary folder's path. Ray appends up to 8 + 4 + 64 characters to it for its sockets:
# "/diptych-" and 8 random characters, "/ray", and "/session_2026-01-31_23-59-59_999999_4194304/sockets/plasma_store".
# A socket's path has at most 107.
MAX_TEMP_CHARS = 107 - 17 - 4 - 64


def run_guarded(run: Callable[[], int], remove: Path | None = None) -> int:
    """Run `run()` in a child process; at the end remove the folder `remove`. Returns the child's exit status.

    Must be called before threads are started, because the child is a fork.
    """
    guard = os.getpid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard:
            os._exit(1)
        os.setsid()
        try:
            return run()
        finally:
            if os.getppid() != guard:
                # The guard was killed, so it cannot remove the folder.
                _remove_folder(remove)
    for name in FORWARDED_SIGNALS:
        signal.signal(name, lambda number, _frame: _forward_signal(child, number))
    try:
        return _reap_until_exit(child)
    finally:
        kill_descendants()
        _remove_folder(remove)


def run_guarded_with_folder(run: Callable[[Path], int]) -> int:
    """Do what `run_guarded` does with `run(folder)`, for a private folder (mode 0700) that is removed at the end.

    Raises:
        ConfigError: the folder cannot be made.
    """
    try:
        base = tempfile.gettempdir()
        folder = Path(
            tempfile.mkdtemp(prefix="diptych-", dir=base if len(base) <= MAX_TEMP_CHARS else "/tmp")
        )
    except OSError as error:
        raise ConfigError(
            "no folder can be made for keys and sockets",
            error.strerror or str(error),
            "let this user write to /tmp (in a container: a tmpfs), or set TMPDIR to a folder that it may write to",
        ) from None
    _lock_folder(folder)
    return run_guarded(lambda: run(folder), folder)


def _remove_folder(folder: Path | None) -> None:
    """Remove the folder with its content; errors are ignored."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _lock_folder(folder: Path) -> None:
    """Lock the folder until guard and child have ended, since systemd-tmpfiles does not remove locked folders."""
    # Not all file systems have locks. Lost keys are written again anyway.
    with contextlib.suppress(OSError):
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)


def tied_command(command: Sequence[str]) -> list[str]:
    """A command that runs `command` and gets SIGTERM when the thread that started it ends, even by SIGKILL.

    For programs that start a whole `diptych serve`, so that no deployment outlives them. `command` begins with a path.
    """
    return [sys.executable, "-P", "-c", TIED_PROGRAM, str(os.getpid()), *command]


def _forward_signal(child: int, number: int) -> None:
    """Send the signal to the child, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _reap_until_exit(child: int) -> int:
    """Reap ended children, adopted orphans included, until `child` ends; return its status as a shell would."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def kill_descendants(rounds: int = 50) -> list[str]:
    """Kill all descendants of this process, also those that appear meanwhile; return their command lines."""
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
    """Call prctl(2); raises OSError if it fails."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
