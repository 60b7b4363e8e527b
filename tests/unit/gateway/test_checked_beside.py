"""A large grammar is checked while its prompt is tokenised, and a small one before it."""

from __future__ import annotations

from threading import Event, current_thread, main_thread

import pytest

from diptych.errors import RequestError
from diptych.request import Grammar
from services.gateway.preparation.checked_beside import (
    MAX_BODY_BYTES,
    MIN_GRAMMAR_CHARS,
    checked_grammar,
)

SMALL, LARGE = Grammar("json_schema", "{}"), Grammar("tools", "x" * MIN_GRAMMAR_CHARS)


@pytest.mark.parametrize(
    ("grammar", "body_bytes"), [(SMALL, 100), (LARGE, MAX_BODY_BYTES + 1)], ids=["small", "long body"]
)
def test_it_is_checked_before_the_block(grammar: Grammar, body_bytes: int) -> None:
    checked: list[Grammar] = []

    def check(grammar: Grammar, field: str) -> str | None:
        assert current_thread() is main_thread()
        checked.append(grammar)
        return None if len(checked) == 1 else f"{field} is too large"

    with checked_grammar(grammar, "tools", check, body_bytes):
        assert checked == [grammar]
    with (
        pytest.raises(RequestError, match="tools is too large"),
        checked_grammar(grammar, "tools", check, body_bytes),
    ):
        pytest.fail("the block ran")


def test_both_run_at_once() -> None:
    checking, tokenized = Event(), Event()

    def check(grammar: Grammar, field: str) -> str | None:
        checking.set()
        return None if tokenized.wait(60) else "the block never ran"

    with checked_grammar(LARGE, "tools", check, 100):
        assert checking.wait(60)
        tokenized.set()


def test_its_refusal_comes_before_that_of_the_prompt() -> None:
    with (
        pytest.raises(RequestError, match="too deep"),
        checked_grammar(LARGE, "tools", lambda grammar, field: "too deep", 100),
    ):
        raise ValueError("the prompt is too long")


def test_without_a_grammar_nothing_is_checked() -> None:
    with checked_grammar(None, "tools", lambda grammar, field: pytest.fail("checked"), 100):
        pass
