"""Decides whether a request is within the rates of its API key, and counts what the key has used (pure).

    requests   HTTP requests for generation, and lines of batches, when they are admitted
    tokens     prompt tokens when a request is admitted, each prompt once; generated tokens as they come

What is refused is not counted. Generated tokens may take a key above its limit: it then waits until they come back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.keys.named_key import NamedKey
from services.gateway.keys.rate_window import RateWindow

REQUESTS, TOKENS = "requests", "tokens"
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{name}" for name in (REQUESTS, TOKENS) for what in ("limit", "remaining", "reset")
)
# Lines of batches leave this share of each limit to requests over HTTP.
RESERVED_SHARE = 0.25


@dataclass(slots=True)
class KeyUse:
    """What a key has used since the gateway knows it; `refused` by the limit that was reached."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    refused: Counter[str] = field(default_factory=lambda: Counter({REQUESTS: 0, TOKENS: 0}))


class KeyRates:
    """The limits of one key, and what it has used. Times are seconds on the monotonic clock."""

    def __init__(self, key: NamedKey) -> None:
        self.key, self.use = key, KeyUse()
        self.windows: dict[str, RateWindow] = {}
        # The prompt that was refused last: most likely it comes again.
        self._refused_tokens = 1
        self.change_key(key)

    def change_key(self, key: NamedKey) -> None:
        """The file was replaced: the limits are those of `key`, and what was taken stays taken."""
        self.key = key
        limits = {REQUESTS: key.requests_per_minute, TOKENS: key.tokens_per_minute}
        before, self.windows = self.windows, {}
        for name, limit in limits.items():
            if limit is not None:
                self.windows[name] = before.get(name) or RateWindow(limit)
                self.windows[name].limit = limit

    def find_refusal(self, prompt_tokens: int, now_s: float, bulk: bool = False) -> RequestFailure | None:
        """Why a request with `prompt_tokens` (0: not known yet) is refused now; None if it may be admitted.

        `bulk` requests are lines of batches.
        """
        limits = {name: _bulk_limit(one) if bulk else one.limit for name, one in self.windows.items()}
        if TOKENS in limits and prompt_tokens > limits[TOKENS]:
            self.use.refused[TOKENS] += 1
            return self._refuse_length(prompt_tokens, limits[TOKENS])
        amounts = {REQUESTS: 1, TOKENS: prompt_tokens or self._refused_tokens}
        waits_s = {
            name: window.wait_s(amounts[name], now_s, limits[name]) for name, window in self.windows.items()
        }
        if (
            not prompt_tokens
            and TOKENS in limits
            and not self.windows[TOKENS].wait_s(1, now_s, limits[TOKENS])
        ):
            # Whether the prompt fits is known once it is tokenized.
            waits_s[TOKENS] = 0.0
        if not any(waits_s.values()):
            return None
        name = max(waits_s, key=lambda one: waits_s[one])
        self.use.refused[name] += 1
        self._refused_tokens = prompt_tokens or self._refused_tokens
        window = self.windows[name]
        wait_s = max(window.expect(amounts[name], now_s, limits[name]), *waits_s.values())
        message = (
            f"this API key has {window.limit} {name} per minute: "
            f"{window.remaining(now_s)} are left, and {amounts[name]} are asked for"
        )
        cause = f"key {self.key.name}"
        return RequestFailure(FailureReason.RATE_LIMIT_EXCEEDED, message, wait_s=wait_s, cause=cause)

    def admit_request(self, prompt_tokens: int, now_s: float) -> None:
        """Take what a request needs that `find_refusal` did not refuse."""
        self.use.requests += 1
        self.use.prompt_tokens += prompt_tokens
        for name, amount in ((REQUESTS, 1), (TOKENS, prompt_tokens)):
            if name in self.windows:
                self.windows[name].take(amount, now_s)

    def count_generated(self, num_tokens: int, now_s: float) -> None:
        """Take tokens that were generated."""
        self.use.generated_tokens += num_tokens
        if TOKENS in self.windows:
            self.windows[TOKENS].take(num_tokens, now_s)

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """The headers that say what is left, as OpenAI sends them."""
        return [
            (f"x-ratelimit-{what}-{name}".encode(), value.encode())
            for name, window in self.windows.items()
            for what, value in (
                ("limit", str(window.limit)),
                ("remaining", str(window.remaining(now_s))),
                ("reset", format_duration(window.reset_s(now_s))),
            )
        ]

    def _refuse_length(self, prompt_tokens: int, limit: int) -> RequestFailure:
        """The failure of a prompt that the limit never has room for."""
        message = f"the prompt has {prompt_tokens} tokens, and this API key has {limit} tokens per minute"
        cause = f"key {self.key.name}"
        return RequestFailure(FailureReason.PROMPT_ABOVE_RATE, message, cause=cause)


def _bulk_limit(window: RateWindow) -> int:
    """What lines of batches may take of a limit."""
    return max(1, int(window.limit * (1 - RESERVED_SHARE)))


def format_duration(seconds: float) -> str:
    """A duration as Go writes it, which OpenAI's headers do: `1m26.25s`, `20ms`, `0s`."""
    num_ms = round(seconds * 1000)
    if num_ms < 1000:
        return f"{num_ms}ms" if num_ms else "0s"
    minutes, rest_ms = divmod(num_ms, 60_000)
    rest = f"{rest_ms / 1000:g}s"
    return f"{minutes}m{rest}" if minutes else rest
