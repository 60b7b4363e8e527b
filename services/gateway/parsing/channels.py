"""Reads answers that consist of messages with headers, as those of gpt-oss (the format "harmony").

    <|channel|>analysis<|message|> a thought <|end|><|start|>assistant<|channel|>final<|message|> the answer

A message to `functions.NAME` is a call; one in the channels `final` and `commentary` is for the client; others are
thoughts.
"""

from __future__ import annotations

import re

from services.gateway.parsing.answer_format import CHANNEL, MESSAGE, MESSAGE_ENDS, START
from services.gateway.parsing.reading_state import ReadingState
from services.gateway.parsing.text_cursor import LiteralSet, NotACall, Reading

RECIPIENT = re.compile(r"\bto=([^\s<]+)")
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
TOOL_PREFIX = "functions."
# Most characters of a header.
MAX_HEADER = 512


def read_channels(state: ReadingState) -> Reading[None]:
    """Read an answer behind the role of its first message."""
    cursor, mark = state.cursor, state.markup.markers.mark_text
    channel, start = mark(CHANNEL), mark(START)
    begins, bodies = LiteralSet([channel, start]), LiteralSet([mark(MESSAGE)])
    ends = LiteralSet([*map(mark, MESSAGE_ENDS), start, channel])
    state.takes_content = False
    while char := (yield from cursor.read_char()):
        cursor.keep()
        begin = ""
        for literal in begins.literals:
            if not begin and (yield from cursor.skip_literal(literal)):
                begin = literal
        header: str | None = None
        # The first call may name its tool before its channel.
        if begin or char == " ":
            try:
                text, body = yield from cursor.read_until(bodies, MAX_HEADER)
                if begin and not body:
                    # The answer was cut within a header.
                    cursor.release()
                    return
                header = begin + text if body else None
            except NotACall:
                header = None
        if header is not None:
            cursor.release()
            yield from _read_message(state, header, ends)
        else:
            cursor.go_back(len(begin))
            state.add_text(begin)
            yield from _read_plain(state, ends)


def _read_plain(state: ReadingState, end_literals: LiteralSet) -> Reading[None]:
    """Read text without a header, which is for the client."""
    state.takes_content = True
    while piece := (yield from state.cursor.read_piece(end_literals)):
        state.add_text(piece)
    _skip_end(state, end_literals)


def _read_message(state: ReadingState, header: str, end_literals: LiteralSet) -> Reading[None]:
    """Read the body of a message."""
    cursor, parts, unmark = state.cursor, state.parts, state.markup.markers.unmark_text
    recipient, channels = RECIPIENT.search(unmark(header)), CHANNEL_NAME.findall(unmark(header))
    target = recipient[1] if recipient else ""
    name = target.removeprefix(TOOL_PREFIX)
    is_call = state.markup.calls is not None and (name != target or name in state.tools)
    is_thought = not is_call and (bool(target) or channels[-1:] not in ([], ["final"], ["commentary"]))
    state.takes_content, state.thinking = not is_call and not is_thought, is_thought
    if is_call:
        parts.begin_call(name)
    elif is_thought:
        parts.begin_thought()
    parts.end_markup()
    while piece := (yield from cursor.read_piece(end_literals)):
        if is_call:
            parts.add_arguments(piece)
        else:
            state.add_text(piece, is_thought)
    if is_call:
        parts.end_call()
    _skip_end(state, end_literals)


def _skip_end(state: ReadingState, end_literals: LiteralSet) -> None:
    """Skip what ends a message, but not the beginning of the next one."""
    end = state.cursor.follows(end_literals)
    state.cursor.at += len(end) * (end in end_literals.literals[: len(MESSAGE_ENDS)])
    state.takes_content = state.thinking = False
