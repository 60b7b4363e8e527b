"""Input files are read in a process of their own, fairly by tenant, and requests do not notice."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from pathlib import Path

import psutil
import pytest
from msgspec import json

from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.preparation import file_checker, line_check, preparation_job
from services.gateway.preparation.file_checker import FileChecker, FileJobFailed, FileOrder
from services.gateway.preparation.file_job import CheckFileJob, FileUnreadable, ReadLines, ReadLinesJob
from services.gateway.preparation.fork_server import LOWEST_NICE
from services.gateway.preparation.line_check import CheckedSlice, CheckState, FileRules
from services.gateway.preparation.preparation_job import PreparationJob
from services.gateway.preparation.preparer_pool import MAX_INLINE_BYTES, PreparerPool
from tests.unit.gateway.preparing import Gaps, within

URL = "/v1/completions"


def line(name: str, size: int = 0) -> bytes:
    body = {"prompt": "x" * size}
    return json.encode({"custom_id": name, "method": "POST", "url": URL, "body": body}) + b"\n"


def job(path: Path) -> CheckFileJob:
    return CheckFileJob(str(path), FileRules(URL, 8 << 20, "toy", b"key"), CheckState())


def processes() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}


def test_tenants_take_turns_whatever_the_number_of_their_files() -> None:
    order = FileOrder()
    for number in range(50):
        order.push_file("a", f"a{number}", 100, number, begun=False)
    order.push_file("b", "b", 10**9, 50, begun=False)
    assert [order.pop_file() for _ in range(3)] == ["a0", "b", "a1"]


def test_a_file_that_was_begun_goes_on_and_then_what_expires_first() -> None:
    order = FileOrder()
    order.push_file("a", "late", 100, 0, begun=False)
    order.push_file("a", "soon", 50, 1, begun=False)
    order.push_file("a", "soon", 50, 1, begun=False)
    order.push_file("a", "begun", 999, 2, begun=True)
    assert [order.pop_file() for _ in range(4)] == ["begun", "soon", "late", None]


def test_a_file_is_checked_by_a_process_that_comes_last_and_ends(
    rules: RequestRules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_checker, "IDLE_S", 0.2)
    path, others = tmp_path / "in.jsonl", processes()
    pool = PreparerPool(rules)
    path.write_bytes(line("a") + line("b", 100_000))

    async def work(gaps: Gaps) -> None:
        checker = FileChecker(pool)
        while len(processes() - others) < 1 + pool.num:
            await asyncio.sleep(0.01)
        before = processes()
        found = await checker.check_slice(job(path))
        assert isinstance(found, CheckedSlice) and found.is_complete and found.state.num_lines == 2
        (helper,) = processes() - before
        assert psutil.Process(helper).nice() == LOWEST_NICE
        number, offset, num_bytes = array("q", found.lines)[3:]
        span = array("q", (offset, num_bytes, 0, 5)).tobytes()
        read = await checker.read_lines(ReadLinesJob(str(path), span, with_bodies=True))
        assert isinstance(read, ReadLines) and (number, read.custom_ids) == (2, ["b", None])
        assert json.decode(read.bodies[0]) == {"prompt": "x" * 100_000}
        assert processes() - before == {helper}, "the same one"
        while helper in processes():
            await asyncio.sleep(0.01)
        checker.close()

    within(pool, work)


def test_what_ends_the_process_is_said_and_the_next_file_is_checked(
    rules: RequestRules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed from outside, or takes too much CPU time. A file that is missing is another matter."""
    monkeypatch.setattr(preparation_job, "JOB_CPU_S", 0.5)
    check = line_check.check_slice

    def endless(*given: object) -> CheckedSlice:
        if os.path.exists(tmp_path / "endless"):
            while True:
                pass
        return check(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("services.gateway.preparation.file_job.check_slice", endless)
    path, others = tmp_path / "in.jsonl", processes()
    pool = PreparerPool(rules)
    path.write_bytes(line("a"))

    async def work(gaps: Gaps) -> None:
        checker = FileChecker(pool)
        while len(processes() - others) < 1 + pool.num:
            await asyncio.sleep(0.01)
        before = processes()
        assert isinstance(await checker.check_slice(job(tmp_path / "none")), FileUnreadable)
        (helper,) = processes() - before
        (tmp_path / "endless").touch()
        with pytest.raises(FileJobFailed):
            await checker.check_slice(job(path))
        assert helper not in processes()
        checking = asyncio.create_task(checker.check_slice(job(path)))
        while not (found := processes() - before):
            await asyncio.sleep(0.01)
        # A request needs no more of the pool than before.
        body = json.encode({"model": "toy", "prompt": "y" * (MAX_INLINE_BYTES + 1)})
        with pytest.raises(Exception, match="context"):
            await pool.prepare_body(PreparationJob("completion", body, Caller(0.0, "b")))
        os.kill(found.pop(), signal.SIGKILL)
        with pytest.raises(FileJobFailed):
            await checking
        (tmp_path / "endless").unlink()
        assert isinstance(await checker.check_slice(job(path)), CheckedSlice)
        checker.close()

    within(pool, work)


def test_a_hostile_file_does_not_hold_the_event_loop(rules: RequestRules, tmp_path: Path) -> None:
    """Nested values, and 50,000 lines: neither their check nor taking its answer."""
    path, pool = tmp_path / "in.jsonl", PreparerPool(rules)
    nested = b"[" + b"[[]]," * 1_000_000 + b"[]]"
    text = b'{"custom_id":"n","method":"POST","url":"%s","body":{"model":%s}}\n' % (URL.encode(), nested)
    path.write_bytes(text + b"".join(line(f"{number}" * 50) for number in range(20_000)))

    async def work(gaps: Gaps) -> None:
        checker, found, state = FileChecker(pool), 0, CheckState()
        while True:
            part = await checker.check_slice(CheckFileJob(str(path), job(path).rules, state))
            assert isinstance(part, CheckedSlice)
            found, state = found + len(part.lines) // 24, part.state
            if part.is_complete:
                break
        checker.close()
        assert found == 20_001
        assert await gaps.longest() < 0.25

    within(pool, work)
