"""The fork server outlives what it is refused: a priority, a process, a descriptor."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.gateway.openai.validate import RequestRules
from services.gateway.preparation import preparer_pool
from services.gateway.preparation.preparation_job import PreparedRequest
from services.gateway.preparation.preparer_pool import PreparerPool
from tests.unit.gateway.preparing import Gaps, completion, within

ROOT = Path(__file__).resolve().parents[3]

# A gateway that a service manager has started with Nice=10 and without root.
NICE = """
import encodings.ascii  # the folder of a root user's Python cannot be read by others
import os, select
from services.gateway.preparation.fork_server import ForkServer, FrameSocket, SlowPreparer
os.nice(10 - os.nice(0))
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)

def work(job, gateway):
    return f"{os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0) == os.SCHED_BATCH}".encode()

server = ForkServer(lambda: work)
connections = [server.start_preparer(name) for name in (1, 2)]
server.send_order(SlowPreparer(1))
for connection in connections:
    connection.setblocking(True)
    frames = FrameSocket(connection)
    frames.write_frame(b"job")
    frames.read_frame()
server.start_preparer(3)  # orders are obeyed one after the other: once it is there, 1 has been slowed
names = set()
while 3 not in names:
    select.select([server.control], [], [], 30)
    names.add(server.receive_report().name)
for connection in connections:
    frames = FrameSocket(connection)
    frames.write_frame(b"job")
    print(frames.read_frame().decode())
server.close()
"""


def test_a_gateway_that_is_nice_already_stays_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NICE], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines() == ["10 True", "10 False"], done.stderr


def failing(call: Callable[..., Any], succeeds: int, fails: int) -> Callable[..., Any]:
    """`call`, but after `succeeds` calls it fails `fails` times. What a process has counted its children go on with."""
    calls = 0

    def instead(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if succeeds < calls <= succeeds + fails:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return call(*args)

    return instead


@pytest.mark.parametrize(("name", "succeeds"), [("fork", 1), ("pidfd_open", 0)])
def test_a_preparer_that_cannot_be_forked_is_forked_later(
    rules: RequestRules, monkeypatch: pytest.MonkeyPatch, name: str, succeeds: int
) -> None:
    monkeypatch.setattr(preparer_pool, "FORK_RETRY_S", 0.05)
    # The first fork is the fork server.
    monkeypatch.setattr(os, name, failing(getattr(os, name), succeeds, 5))
    pool = PreparerPool(rules)

    async def work(gaps: Gaps) -> None:
        for _ in range(3):
            assert isinstance(await pool.prepare_body(completion("any")), PreparedRequest)

    within(pool, work)


def test_a_connection_that_cannot_be_made_is_made_later(
    rules: RequestRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway has no descriptor left."""
    monkeypatch.setattr(preparer_pool, "FORK_RETRY_S", 0.05)
    pool = PreparerPool(rules)
    monkeypatch.setattr(pool._server, "start_preparer", failing(pool._server.start_preparer, 0, 5))

    async def work(gaps: Gaps) -> None:
        assert isinstance(await pool.prepare_body(completion("any")), PreparedRequest)

    within(pool, work)
