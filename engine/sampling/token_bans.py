"""Keeps tokens from being chosen that a request names: all but those it allows, and the ends of words it forbids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.request import SamplingParams

Floats = NDArray[np.float32]


class TokenBans:
    """The tokens that one output may not have next.

    What is kept is as long as what the request names, however large the vocabulary is. Of words of several tokens the
    tokens that would complete one follow from the end of the output.
    """

    def __init__(self, sampling: SamplingParams, output: Iterable[int]) -> None:
        self._allowed: NDArray[Any] = np.array(sampling.allowed_token_ids, np.int64)
        self._always: NDArray[Any] = np.array(
            [word[0] for word in sampling.bad_words if len(word) == 1], np.int64
        )
        # By the last token of a word's beginning: the word's last token, and its beginning.
        self._endings: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for *begin, last in (word for word in sampling.bad_words if len(word) > 1):
            self._endings.setdefault(begin[-1], []).append((last, tuple(begin)))
        self._longest = max((len(word) - 1 for word in sampling.bad_words), default=0)
        self._tail: tuple[int, ...] = ()
        for token in output:
            self.push(token)

    def push(self, token: int) -> None:
        """Record the next token of the output."""
        if self._longest:
            self._tail = (*self._tail, token)[-self._longest :]

    def forbid(self, logits: Floats) -> None:
        """Set the logits [vocab] of tokens that may not come next to -inf."""
        if len(self._allowed):
            kept = logits[self._allowed]
            logits.fill(-np.inf)
            logits[self._allowed] = kept
        logits[self._always] = -np.inf
        for last, begin in self._endings.get(self._tail[-1], ()) if self._tail else ():
            if self._tail[-len(begin) :] == begin:
                logits[last] = -np.inf


def make_bans(sampling: SamplingParams, output: Iterable[int]) -> TokenBans | None:
    """The bans of a request; None, at no cost, if it has none."""
    if not sampling.allowed_token_ids and not sampling.bad_words:
        return None
    return TokenBans(sampling, output)
