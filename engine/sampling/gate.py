"""Says where in an answer a grammar binds, and when a thought has to end. Both follow from the tokens alone.

    free tokens (a thought, text) ── GrammarGate.binds ─▶ tokens that the grammar allows ── `repeats` ─▶ free tokens …

So another worker continues an answer in the middle of a thought or a call with the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from diptych.request import GrammarGate, ThoughtBudget
from engine.sampling.grammar import GrammarMatcher


class GatedMatcher:
    """The position of an output whose grammar binds only a part of it. `fresh` is at the grammar's beginning."""

    def __init__(self, gate: GrammarGate, fresh: GrammarMatcher) -> None:
        self._gate, self._fresh, self._matcher = gate, fresh, fresh.copy()
        self._is_free, self._is_start = gate.is_free, True
        self._tail: tuple[int, ...] = ()
        self._longest = max(map(len, gate.binds), default=0)

    @property
    def binds(self) -> bool:
        """See `TokenMatcher`."""
        return not self._is_free

    @property
    def may_end(self) -> bool:
        """See `TokenMatcher`."""
        return not self._is_free or self._gate.may_end

    @property
    def done(self) -> bool:
        """See `TokenMatcher`."""
        return not self._is_free and self._matcher.done

    def token_mask(self, width: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """See `TokenMatcher`. Raises GrammarError."""
        if self._is_free:
            return np.ones(width, np.bool_)
        allowed = self._matcher.token_mask(width)
        if self._is_start and self._gate.frees is not None and self._gate.frees < width:
            allowed[self._gate.frees] = True
        return allowed

    def push(self, token: int) -> None:
        """See `TokenMatcher`. Raises GrammarError."""
        is_start, self._is_start = self._is_start, False
        if self._is_free and token in self._gate.starts:
            self._is_free, self._matcher = False, self._fresh.copy()
            self._matcher.push(token)
        elif self._is_free:
            self._tail = (*self._tail, token)[-self._longest :]
            if any(self._tail[-len(bind) :] == bind for bind in self._gate.binds):
                self._is_free, self._matcher = False, self._fresh.copy()
        elif is_start and token == self._gate.frees:
            self._is_free = True
        else:
            self._matcher.push(token)
            if self._gate.repeats and self._matcher.done:
                self._is_free, self._tail = True, ()

    def replay(self, tokens: Iterable[int]) -> None:
        """See `TokenMatcher`. Raises GrammarError."""
        for token in tokens:
            self.push(token)


class ThoughtCounter:
    """Counts an answer's tokens that are thoughts, from its first one on."""

    def __init__(self, budget: ThoughtBudget, output: Iterable[int]) -> None:
        self._budget, self._in_thought, self._num_tokens = budget, budget.is_open, 0
        self._tail: tuple[int, ...] = ()
        for token in output:
            self.push(token)

    @property
    def forced(self) -> int | None:
        """The token that must follow, since the budget is used."""
        return self._budget.ends[0] if self._in_thought and self._num_tokens >= self._budget.tokens else None

    def push(self, token: int) -> None:
        """Count a token."""
        budget = self._budget
        if self._in_thought:
            self._in_thought = token not in budget.ends
            self._num_tokens += self._in_thought
            # What ends a thought may begin another one.
            self._tail = (token,)
            return
        self._tail = (*self._tail, token)[-len(budget.begin) :]
        if self._tail == budget.begin:
            self._in_thought, self._tail = True, ()
