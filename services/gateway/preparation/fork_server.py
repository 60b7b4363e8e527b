"""Forks preparers: processes for jobs that must not block the event loop, with the tokenizer loaded already.

    gateway ──fork──▶ fork server ──fork──▶ preparer        one socket pair between the gateway and each of the two
       │ Start, Slow, Kill ▶                   ▲
       │ ◀─ Started, Ended ┘                   │
       └───────────────── frames ──────────────┘

The fork server is forked before the gateway has threads. It shares the gateway's tokenizer (copy on write), so a new
preparer costs a few milliseconds and a few megabytes. It never sees a client's data. Preparers end with the gateway.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import NoReturn

import msgspec

# Most bytes of memory that a preparer may allocate. A process that needs more ends.
MAX_PREPARER_BYTES = 1 << 30
# Priorities of preparers: of those whose job takes long, and of the one for work that nobody waits for.
SLOW_NICE, LOWEST_NICE = 5, 19
MAX_FRAME_BYTES = 256 << 20
# With this score the kernel ends preparers before it ends the gateway or a worker.
PREPARER_OOM_SCORE = 500
# Most bytes of an order or a report.
_ORDER_BYTES = 512
_ERROR_CHARS = 200
_LENGTH = struct.Struct("!I")
FRAME_HEAD_BYTES = _LENGTH.size
_PR_SET_PDEATHSIG = 1


class StartPreparer(msgspec.Struct, frozen=True, tag=True):
    """Fork a preparer that answers on the socket which comes with this message."""

    name: int


class SlowPreparer(msgspec.Struct, frozen=True, tag=True):
    """Lower the priority of that preparer, so that workers and streams come first."""

    name: int
    nice: int = SLOW_NICE


class KillPreparer(msgspec.Struct, frozen=True, tag=True):
    """Kill that preparer; `PreparerEnded` follows."""

    name: int


class PreparerStarted(msgspec.Struct, frozen=True, tag=True):
    """A preparer runs."""

    name: int


class PreparerEnded(msgspec.Struct, frozen=True, tag=True):
    """A preparer is gone. `status` is its exit status, or the negative number of the signal that killed it.

    If it could not be forked, `status` is None and `error` says why.
    """

    name: int
    status: int | None
    error: str = ""


class FrameSocket:
    """Sends and receives length-prefixed frames over a blocking socket: a preparer's end of its connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def read_frame(self) -> bytes | None:
        """The next frame; None if the peer has closed the connection."""
        head = self._read_exactly(FRAME_HEAD_BYTES)
        return None if head is None else self._read_exactly(_LENGTH.unpack(head)[0])

    def write_frame(self, frame: bytes) -> None:
        """Send a frame. Raises OSError if the peer has closed the connection."""
        self._connection.sendall(_LENGTH.pack(len(frame)))
        self._connection.sendall(frame)

    def _read_exactly(self, size: int) -> bytes | None:
        received = bytearray()
        while len(received) < size:
            piece = self._connection.recv(min(size - len(received), 1 << 20))
            if not piece:
                return None
            received += piece
        return bytes(received)


# Turns a job into its result. While it runs it may exchange frames with the gateway.
JobFunction = Callable[[bytes, FrameSocket], bytes]


def frame_head(frame: bytes) -> bytes:
    """The length prefix of `frame`."""
    return _LENGTH.pack(len(frame))


def frame_size(head: bytes) -> int:
    """The length of the frame that follows `head`.

    Raises:
        ValueError: it is longer than any frame may be.
    """
    size: int = _LENGTH.unpack(head)[0]
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return size


class ForkServer:
    """The gateway's end of the fork server. `control` does not block; see `receive_report`."""

    def __init__(self, prepare: Callable[[], JobFunction]) -> None:
        """Fork now, while the process has one thread. `prepare` runs once, in the fork server."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            run_forked(
                lambda: _ForkServerLoop(keep_only_connection(theirs, parent), prepare()).serve_orders()
            )
        theirs.close()
        self.control.setblocking(False)

    def start_preparer(self, name: int) -> socket.socket:
        """Have a preparer forked, and return the connection to it. Raises OSError if the order cannot be sent."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [msgspec.json.encode(StartPreparer(name))], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return ours

    def send_order(self, order: SlowPreparer | KillPreparer) -> None:
        """Send an order about a preparer. Does nothing if the fork server has ended, which `receive_report` notices."""
        # An error means that the fork server has ended, which `receive_report` notices.
        with contextlib.suppress(OSError):
            self.control.send(msgspec.json.encode(order))

    def receive_report(self) -> PreparerStarted | PreparerEnded | None:
        """The next report; None if there is none now.

        Raises:
            ConnectionError: the fork server has ended.
        """
        try:
            report = self.control.recv(_ORDER_BYTES)
        except BlockingIOError:
            return None
        if not report:
            raise ConnectionError("the fork server has ended")
        return msgspec.json.decode(report, type=PreparerStarted | PreparerEnded)

    def close(self) -> None:
        """End the fork server and all preparers. Idempotent."""
        if self.control.fileno() >= 0:
            self.control.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


def run_forked(main: Callable[[], None]) -> NoReturn:
    """Run `main` in a forked process and end the process: nothing of the parent's stack may run on."""
    status = 1
    try:
        # Frozen objects are not finalised in this process. The parent may own descriptors through them.
        gc.freeze()
        main()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def keep_only_connection(connection: socket.socket, parent: int) -> socket.socket:
    """Set up a forked process: keep only `connection` and standard error open, end with the parent, ignore signals.

    `parent` is the parent's pid before the fork: it may have ended since.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    # Both signals reach the whole process group, but it is the gateway that ends preparers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    kept = os.dup2(connection.fileno(), 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    return socket.socket(fileno=kept)


class _ForkServerLoop:
    """The fork server's process: follows orders, and reports when preparers end. No failed preparer ends it."""

    def __init__(self, control: socket.socket, work: JobFunction) -> None:
        self._control, self._work = control, work
        # Process ids of the preparers, by name. They are not reaped yet, so no id can belong to another process.
        self._pids: dict[int, int] = {}
        # Names of the preparers, by the descriptor of their process.
        self._names: dict[int, int] = {}
        self._poll = select.poll()

    def serve_orders(self) -> None:
        """Follow orders until the gateway closes the connection."""
        gc.freeze()
        self._poll.register(self._control, select.POLLIN)
        while True:
            for ready, _ in self._poll.poll():
                if ready != self._control.fileno():
                    self._reap_preparer(ready)
                    continue
                order, connections, _, _ = socket.recv_fds(self._control, _ORDER_BYTES, 1)
                if not order:
                    return
                self._handle_order(
                    msgspec.json.decode(order, type=StartPreparer | SlowPreparer | KillPreparer), connections
                )

    def _handle_order(
        self, order: StartPreparer | SlowPreparer | KillPreparer, connections: list[int]
    ) -> None:
        if isinstance(order, StartPreparer):
            self._start_preparer(order.name, connections)
        elif (pid := self._pids.get(order.name)) is not None:
            if isinstance(order, SlowPreparer):
                _lower_priority(pid, order.nice)
            else:
                os.kill(pid, signal.SIGKILL)

    def _start_preparer(self, name: int, connections: list[int]) -> None:
        try:
            if not connections:
                raise OSError("no descriptor is left for its connection")
            pid = _fork_preparer(connections[0], self._work)
            try:
                watch = os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
        except OSError as error:
            return self._send_report(PreparerEnded(name, None, str(error)[:_ERROR_CHARS]))
        finally:
            for connection in connections:
                os.close(connection)
        self._pids[name], self._names[watch] = pid, name
        self._poll.register(watch, select.POLLIN)
        self._send_report(PreparerStarted(name))

    def _reap_preparer(self, watch: int) -> None:
        name = self._names.pop(watch)
        self._poll.unregister(watch)
        os.close(watch)
        status = os.waitstatus_to_exitcode(os.waitpid(self._pids.pop(name), 0)[1])
        self._send_report(PreparerEnded(name, status))

    def _send_report(self, report: PreparerStarted | PreparerEnded) -> None:
        self._control.send(msgspec.json.encode(report))


def _lower_priority(pid: int, nice: int) -> None:
    """Lower the priority of a process as far as allowed. It cannot be raised again without privileges."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, max(os.getpriority(os.PRIO_PROCESS, pid), nice))
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))


def _fork_preparer(connection: int, work: JobFunction) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        run_forked(lambda: _serve_jobs(keep_only_connection(socket.socket(fileno=connection), parent), work))
    return pid


def _serve_jobs(connection: socket.socket, work: JobFunction) -> None:
    """A preparer's process: do one job after the other until the gateway closes the connection."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(PREPARER_OOM_SCORE))
    limit_bytes = _address_space_bytes() + MAX_PREPARER_BYTES
    # Setting the limit fails if an operator has set a lower one already.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    frames = FrameSocket(connection)
    while (job := frames.read_frame()) is not None:
        frames.write_frame(work(job, frames))


def _address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
