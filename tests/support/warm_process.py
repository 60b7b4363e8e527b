"""Starts workers and gateways of tests without paying for their imports, which cost more than all else in a start.

A `WarmProcess` is a `Popen`: its program is a child of this process, with its own environment, streams and session. But
it is forked from a process that has imported its packages (`tests.support.warm_server`), one for each process that
tests. Whatever depends on a fresh interpreter is started as usual: with variables that are read by an import, or with
more than standard streams. Tests of `diptych serve`, which start everything as users do, have no part in this.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from services.host.supervision.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_CHILD_SUBREAPER = 36
# Variables that are read when something is imported or when a process is loaded.
EARLY = (
    "NUMBA_",
    "XDG_",
    "HOME",
    "LD_",
    "MALLOC_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "TRITON_",
    "TORCH_",
    "GLIBC_",
    "PYTHON",
)
# The parts of a deployment are given these. The server has imported by then, and streams of forked programs are
# written through.
KNOWN = ("PYTHONSAFEPATH", "PYTHONUNBUFFERED")
# Far beyond what a fork takes, in seconds.
ANSWER_S = 60.0
_lock = threading.Lock()


def early_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those variables that a program cannot be given after its imports; of the import path what is not ours."""
    early = {name: value for name, value in environ.items() if name.startswith(EARLY) and name not in KNOWN}
    paths = [path for path in early.pop("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(ROOT))]
    return early | {"PYTHONPATH": os.pathsep.join(paths)}


class WarmServer:
    """The process that forks programs. Start it from the main thread: it ends with the thread that started it."""

    current: WarmServer | None = None

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.early = early_variables(os.environ)
        command = [sys.executable, "-m", "tests.support.warm_server", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )  # fmt: skip
        assert self._line.recv(16) == b"ready", "the process that forks programs has ended"
        # A program that ends before it answers must not be waited for.
        self._line.settimeout(ANSWER_S)
        atexit.register(self.close)

    @classmethod
    def running(cls) -> WarmServer | None:
        """The one of this process; None if it cannot be started from this thread."""
        with _lock:
            if cls.current is None and threading.current_thread() is threading.main_thread():
                cls.current = cls()
            return cls.current

    def start(self, order: dict[str, Any], streams: list[int]) -> int:
        """Start a program; returns its process id."""
        packet = json.dumps(order).encode()
        with _lock, _reaping():
            socket.send_fds(self._line, [packet], streams)
            answer = self._line.recv(64)
        assert answer, "the process that forks programs has ended"
        return int(answer)

    def close(self) -> None:
        self._line.close()
        self._process.wait()


@contextmanager
def _reaping() -> Any:
    """In this context orphans become children of this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class WarmProcess(subprocess.Popen[Any]):
    """A `Popen` whose program, if it is a module of ours, is forked instead of started."""

    def _execute_child(self, *args: Any) -> None:
        (
            command, executable, preexec, _, pass_fds, cwd, env, _, _, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_, session, group,
        ) = args  # fmt: skip
        environ = dict(os.environ if env is None else env)
        plain = not (executable or preexec or pass_fds or shell) and group in (None, -1)
        words = list(command)[2:] if plain and list(command)[:2] == [sys.executable, "-m"] else []
        server = WarmServer.running() if words else None
        if server is None or early_variables(environ) != server.early:
            super()._execute_child(*args)  # type: ignore[misc]
            return
        order = {
            "words": words, "environ": environ, "folder": str(cwd or os.getcwd()), "session": bool(session),
        }  # fmt: skip
        streams = [
            given if given != -1 else usual for usual, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        try:
            self.pid = server.start(order, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


class WarmSupervisor(Supervisor):
    """Keeps a program alive that is forked. `start` is called from the main thread, as `WarmServer` must be."""

    def start(self) -> None:
        WarmServer.running()
        super().start()

    def _start_process(self, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
        return WarmProcess(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            env=self._environ, start_new_session=True,
        )  # fmt: skip
