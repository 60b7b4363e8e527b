"""A head is lost once it has not answered twice in a row, and a process once it has ended."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from services.cluster import head_watch


def test_a_head_is_lost_after_two_failures_and_back_with_its_next_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_watch, "HEAD_CHECK_S", 0.0)
    answers, seen = [True, False, True, False, False, False, True, True, False, False], list[str]()

    def ask() -> bool:
        if len(seen) == len(answers):
            raise EOFError
        seen.append("")
        return answers[len(seen) - 1]

    def note(event: str) -> None:
        seen[-1] = event

    async def story() -> None:
        watching = head_watch.watch_answers(ask, lambda: note("lost"), lambda: note("back"))
        with pytest.raises(EOFError):
            await watching

    asyncio.run(story())
    assert seen == ["", "", "", "", "lost", "", "back", "", "", "lost"]


def test_the_end_of_a_process_is_waited_for() -> None:
    async def story() -> None:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
            ended = asyncio.create_task(head_watch.await_process_end(process.pid))
            await asyncio.sleep(0)
            assert not ended.done()
            process.communicate()
            await ended
        # It has been waited for, so there is none.
        await head_watch.await_process_end(process.pid)

    asyncio.run(story())
