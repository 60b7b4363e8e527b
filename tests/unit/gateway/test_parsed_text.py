"""An answer with thoughts: separated exactly, counted right, stop strings behind them, and every log-probability."""

from __future__ import annotations

import msgspec
import pytest

from diptych.request import SamplingParams
from services.gateway.generation.chat_parts import make_delta, make_message
from services.gateway.generation.output_text import OutputPiece
from services.gateway.generation.scored_tokens import ScoredTokens
from services.gateway.openai.resolve import ResolvedRequest, make_prompt
from services.gateway.openai.validate import RequestRules
from services.gateway.parsing.answer_parts import AnswerContext, AnswerPart
from tests.unit.gateway.parsing.answer_samples import join_parts
from tests.unit.gateway.thinking_model import parse_text, thinking_rules, token_ids

ANSWER = "<think>\nso jumps the fox\n</think>\n\nThe fox jumps over it."


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> RequestRules:
    return thinking_rules(tmp_path_factory.mktemp("thinking"))


def asked(**fields: object) -> ResolvedRequest:
    base = {"logprobs": 0, "sampling": SamplingParams(max_tokens=200, seed=0), "context": AnswerContext()}
    return ResolvedRequest("toy", [make_prompt([5])], context_tokens=512, **(base | fields))  # type: ignore[arg-type]


def said(pieces: list[OutputPiece]) -> list[tuple[str, str]]:
    return join_parts(part for piece in pieces for part in piece.parts)


@pytest.mark.parametrize("step", [1, 2, 7, 200])
def test_a_thought_is_separated_and_counted(thinking: RequestRules, step: int) -> None:
    tokens = token_ids(thinking, ANSWER)
    text, pieces = parse_text(thinking, asked(), tokens, step=step)
    assert said(pieces) == [("reasoning", "so jumps the fox"), ("content", "The fox jumps over it.")]
    assert text.reasoning_tokens == tokens.index(token_ids(thinking, "</think>")[0]) + 1
    assert text.finish == "stop" and text.num_tokens == len(tokens)
    assert [row.token for piece in pieces for row in piece.iter_rows()] == tokens
    assert "".join(piece.text for piece in pieces) == "The fox jumps over it."


def test_the_prompt_may_have_begun_the_thought_or_closed_it(thinking: RequestRules) -> None:
    tokens = token_ids(thinking, "so</think>yes")
    text, pieces = parse_text(thinking, asked(context=AnswerContext("<think>\n")), tokens)
    assert said(pieces) == [("reasoning", "so"), ("content", "yes")]
    assert text.reasoning_tokens == len(token_ids(thinking, "so</think>"))
    off = asked(context=AnswerContext("<think>\n\n</think>\n\n"))
    text, pieces = parse_text(thinking, off, token_ids(thinking, "yes"))
    assert said(pieces) == [("content", "yes")] and text.reasoning_tokens == 0


def test_stop_strings_begin_behind_the_thought(thinking: RequestRules) -> None:
    tokens = token_ids(thinking, ANSWER)
    for step in (1, 5, 200):
        text, pieces = parse_text(thinking, asked(stops=("jumps",)), tokens, "length", step)
        assert said(pieces) == [("reasoning", "so jumps the fox"), ("content", "The fox ")]
        assert text.finish == "stop"
        shown = [row.token for piece in pieces for row in piece.iter_rows()]
        assert shown == tokens[: len(shown)]
        assert "The fox" in thinking.tokenizer.decode(shown, False)


def test_calls_of_a_request_without_tools_are_text(thinking: RequestRules) -> None:
    text, pieces = parse_text(thinking, asked(), token_ids(thinking, '<tool_call>{"name": "f"}</tool_call>'))
    # The markers are special tokens, which are not shown.
    assert said(pieces) == [("content", '{"name": "f"}')]
    assert text.finish == "stop"


def test_a_cut_thought_ends_for_its_length(thinking: RequestRules) -> None:
    tokens = token_ids(thinking, ANSWER)[:5]
    text, pieces = parse_text(thinking, asked(), tokens, "length")
    assert {kind for kind, _ in said(pieces)} == {"reasoning"}
    assert (text.finish, text.reasoning_tokens) == ("length", 5)


def test_pieces_are_split_into_one_part_each() -> None:
    scored = ScoredTokens(0)
    for token in range(5):
        scored.add_token(token, token, None)
    parts = [AnswerPart("reasoning", "a"), AnswerPart("content", "b")]
    for limit in (1, 2, 9):
        split = [*OutputPiece("b", scored, parts=parts, part_stops=[3]).split_pieces(limit)]
        own = [row.token for piece in split[: -(-3 // limit)] for row in piece.iter_rows()]
        assert own == [0, 1, 2]
        assert [part for piece in split for part in piece.parts] == parts
        assert [row.token for piece in split for row in piece.iter_rows()] == list(range(5))
        assert "".join(piece.text for piece in split) == "b"


@pytest.mark.parametrize("step", [1, 3, 200])
def test_each_text_has_its_own_tokens(thinking: RequestRules, step: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tokens = token_ids(thinking, f"<think>\nso\n</think>\n\nThe fox.{call}\nThe dog.{call}")
    ask = asked(text_logprobs=True, context=AnswerContext(tools={"f": {}}))
    _, pieces = parse_text(thinking, ask, tokens, step=step)
    texts: list[list[int]] = [[]]
    for piece in (part for whole in pieces for part in whole.split_pieces(99)):
        texts += [[]] if any(part.kind == "call" for part in piece.parts) else []
        texts[-1] += [row.token for row in piece.iter_rows()]
    shown = [thinking.tokenizer.decode(ids, False).strip() for ids in texts]
    assert shown == ["The fox.", "The dog.", ""]


def test_messages_and_deltas_name_thoughts_twice() -> None:
    delta = msgspec.json.decode(msgspec.json.encode(make_delta(AnswerPart("reasoning", "a"), "")))
    assert delta == {"reasoning": "a", "reasoning_content": "a"}
    piece = OutputPiece(
        "b", ScoredTokens(0), parts=[AnswerPart("reasoning", "a"), AnswerPart("content", "b")]
    )
    message = msgspec.json.decode(msgspec.json.encode(make_message(piece, str)))
    assert message == {
        "content": "b", "role": "assistant", "refusal": None, "reasoning": "a", "reasoning_content": "a",
    }  # fmt: skip
    plain = msgspec.json.decode(msgspec.json.encode(make_message(OutputPiece("b", ScoredTokens(0)), str)))
    assert plain == {"content": "b", "role": "assistant", "refusal": None}
