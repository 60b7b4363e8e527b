"""How long answers are expected to be (pure)."""

from __future__ import annotations

# Weight of the past in the mean length of answers, applied at each answer.
ANSWER_DECAY = 0.95
# Mean answer length in tokens that is assumed until the first answer has ended.
INITIAL_ANSWER_TOKENS = 256.0


class AnswerLengths:
    """The mean length of recent answers; older answers count less."""

    def __init__(self) -> None:
        self._mean_tokens = INITIAL_ANSWER_TOKENS

    def record_length(self, tokens: int) -> None:
        """An answer has ended after `tokens` tokens."""
        self._mean_tokens = ANSWER_DECAY * self._mean_tokens + (1 - ANSWER_DECAY) * tokens

    def expected_tokens(self, max_tokens: int) -> int:
        """The expected length, in tokens, of an answer that may have `max_tokens`."""
        return min(max_tokens, round(self._mean_tokens))
