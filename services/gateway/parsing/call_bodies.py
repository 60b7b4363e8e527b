"""Reads calls as models write them behind a call's marker, and gives their names and arguments to a `PartList`.

    json            {"name": …, "arguments": {…}}, also several: in a list, or with semicolons between
    named           NAME separator {…}, with a fixed text before the name if it has one
    json-or-named   whichever it is
    tagged, gemma   see `tagged_calls`

Arguments that are JSON pass as they are written, so they stream without delay. Until a call has its name nothing has
been given away, and a reader may still take the text for something else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from services.gateway.parsing.answer_format import CallRegion
from services.gateway.parsing.answer_parts import PartList, ToolTypes
from services.gateway.parsing.text_cursor import LiteralSet, NotACall, Reading, TextCursor

NAME = re.compile(r"[\w.\-]{1,128}")
# Most characters before a name ends.
MAX_HEAD = 512


@dataclass(frozen=True, slots=True)
class CallSource:
    """What a reader of calls works with. `marks` are characters that no call contains, see `markers`.

    With `only_known`, a call of a tool that the request does not have is none.
    """

    cursor: TextCursor
    parts: PartList
    region: CallRegion
    marks: LiteralSet
    tools: ToolTypes
    only_known: bool = False

    def begin_call(self, name: str) -> None:
        """A call begins: from here on it cannot be anything else. Raises NotACall if `name` is no name."""
        if not NAME.fullmatch(name) or (self.only_known and name not in self.tools):
            raise NotACall
        self.parts.begin_call(name, not self.only_known)
        self.cursor.release()


def read_json_calls(source: CallSource) -> Reading[None]:
    """Read calls that are JSON objects. Raises NotACall."""
    cursor = source.cursor
    in_list = (yield from cursor.skip_space()) == "["
    cursor.at += in_list
    while True:
        yield from _read_call_object(source)
        char = yield from cursor.skip_space()
        if char == "]" and in_list:
            cursor.at += 1
            return
        if not char or char not in ",;":
            return
        cursor.at += 1


def _read_call_object(source: CallSource) -> Reading[None]:
    """Read one object, with its keys in any order, or another one around it as `{"function": {…}}`."""
    cursor, parts = source.cursor, source.parts
    early: list[str] | None = None
    depth, is_begun = 0, False
    while True:
        char = yield from cursor.skip_space()
        cursor.at += 1
        if char == "{" and not depth:
            depth = 1
        elif char == "}" and depth:
            depth -= 1
            if not depth:
                break
        elif char == '"' and depth:
            cursor.at -= 1
            key = yield from _read_string(source)
            if (yield from cursor.skip_space()) != ":":
                raise NotACall
            cursor.at += 1
            char = yield from cursor.skip_space()
            if key == "function" and char == "{":
                cursor.at += 1
                depth += 1
            elif key in ("name", "function") and not is_begun:
                source.begin_call((yield from _read_string(source)))
                is_begun = True
                parts.add_arguments("".join(early or ()))
            elif key in ("arguments", "parameters"):
                early = [] if not is_begun else None
                yield from _read_arguments(source, early)
            else:
                yield from _read_raw(source)
        elif char != "," or not depth:
            cursor.at -= 1
            raise NotACall
    if not is_begun:
        raise NotACall
    parts.end_call()


def _read_raw(source: CallSource) -> Reading[str]:
    """One JSON value as it is written. Raises NotACall if it does not end."""
    pieces: list[str] = []
    if not (yield from source.cursor.read_value(source.marks, pieces.append)):
        raise NotACall
    return "".join(pieces)


def _read_string(source: CallSource) -> Reading[str]:
    """One JSON string. Raises NotACall."""
    try:
        value = json.loads((yield from _read_raw(source)))
        # A JSON string may name half a character, which no text can have.
        str(value).encode()
    except ValueError as error:
        raise NotACall from error
    if not isinstance(value, str):
        raise NotACall
    return value


def _read_arguments(source: CallSource, early: list[str] | None = None) -> Reading[None]:
    """Read the arguments of a call, which may be JSON within a JSON string. They go to `early` if it is given."""
    add_piece = source.parts.add_arguments if early is None else early.append
    char = yield from source.cursor.skip_space()
    if char == '"':
        add_piece((yield from _read_string(source)))
    elif char == "{":
        if not (yield from source.cursor.read_value(source.marks, add_piece)):
            raise NotACall
    elif char and char in "n[-0123456789tf":
        raw = yield from _read_raw(source)
        add_piece("" if raw == "null" else raw)


def read_named_call(source: CallSource) -> Reading[None]:
    """Read a name, a separator, and the arguments. Raises NotACall."""
    cursor, options = source.cursor, source.region.options
    prefix, call_id = options.get("prefix", ""), options.get("id")
    if not (yield from cursor.skip_literal(prefix)):
        raise NotACall
    separators = options["separator"]
    heads = LiteralSet([*separators, *([call_id] if call_id else ()), *source.marks.literals])
    name, separator = yield from cursor.read_until(heads, MAX_HEAD)
    if call_id and separator == call_id:
        _, separator = yield from cursor.read_until(LiteralSet([*separators]), MAX_HEAD)
    if separator not in separators:
        cursor.at -= len(separator)
        raise NotACall
    cursor.at -= separator == "{"
    source.begin_call(name.strip())
    yield from _read_arguments(source)
    source.parts.end_call()
    yield from cursor.skip_literal(options.get("suffix", ""))


def read_json_or_named(source: CallSource) -> Reading[None]:
    """Read a list of calls, or one that begins with its name. Raises NotACall."""
    char = yield from source.cursor.skip_space()
    if char and char in "[{":
        yield from read_json_calls(source)
    else:
        yield from read_named_call(source)
