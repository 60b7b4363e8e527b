"""The format of a model's answers, as data: where thoughts and calls begin and end, and how calls are written.

The data has the shape of transformers' `response_template`. What `content` of `tool_calls` may be is listed in
`call_bodies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# The marks of gpt-oss: header, body, and what ends a message.
CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")


@dataclass(frozen=True)
class Region:
    """A part of an answer between an opening and a closing literal."""

    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallRegion(Region):
    """Calls of tools. `content` names how they are written, `options` says it more exactly.

    `wraps` are literals around several calls, which mean nothing. If a region is `bare`, an answer that begins with a
    JSON object may be a call without an opening literal. `bare_opens` are the first literals within a region that may
    stand without its opening one.
    """

    content: str = "json"
    options: Mapping[str, Any] = field(default_factory=dict)
    wraps: tuple[str, ...] = ()
    bare: bool = False
    bare_opens: tuple[str, ...] = ()
    # The name of how a grammar writes them (`call_writing`); empty: none does.
    writing: str = ""


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a model's answers.

    `anchors` end what the chat template writes before an answer. With `channels` an answer consists of messages with
    headers, as that of gpt-oss, and has no other regions. `short_ids`: the ids of calls are nine letters and digits,
    which the template requires.
    """

    reasoning: Region | None = None
    calls: CallRegion | None = None
    anchors: tuple[str, ...] = ()
    channels: bool = False
    short_ids: bool = False
    # Parts of literals that may be tokens by themselves.
    marks: tuple[str, ...] = ()

    def without_calls(self) -> AnswerFormat:
        """The format of answers to requests without tools: what looks like a call is text."""
        return replace(self, calls=None)

    @property
    def literals(self) -> tuple[str, ...]:
        """Every literal of the format."""
        regions = [region for region in (self.reasoning, self.calls) if region is not None]
        found = [literal for region in regions for literal in (*region.opens, *region.closes)]
        if self.calls is not None:
            found += [*self.calls.wraps, *self.calls.options.get("marks", ())]
        found += self.marks
        if self.channels:
            found += [CHANNEL, MESSAGE, START, *MESSAGE_ENDS, "<|constrain|>"]
        return tuple(dict.fromkeys(found))


def load_format(template: Mapping[str, Any]) -> AnswerFormat:
    """The format that a template in the form of `families` describes."""
    fields = template.get("fields", {})
    reasoning, calls = fields.get("reasoning"), fields.get("tool_calls")
    return AnswerFormat(
        None if reasoning is None else Region(_as_tuple(reasoning["open"]), _as_tuple(reasoning["close"])),
        None
        if calls is None
        else CallRegion(
            _as_tuple(calls["open"]),
            _as_tuple(calls.get("close", ())),
            calls["content"],
            calls.get("content_args", {}),
            _as_tuple(calls.get("wrap", ())),
            calls.get("bare", False),
            _as_tuple(calls.get("bare_open", ())),
            calls.get("writing", ""),
        ),
        _as_tuple(template.get("start_anchor", ())),
        template.get("channels", False),
        template.get("short_ids", False),
        _as_tuple((reasoning or {}).get("marks", ())),
    )


def _as_tuple(literals: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    return (literals,) if isinstance(literals, str) else tuple(literals)
