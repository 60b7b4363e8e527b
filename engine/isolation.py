"""Finds the sequence that caused a failure of a whole batch, and the failure's code (pure)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diptych.errors import GrammarError, raise_if_lost


class BadSamplingParams(ValueError):
    """The request's own sampling parameters leave no token to choose. The logits, and so the KV, are valid."""


class NonFiniteKv(ValueError):
    """Keys or values of some `rows` of a step are not finite. Nothing was written."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__("keys and values must be finite")
        self.rows = rows


def isolate_failures(call: Callable[[list[Any]], list[Any]], batch: list[Any]) -> list[Any]:
    """`call(batch)`. If that raises, call each item alone: only items that fail alone get an exception as result.

    Raises DeviceLost: the device failed, and no item did.
    """
    try:
        return call(batch)
    except Exception as error:
        raise_if_lost(error)
        if len(batch) == 1:
            return [error]
        return [result for item in batch for result in isolate_failures(call, [item])]


def failure_code(error: Exception) -> str:
    """The code in `diptych.messages.Failed` for an error. torch's out-of-memory error is recognised by its text, so
    that torch need not be imported here.

    Raises DeviceLost: it is the device's failure, and no request's.
    """
    raise_if_lost(error)
    if isinstance(error, GrammarError):
        return "invalid_grammar"
    if isinstance(error, BadSamplingParams):
        return "no_token_left"
    words = f"{type(error).__name__} {error}".lower()
    exhausted = isinstance(error, MemoryError) or "outofmemory" in words or "t allocate memory" in words
    return "out_of_memory" if exhausted else "internal_error"
