"""A gateway whose event loop hangs says where, and ends; one that was stopped as a whole goes on."""

from __future__ import annotations

import faulthandler
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from diptych.errors import DiptychError
from diptych.process import EXIT_FATAL
from services.gateway.ops.loop_watchdog import CHECK_INTERVAL_S, MAX_HANG_S, LoopWatchdog
from tests.support.gateway_process import ROOT, WAIT_S, specification

# The real gateway, with less patience; its loop hangs `argv[1]` s after it has begun, if that is not negative.
GATEWAY = """
import asyncio, sys, time
from services.gateway import __main__
from services.gateway.ops import loop_watchdog
from services.gateway.ops.readiness import CanaryProber
loop_watchdog.MAX_HANG_S, delay_s = 2.0, float(sys.argv[1])
async def run_forever(prober):
    await asyncio.sleep(delay_s if delay_s >= 0 else 3600)
    what_hangs()
def what_hangs():
    while True:
        time.sleep(0.1)
CanaryProber.run_forever = run_forever
sys.exit(__main__.main())
"""


@contextmanager
def started(folder: Path, delay_s: float) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """A gateway that is ready, its port and its log."""
    spec, log = specification(folder), folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", GATEWAY, str(delay_s)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    with process, process.stdin as pipe:
        pipe.write(msgspec.json.encode(spec) + b"\n")
        pipe.flush()
        try:
            while json.loads(process.stdout.readline()).get("phase") != "ready":
                pass
            yield process, spec.port, log
        finally:
            process.kill()


def test_a_loop_that_hangs_ends_the_gateway_and_shows_where(tmp_path: Path) -> None:
    with started(tmp_path, 0.0) as (process, _, log):
        assert process.wait(WAIT_S) == EXIT_FATAL and process.stdout is not None
        (error,) = [json.loads(line)["error"] for line in process.stdout if b"error" in line]
        assert error["what"] == "the gateway hangs" and "event loop" in error["why"]
        assert "what_hangs" in log.read_text(encoding="utf-8")


def test_a_gateway_that_was_stopped_goes_on(tmp_path: Path) -> None:
    with started(tmp_path, -1.0) as (process, port, log):
        process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)  # twice its patience
        process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        url = f"http://127.0.0.1:{port}/version"
        assert httpx.get(url, trust_env=False, timeout=WAIT_S).status_code == 200
        process.terminate()
        assert process.wait(WAIT_S) == 0 and "what_hangs" not in log.read_text(encoding="utf-8")


class Loop:
    """A loop that comes round when it is asked to, and a clock that stands until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds, self.now_s, self.errors = 0, 100.0, list[DiptychError]()
        self.watch = LoopWatchdog(lambda: self.rounds, self.errors.append, lambda: self.now_s)
        monkeypatch.setattr(faulthandler, "dump_traceback", lambda file: None)

    def stands(self, seconds: float, looks: int) -> bool:
        for _ in range(looks):
            self.now_s += seconds / looks
            alive = self.watch.check_loop()
        return alive


def test_only_the_time_of_looks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    assert loop.stands(3600.0, looks=int(MAX_HANG_S / CHECK_INTERVAL_S)) and not loop.errors, (
        "stopped between looks"
    )
    assert not loop.stands(CHECK_INTERVAL_S, looks=1) and len(loop.errors) == 1


def test_a_loop_that_comes_round_now_and_then_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    for _ in range(5):
        assert loop.stands(MAX_HANG_S - 1, looks=200)
        loop.rounds += 1
    assert not loop.errors
