"""Predicts the duration of a step from past steps, and how many prompt tokens fit into a time limit (pure)."""

from __future__ import annotations

# Fewest prompt tokens of a step, however slow steps are, so that every prompt ends at some time.
MIN_PREFILL_TOKENS = 16
# Weight of the past in the averages, per step.
_MEMORY = 0.98
# Weight of the initial values, in steps. It matters while few steps are known.
_PRIOR = 1e-3


class StepTimeModel:
    """seconds = a + b · decode rows + c · prompt tokens, by least squares in which older steps count less.

    The duration also depends on the length of contexts: the fit adapts as these change.
    """

    def __init__(self, base_s: float = 1e-3, row_s: float = 1e-4, token_s: float = 1e-4) -> None:
        self.base_s, self.row_s, self.token_s = base_s, row_s, token_s
        self._prior = (base_s, row_s, token_s)
        # Sums over steps of the products of (1, rows, tokens) with each other: 11, 1r, 1t, rr, rt, tt.
        self._products = [0.0] * 6
        # Sums over steps of the products of (1, rows, tokens) with the step's seconds.
        self._right = [0.0] * 3
        # Tokens of sequences that decided what they keep, and the seconds of that; older ones count less.
        self._decided_tokens = self._decided_s = 0.0

    def add_sample(self, rows: int, tokens: int, seconds: float) -> None:
        """A step with `rows` decode rows and `tokens` prompt tokens took `seconds`."""
        fresh = (1.0, rows, tokens, rows * rows, rows * tokens, tokens * tokens)
        self._products = [_MEMORY * old + new for old, new in zip(self._products, fresh, strict=True)]
        sample = (seconds, rows * seconds, tokens * seconds)
        self._right = [_MEMORY * old + new for old, new in zip(self._right, sample, strict=True)]
        fit = self._solve_normal_equations()
        self.base_s, self.row_s = max(0.0, fit[0]), max(0.0, fit[1])
        self.token_s = max(1e-7, fit[2])

    def seconds(self, rows: int, tokens: int) -> float:
        """Predicted seconds of a step with `rows` decode rows and `tokens` prompt tokens."""
        return self.base_s + self.row_s * rows + self.token_s * tokens

    def add_decisions(self, tokens: int, seconds: float) -> None:
        """Answers with `tokens` tokens together, prompts included, have decided what they keep, in `seconds`."""
        self._decided_tokens = _MEMORY * self._decided_tokens + tokens
        self._decided_s = _MEMORY * self._decided_s + seconds

    def decision_s(self, tokens: int) -> float:
        """Predicted seconds of decisions about answers of `tokens` tokens; 0 before the first one."""
        return tokens * self._decided_s / self._decided_tokens if self._decided_tokens else 0.0

    def prefill_budget(self, rows: int, within_s: float, decided_tokens: int = 0) -> int:
        """Prompt tokens with which a step of `rows` decode rows stays within `within_s`; at least
        `MIN_PREFILL_TOKENS`. Sequences of `decided_tokens` tokens decide in it what they keep.
        """
        left_s = within_s - self.seconds(rows, 0) - self.decision_s(decided_tokens)
        return max(MIN_PREFILL_TOKENS, int(left_s / self.token_s))

    def _solve_normal_equations(self) -> tuple[float, float, float]:
        """Solve the fit's normal equations (Cramer's rule). The prior guarantees that there is exactly one solution."""
        one, r, t, rr, rt, tt = self._products
        one, rr, tt = one + _PRIOR, rr + _PRIOR, tt + _PRIOR
        x, y, z = (right + _PRIOR * prior for right, prior in zip(self._right, self._prior, strict=True))
        det = _determinant(one, r, t, r, rr, rt, t, rt, tt)
        return (
            _determinant(x, r, t, y, rr, rt, z, rt, tt) / det,
            _determinant(one, x, t, r, y, rt, t, z, tt) / det,
            _determinant(one, r, x, r, rr, y, t, rt, z) / det,
        )


def _determinant(
    a: float, b: float, c: float, d: float, e: float, f: float, g: float, h: float, i: float
) -> float:
    """The determinant of the 3 x 3 matrix [[a, b, c], [d, e, f], [g, h, i]]."""
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
