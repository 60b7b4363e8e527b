"""What `benchmarks.rates` compares: what a key got with its rate, at twice which it asks."""

from __future__ import annotations

import pytest

from benchmarks.rates import NEW_TOKENS, PROMPT, AskingKey
from diptych.keys.key_file import FIELDS


def test_a_key_asks_at_twice_its_rate() -> None:
    by_requests, by_tokens = AskingKey("r", requests_per_minute=30), AskingKey("t", tokens_per_minute=300)
    assert 60 / by_requests.interval_s == 60
    assert (len(PROMPT) + NEW_TOKENS) * 60 / by_tokens.interval_s == pytest.approx(600)


def test_the_error_is_the_part_of_the_rate_that_is_missing_or_too_much() -> None:
    key = AskingKey("r", requests_per_minute=30, requests=57)
    assert key.error(120) == pytest.approx(0.05) and key.error(114) == pytest.approx(0.0)
    assert AskingKey("t", tokens_per_minute=300, tokens=630).error(120) == pytest.approx(0.05)


def test_entries_are_those_of_the_file() -> None:
    key = AskingKey("r", requests_per_minute=30)
    assert set(key.entry) == {"name", "key", "requests_per_minute"} <= set(FIELDS)
