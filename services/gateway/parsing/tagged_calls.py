"""Reads calls whose arguments are no JSON, and writes them as JSON.

    tagged   <function=NAME> <parameter=KEY> VALUE </parameter> … </function>, with the tags that the format names
    gemma    call:NAME{key:<|"|>text<|"|>,other:3}

Texts are written while they arrive where the tool's schema says that they are strings; other values once they are
complete, by the types of the schema.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from services.gateway.parsing.call_bodies import MAX_HEAD, CallSource
from services.gateway.parsing.text_cursor import LiteralSet, NotACall, Reading

# Most characters between two delimiters of Gemma's form: a number, a name, or text that should have been quoted.
MAX_BARE = 1 << 16
LONE = re.compile("[\ud800-\udfff]")


def read_tagged_calls(source: CallSource) -> Reading[None]:
    """Read calls whose parameters are in tags of their own. Raises NotACall."""
    cursor, parts, options = source.cursor, source.parts, source.region.options
    name_open, name_closes = options["name"]
    key_open, end = options["key"][0], options.get("end")
    heads = LiteralSet([*name_closes, *(mark for mark in source.marks.literals if mark not in name_closes)])
    is_first = True
    while is_first or end:
        yield from cursor.skip_space()
        if not (yield from cursor.skip_literal(name_open)):
            if is_first:
                raise NotACall
            return
        name, closer = yield from cursor.read_until(heads, MAX_HEAD)
        if closer not in name_closes:
            raise NotACall
        if closer == key_open or closer in source.region.closes:
            cursor.at -= len(closer)
        source.begin_call(name.strip())
        is_first, is_empty = False, True
        while True:
            yield from cursor.skip_space()
            if not (yield from cursor.skip_literal(key_open)):
                break
            parts.add_arguments("{" if is_empty else ", ")
            is_empty = False
            yield from _read_parameter(source, name.strip())
        parts.add_arguments("{}" if is_empty else "}")
        parts.end_call()
        if end and not (yield from cursor.skip_literal(end)):
            return


def _read_parameter(source: CallSource, tool: str) -> Reading[None]:
    """Read a parameter behind its opening tag. Raises NotACall if it does not end."""
    cursor, parts, options = source.cursor, source.parts, source.region.options
    value_open, value_close = options["value"]
    key, closer = yield from cursor.read_until(LiteralSet([options["key"][1]]), MAX_HEAD)
    if not closer:
        raise NotACall
    types: tuple[str, ...] = ()
    if "string" in options and options["string"] in key:
        key, _, flag = key.partition(options["string"])
        types = ("string",) if flag == "true" else ()
    types = types or source.tools.get(tool, {}).get(key.strip(), ())
    if value_open:
        yield from cursor.skip_space()
        if not (yield from cursor.skip_literal(value_open)):
            raise NotACall
    parts.add_arguments(write_json(parts.unmark(key.strip())) + ": ")
    is_text, trim, held = types == ("string",), options.get("trim", ""), ""
    if is_text:
        parts.add_arguments('"')
    if trim:
        yield from cursor.skip_literal(trim)
    ends = LiteralSet([value_close, *(mark for mark in source.marks.literals if mark != value_close)])
    while piece := (yield from cursor.read_piece(ends)):
        held += parts.unmark(piece)
        if is_text:
            # A line break at the end belongs to the tag.
            most = len(held) - (len(trim) if trim and held.endswith(trim) else 0)
            parts.add_arguments(write_json(held[:most])[1:-1])
            held = held[most:]
    is_closed = yield from cursor.skip_literal(value_close)
    if is_text:
        parts.add_arguments('"' if is_closed else "")
    else:
        parts.add_arguments(write_value(held.removesuffix(trim), types) if is_closed else "")
    if not is_closed:
        raise NotACall


def write_value(raw: str, types: tuple[str, ...]) -> str:
    """The JSON of a value that is written as text, by the types that its schema allows; without types, any JSON."""
    try:
        value: Any = json.loads(raw)
    except (ValueError, RecursionError):
        value = {"true": True, "false": False, "none": None}.get(raw.strip().lower(), raw)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": is_number and value == math.floor(value),
        "number": is_number,
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
    }
    for name in types or fits:
        if name == "string":
            break
        if fits.get(name):
            return write_json(int(value) if name == "integer" else value)
    return write_json(raw)


def write_json(value: Any) -> str:
    """A value as JSON. Half characters, which a JSON text may name and no text can have, stay escapes."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if LONE.search(text) else text


def read_gemma_call(source: CallSource) -> Reading[None]:
    """Read a call in Gemma's own form of JSON: keys without quotes, texts between special tokens. Raises NotACall."""
    cursor, parts = source.cursor, source.parts
    quote = source.region.options["quote"]
    if not (yield from cursor.skip_literal("call:")):
        raise NotACall
    name, closer = yield from cursor.read_until(LiteralSet(["{", *source.marks.literals]), MAX_HEAD)
    if closer != "{":
        raise NotACall
    source.begin_call(name.strip())
    parts.add_arguments("{")
    delimiters = LiteralSet([*"{}[]:,", quote, *(one for one in source.marks.literals if one != quote)])
    quotes = LiteralSet([quote, *source.marks.literals])
    depth = 1
    while depth:
        word, found = yield from cursor.read_until(delimiters, MAX_BARE)
        word = parts.unmark(word.strip())
        if word:
            parts.add_arguments(_write_word(word, is_key=found == ":"))
        if found == quote:
            parts.add_arguments('"')
            while piece := (yield from cursor.read_piece(quotes)):
                parts.add_arguments(write_json(parts.unmark(piece))[1:-1])
            if not (yield from cursor.skip_literal(quote)):
                raise NotACall
            parts.add_arguments('"')
        elif not found or found not in "{}[]:,":
            cursor.at -= len(found)
            raise NotACall
        else:
            depth += (found in "{[") - (found in "}]")
            parts.add_arguments(found)
    parts.end_call()


def _write_word(word: str, is_key: bool) -> str:
    """What stands between delimiters as JSON: a key, a number, or a text that may be quoted."""
    try:
        if isinstance(json.loads(word), str):
            return word
    except (ValueError, RecursionError):
        pass
    return write_json(word) if is_key else write_value(word, ())
