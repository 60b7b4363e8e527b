"""A part of `diptych serve` fails for good once everything is up: that is reported, and the gateway's ends the run."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from diptych.config.load import ApiKeys, load_config
from diptych.errors import StartError
from services.cli.serve.launch import ServeRun
from services.cli.serve.progress import StartProgress
from services.cluster.local_deployment import LocalDeployment
from services.host.exit_codes import INTERRUPTED, OK
from services.host.supervision.supervisor import ChildStatus, ErrorReport

FAILED = ErrorReport("nobody looks after it any more", "ValueError: a mistake of ours")


class Up(ServeRun):
    """A deployment that is up at once, and receives what it is sent."""

    status: ChildStatus

    async def _start_all(self, port: int, accepted: ApiKeys) -> None:
        self._view.up = True
        for _ in range(2):
            self._on_status(self.status)


def start(folder: Path, status: ChildStatus) -> tuple[Up, io.StringIO]:
    out = io.StringIO()
    begun = Up(
        load_config("serve", {"port": "0"}, {}),
        None,
        folder,
        folder,
        StartProgress(Console(file=out, width=200), 1),
    )
    begun.status = status
    return begun, out


def test_a_gateway_that_has_failed_for_good_ends_the_run_with_its_error(tmp_path: Path) -> None:
    begun, out = start(tmp_path, ChildStatus("gateway", "failed", error=FAILED))

    async def run() -> None:
        async with asyncio.timeout(30):
            await begun.run_until_stopped()

    with pytest.raises(StartError, match="nobody looks after it"):
        asyncio.run(run())
    assert "gateway has failed, and is not started again: nobody looks after it any more" in out.getvalue()


def test_a_worker_that_has_failed_for_good_is_reported_once_and_the_others_serve(tmp_path: Path) -> None:
    begun, out = start(tmp_path, ChildStatus("decode-0", "failed", error=FAILED))

    async def run() -> int:
        running = asyncio.create_task(begun.run_until_stopped())
        done, _ = await asyncio.wait([running], timeout=0.5)
        assert not done
        begun._stop.stop_asked.set()
        async with asyncio.timeout(30):
            return await running

    assert asyncio.run(run()) == OK
    assert out.getvalue().count("decode-0 has failed, and is not started again: nobody looks") == 1


class Draining:
    """A deployment whose gateway drains, in a thread, until it is ended at once."""

    def __init__(self) -> None:
        self.drains, self.ended = asyncio.Event(), threading.Event()

    async def stop(self, drain_s: float) -> None:
        self.drains.set()
        await asyncio.to_thread(self.ended.wait, 10.0)

    def end_at_once(self) -> None:
        self.ended.set()


def test_a_second_ctrl_c_ends_the_gateway_without_grace(tmp_path: Path) -> None:
    """The run would wait for its thread otherwise, for as long as requests may take."""
    begun, out = start(tmp_path, ChildStatus("decode-0", "ready"))

    async def run() -> tuple[int, bool]:
        draining = Draining()
        begun._deployment = cast(LocalDeployment, draining)
        running = asyncio.create_task(begun.run_until_stopped())
        begun._stop.stop_asked.set()
        await draining.drains.wait()
        begun._stop.hurry_asked.set()
        return await running, draining.ended.is_set()

    assert asyncio.run(run()) == (INTERRUPTED, True)
    assert out.getvalue().count("\n") <= 6


class Packing(ServeRun):
    """A deployment whose workers pack weights; notes when the start would be given up after each status."""

    def __init__(self, folder: Path) -> None:
        view = StartProgress(Console(file=io.StringIO(), width=200), 2)
        super().__init__(load_config("serve", {"port": "0"}, {}), None, folder, folder, view)
        self.ends: list[bool] = []

    async def _start_all(self, port: int, accepted: ApiKeys) -> None:
        for status in (
            # A worker packs; it crashes and begins again; then it gets further; another one packs, too.
            ChildStatus("decode-0", phase="load", done=0, total=1),
            ChildStatus("decode-0", phase="load", done=1, total=9),
            ChildStatus("decode-0", phase="load", done=2, total=9),
            ChildStatus("decode-0", phase="load", done=0, total=1),
            ChildStatus("decode-0", phase="load", done=1, total=9),
            ChildStatus("decode-0", phase="load", done=3, total=9),
            ChildStatus("decode-1", phase="load", done=1, total=9),
            ChildStatus("decode-0", phase="load", done=1, total=1),
            ChildStatus("decode-0", phase="warm", done=0, total=1),
        ):
            before = self._deadline.ends_s
            await asyncio.sleep(0.001)
            self._on_status(status)
            assert before is not None and self._deadline.ends_s is not None
            self.ends.append(self._deadline.ends_s > before)
        raise TimeoutError


def test_a_start_goes_on_while_weights_are_packed(tmp_path: Path) -> None:
    begun = Packing(tmp_path)

    async def run() -> None:
        async with asyncio.timeout(30):
            await begun.run_until_stopped()

    with pytest.raises(StartError, match="not ready") as caught:
        asyncio.run(run())
    assert begun.ends == [False, True, True, False, False, True, True, False, False]
    assert caught.value.why == "waited 600 s since weights were last packed (start_timeout_s)"
