"""Stores tokens with their log-probabilities in arrays: 12 bytes per alternative instead of about 100 as objects."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from diptych.messages import Logprob

TOKEN_BYTES, ALTERNATIVE_BYTES = 24, 12


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability, which is None for the first token of a prompt.

    `offset` is where the token's text begins in the answer. `top` are its alternatives (token, log-probability).
    """

    token: int
    offset: int
    logprob: float | None
    top: list[tuple[int, float]]


class RankedTokens:
    """The tokens of a prompt, each with its log-probability, its rank, and the `num_top` most likely tokens."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._scored, self._ranks = ScoredTokens(num_top), array("i")

    def __len__(self) -> int:
        return len(self._scored)

    @property
    def num_bytes(self) -> int:
        """The memory of all tokens, in bytes."""
        return self._scored.num_bytes + self._ranks.itemsize * len(self._ranks)

    def add_token(self, token: int, logprob: Logprob | None) -> None:
        """Append a token."""
        self._scored.add_token(token, 0, logprob)
        self._ranks.append(0 if logprob is None else logprob.rank)

    def iter_rows(self, start: int, stop: int) -> Iterator[tuple[ScoredToken, int]]:
        """The tokens from `start` up to, but without, `stop`, with their ranks."""
        return zip(self._scored.iter_rows(start, stop), self._ranks[start:stop], strict=True)


class ScoredTokens:
    """A sequence of `ScoredToken` that keeps the first `num_top` alternatives of each token."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._tokens, self._offsets, self._logprobs = array("i"), array("q"), array("d")
        # Where each token's alternatives end, counted from the first alternative that was ever added.
        self._ends = array("q")
        # Number of alternatives of tokens that were removed from the front.
        self._removed = 0
        self._top_tokens, self._top_logprobs = array("i"), array("d")

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_bytes(self) -> int:
        """The memory of all tokens, in bytes."""
        return self.bytes_of(len(self._tokens))

    def bytes_of(self, count: int) -> int:
        """The memory of the first `count` tokens, in bytes."""
        return TOKEN_BYTES * count + ALTERNATIVE_BYTES * self._num_alternatives(count)

    def count_before(self, offset: int) -> int:
        """How many tokens begin before `offset`; offsets never decrease."""
        return bisect_left(self._offsets, offset)

    def add_token(self, token: int, offset: int, logprob: Logprob | None) -> None:
        """Append a token. `offset` is where its text begins in the answer."""
        self._tokens.append(token)
        self._offsets.append(offset)
        self._logprobs.append(math.nan if logprob is None else logprob.logprob)
        for other, value in logprob.top[: self._num_top] if logprob is not None else ():
            self._top_tokens.append(other)
            self._top_logprobs.append(value)
        self._ends.append(self._removed + len(self._top_tokens))

    def extend(self, others: ScoredTokens) -> None:
        """Append all of `others`."""
        shift = self._removed + len(self._top_tokens) - others._removed
        self._tokens.extend(others._tokens)
        self._offsets.extend(others._offsets)
        self._logprobs.extend(others._logprobs)
        self._top_tokens.extend(others._top_tokens)
        self._top_logprobs.extend(others._top_logprobs)
        self._ends.extend(array("q", (shift + end for end in others._ends)))

    def remove_first(self, count: int) -> ScoredTokens:
        """Remove the first `count` tokens and return them."""
        if not count:
            # Nothing has to be copied.
            return ScoredTokens(self._num_top)
        removed, num_top = ScoredTokens(self._num_top), self._num_alternatives(count)
        removed._tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        removed._offsets, self._offsets = self._offsets[:count], self._offsets[count:]
        removed._logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        removed._top_tokens, self._top_tokens = self._top_tokens[:num_top], self._top_tokens[num_top:]
        removed._top_logprobs, self._top_logprobs = self._top_logprobs[:num_top], self._top_logprobs[num_top:]
        removed._ends, self._ends = self._ends[:count], self._ends[count:]
        removed._removed = self._removed
        self._removed += num_top
        return removed

    def iter_rows(self, start: int, stop: int) -> Iterator[ScoredToken]:
        """The tokens from `start` up to, but without, `stop`."""
        begin = self._num_alternatives(start)
        for i in range(start, min(stop, len(self._tokens))):
            end = self._ends[i] - self._removed
            top = list(zip(self._top_tokens[begin:end], self._top_logprobs[begin:end], strict=True))
            value = self._logprobs[i]
            yield ScoredToken(self._tokens[i], self._offsets[i], None if math.isnan(value) else value, top)
            begin = end

    def _num_alternatives(self, count: int) -> int:
        """How many alternatives the first `count` tokens have together."""
        return self._ends[count - 1] - self._removed if count else 0
