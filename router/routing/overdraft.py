"""Overdraft of decode room: a prompt begins before its room is free, if so much is freed while it is computed (pure).

    decode worker's room   ███████████████ answers, nearly at their ends    ← missing: what the prompt needs beyond it
    prefill worker         ├── the prompt is computed ──┤ by then enough of them must have ended

An answer surely ends at its `max_tokens`. That it ends before is as likely as recent answers say, of which those that
reached their `max_tokens` only say that they had not ended until then (Kaplan and Meier 1958). The sum of what is
freed must exceed what is missing by `MARGIN_DEVIATIONS` standard deviations.

If the prediction was wrong, the prompt's KV waits at its prefill worker under a lease, as any KV waits for room. So
that such KV blocks nobody, it may have half of a prefill worker's pool at most, and what is missing at a decode worker
may be half of its pool. Nothing waits for an overdrawn prompt but those who come after it, and answers always end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

# The room that may be missing at a decode worker, as a share of its pool of the KV class.
MAX_MISSING_SHARE = 0.5
# The share of a prefill worker's pool that overdrawn prompts may have.
MAX_HELD_SHARE = 0.5
# By how many standard deviations what is freed must exceed what is missing.
MARGIN_DEVIATIONS = 2.0
# The share of a prompt's time within which room must be free: at first, at least, and at most.
FIRST_PATIENCE, MIN_PATIENCE, MAX_PATIENCE = 0.8, 0.1, 1.0
# Factor of that share after a prompt that had to wait, and what each other one adds: at most about one of 100 waits.
LATE_FACTOR, IN_TIME_STEP = 0.7, 0.003
# Number of recent answers whose lengths count.
RECENT_ANSWERS = 256
# Tokens from which on the pace of running answers is known.
MIN_PACE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class RunningAnswer:
    """A request that decodes: the room that its end frees, the tokens that it has delivered, and may have at most.

    `decoded_tokens` of them came from this worker, in `decoding_s` seconds.
    """

    room_tokens: int
    done_tokens: int
    max_tokens: int
    decoded_tokens: int = 0
    decoding_s: float = 0.0


class AnswerEnds:
    """How likely an answer ends after how many tokens, from `RECENT_ANSWERS`."""

    def __init__(self) -> None:
        # Tokens, and whether it ended by itself.
        self._recent: deque[tuple[int, bool]] = deque(maxlen=RECENT_ANSWERS)
        # Lengths at which answers ended, ascending, and the share of answers that are longer than each.
        self._lengths: list[int] = []
        self._longer: list[float] = []
        self._stale = False

    def record_answer(self, tokens: int, max_tokens: int) -> None:
        """An answer has ended, which might have had `max_tokens`."""
        self._recent.append((tokens, tokens < max_tokens))
        self._stale = True

    def share_longer(self, tokens: int) -> float:
        """The share of answers that have more than `tokens`."""
        if self._stale:
            self._compute_shares()
        at = bisect_right(self._lengths, tokens)
        return self._longer[at - 1] if at else 1.0

    def end_probability(self, done_tokens: int, max_tokens: int, steps: int) -> float:
        """The probability that an answer with `done_tokens` ends within so many more tokens.

        0 for one that is longer than all that ended by themselves, until its `max_tokens` are near.
        """
        if done_tokens + steps >= max_tokens:
            return 1.0
        longer = self.share_longer(done_tokens)
        return 1.0 - self.share_longer(done_tokens + steps) / longer if longer > 0.0 else 0.0

    def _compute_shares(self) -> None:
        ended, counts = Counter[int](), Counter[int]()
        for tokens, by_itself in self._recent:
            counts[tokens] += 1
            ended[tokens] += by_itself
        self._lengths, self._longer, self._stale = [], [], False
        at_risk, longer = len(self._recent), 1.0
        for tokens in sorted(counts):
            if ended[tokens]:
                longer *= 1.0 - ended[tokens] / at_risk
                self._lengths.append(tokens)
                self._longer.append(longer)
            at_risk -= counts[tokens]


class OverdraftPatience:
    """Within which share of a prompt's time room must be predicted to be free: less after each that had to wait."""

    def __init__(self) -> None:
        self.share = FIRST_PATIENCE
        self.num_in_time = self.num_late = 0

    def record_outcome(self, in_time: bool) -> None:
        """The KV of an overdrawn prompt was complete, and its room was free by then, or was not."""
        self.num_in_time += in_time
        self.num_late += not in_time
        share = self.share + IN_TIME_STEP if in_time else self.share * LATE_FACTOR
        self.share = min(max(share, MIN_PATIENCE), MAX_PATIENCE)


def frees_in_time(
    missing_tokens: int, answers: Iterable[RunningAnswer], ends: AnswerEnds, steps: int
) -> bool:
    """Whether answers that end within so many steps free at least `missing_tokens`, with a margin."""
    freed = variance = 0.0
    for answer in answers:
        probability = ends.end_probability(answer.done_tokens, answer.max_tokens, steps)
        freed += probability * answer.room_tokens
        variance += probability * (1.0 - probability) * answer.room_tokens**2
    return freed - MARGIN_DEVIATIONS * sqrt(variance) >= missing_tokens


def predicted_steps(seconds: float, step_s: float, answers: Iterable[RunningAnswer]) -> int:
    """How many tokens each of the running answers gets in so many seconds, at least.

    `step_s` is a step's time as the worker measures it; if they came more slowly, that counts.
    """
    tokens, decoding_s = 0, 0.0
    for answer in answers:
        tokens += answer.decoded_tokens
        decoding_s += answer.decoding_s
    if tokens >= MIN_PACE_TOKENS:
        step_s = max(step_s, decoding_s / tokens)
    return int(seconds / step_s) if step_s > 0.0 else 0
