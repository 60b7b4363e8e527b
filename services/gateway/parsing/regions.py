"""Reads answers whose thoughts and calls are regions within their text."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.parsing.call_bodies import (
    CallSource,
    read_json_calls,
    read_json_or_named,
    read_named_call,
)
from services.gateway.parsing.reading_state import ReadingState
from services.gateway.parsing.tagged_calls import read_gemma_call, read_tagged_calls
from services.gateway.parsing.text_cursor import NotACall, Reading

CALL_READERS: dict[str, Callable[[CallSource], Reading[None]]] = {
    "json": read_json_calls,
    "named": read_named_call,
    "json-or-named": read_json_or_named,
    "tagged": read_tagged_calls,
    "gemma": read_gemma_call,
}


def read_regions(state: ReadingState) -> Reading[None]:
    """Read an answer to its end."""
    markup, cursor = state.markup, state.cursor
    if markup.calls is not None and markup.calls.bare:
        cursor.keep()
        char = yield from cursor.skip_space()
        cursor.go_back(0)
        if char == "{":
            yield from _read_calls(state, "")
    while True:
        if piece := (yield from cursor.read_piece(markup.openers)):
            state.add_text(piece)
            continue
        opener = cursor.follows(markup.openers)
        if not opener:
            return
        if opener in markup.reasoning.opens:
            cursor.at += len(opener)
            yield from _read_thought(state)
        elif markup.calls is not None and opener in (*markup.calls.opens, *markup.calls.bare_opens):
            yield from _read_calls(state, opener)
        else:
            cursor.at += len(opener)
            state.parts.end_markup()


def _read_thought(state: ReadingState) -> Reading[None]:
    """Read a thought behind its opening, up to its end or to a call."""
    markup, cursor = state.markup, state.cursor
    state.thinking, state.takes_content = True, False
    state.parts.begin_thought()
    while True:
        if piece := (yield from cursor.read_piece(markup.thought_ends)):
            state.add_text(piece, in_thought=True)
            continue
        end = cursor.follows(markup.thought_ends)
        if not end or markup.calls is None or end not in markup.calls.opens:
            cursor.at += len(end)
            break
        if (yield from _read_calls(state, end, in_thought=True)):
            break
    state.thinking, state.takes_content = False, True
    state.parts.end_markup()


def _read_calls(state: ReadingState, opener: str, in_thought: bool = False) -> Reading[bool]:
    """Read calls behind `opener`, and what ends them. Returns whether there are any; if not, the opener is text.

    Without an opener of their own they are calls only of tools that the request has.
    """
    markup, cursor, before = state.markup, state.cursor, state.parts.num_calls
    assert markup.calls is not None
    is_marked = opener in markup.calls.opens
    cursor.keep()
    cursor.at += len(opener) * is_marked
    state.takes_content = False
    if in_thought:
        state.thinking, state.first_doubtful = False, before
    source = CallSource(cursor, state.parts, markup.calls, markup.marks, state.tools, not is_marked)
    try:
        yield from CALL_READERS[markup.calls.content](source)
        found = True
    except NotACall:
        found = state.parts.num_calls > before
    if found:
        cursor.release()
        state.parts.end_markup()
        yield from _skip_end(state)
    else:
        cursor.go_back(len(opener))
        if cursor.is_over and opener in markup.marks.literals:
            # The answer was cut before the call's name.
            state.parts.end_markup()
        else:
            state.add_text(opener, in_thought)
    state.takes_content, state.thinking, state.first_doubtful = not in_thought, in_thought and not found, None
    return found


def _skip_end(state: ReadingState) -> Reading[None]:
    """Skip the end of a region of calls, and brackets too many before it."""
    cursor, closes = state.cursor, state.markup.call_closes.literals
    while (char := (yield from cursor.skip_space())) and char in "}]" and closes:
        cursor.at += 1
    for literal in closes:
        if (yield from cursor.skip_literal(literal)):
            return
