"""Keeps one child process alive: writes its specification to its standard input, reads its status, restarts it.

The child writes JSON lines to standard output: {"phase", "done", "total"} while it starts, {"role"} when it has changed
its role, and {"error": {"what", "why", "fix"}} before it gives up. The child asks the kernel to end it when the thread
that started it ends, so that thread lives as long as the child.
This module does not import Ray: a Ray actor holds one supervisor per worker, `diptych serve` one for the gateway.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec

from diptych.errors import DiptychError, StartError
from diptych.logs.log_files import MAX_LOG_BYTES, open_log, truncate_log
from diptych.process import EXIT_LOST, EXIT_REJECTED, EXIT_RETIRED
from services.host.supervision.oom_kills import count_oom_kills

OUT_OF_MEMORY = ", for want of memory"
# Number of deaths in a row from which on a child counts as in a crash loop.
CRASH_LOOP_DEATHS = 5
MAX_LINE_BYTES = 64 << 10
# Seconds between two checks of the log's size and of the kernel's out-of-memory kills.
CHECK_INTERVAL_S = 5.0


class ErrorReport(msgspec.Struct, frozen=True):
    """The three parts of a `DiptychError`, as a child reports them."""

    what: str
    why: str = ""
    fix: str = ""


class ChildMessage(msgspec.Struct, frozen=True):
    """One line of a child's standard output."""

    phase: str = ""
    role: str = ""
    done: float = 0
    total: float = 0
    error: ErrorReport | None = None


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """The state of a child. `version` grows with every change, so that a caller can wait for the next one."""

    name: str
    # "starting", "ready", "waiting" (to be started again), "failed", "retired" or "stopped".
    state: str = "starting"
    phase: str = ""
    done: float = 0
    total: float = 0
    pid: int = 0
    restarts: int = 0
    # Number of deaths in a row without a longer time in state "ready" between them.
    crashes: int = 0
    # How the last process ended, in words.
    ended: str = ""
    error: ErrorReport | None = None
    version: int = 0

    @property
    def looping(self) -> bool:
        """Whether the child has crashed so often in a row that it will hardly recover."""
        return self.crashes >= CRASH_LOOP_DEATHS


def do_nothing() -> None:
    """The default for `prepare`: nothing has to be done before a start."""


def restart_delay_s(crashes: int) -> float:
    """Seconds before the next start after `crashes` in a row: 0 after the first, then 0.2 s, doubling up to 5 s."""
    # With a bound, since a power of thousands is no float.
    return 0.0 if crashes <= 1 else min(0.2 * 2 ** min(crashes - 2, 10), 5.0)


def describe_exit(code: int) -> str:
    """How a process ended, in words, from its exit code as `Popen` gives it."""
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def exit_cause(code: int, starved: bool = False) -> str:
    """The cause of a process's end, for its successor (`WorkerSpec.ended`): "killed", "crashed" or "" (exit status 0).

    "killed" means from outside, by SIGKILL or SIGTERM, or since its device failed; programs that fail by themselves end
    with other codes. If the kernel has just killed a process for memory (`starved`), SIGKILL counts as "crashed": a
    request of this process may have used up the memory.
    """
    if code == -signal.SIGKILL and starved:
        return "crashed"
    if code in (-signal.SIGKILL, -signal.SIGTERM, EXIT_LOST):
        return "killed"
    return "crashed" if code else ""


class Supervisor:
    """Starts `command`, writes `spec` to its standard input, and restarts it whenever it ends, until `stop`.

    The child's standard error is appended to `log`, whose size is limited, or goes to that of this process. The
    specification of a restarted child says how its predecessor ended (`ended`) and which `role` it had last, if the
    specification has such fields. A child that ends with `EXIT_RETIRED` is not restarted: its state becomes "retired".
    Until the child was ready for the first time, an error that it reports ends the attempts (state "failed").
    A child that dies silently, or cannot be started (no memory, processes, descriptors or disk left), is tried
    `start_attempts` times in a row. Once it was ready, or with `restarted`, it is restarted without limit, only with a
    delay. `prepare` is called before each start; if it raises OSError or DiptychError, the start has failed. The child
    has the descriptors `pass_fds`.
    All methods may be called from any thread.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        spec: bytes,
        log: Path | None = None,
        environ: Mapping[str, str] | None = None,
        start_attempts: int = 3,
        steady_s: float = 30.0,
        prepare: Callable[[], None] = do_nothing,
        restarted: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._prepare, self._pass_fds = prepare, tuple(pass_fds)
        self._command, self._spec, self._log = list(command), spec, log
        self._environ = dict(os.environ if environ is None else environ)
        self._start_attempts, self._steady_s = start_attempts, steady_s
        self._status = ChildStatus(name)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        # Fields of the child's specification whose values differ from those at the first start.
        self._spec_changes: dict[str, str] = {}
        self._was_ready = restarted
        # The results of the latest calls of `count_oom_kills`, the oldest first.
        self._oom_kills = deque[int]()
        self._thread = threading.Thread(target=self._run_thread, name=f"supervise {name}", daemon=True)

    def start(self) -> None:
        """Start the child, from a thread of the supervisor. Returns at once."""
        self._thread.start()

    def status(self) -> ChildStatus:
        """The child's status now."""
        with self._changed:
            return self._status

    def wait_status(self, version: int, timeout_s: float) -> ChildStatus:
        """The status as soon as its version differs from `version`, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._status.version != version, timeout_s)
            return self._status

    def stop(self, grace_s: float = 5.0) -> None:
        """End the child with SIGTERM, after `grace_s` with SIGKILL; return when it has ended. Idempotent."""
        with self._changed:
            self._stopping.set()
            child = self._child
        if child is not None and child.poll() is None:
            child.terminate()
            try:
                child.wait(grace_s)
            except subprocess.TimeoutExpired:
                child.kill()
        if self._thread.ident is not None:
            self._thread.join()
        self._set_status(state="stopped", pid=0)

    def _run_thread(self) -> None:
        """The thread's main function; an unexpected error ends supervision, and with this thread also the child."""
        try:
            self._restart_until_stopped()
        except Exception as error:
            # This is a bug in the supervisor.
            why = f"{type(error).__name__}: {error}"
            self._set_status(
                state="failed", pid=0, error=ErrorReport(f"{self.name} is not supervised any more", why)
            )

    def _restart_until_stopped(self) -> None:
        """Run one child after the other, until `stop` is called or the child must not be restarted."""
        while not self._stopping.is_set():
            started_s = time.monotonic()
            self._oom_kills = deque([count_oom_kills()], maxlen=3)
            try:
                code = self._run_child()
            except (OSError, MemoryError, RuntimeError, DiptychError) as error:
                again = self._stopping.is_set() or self._on_start_failed(error)
            else:
                # SIGKILL together with a new out-of-memory kill means that the kernel has probably killed this child.
                starved = code == -signal.SIGKILL and count_oom_kills() != self._oom_kills[0]
                again = self._stopping.is_set() or self._on_exit(code, time.monotonic() - started_s, starved)
            if not again:
                return

    def _run_child(self) -> int:
        """Start one child and attend to it until it ends; return its exit code as `Popen` does.

        Raises:
            OSError, MemoryError, RuntimeError, DiptychError: the child could not be started.
        """
        self._prepare()
        with open_log(self._log) if self._log is not None else contextlib.nullcontext() as log:
            with self._changed:
                if self._stopping.is_set():
                    return 0
                self._child = child = self._start_process(log)
            return self._attend_child(child, log)

    def _start_process(self, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
        """Start the child's process, whose standard error is `log`."""
        # It gets a session of its own: Ctrl-C in the terminal must reach `diptych serve` alone, which then ends all
        # parts in order.
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            env=self._environ, start_new_session=True, pass_fds=self._pass_fds,
        )  # fmt: skip

    def _attend_child(self, child: subprocess.Popen[bytes], log: IO[bytes] | None) -> int:
        """Write the specification to a child, and read its messages until it ends; return its exit code.

        Raises:
            MemoryError, RuntimeError: no thread could be started to read its messages; the child is killed.
        """
        hearing = threading.Thread(
            target=self._read_messages, args=(child,), name=f"messages {self.name}", daemon=True
        )
        try:
            hearing.start()
        except (RuntimeError, MemoryError):
            with child:
                child.kill()
            raise
        self._set_status(state="starting", phase="", done=0, total=0, pid=child.pid, error=None)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
            pipe.write(self._spec_bytes() + b"\n")
        self._watch_until_exit(child, log)
        code = child.wait()
        # This takes longer only if a grandchild holds the pipe, whose output does not matter.
        hearing.join(1.0)
        return code

    def _watch_until_exit(self, child: subprocess.Popen[bytes], log: IO[bytes] | None) -> None:
        """Check the log's size and out-of-memory kills until the child ends; return at once without pidfd support."""
        with contextlib.ExitStack() as opened:
            try:
                ended = os.pidfd_open(child.pid)
            except OSError:
                # `stop` has reaped the child already, or the kernel is too old.
                return
            opened.callback(os.close, ended)
            watch = select.poll()
            watch.register(ended, select.POLLIN)
            while not watch.poll(CHECK_INTERVAL_S * 1e3):
                self._oom_kills.append(count_oom_kills())
                if log is not None and self._log is not None:
                    truncate_log(self._log, log.fileno(), MAX_LOG_BYTES)

    def _spec_bytes(self) -> bytes:
        """The child's specification, updated by what has changed since the first start."""
        if not self._spec_changes:
            return self._spec
        spec: dict[str, object] = json.loads(self._spec)
        return json.dumps(spec | {k: v for k, v in self._spec_changes.items() if k in spec}).encode()

    def _read_messages(self, child: subprocess.Popen[bytes]) -> None:
        """Update the status by the child's messages until it closes its standard output."""
        assert child.stdout is not None
        with child.stdout as pipe:
            while raw := pipe.readline(MAX_LINE_BYTES):
                try:
                    line = msgspec.json.decode(raw, type=ChildMessage)
                except msgspec.MsgspecError:
                    # This line is not a message of the child: a library printed it.
                    continue
                if child is not self._child:
                    return
                if line.role:
                    self._spec_changes["role"] = line.role
                elif line.error is not None:
                    self._set_status(error=line.error)
                elif line.phase == "ready":
                    self._was_ready = True
                    self._set_status(state="ready", phase="ready", done=1, total=1)
                elif line.phase:
                    self._set_status(phase=line.phase, done=line.done, total=line.total)

    def _on_exit(self, code: int, uptime_s: float, starved: bool) -> bool:
        """Record the end of a child and wait for the restart delay. Returns False if it must not be restarted."""
        now = self.status()
        if code == EXIT_RETIRED:
            self._set_status(state="retired", pid=0, ended="drained")
            return False
        if code == EXIT_REJECTED:
            report = now.error or ErrorReport(f"{self.name} was rejected by the gateway")
            self._set_status(state="failed", pid=0, ended="rejected", error=report)
            return False
        self._spec_changes["ended"] = exit_cause(code, starved)
        steady = now.state == "ready" and uptime_s >= self._steady_s
        ended = describe_exit(code) + (OUT_OF_MEMORY if starved else "")
        report = ErrorReport(f"{self.name} ended while starting", f"{ended}, {now.crashes + 1} times")
        return self._wait_to_restart(1 if steady else now.crashes + 1, ended, now.error, report)

    def _on_start_failed(self, error: Exception) -> bool:
        """Do the same for a child that could not be started; `ended` of the specification stays unchanged."""
        why = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        report = ErrorReport(f"cannot start {self.name}", str(error) or why)
        if isinstance(error, DiptychError):
            why, report = error.what, ErrorReport(error.what, error.why, error.fix)
        return self._wait_to_restart(self.status().crashes + 1, f"it cannot be started: {why}", None, report)

    def _wait_to_restart(
        self, crashes: int, ended: str, error: ErrorReport | None, report: ErrorReport
    ) -> bool:
        """Wait before the next start, longer after more `crashes`.

        Returns False if the child was never ready and has reported an `error` or crashed too often. Its state is then
        "failed", with `error` or else `report`.
        """
        if not self._was_ready and (error is not None or crashes >= self._start_attempts):
            self._set_status(state="failed", pid=0, crashes=crashes, ended=ended, error=error or report)
            return False
        restarts = self.status().restarts + 1
        self._set_status(state="waiting", pid=0, crashes=crashes, restarts=restarts, ended=ended)
        return not self._stopping.wait(restart_delay_s(crashes))

    def _set_status(self, **changes: object) -> None:
        """Change fields of the status and wake all callers of `wait_status`."""
        with self._changed:
            self._status = replace(self._status, version=self._status.version + 1, **changes)  # type: ignore[arg-type]
            self._changed.notify_all()


def start_error(status: ChildStatus, log: Path | None = None) -> DiptychError:
    """The error of a failed child; if it has reported none, with the last line of its log."""
    error = status.error or ErrorReport(f"{status.name} failed", status.ended)
    last = last_log_line(log) if log is not None and not error.fix else ""
    return StartError(
        error.what, error.why, error.fix or (f"the last line of its log: {last}" if last else "")
    )


def last_log_line(log: Path) -> str:
    """The last non-empty line of a log, at most its last 300 characters; "" if there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][-300:] if lines else ""
    return ""
