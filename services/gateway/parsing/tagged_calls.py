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
    inner = LiteralSet([key_open, *([end] if end else ())])
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
        if source.only_known and not (yield from cursor.leads_to(inner, or_end=False)):
            # A text that only names the tool.
            raise NotACall
        source.begin_call(name.strip())
        is_first, is_empty = False, True
        if closer == options.get("empty"):
            # A tag that is its own end.
            parts.end_call()
            continue
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
    is_text, trim, held, end = types == ("string",), options.get("trim", ""), "", ""
    if is_text:
        parts.add_arguments('"')
    if trim:
        yield from cursor.skip_literal(trim)
    ends = LiteralSet([value_close, options["key"][0], *_outer_ends(source)])
    while True:
        piece = yield from cursor.read_piece(ends)
        if not piece:
            end = cursor.follows(ends)
            if not end or (yield from _ends_value(source, tool, end, held)):
                break
            cursor.at += len(end)
            piece = end
        held += parts.unmark(piece)
        if is_text:
            # A line break at the end belongs to the tag.
            most = len(held) - (len(trim) if trim and held.endswith(trim) else 0)
            parts.add_arguments(write_json(held[:most])[1:-1])
            held = held[most:]
    if not end:
        raise NotACall
    cursor.at += len(end) * (end == value_close)
    parts.add_arguments('"' if is_text else write_value(held.removesuffix(trim), types))


def _outer_ends(source: CallSource) -> list[str]:
    """What ends a call, and the region around it."""
    end = source.region.options.get("end")
    return [*([end] if end else ()), *source.region.closes]


def _ends_value(source: CallSource, tool: str, found: str, before: str) -> Reading[bool]:
    """Whether a tag that stands in a value ends it; else it is a part of the text.

    That follows from what comes behind it. Models forget to close a value, too: then what is around it ends it.
    """
    cursor, region, options = source.cursor, source.region, source.region.options
    key_open, name_open = options["key"][0], options["name"][0]
    if found == key_open:
        # On a line of its own, with a name that the tool has.
        if "string" in options or not before.endswith(options.get("trim", "")):
            return False
        keys = LiteralSet([f"{key_open}{name}{options['key'][1]}" for name in source.tools.get(tool, ())])
        return (yield from cursor.leads_to(keys, or_end=False))
    if found in region.closes:
        return (yield from cursor.leads_to(LiteralSet(region.opens), len(found)))
    behind = [*region.closes, *([name_open] if name_open else ())]
    if found == options["value"][1]:
        behind = [key_open, *_outer_ends(source)]
    return (yield from cursor.leads_to(LiteralSet(behind), len(found)))


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
    if raw.strip() == "null" and "null" in types:
        return "null"
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
    quotes = LiteralSet([quote])
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
