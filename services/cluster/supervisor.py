"""One child process kept alive: started with its specification on standard input, heard, and started again.

The child speaks in JSON lines on standard output: {"phase", "done", "total"}, {"role"} when it has changed its role,
and {"error": {"what", "why", "fix"}} before it gives up. It asks the kernel to die with the thread that started it, so
that thread lives as long as it does.
No Ray here: an actor holds one of these for a worker, and `diptych serve` one for the gateway.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from diptych.errors import DiptychError, StartError
from worker.start import RETIRED

CRASH_LOOP = 5  # deaths in a row after which a child is said to be in a crash loop
MAX_LINE_BYTES = 64 << 10


class Told(msgspec.Struct, frozen=True):
    """The three parts of a `DiptychError`, as a child tells them."""

    what: str
    why: str = ""
    fix: str = ""


class Line(msgspec.Struct, frozen=True):
    """One line of a child's standard output."""

    phase: str = ""
    role: str = ""
    done: float = 0
    total: float = 0
    error: Told | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """Where a child is. `version` grows with every change, so that a reader can wait for the next one."""

    name: str
    state: str = "starting"  # "starting" | "ready" | "waiting" (to be started again) | "failed" | "retired" | "stopped"
    phase: str = ""
    done: float = 0
    total: float = 0
    pid: int = 0
    restarts: int = 0
    crashes: int = 0  # deaths since it was last ready for a while
    ended: str = ""  # how the last one ended, in words
    error: Told | None = None
    version: int = 0

    @property
    def looping(self) -> bool:
        return self.crashes >= CRASH_LOOP


def delay_s(crashes: int) -> float:
    """How long to wait before the next start after so many deaths in a row: at once, then 0.2 s doubling to 5 s."""
    return 0.0 if crashes <= 1 else min(0.2 * 2 ** (crashes - 2), 5.0)


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def cause(code: int) -> str:
    """How a process ended, for the one that follows it (`WorkerSpec.ended`): "killed" from outside, "crashed", or "".

    Outside are `kill` and whoever else may send SIGKILL or SIGTERM; what a program does to itself ends otherwise.
    """
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return "killed"
    return "crashed" if code else ""


class Supervisor:
    """Starts `command`, writes `spec` to its standard input, and starts it again whenever it ends, until `stop`.

    Its standard error is appended to `log`, or is that of this process. A child that is started again is told in its
    specification how the one before it ended (`ended`), and its latest role, if its specification has such fields. One
    that ends with `RETIRED` is not started again: the state is then "retired".

    Before the child was ready once, an error that it tells ends the attempts: the state is then "failed". A child that
    dies silently is tried again; afterwards there is no limit, only the delay. Safe to call from any thread.
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
    ) -> None:
        self.name = name
        self._command, self._spec, self._log = list(command), spec, log
        self._environ = dict(os.environ if environ is None else environ)
        self._start_attempts, self._steady_s = start_attempts, steady_s
        self._status = Status(name)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._known: dict[str, str] = {}  # what a child's specification says otherwise than the first one's
        self._was_ready = False
        self._thread = threading.Thread(target=self._run, name=f"supervise {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def status(self) -> Status:
        with self._changed:
            return self._status

    def wait(self, seen: int, timeout_s: float) -> Status:
        """The status once its version is not `seen` any more, or after `timeout_s` as it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._status.version != seen, timeout_s)
            return self._status

    def stop(self, grace_s: float = 5.0) -> None:
        """End the child: SIGTERM, and SIGKILL after `grace_s`. Idempotent; returns when it is gone."""
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
        self._set(state="stopped", pid=0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                code = self._live()
            except OSError as error:
                self._set(state="failed", error=Told(f"cannot start {self.name}", str(error)))
                return
            if self._stopping.is_set() or not self._again(code, time.monotonic() - started_s):
                return

    def _live(self) -> int:
        """Start one child and stay with it until it ends; returns its exit code as `Popen` does."""
        with contextlib.ExitStack() as opened, self._changed:
            log = None
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                log = opened.enter_context(self._log.open("ab"))
            if self._stopping.is_set():
                return 0
            # A session of its own: Ctrl-C in the terminal is for `diptych serve` alone, which then ends all in order.
            self._child = child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=self._environ, start_new_session=True,
            )  # fmt: skip
        self._set(state="starting", phase="", done=0, total=0, pid=child.pid, error=None)
        hearing = threading.Thread(target=self._hear, args=(child,), name=f"hear {self.name}", daemon=True)
        hearing.start()
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
            pipe.write(self._told() + b"\n")
        code = child.wait()
        hearing.join(1.0)  # longer only if a grandchild holds the pipe; then what it says does not matter
        return code

    def _told(self) -> bytes:
        """The specification, with what has become known since the first start."""
        if not self._known:
            return self._spec
        spec: dict[str, object] = json.loads(self._spec)
        return json.dumps(spec | {k: v for k, v in self._known.items() if k in spec}).encode()

    def _hear(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        with child.stdout as pipe:
            while raw := pipe.readline(MAX_LINE_BYTES):
                try:
                    line = msgspec.json.decode(raw, type=Line)
                except msgspec.MsgspecError:
                    continue  # not for us: a library printed something
                if child is not self._child:
                    return
                if line.role:
                    self._known["role"] = line.role
                elif line.error is not None:
                    self._set(error=line.error)
                elif line.phase == "ready":
                    self._was_ready = True
                    self._set(state="ready", phase="ready", done=1, total=1)
                elif line.phase:
                    self._set(phase=line.phase, done=line.done, total=line.total)

    def _again(self, code: int, lived_s: float) -> bool:
        """Account for a death; wait as long as is due. False when the child shall not be started again."""
        now = self.status()
        if code == RETIRED:
            self._set(state="retired", pid=0, ended="drained")
            return False
        self._known["ended"] = cause(code)
        steady = now.state == "ready" and lived_s >= self._steady_s
        crashes = 1 if steady else now.crashes + 1
        if not self._was_ready and (now.error is not None or crashes >= self._start_attempts):
            told = now.error or Told(f"{self.name} ended while starting", f"{ending(code)}, {crashes} times")
            self._set(state="failed", pid=0, crashes=crashes, ended=ending(code), error=told)
            return False
        self._set(state="waiting", pid=0, crashes=crashes, restarts=now.restarts + 1, ended=ending(code))
        return not self._stopping.wait(delay_s(crashes))

    def _set(self, **changes: object) -> None:
        with self._changed:
            self._status = replace(self._status, version=self._status.version + 1, **changes)  # type: ignore[arg-type]
            self._changed.notify_all()


def raised(status: Status, log: Path | None = None) -> DiptychError:
    """The error of a failed child, with the last line of its log when it said nothing itself."""
    error = status.error or Told(f"{status.name} failed", status.ended)
    last = tail(log) if log is not None and not error.fix else ""
    return StartError(error.what, error.why, error.fix or (f"its last words: {last}" if last else ""))


def tail(log: Path) -> str:
    """The last line of a log that is not empty, at most 300 characters; "" when there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][-300:] if lines else ""
    return ""
