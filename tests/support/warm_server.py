"""`python -m tests.support.warm_server FD`: forks programs from a process that has imported what they import.

Each packet on the socket FD is a JSON object (`words`, `environ`, `folder`, `session`) with three descriptors, which
become standard input, output and error. The program is forked twice, so that it becomes a child of the test process,
which is the reaper of orphans meanwhile (`tests.support.warm_process`); then it answers with its process id.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

from diptych.process import configure_process
from engine.torch_import import import_torch

PRELOADED = ("services.worker.__main__", "services.gateway.__main__")
MAX_PACKET_BYTES, NUM_DESCRIPTORS = 1 << 20, 3


def serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork what is asked for until the test process hangs up, then None; returns what to run in the program itself."""
    reaper = os.getppid()
    while True:
        packet, descriptors, _, _ = socket.recv_fds(line, MAX_PACKET_BYTES, NUM_DESCRIPTORS)
        if not packet:
            return None
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            order = become(json.loads(packet), descriptors, reaper)
            line.send(str(os.getpid()).encode())
            line.close()
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)


def become(order: dict[str, Any], descriptors: list[int], reaper: int) -> dict[str, Any]:
    """Make this process look as one that was just started; returns the order."""
    # The process between is about to end.
    while os.getppid() != reaper:
        if os.getppid() == 1:
            os._exit(1)
        os.sched_yield()
    if order["session"]:
        os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = order["words"]
    return order


def main() -> None:
    """The program: imports, then forks."""
    configure_process()
    import_torch()
    for module in PRELOADED:
        importlib.import_module(module)
        # It will be run, not imported.
        del sys.modules[module]
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot fork programs"
    gc.collect()
    gc.freeze()
    line = socket.socket(fileno=int(sys.argv[1]))
    line.send(b"ready")
    order = serve(line)
    if order is not None:
        runpy.run_module(order["words"][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
