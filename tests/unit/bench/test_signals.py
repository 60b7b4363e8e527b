"""A measurement that is asked to end does so, whatever it is doing, and lets go of what it owns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from services.bench.signals import interrupt_on_sigterm

PROGRAM = """
import asyncio, contextlib, signal, uvloop
from services.bench.signals import interrupt_on_sigterm

async def ask():
    while True:
        await asyncio.sleep(0.001)

async def drive():
    asking = [asyncio.create_task(ask()) for _ in range(20)]
    print("ready", flush=True)
    await asyncio.wait(asking)

with contextlib.ExitStack() as owned:
    owned.callback(print, "let go", flush=True)
    owned.enter_context(interrupt_on_sigterm())
    if {waits}:
        print("ready", flush=True)
        signal.pause()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(drive())
    print("went on")
"""


def _ignore() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what is in the background


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("background", [True, False])
def test_it_ends_and_lets_go(waits: bool, number: int, background: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("{waits}", str(waits))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        preexec_fn=_ignore if background else None,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        output, error = process.communicate(timeout=60)
    finally:
        process.kill()  # one that does not listen is not left behind
        process.wait()
    assert output == "let go\n" and "KeyboardInterrupt" in error and process.returncode != 0


def test_handlers_are_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interrupt_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
