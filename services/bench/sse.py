"""What a streamed answer says, read event by event: when tokens came, how many, and how it ended.

Events are decoded, since a role, a usage and an error look alike from outside, but into classes that hold only what is
looked at: that costs about a microsecond an event, which matters where the client shares cores with the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

DATA, DONE = b"data:", b"[DONE]"
# Most characters of a server's own words that are kept.
MAX_ERROR_CHARS = 200


class StreamDelta(msgspec.Struct, gc=False):
    """A piece of a chat answer."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class StreamChoice(msgspec.Struct, gc=False):
    """`text` of a completion, or `delta` of a chat."""

    text: str | None = None
    delta: StreamDelta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether the choice has text."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning)

    @property
    def is_role_only(self) -> bool:
        """Whether it only names the role of the message. Some servers send such an event before the first token."""
        roles = self.delta is not None and self.delta.role is not None
        return roles and self.finish_reason is None and not self.has_text


class StreamUsage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class StreamEvent(msgspec.Struct, gc=False):
    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: Any = None


_event_decoder = msgspec.json.Decoder(StreamEvent)


@dataclass(slots=True, eq=False)
class StreamedAnswer:
    """The part of one answer that has arrived. `stamps_s`: when each event with tokens arrived, on the caller's clock.

    `last_s` is when the last token came: that of the finish reason, which some servers send with it and some just after
    it. `failed` names what went wrong, in words that can be counted; `error_text` is what the server said about it.
    """

    stamps_s: list[float] = field(default_factory=list)
    last_s: float = 0.0
    usage: StreamUsage | None = None
    # Whether the stream has ended with [DONE] or a finish reason.
    ended: bool = False
    failed: str = ""
    error_text: str = ""
    _rest: bytes = b""

    @property
    def tokens(self) -> int:
        """Number of tokens of the answer: the server's count, or else one for each event."""
        counted = self.usage.completion_tokens if self.usage is not None else 0
        return counted or len(self.stamps_s)

    def record_failure(self, kind: str, text: str = "") -> None:
        """Record a failure; only the first one is kept."""
        if not self.failed:
            self.failed, self.error_text = kind, text[:MAX_ERROR_CHARS]

    def feed_bytes(self, body: bytes, now_s: float) -> None:
        """Take in bytes of the stream that arrived at `now_s`."""
        lines = (self._rest + body if self._rest else body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(DATA):
                self._on_event(line[len(DATA) :].strip(), now_s)

    def end_stream(self, now_s: float) -> None:
        """The body has ended: record a failure if the stream was not complete."""
        self.feed_bytes(b"\n", now_s)
        if not self.ended:
            self.record_failure("broken off", f"the stream ended after {len(self.stamps_s)} events")
        elif not self.stamps_s:
            self.record_failure("empty", "the stream had no token")

    def _on_event(self, content: bytes, now_s: float) -> None:
        if content == DONE:
            self.ended = True
            return
        try:
            event = _event_decoder.decode(content)
        except msgspec.DecodeError:
            self.record_failure("malformed event", content.decode(errors="replace"))
            return
        if event.error is not None:
            self.record_failure(*error_words(event.error, "error in the stream"))
        if event.usage is not None and event.usage.completion_tokens:
            self.usage = event.usage
        for choice in event.choices:
            self.ended = self.ended or choice.finish_reason is not None
            if choice.is_role_only:
                continue
            self.last_s = now_s
            if choice.finish_reason is None or choice.has_text or not self.stamps_s:
                self.stamps_s.append(now_s)


def error_words(error: Any, default_code: str) -> tuple[str, str]:
    """(code, message) of an OpenAI error object. The report groups errors by code.

    The code is `default_code` if the object has neither code nor type, or is no object at all.
    """
    if isinstance(error, dict):
        named = error.get("code") or error.get("type")
        return (str(named) if named else default_code, str(error.get("message", error)))
    return default_code, str(error)
