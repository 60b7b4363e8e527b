"""Whose fault a failure is, and what it is called (pure)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diptych.errors import GrammarError


def isolate(call: Callable[[list[Any]], list[Any]], batch: list[Any]) -> list[Any]:
    """`call(batch)`; if that raises, each item alone, so that only those at fault get an exception for a result."""
    try:
        return call(batch)
    except Exception as error:
        if len(batch) == 1:
            return [error]
        return [result for item in batch for result in isolate(call, [item])]


def code_of(error: Exception) -> str:
    """The `Failed` code of what went wrong. torch is not imported here, so its out-of-memory is known by its words."""
    if isinstance(error, GrammarError):
        return "invalid_grammar"
    words = f"{type(error).__name__} {error}".lower()
    exhausted = isinstance(error, MemoryError) or "outofmemory" in words or "t allocate memory" in words
    return "out_of_memory" if exhausted else "internal_error"
