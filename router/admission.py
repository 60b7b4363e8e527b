"""How much the gateway takes in before it says "later" (pure).

Every queue behind it is bounded because this one is: requests in flight, prompt tokens that nobody has read yet, and
the time that these are predicted to take. A refusal says when to come back, from the same prediction.

    wait = prompt tokens not read yet / tokens read per second; while nothing is read, since those who write have no
           room, at least: requests without a first token / requests that end per second

Both rates are measured only while others wait, since a service with little to do says nothing of how much it could.
A pause that lasts is expected to last as long again.
"""

from __future__ import annotations

from dataclasses import dataclass

FADE = 0.95  # weight of the past in a rate, per departure
STALLED = 5.0  # times the usual time between departures without one
MIN_WAIT_S, MAX_WAIT_S, UNKNOWN_WAIT_S = 1.0, 60.0, 2.0  # official clients ignore a Retry-After above 120 s


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the gateway: live requests, tokens of prompts not read yet, and the wait for a first token."""

    max_requests: int = 256
    max_queued_tokens: int = 262_144
    max_wait_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken in, as OpenAI clients understand it."""

    code: str
    message: str
    retry_after_s: float
    status: int = 429


class Rate:
    """Units per second while somebody waits, fading with every departure."""

    def __init__(self) -> None:
        self._units = self._seconds = self._departures = 0.0
        self._since_s: float | None = None  # the last departure, if somebody has waited since

    def begin(self, now_s: float) -> None:
        """Somebody waits from now on."""
        self._since_s = now_s if self._since_s is None else self._since_s

    def leave(self, units: float, now_s: float, *, idle: bool) -> None:
        """`units` have been dealt with; `idle` if nobody waits now."""
        if self._since_s is not None:
            self._units = FADE * self._units + units
            self._seconds = FADE * self._seconds + now_s - self._since_s
            self._departures = FADE * self._departures + 1
        self._since_s = None if idle else now_s

    def rest(self) -> None:
        """Nobody waits any more, whatever became of them."""
        self._since_s = None

    def wait_s(self, units: float, now_s: float) -> float | None:
        """Seconds until `units` have been dealt with; None if that is not known."""
        if not self._units or not self._seconds:
            return None
        return units * self._seconds / self._units + self._pause_s(now_s)

    def stalled(self, now_s: float) -> bool:
        """Whether nobody has left for much longer than is usual."""
        return self._pause_s(now_s) * self._departures > STALLED * self._seconds

    def _pause_s(self, now_s: float) -> float:
        return 0.0 if self._since_s is None else max(0.0, now_s - self._since_s)


class Admission:
    """The requests in flight: each counts from `admit` to `done`, its prompt tokens until `read`."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._unread: dict[str, int] = {}  # request -> prompt tokens not read yet; 0 once read
        self.queued_tokens = self.num_unread = 0
        # tokens read and requests ended while others wait for their first token; requests ended while any are open
        self._reading, self._yielding, self._serving = Rate(), Rate(), Rate()

    @property
    def in_flight(self) -> int:
        return len(self._unread)

    def refusal(self, num_requests: int, prompt_tokens: int, now_s: float) -> Refusal | None:
        """Why `num_requests` with `prompt_tokens` in all cannot be taken in now, or None if they can."""
        limits = self.limits
        excess = self.in_flight + num_requests - limits.max_requests
        if excess > 0:
            after_s = self._yielding.wait_s(excess, now_s) or self._serving.wait_s(excess, now_s)
            text = f"{self.in_flight} requests are in flight, the limit is {limits.max_requests}"
            return Refusal("too_many_requests", text, _clamp(after_s))
        if not self.queued_tokens:  # one that is alone too long is a matter of the model's length
            return None
        excess = self.queued_tokens + prompt_tokens - limits.max_queued_tokens
        if excess > 0:
            after_s = self._reading.wait_s(excess, now_s)
            text = f"{self.queued_tokens} prompt tokens wait already, the limit is {limits.max_queued_tokens}"
            return Refusal("queue_full", text, _clamp(after_s))
        wait_s = self.wait_s(now_s)
        if wait_s > limits.max_wait_s:
            text = f"a first token would take about {wait_s:.0f} s, the limit is {limits.max_wait_s:g} s"
            return Refusal("queue_too_long", text, _clamp(wait_s - limits.max_wait_s))
        return None

    def wait_s(self, now_s: float) -> float:
        """How long a request that comes now is predicted to wait for its turn; 0 if that is not known."""
        wait_s = self._reading.wait_s(self.queued_tokens, now_s) or 0.0
        if self._reading.stalled(now_s):
            wait_s = max(wait_s, self._yielding.wait_s(self.num_unread, now_s) or 0.0)
        return wait_s

    def admit(self, request: str, prompt_tokens: int, now_s: float) -> None:
        """Count a request in."""
        self._unread[request] = prompt_tokens
        self.queued_tokens += prompt_tokens
        self.num_unread += prompt_tokens > 0
        self._serving.begin(now_s)
        if self.num_unread > 1:
            self._reading.begin(now_s)
            self._yielding.begin(now_s)

    def read(self, request: str, now_s: float) -> None:
        """Its first token is there. Idempotent, and nothing for a request that was not counted in."""
        if tokens := self._unread.get(request, 0):
            self._unread[request] = 0
            self.queued_tokens -= tokens
            self.num_unread -= 1
            self._reading.leave(tokens, now_s, idle=False)
            self._rest()

    def done(self, request: str, now_s: float) -> None:
        """It has ended. Idempotent."""
        if request not in self._unread:
            return
        tokens = self._unread.pop(request)
        self.queued_tokens -= tokens
        self.num_unread -= tokens > 0
        self._serving.leave(1, now_s, idle=not self._unread)
        if not tokens:  # one that leaves unread gives no room to others
            self._yielding.leave(1, now_s, idle=False)
        self._rest()

    def _rest(self) -> None:
        """A single request waits for itself alone, and shows no speed."""
        if self.num_unread < 2:
            self._reading.rest()
            self._yielding.rest()


def _clamp(wait_s: float | None) -> float:
    return min(MAX_WAIT_S, max(MIN_WAIT_S, UNKNOWN_WAIT_S if wait_s is None else wait_s))
