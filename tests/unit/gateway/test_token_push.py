"""What is written past the task of an answer, and what is left to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.gateway.generation.formats import OutputFormat
from services.gateway.generation.generation import Generation
from services.gateway.generation.streaming import TokenPush
from services.gateway.http.response_writer import ResponseWriter


class Parts:
    """A push, and the parts around it, which the test changes."""

    def __init__(self) -> None:
        self.waiting, self.written, self.marked = list[str](), list[bytes](), list[float]()
        self.held = 0
        self.answer = SimpleNamespace(finish=None, take_piece=self.take_piece)
        stream = SimpleNamespace(answer=self.answer, mark_written=self.marked.append)
        self.generation = SimpleNamespace(
            streams=[stream],
            failure=None,
            push=None,
            usage_so_far=lambda choice: None,
            resolved=SimpleNamespace(logprobs=None, prompt_logprobs=None, return_ids=False, echo=False),
        )
        self.format = SimpleNamespace(delta_events=self.delta_events)
        self.writer = SimpleNamespace(can_write_now=True, write_now=self.written.append)
        self.push = TokenPush(
            cast(Generation, self.generation),
            cast(OutputFormat, self.format),
            cast(ResponseWriter, self.writer),
            self.hold_kept,
        )

    def take_piece(self) -> Any:
        text, self.waiting = "".join(self.waiting), []
        return SimpleNamespace(text=text, split_pieces=lambda limit: [text]) if text else ""

    def delta_events(self, choice: int, part: str, used: Any) -> list[bytes]:
        return [] if part == "held back" else [f"<{part}>".encode()]

    def hold_kept(self) -> None:
        self.held += 1


def test_what_comes_while_the_task_waits_is_written_at_once() -> None:
    parts = Parts()
    with parts.push.while_waiting():
        for text in ("one", "two"):
            parts.waiting.append(text)
            assert parts.generation.push()
        assert parts.generation.push(), "nothing is new, so there is nothing to wake a task for"
    assert parts.generation.push is None
    assert parts.written == [b"<one>", b"<two>"]
    assert parts.marked[-1] == parts.push.written_s > 0 and parts.held == 2


def test_events_that_a_format_holds_back_do_not_count_as_written() -> None:
    parts = Parts()
    parts.waiting.append("held back")
    assert parts.push.write_news()
    assert (parts.written, parts.marked, parts.push.written_s, parts.held) == ([], [], 0.0, 1)


@pytest.mark.parametrize("why", ["ended", "failed", "slow"])
def test_what_has_to_wait_or_ends_the_answer_is_left_to_the_task(why: str) -> None:
    parts = Parts()
    parts.waiting.append("one")
    parts.answer.finish = "stop" if why == "ended" else None
    parts.generation.failure = object() if why == "failed" else None
    parts.writer.can_write_now = why != "slow"
    assert not parts.push.write_news()
    assert parts.waiting == ["one"] and not parts.written


def test_a_failure_reaches_the_task_and_nobody_else() -> None:
    parts = Parts()

    def fail(*_: Any) -> list[bytes]:
        raise ValueError("no such part")

    parts.format.delta_events = fail
    with pytest.raises(ValueError, match="no such part"), parts.push.while_waiting():
        parts.waiting.append("one")
        assert not parts.generation.push()
        parts.waiting.append("two")
        assert not parts.generation.push(), "the order of what is written stays"
    assert parts.waiting == ["two"]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs", "return_ids", "echo", "choices"])
def test_answers_whose_pieces_may_be_large_are_left_to_the_task(field: str) -> None:
    parts = Parts()
    assert TokenPush.fits(cast(Generation, parts.generation))
    if field == "choices":
        parts.generation.streams *= 2
    else:
        setattr(parts.generation.resolved, field, 1)
    assert not TokenPush.fits(cast(Generation, parts.generation))
