"""An answer is the same however its tokens come in and however often somebody takes what is there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.messages import Logprob, Output
from diptych.request import SamplingParams
from services.gateway.generation.output_text import OutputText, with_echo
from services.gateway.openai.resolve import ResolvedRequest, make_prompt
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import END, TEXT


def asked(**fields: object) -> ResolvedRequest:
    base = {"logprobs": 2, "sampling": SamplingParams(max_tokens=99, seed=0, stop_token_ids=(END,))}
    return ResolvedRequest("toy", [make_prompt([5], "p")], context_tokens=256, **(base | fields))  # type: ignore[arg-type]


def written(
    tokens: GatewayTokenizer, ask: ResolvedRequest, ids: list[int], ends: str, cuts: random.Random | None
) -> tuple[str, list[int], OutputText]:
    """Feed `ids` and take what comes: in steps of one and only at the end, or at random."""
    answer, pieces = OutputText(ask, 0, ask.prompts[0], tokens), []
    rest = list(ids)
    while rest and answer.finish is None:
        count = 1 if cuts is None else cuts.randint(1, 5)
        step, rest = rest[:count], rest[count:]
        logprobs = [Logprob(token, -1.0, []) for token in step]
        answer.feed_output(Output("r", 0, step, logprobs, finish=ends if not rest else None))
        if cuts is not None and cuts.random() < 0.7:
            pieces.append(answer.take_piece())
    answer.end_sequence(ends)
    pieces.append(answer.take_piece())
    return (
        "".join(piece.text for piece in pieces),
        [one.token for piece in pieces for one in piece.iter_rows()],
        answer,
    )


@given(
    st.lists(st.integers(4, 319), min_size=1, max_size=60),
    st.lists(st.text(alphabet="aeou n", min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.integers(),
)
def test_cutting_changes_nothing(
    tokens: GatewayTokenizer, ids: list[int], stops: list[str], keep: bool, seed: int
) -> None:
    ask = asked(stops=tuple(stops), keep_stop=keep)
    whole = written(tokens, ask, ids, "length", None)
    parts = written(tokens, ask, ids, "length", random.Random(seed))
    assert parts[:2] == whole[:2]
    assert parts[2].finish == whole[2].finish
    if not stops:
        assert whole[:2] == (tokens.decode(ids), ids)


def test_log_probabilities_behind_a_stop_string_are_dropped(tokens: GatewayTokenizer) -> None:
    ids = tokens.encode("The quick brown fox", False)
    text, scored, answer = written(tokens, asked(stops=("brown",)), ids, "length", None)
    assert (text, answer.finish) == ("The quick ", "stop")
    assert "".join(tokens.token_text(token) for token in scored) == text


def test_an_end_token_is_counted_and_not_shown(tokens: GatewayTokenizer) -> None:
    ids = [*tokens.encode("fox", False), END]
    text, scored, answer = written(tokens, asked(skip_special=False), ids, "stop", None)
    assert (text, scored, answer.num_tokens) == ("fox", ids[:-1], len(ids))
    shown, _, _ = written(tokens, asked(skip_special=False, keep_stop=True), ids, "stop", None)
    assert shown == "fox<|end|>"


def test_an_answer_that_ends_by_its_grammar_keeps_its_last_token(tokens: GatewayTokenizer) -> None:
    ids = tokens.encode("{1}", False)
    assert written(tokens, asked(), ids, "stop", None)[0] == "{1}"


def test_nothing_is_lost_when_an_answer_ends_within_a_held_text(tokens: GatewayTokenizer) -> None:
    ids = tokens.encode("The qui", False)
    assert written(tokens, asked(stops=("quick",)), ids, "length", None)[0] == "The qui"


def test_what_waits_is_bounded_by_what_it_says(tokens: GatewayTokenizer) -> None:
    answer = OutputText(asked(), 0, make_prompt([5]), tokens)
    assert answer.waiting_bytes == 0
    for token in tokens.encode(TEXT, False):
        answer.feed_output(Output("r", 0, [token], [Logprob(token, -1.0, [])]))
    assert answer.waiting_bytes > len(TEXT)
    answer.take_piece()
    assert answer.waiting_bytes == 0
    assert not answer.take_piece()


def test_cached_tokens_are_those_of_the_reading_that_gave_the_first_token(tokens: GatewayTokenizer) -> None:
    answer = OutputText(asked(), 0, make_prompt([5] * 200), tokens)
    for cached_tokens, reported in (
        (64, 64),
        (192, 64),
    ):  # later: a decode worker's own, or a second attempt's
        answer.feed_output(Output("r", 0, [9], [Logprob(9, -1.0, [])], cached_tokens=cached_tokens))
        assert answer.cached_tokens == reported


@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echoed_prompt_comes_first(tokens: GatewayTokenizer, logprobs: int | None) -> None:
    ids = tokens.encode("größer", False)
    ask = asked(echo=True, logprobs=logprobs)
    answer = OutputText(ask, 0, with_echo(make_prompt(ids), tokens, True), tokens)
    scores = [None, *(Logprob(token, -2.0, []) for token in ids[1:])]
    answer.feed_output(
        Output("r", 0, [ids[0]], [Logprob(ids[0], -1.0, [])], prompt_logprobs=scores, finish="length")
    )
    answer.end_sequence("length")
    while answer.pack_logprobs(3):
        pass
    piece = answer.take_piece()
    assert piece.text == "größer" + tokens.token_text(ids[0])
    assert [one.offset for one in piece.iter_rows()][-1:] == ([len("größer")] if logprobs else [])
    assert len(piece.scored) == (len(ids) + 1 if logprobs else 0)


@given(st.lists(st.integers(4, 319), min_size=1, max_size=40), st.integers(), st.booleans())
def test_pieces_have_every_token_that_is_counted(
    tokens: GatewayTokenizer, ids: list[int], seed: int, ends: bool
) -> None:
    cuts, ask = random.Random(seed), asked(return_ids=True, logprobs=None)
    answer, pieces = OutputText(ask, 0, ask.prompts[0], tokens), []
    for i, token in enumerate(ids := [*ids, END] if ends else ids):
        answer.feed_output(
            Output("r", 0, [token], finish=None if i < len(ids) - 1 else "stop" if ends else "length")
        )
        if cuts.random() < 0.5:
            pieces.append(answer.take_piece())
    answer.end_sequence("stop" if ends else "length")
    pieces.append(answer.take_piece())
    taken = [token for piece in pieces for token in piece.token_ids]
    assert [*taken, *answer.take_token_ids()] == ids and answer.num_tokens == len(ids)
    assert all(piece for piece in pieces if piece.token_ids), "no piece has ids alone"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"own_stop_ids": (END,)}, END),
        ({"own_stop_ids": (END,), "keep_stop": True}, END),
        ({"own_stop_ids": (9,)}, None),
        ({"stops": ("b",)}, "b"),
        ({"stops": ("b",), "keep_stop": True}, "b"),
        ({"stops": ("zz",)}, None),
    ],
)
def test_an_answer_says_what_stopped_it(
    tokens: GatewayTokenizer, fields: dict[str, object], reason: str | int | None
) -> None:
    ids = tokens.encode("abc", False)
    *_, answer = written(tokens, asked(**fields), [*ids, END], "stop", None)
    assert (answer.finish, answer.stop_reason) == ("stop", reason)
    *_, cut = written(tokens, asked(**fields | {"stops": ()}), ids, "length", None)
    assert (cut.finish, cut.stop_reason) == ("length", None)
