"""What is read from a stream: when tokens came, how many, and what went wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.sse import StreamedAnswer
from tests.unit.bench.fake_server import DONE, event, text, usage


def read(*pieces: bytes) -> StreamedAnswer:
    """Piece i arrives at second i."""
    answer = StreamedAnswer()
    for second, piece in enumerate(pieces):
        answer.feed_bytes(piece, float(second))
    answer.end_stream(float(len(pieces)))
    return answer


def delta(finish: str | None = None, **said: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": said, "finish_reason": finish}]})


def test_each_event_with_tokens_is_stamped() -> None:
    answer = read(text("a"), text("b"), text("c", "length") + usage(7, 3) + DONE)
    assert (answer.stamps_s, answer.last_s, answer.tokens, answer.failed) == ([0.0, 1.0, 2.0], 2.0, 3, "")
    assert answer.usage is not None and answer.usage.prompt_tokens == 7


def test_tokens_are_as_the_server_counts_them_and_else_one_an_event() -> None:
    assert read(text("several words"), text("", "stop") + usage(7, 5) + DONE).tokens == 5
    assert read(text("a"), text("b"), text("", "stop") + DONE).tokens == 2


def test_a_role_is_no_token_and_a_finish_of_its_own_ends_the_last_one() -> None:
    answer = read(
        delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop"), DONE
    )
    assert (answer.stamps_s, answer.last_s, answer.failed) == ([1.0, 2.0], 3.0, "")


def test_a_role_that_comes_with_text_is_a_token_and_reasoning_too() -> None:
    assert read(delta(role="assistant", content="a"), delta("stop"), DONE).stamps_s == [0.0]
    assert read(delta(role="assistant", reasoning_content="hm"), delta(content="a"), DONE).stamps_s == [
        0.0,
        1.0,
    ]


def test_an_answer_that_is_only_a_finish_has_one_token() -> None:
    answer = read(text("", "length"), DONE)
    assert (answer.stamps_s, answer.failed) == ([0.0], "")


def test_a_piece_without_text_is_a_token_all_the_same() -> None:
    assert read(text(""), text("é"), DONE).stamps_s == [0.0, 1.0]


@pytest.mark.parametrize(
    ("pieces", "failed"),
    [
        ((text("a"),), "broken off"),
        ((), "broken off"),
        ((DONE,), "empty"),
        ((text("a"), event({"error": {"code": "worker_lost", "message": "gone"}}), DONE), "worker_lost"),
        ((event({"error": "gone"}), DONE), "error in the stream"),
        ((b"data: {broken\n\n", text("a"), DONE), "malformed event"),
    ],
)
def test_what_went_wrong_first_has_a_name(pieces: tuple[bytes, ...], failed: str) -> None:
    assert read(*pieces).failed == failed


@given(st.lists(st.integers(0, 400), max_size=12), st.sampled_from(["\n", "\r\n"]))
def test_nothing_depends_on_where_the_bytes_are_cut(cuts: list[int], end: str) -> None:
    stream = b": ping\n\n" + text("Grüße ") + text("b") + text("", "length") + usage(9, 2) + DONE
    stream = stream.replace(b"\n", end.encode())
    at = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    answer = read(*(stream[early:late] for early, late in zip(at, at[1:], strict=False)))
    assert (len(answer.stamps_s), answer.tokens, answer.failed) == (2, 2, "")
