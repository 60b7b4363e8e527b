"""How long the machine itself held up processes while a benchmark ran.

On each core a process only sleeps, and notes how late it wakes. What is measured can delay it through the machine
alone: other processes have the core, or a hypervisor has taken it away. So if a server was late by a second and these
were as well, the server's own code is not the cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

NAP_S = 0.01
# How late a nap has to end to be noted.
MIN_LATE_S = 0.02


@dataclass(frozen=True, slots=True)
class LateWake:
    """A sleeping process woke `late_s` after its time, at `at_s` of the monotonic clock."""

    at_s: float
    late_s: float


@dataclass(slots=True)
class Sleepers:
    """One sleeping process per core."""

    processes: list[subprocess.Popen[str]]
    wakes: list[LateWake]

    def stop(self) -> None:
        """End them and collect what they noted. Idempotent."""
        for process in self.processes:
            out, _ = process.communicate()  # closes standard input, which ends it
            self.wakes += [LateWake(at_s, late_s) for at_s, late_s in json.loads(out)]
        self.processes = []

    def max_late_s(self, start_s: float, end_s: float) -> float:
        """How late the latest wake between two moments was; 0 if none was later than `MIN_LATE_S`."""
        return max((one.late_s for one in self.wakes if start_s < one.at_s <= end_s), default=0.0)


@contextlib.contextmanager
def sleeping_processes() -> Iterator[Sleepers]:
    """Run one sleeping process on each core of this process until the context is left, or `stop` is called."""
    sleepers = Sleepers([], [])
    try:
        for core in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-I", __file__, str(core)]
            sleepers.processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        yield sleepers
    finally:
        sleepers.stop()


def stolen_s() -> float:
    """Processor time that a hypervisor has taken from this machine since it started, all cores together (`proc(5)`)."""
    with open("/proc/stat", encoding="ascii") as file:
        fields = file.readline().split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def _sleep_on_core(core: int) -> None:
    """Sleep in short naps on `core` until standard input is closed; then print the late wakes as JSON."""
    os.sched_setaffinity(0, {core})
    os.set_blocking(0, False)
    late: list[tuple[float, float]] = []
    while True:
        due_s = time.monotonic() + NAP_S
        time.sleep(NAP_S)
        now_s = time.monotonic()
        if now_s - due_s > MIN_LATE_S:
            late.append((now_s, now_s - due_s))
        with contextlib.suppress(BlockingIOError):
            if os.read(0, 1) == b"":
                break
    print(json.dumps(late))


if __name__ == "__main__":
    _sleep_on_core(int(sys.argv[1]))
