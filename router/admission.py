"""How much the gateway takes in before it says "later" (pure).

Every queue behind it is bounded because this one is: requests in flight, and prompt tokens that nobody has read yet. A
refusal says when to come back, computed from how fast requests have been leaving.
"""

from __future__ import annotations

from dataclasses import dataclass

FADE = 0.9  # weight of the past in a rate, per departure
MIN_WAIT_S, MAX_WAIT_S, UNKNOWN_WAIT_S = 1.0, 60.0, 2.0  # official clients ignore a Retry-After above 120 s


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the gateway: live requests, and tokens of prompts that have not been read yet."""

    max_requests: int = 256
    max_queued_tokens: int = 262_144


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken in, as OpenAI clients understand it."""

    code: str
    message: str
    retry_after_s: float
    status: int = 429


class Rate:
    """Units per second of busy time, fading with every departure."""

    def __init__(self) -> None:
        self._units = self._seconds = 0.0
        self._since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """There is work from now on."""
        self._since_s = now_s if self._since_s is None else self._since_s

    def leave(self, units: float, now_s: float, *, idle: bool) -> None:
        """`units` have been dealt with; `idle` if nothing is left."""
        if self._since_s is not None:
            self._units = FADE * self._units + units
            self._seconds = FADE * self._seconds + now_s - self._since_s
        self._since_s = None if idle else now_s

    def rest(self) -> None:
        """Nothing is left to do, whatever became of it."""
        self._since_s = None

    def wait_s(self, units: float) -> float | None:
        """Seconds until `units` have been dealt with; None if that is not known."""
        return units * self._seconds / self._units if self._units > 0 and self._seconds > 0 else None


class Admission:
    """The requests in flight: each counts from `admit` to `done`, its prompt tokens until `read`."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._unread: dict[str, int] = {}  # request -> prompt tokens not read yet; 0 once read
        self.queued_tokens = 0
        self._reading, self._serving = Rate(), Rate()

    @property
    def in_flight(self) -> int:
        return len(self._unread)

    def refusal(self, num_requests: int, prompt_tokens: int) -> Refusal | None:
        """Why `num_requests` with `prompt_tokens` in all cannot be taken in now, or None if they can."""
        excess = self.in_flight + num_requests - self.limits.max_requests
        if excess > 0:
            after_s = _clamp(self._serving.wait_s(excess))
            text = f"{self.in_flight} requests are in flight, the limit is {self.limits.max_requests}"
            return Refusal("too_many_requests", text, after_s)
        excess = self.queued_tokens + prompt_tokens - self.limits.max_queued_tokens
        if (
            excess > 0 and self.queued_tokens > 0
        ):  # one that is alone too long is a matter of the model's length
            after_s = _clamp(self._reading.wait_s(excess))
            text = f"{self.queued_tokens} prompt tokens wait already, the limit is {self.limits.max_queued_tokens}"
            return Refusal("queue_full", text, after_s)
        return None

    def admit(self, request: str, prompt_tokens: int, now_s: float) -> None:
        """Count a request in."""
        self._unread[request] = prompt_tokens
        self.queued_tokens += prompt_tokens
        self._reading.begin(now_s)
        self._serving.begin(now_s)

    def read(self, request: str, now_s: float) -> None:
        """Its first token is there. Idempotent, and nothing for a request that was not counted in."""
        if tokens := self._unread.get(request, 0):
            self._unread[request] = 0
            self.queued_tokens -= tokens
            self._reading.leave(tokens, now_s, idle=self.queued_tokens == 0)

    def done(self, request: str, now_s: float) -> None:
        """It has ended. Idempotent."""
        if request not in self._unread:
            return
        self.queued_tokens -= self._unread.pop(request)
        if self.queued_tokens == 0:
            self._reading.rest()
        self._serving.leave(1, now_s, idle=not self._unread)


def _clamp(wait_s: float | None) -> float:
    return min(MAX_WAIT_S, max(MIN_WAIT_S, UNKNOWN_WAIT_S if wait_s is None else wait_s))
