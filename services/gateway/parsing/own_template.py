"""Reads a checkpoint's own `response_template` (transformers' form) as a format.

Patterns are taken apart into literals, captures and whitespace. What else a regular expression can say is refused when
the gateway starts, since it might not compile, or run for ever on some answer.
"""

from __future__ import annotations

import re
from typing import Any

from diptych.errors import ModelError
from services.gateway.parsing.answer_format import AnswerFormat, load_format

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
TEMPLATE_FIELDS = frozenset({*REASONING_FIELDS, "tool_calls", "content"})
# Whitespace, a named group of one repeated character, or a literal character.
_PART = re.compile(
    r"(?P<space>(?:\\s|\\n)[*+?]?)"
    r"|\(\?P<(?P<capture>\w+)>(?:\[(?:\\.|[^\]\\])*\]|\\\w|\.)[*+]\??\)"
    r"|\\(?P<escaped>[^\w\s])|(?P<plain>[^\\()\[\]{}*+?.|^$])"
)


def convert_template(template: Any, source: str) -> AnswerFormat:
    """The format of a `response_template`; `source` says where it is from.

    Raises:
        ModelError: it is no template, or says what cannot be read here.
    """
    try:
        return _convert(template)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"the response_template of {source} cannot be used",
            why[:200],
            "choose formats with --tool-call-parser and --reasoning-parser",
        ) from error


def _convert(template: Any) -> AnswerFormat:
    fields: dict[str, Any] = template["fields"]
    if strange := sorted(fields.keys() - TEMPLATE_FIELDS):
        raise ValueError(f"its field {strange[0]!r} is not known")
    converted: dict[str, Any] = {}
    for name in REASONING_FIELDS:
        if name in fields:
            opens, closes = _literals(fields[name], "open"), _literals(fields[name], "close")
            converted["reasoning"] = {"open": opens, "close": closes}
    if "tool_calls" in fields:
        converted["tool_calls"] = _convert_calls(fields["tool_calls"])
    anchor = _literals(template, "start_anchor")
    return load_format({"fields": converted, "start_anchor": anchor})


def _convert_calls(calls: dict[str, Any]) -> dict[str, Any]:
    """The calls of a template in the form of `families`."""
    content, options = calls.get("content", "text"), calls.get("content_args", {})
    parts = [part for part in _open_parts(calls) if part[0] != "space"]
    texts, captures = (
        [text for kind, text in parts if kind == "text"],
        [n for k, n in parts if k == "capture"],
    )
    if captures not in ([], ["name"]):
        raise ValueError(f"it captures {', '.join(captures)} where a call begins")
    closes = [text for kind, text in _close_parts(calls) if kind == "text"]
    if content == "xml-inline" and captures:
        return {"open": texts[0], "close": closes[-1], "content": "tagged"} | {
            "content_args": _tag_options(texts, closes, options)
        }
    if content != "json":
        raise ValueError(f"its calls are written as {content!r}")
    if not captures:
        _check_keys(calls.get("transform"))
        return {"open": _literals(calls, "open"), "close": _literals(calls, "close"), "content": "json"}
    if options.get("string_delims"):
        [[quote, _]] = options["string_delims"]
        opener = texts[0].removesuffix("call:")
        return {
            "open": opener,
            "close": closes,
            "content": "gemma",
            "content_args": {"quote": quote, "marks": [quote]},
        }
    separator = texts[1:] or ["{"]
    return {"open": texts[0], "close": closes, "content": "named", "content_args": {"separator": separator}}


def _tag_options(texts: list[str], closes: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """The options of calls in tags: `texts` are around the name, `closes` end the call."""
    parts = _split_pattern(options["tag_pattern"])
    around = [text for kind, text in parts if kind == "text"]
    if [name for kind, name in parts if kind == "capture"] != ["key", "value"] or len(around) != 3:
        raise ValueError(f"its tag_pattern {options['tag_pattern']!r} is not a key and a value in tags")
    made: dict[str, Any] = {
        "name": [texts[1] if len(texts) > 2 else "", [texts[-1]]],
        "key": around[:2],
        "value": ["", around[2]],
        "trim": "\n",
    }
    return made | ({"end": closes[0]} if len(closes) > 1 else {})


def _check_keys(transform: Any) -> None:
    """Raise ValueError if calls in JSON have other keys than are read here."""
    function = transform.get("function", transform) if isinstance(transform, dict) else transform
    if isinstance(function, str):
        if function != "{content}":
            raise ValueError(f"its transform is {function!r}")
        return
    for name, words in {"name": ("name", "function"), "arguments": ("arguments", "parameters")}.items():
        key = str(function[name]).strip("{}").removeprefix("content.")
        if key not in words:
            raise ValueError(f"its calls have the key {key!r}")


def _open_parts(field: dict[str, Any]) -> list[tuple[str, str]]:
    if "open" in field:
        return [("text", field["open"])]
    return _split_pattern(field["open_pattern"])


def _close_parts(field: dict[str, Any]) -> list[tuple[str, str]]:
    if "close_pattern" in field:
        return _split_pattern(field["close_pattern"])
    return [("text", literal) for literal in _literals(field, "close")]


def _literals(field: dict[str, Any], name: str) -> list[str]:
    """The literals of an anchor of a field, however it is given."""
    if name in field:
        given = field[name]
        return [given] if isinstance(given, str) else [str(literal) for literal in given]
    if f"{name}_pattern" not in field:
        return []
    parts = [part for part in _split_pattern(field[f"{name}_pattern"]) if part[0] != "space"]
    if len(parts) != 1 or parts[0][0] != "text":
        raise ValueError(f"its {name}_pattern {field[f'{name}_pattern']!r} is not one literal")
    return [parts[0][1]]


def _split_pattern(pattern: str) -> list[tuple[str, str]]:
    """A pattern as ("text", …), ("capture", name) and ("space", ""). Raises ValueError if it has anything else."""
    parts: list[tuple[str, str]] = []
    at = 0
    while at < len(pattern):
        found = _PART.match(pattern, at)
        if found is None:
            raise ValueError(f"its pattern {pattern!r} has more than literals, captures and whitespace")
        at = found.end()
        if found["space"]:
            parts.append(("space", ""))
        elif found["capture"]:
            parts.append(("capture", found["capture"]))
        else:
            char = found["escaped"] or found["plain"]
            if parts and parts[-1][0] == "text":
                char = parts.pop()[1] + char
            parts.append(("text", char))
    return parts
