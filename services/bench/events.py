"""What a streamed answer says, read event by event: when tokens came, how many, and how it ended.

Events are decoded, since a role, a usage and an error look alike from outside, but into classes that hold only what is
looked at: that costs about a microsecond an event, which matters where the client shares cores with the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

DATA, DONE = b"data:", b"[DONE]"
MAX_TOLD = 200  # characters of a server's own words that are kept


class Delta(msgspec.Struct, gc=False):
    """A piece of a chat answer."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, gc=False):
    """`text` of a completion, or `delta` of a chat."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def says(self) -> bool:
        """It has text."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning)

    @property
    def opens(self) -> bool:
        """It tells whose answer follows, and nothing yet: some servers send this before there is a token."""
        roles = self.delta is not None and self.delta.role is not None
        return roles and self.finish_reason is None and not self.says


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(msgspec.Struct, gc=False):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(Event)


@dataclass(slots=True, eq=False)
class Answer:
    """One answer as far as it has come. `stamps_s`: when each event with tokens arrived, on the caller's clock.

    `last_s` is when the last token came: that of the finish reason, which some servers send with it and some just after
    it. `failed` names what went wrong, in words that can be counted; `told` is what the server said about it.
    """

    stamps_s: list[float] = field(default_factory=list)
    last_s: float = 0.0
    usage: Usage | None = None
    ended: bool = False  # by [DONE] or a finish reason
    failed: str = ""
    told: str = ""
    _rest: bytes = b""

    @property
    def tokens(self) -> int:
        """Of the answer: as the server counted them, or else one an event."""
        counted = self.usage.completion_tokens if self.usage is not None else 0
        return counted or len(self.stamps_s)

    def fail(self, kind: str, told: str = "") -> None:
        """Note what went wrong first."""
        if not self.failed:
            self.failed, self.told = kind, told[:MAX_TOLD]

    def feed(self, body: bytes, now_s: float) -> None:
        """Take in bytes of the stream that arrived at `now_s`."""
        lines = (self._rest + body if self._rest else body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(DATA):
                self._data(line[len(DATA) :].strip(), now_s)

    def finish(self, now_s: float) -> None:
        """The body is complete."""
        self.feed(b"\n", now_s)
        if not self.ended:
            self.fail("broken off", f"the stream ended after {len(self.stamps_s)} events")
        elif not self.stamps_s:
            self.fail("empty", "the stream had no token")

    def _data(self, content: bytes, now_s: float) -> None:
        if content == DONE:
            self.ended = True
            return
        try:
            event = _event.decode(content)
        except msgspec.DecodeError:
            self.fail("malformed event", content.decode(errors="replace"))
            return
        if event.error is not None:
            self.fail(*error_of(event.error, "error in the stream"))
        if event.usage is not None and event.usage.completion_tokens:
            self.usage = event.usage
        for choice in event.choices:
            self.ended = self.ended or choice.finish_reason is not None
            if choice.opens:
                continue
            self.last_s = now_s
            if choice.finish_reason is None or choice.says or not self.stamps_s:
                self.stamps_s.append(now_s)


def error_of(error: Any, otherwise: str) -> tuple[str, str]:
    """A name that can be counted, and the words, of OpenAI's error object or of whatever is in its place."""
    if isinstance(error, dict):
        named = error.get("code") or error.get("type")
        return (str(named) if named else otherwise, str(error.get("message", error)))
    return otherwise, str(error)
