"""How long a step takes, learnt from steps, and how many prompt tokens fit into one that must be short (pure)."""

from __future__ import annotations

SMALLEST_BUDGET = 16  # prompt tokens per step, whatever the pace: a prompt must end some time
_MEMORY = 0.98  # weight of what was known, at each new step
_PRIOR = 1e-3  # how strongly the fit is held to its start while little is known, in steps


class Pace:
    """seconds = a + b · decode rows + c · prompt tokens, by least squares in which older steps fade.

    Contexts differ in length, so a step of the same rows and tokens does, too: the fit follows them.
    """

    def __init__(self, base_s: float = 1e-3, row_s: float = 1e-4, token_s: float = 1e-4) -> None:
        self.base_s, self.row_s, self.token_s = base_s, row_s, token_s
        self._prior = (base_s, row_s, token_s)
        self._products = [0.0] * 6  # of (1, rows, tokens) with each other: 11 1r 1t rr rt tt
        self._right = [0.0] * 3  # of them with the seconds

    def note(self, rows: int, tokens: int, seconds: float) -> None:
        """A step with `rows` decode rows and `tokens` prompt tokens took `seconds`."""
        fresh = (1.0, rows, tokens, rows * rows, rows * tokens, tokens * tokens)
        self._products = [_MEMORY * old + new for old, new in zip(self._products, fresh, strict=True)]
        seen = (seconds, rows * seconds, tokens * seconds)
        self._right = [_MEMORY * old + new for old, new in zip(self._right, seen, strict=True)]
        fit = self._solve()
        self.base_s, self.row_s = max(0.0, fit[0]), max(0.0, fit[1])
        self.token_s = max(1e-7, fit[2])

    def seconds(self, rows: int, tokens: int) -> float:
        """What such a step is expected to take."""
        return self.base_s + self.row_s * rows + self.token_s * tokens

    def budget(self, rows: int, within_s: float) -> int:
        """Prompt tokens that keep a step with `rows` decode rows within `within_s`; never less than a few."""
        return max(SMALLEST_BUDGET, int((within_s - self.seconds(rows, 0)) / self.token_s))

    def _solve(self) -> tuple[float, float, float]:
        """The normal equations, pulled towards the start so that they always have one solution (Cramer's rule)."""
        one, r, t, rr, rt, tt = self._products
        one, rr, tt = one + _PRIOR, rr + _PRIOR, tt + _PRIOR
        x, y, z = (right + _PRIOR * prior for right, prior in zip(self._right, self._prior, strict=True))
        det = _det(one, r, t, r, rr, rt, t, rt, tt)
        return (
            _det(x, r, t, y, rr, rt, z, rt, tt) / det,
            _det(one, x, t, r, y, rt, t, z, tt) / det,
            _det(one, r, x, r, rr, y, t, rt, z) / det,
        )


def _det(a: float, b: float, c: float, d: float, e: float, f: float, g: float, h: float, i: float) -> float:
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
