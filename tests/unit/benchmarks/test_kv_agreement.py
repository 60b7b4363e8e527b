"""What `benchmarks/kv_agreement.py` asks, and how it counts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kv_agreement import (
    FOLDER,
    PATHS,
    PathFigures,
    Question,
    ServedAnswer,
    make_questions,
    parse_threshold,
    path_flags,
)
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from tests.support.engine_model import GreedyAnswer


def body_of(tokens: list[str], **usage: Any) -> dict[str, Any]:
    """The body of a response, with 64 cached tokens."""
    logprobs = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens)}
    cached = {"prompt_tokens_details": {"cached_tokens": 64}}
    return {"choices": [{"logprobs": logprobs}], "usage": cached | usage}


def test_requests_evict_all_or_none() -> None:
    plain, keeps = make_questions(9, 1.0), make_questions(9, 0.8)
    assert [one.prompt for one in plain] == [one.prompt for one in keeps]
    assert all(one.keep == KEEP_ALL and "diptych" not in one.make_body(3) for one in plain)
    assert {one.keep.boundary for one in keeps} == {0, 64}
    assert all(len(one.prompt) > one.keep.boundary and one.keep.threshold == 0.8 for one in keeps)
    body = Question([1, 2], KeepSpec(0.8, 64)).make_body(3)
    assert (body["diptych"], body["max_tokens"]) == (
        {"keep": {"threshold": 0.8, "boundary": 64, "rule": "ada"}},
        3,
    )
    with pytest.raises(ValueError, match="at most 1"):
        parse_threshold("2")


def test_kept_rows_are_counted_and_tokens_behind_a_difference_are_not() -> None:
    figures = PathFigures()
    kept = {"diptych": {"keep": {"kept_rows": 60, "all_rows": 100}}}
    figures.add_answer(
        ServedAnswer.parse(body_of(["a", "b"], **kept)), GreedyAnswer(["a", "b"], [-0.5, -0.5])
    )
    figures.add_answer(
        ServedAnswer.parse(body_of(["x", "b"], **kept)), GreedyAnswer(["a", "b"], [-0.6, -9.0])
    )
    assert (figures.tokens, figures.beyond) == (3, 1) and figures.max_error == pytest.approx(0.1)
    found = figures.summary()
    assert (found["identical_pct"], found["cached_tokens"], found["kept_pct"]) == (50.0, 128, 60.0)
    plain = PathFigures()
    plain.add_answer(ServedAnswer.parse(body_of(["a"])), GreedyAnswer(["a"], [-0.5]))
    assert "kept_pct" not in plain.summary()


def test_ranks_are_left_out_for_codecs_whose_groups_they_would_cut() -> None:
    checkpoint = Checkpoint.resolve(str(FOLDER))
    raw, tq4, nuq = (
        checkpoint.layout(codec=resolve_kv_codec(checkpoint, name)[0]) for name in ("raw", "tq4", "nuq4-1%")
    )
    *others, _ = PATHS
    assert [path for path in PATHS if path_flags(path, raw)] == list(PATHS)
    assert [path for path in PATHS if path_flags(path, tq4)] == list(PATHS)
    assert [path for path in PATHS if path_flags(path, nuq)] == others
    assert path_flags("1P1D", raw) == ("--prefill", "1", "--decode", "1")
