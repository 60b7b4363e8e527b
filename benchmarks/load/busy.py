"""Processes that compute all the time beside what is measured, as other programs of the same machine do."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from services.host.supervision.process_guard import tied_command

# Computes for the given seconds at the most, at the given nice level.
PROGRAM = """
import os, sys, time
os.nice(int(sys.argv[1]))
end_s = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end_s:
    sum(range(10000))
"""
# They end by themselves after so many seconds, whatever becomes of the benchmark.
MAX_BUSY_S = 600.0


@contextlib.contextmanager
def busy_processes(count: int, nice: int) -> Iterator[None]:
    """Run `count` processes at the nice level `nice` that want a core each, until the context is left."""
    command = [sys.executable, "-I", "-c", PROGRAM, str(nice), str(MAX_BUSY_S)]
    processes = [subprocess.Popen(tied_command(command)) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
