"""How the value of a setting is read from text or YAML, with units, and which values an editor takes for right.

Each function here makes a `ValueKind`, which is part of the annotation of a setting's field: pydantic calls `parse`
before its own check of the type, and takes `schema` for its JSON Schema.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import CoreSchema, core_schema

from diptych.keys.key_text import MIN_KEY_CHARS, check_key_text

Parse = Callable[[Any], Any]
JsonSchema = dict[str, Any]

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

# vLLM's spelling: a lower-case letter counts in thousands, an upper-case one in 1024s; the long forms are unambiguous.
SCALES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
BYTE_SCALES = SCALES | {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTE_SCALES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SECONDS_BY_UNIT = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
MS_BY_UNIT = {unit: scale * 1e3 for unit, scale in SECONDS_BY_UNIT.items() if unit} | {"": 1.0}
URL_PATTERN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[^\s/:@\[\]]+)(:[0-9]{1,5})?(/\S*)?")
PATH_PATTERN = re.compile(r"(/[A-Za-z0-9._~-]+)+")
NUMBER_PATTERN = re.compile(r"\s*([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")

# JSON Schema patterns that accept the same values.
LIST_ENTRY = r"[^,]*[^,\s][^,]*"
TEXT_SCHEMA: JsonSchema = {"type": ["string", "number"], "pattern": r"\S"}
KEY_CHAR = r"[^,\x00-\x1f\x7f]"
KEY_EDGE = r"[^,\s\x00-\x1f\x7f]"
SECRET_SCHEMA: JsonSchema = {
    "type": "string",
    "pattern": rf"^\s*{KEY_EDGE}{KEY_CHAR}{{{MIN_KEY_CHARS - 2},}}{KEY_EDGE}\s*$",
}


@dataclass(frozen=True, slots=True, eq=False)
class ValueKind:
    """How a value is read from text or YAML. `parse` raises ValueError with the reason."""

    metavar: str
    parse: Parse
    schema: JsonSchema  # JSON Schema of what a YAML file may hold
    # Whether the setting may be given several times, or as a list.
    many: bool = False
    # Whether the command line has `--name` and `--no-name`.
    switch: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        """What pydantic asks of a part of an annotation: `parse`, and then its own check of the type."""
        return core_schema.no_info_before_validator_function(self.parse, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: object) -> JsonSchema:
        """What pydantic asks for the JSON Schema."""
        return dict(self.schema)


def format_value(value: Any) -> str:
    """A value as a person would write it in YAML or on the command line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(one) for one in value)
    return str(value)


def show_value(value: Any) -> str:
    """A wrong value in a message: its `repr`, cut short."""
    short = reprlib.Repr()
    short.maxlevel, short.maxlist, short.maxdict = 2, 3, 3
    short.maxstring = short.maxother = 120
    return short.repr(value)


def _parse_number(value: Any, scales: Mapping[str, float], what: str) -> float:
    if isinstance(value, bool):
        raise ValueError(f"is not {what}")
    if isinstance(value, int | float):
        return value
    match = NUMBER_PATTERN.fullmatch(value) if isinstance(value, str) else None
    if not match or match[2] not in scales:
        raise ValueError(f"is not {what}")
    digits = match[1].replace("_", "")
    return (float(digits) if "." in digits else int(digits)) * scales[match[2]]


def _number_schema(
    number_schema: JsonSchema, scales: Mapping[str, float], negative: bool = False
) -> JsonSchema:
    """A number, or a text of a number with one of these units; the schema cannot bound the number in a text."""
    sign = "[+-]?" if negative else r"\+?"
    units = "|".join(unit for unit in scales if unit)
    text = rf"^\s*{sign}[0-9][0-9_]*(\.[0-9]+)?\s*({units})?\s*$"
    return {"anyOf": [number_schema, {"type": "string", "pattern": text}]}


def _parse_whole(value: Any, scales: dict[str, int], what: str, least: int, most: int | None) -> int:
    number = _parse_number(value, scales, what)
    # Infinity fails this test too.
    if number % 1 != 0:
        raise ValueError(f"is not {what}")
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"is out of range: it must be {bounds}")
    return int(number)


def _whole_schema(scales: dict[str, int], least: int, most: int | None) -> JsonSchema:
    bounds = {"minimum": least} | ({} if most is None else {"maximum": most})
    return _number_schema({"type": "integer"} | bounds, scales, negative=least <= 0)


def whole_number(least: int = 0, most: int | None = None, metavar: str = "N") -> ValueKind:
    """A whole number; `2k` is 2,000 and `2K` 2,048, as in vLLM."""
    return ValueKind(
        metavar,
        lambda value: _parse_whole(value, SCALES, "a whole number", least, most),
        _whole_schema(SCALES, least, most),
    )


def byte_size(least: int = 1) -> ValueKind:
    """A number of bytes: `512MiB`, `8GiB`, `1.5GB` or plain bytes."""
    return ValueKind(
        "SIZE",
        lambda value: _parse_whole(value, BYTE_SCALES, "a size such as 512MiB", least, None),
        _whole_schema(BYTE_SCALES, least, None),
    )


def share(with_ends: bool = False, with_one: bool = False) -> ValueKind:
    """A share between 0 and 1: `0.99`, or `99%`. Both ends are excluded, unless `with_ends`; `with_one` allows 1."""

    def read(value: Any) -> float:
        percent = isinstance(value, str) and value.strip().endswith("%")
        number = _parse_number(value.strip()[:-1] if percent else value, {"": 1.0}, "a share such as 0.99")
        found = float(number) / (100 if percent else 1)
        # No comparison holds for NaN, so these say what is right, not what is wrong.
        above = found >= 0 if with_ends else found > 0
        below = found <= 1 if with_one or with_ends else found < 1
        if not (above and below):
            ends = "both included" if with_ends else "1 included" if with_one else "both excluded"
            raise ValueError(f"is out of range: it must be between 0 and 1, {ends}")
        return found

    bounds = {"minimum" if with_ends else "exclusiveMinimum": 0}
    bounds |= {"maximum" if with_ends or with_one else "exclusiveMaximum": 1}
    percentage = {"type": "string", "pattern": r"^\s*\+?[0-9][0-9_]*(\.[0-9]+)?\s*%?\s*$"}
    return ValueKind(
        "SHARE",
        read,
        {"anyOf": [{"type": "number", **bounds}, percentage]},
    )


def duration_s(least_s: float = 0.0) -> ValueKind:
    """A duration above 0, and not below `least_s`: `30s`, `500ms`, `2m`, `1h`, or plain seconds."""

    def read(value: Any) -> float:
        seconds = _parse_duration(value, SECONDS_BY_UNIT, "a duration such as 30s or 2m")
        if seconds < least_s:
            raise ValueError(f"is out of range: it must be at least {least_s:g} s")
        return seconds

    bound = {"minimum": least_s} if least_s else {"exclusiveMinimum": 0}
    return ValueKind("TIME", read, _number_schema({"type": "number"} | bound, SECONDS_BY_UNIT))


def duration_ms() -> ValueKind:
    """A duration above 0 in milliseconds when it has no unit; `0.5s` works too."""
    return ValueKind(
        "MS",
        lambda value: _parse_duration(value, MS_BY_UNIT, "a duration such as 200 or 0.5s"),
        _number_schema({"type": "number", "exclusiveMinimum": 0}, MS_BY_UNIT),
    )


def _parse_duration(value: Any, scales: Mapping[str, float], what: str) -> float:
    try:
        duration = float(_parse_number(value, scales, what))
    except OverflowError:
        duration = math.inf
    if duration == math.inf:
        raise ValueError("is out of range: it is too large")
    if not duration > 0:
        raise ValueError("is out of range: it must be above 0")
    return duration


def http_url() -> ValueKind:
    """The URL of an HTTP service, with a host."""

    def read(value: Any) -> str:
        found = _parse_text(value).strip()
        if not URL_PATTERN.fullmatch(found):
            raise ValueError("is not a URL such as http://127.0.0.1:4318/v1/traces")
        return found

    return ValueKind("URL", read, {"type": "string", "pattern": rf"^\s*{URL_PATTERN.pattern}\s*$"})


def url_path() -> ValueKind:
    """The beginning of a URL's path, such as `/llm`, without a slash at its end."""

    def read(value: Any) -> str:
        found = _parse_text(value).strip()
        if not PATH_PATTERN.fullmatch(found):
            raise ValueError("is not a path such as /llm, without a slash at its end")
        return found

    return ValueKind("PATH", read, {"type": "string", "pattern": rf"^\s*{PATH_PATTERN.pattern}\s*$"})


def percentage() -> ValueKind:
    """A number of percent, not negative: `1%`, `0.5%`, or plain `1`."""
    return ValueKind(
        "PERCENT",
        _parse_percentage,
        _number_schema({"type": "number", "minimum": 0}, {"%": 1.0}),
    )


def _parse_percentage(value: Any) -> float:
    what = "a number of percent such as 1%"
    number = _parse_number(
        value.strip().removesuffix("%") if isinstance(value, str) else value, {"": 1}, what
    )
    if not 0 <= number < math.inf:
        raise ValueError("is out of range: it must be at least 0%")
    return float(number)


def text(metavar: str = "TEXT") -> ValueKind:
    """Any text. `metavar` stands for the value in the help."""
    return ValueKind(metavar, _parse_text, TEXT_SCHEMA)


def _parse_text(value: Any) -> str:
    if isinstance(value, bool | dict | list) or value is None or not str(value).strip():
        raise ValueError("is not a text")
    return str(value)


def texts(metavar: str = "TEXT") -> ValueKind:
    """Several texts: the flag repeated, a YAML list, or one value with commas."""
    entry_schema = {"type": ["string", "number"], "pattern": f"^{LIST_ENTRY}(,{LIST_ENTRY})*$"}
    return ValueKind(metavar, _parse_texts, _list_schema(entry_schema), many=True)


def _list_schema(entry_schema: JsonSchema) -> JsonSchema:
    return {"anyOf": [entry_schema, {"type": "array", "items": entry_schema, "uniqueItems": True}]}


def _parse_texts(value: Any) -> tuple[str, ...]:
    given: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    found = [part.strip() for one in given for part in _parse_text(one).split(",")]
    if not all(found):
        raise ValueError("has an empty entry")
    if len(set(found)) != len(found):
        raise ValueError("names the same thing twice")
    return tuple(found)


def key() -> ValueKind:
    """A secret that a client shows in a header; never repeated in a message. Space around it is not part of it."""
    return ValueKind("KEY", check_key, SECRET_SCHEMA)


def keys() -> ValueKind:
    """Several secrets: the flag repeated, or a YAML list. One value is one key."""
    return ValueKind("KEY", _parse_keys, _list_schema(SECRET_SCHEMA), many=True)


def _parse_keys(value: Any) -> tuple[str, ...]:
    given: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    found = tuple(check_key(one) for one in given)
    if len(set(found)) != len(found):
        raise ValueError("is given twice")
    return found


def check_key(value: Any) -> str:
    """The secret without the space around it. Raises ValueError with the reason if it cannot be one."""
    return check_key_text(_parse_text(value))


def path(metavar: str = "FILE") -> ValueKind:
    """A path of a file or folder; a leading `~` is the home folder. `metavar` stands for the value in the help."""
    return ValueKind(metavar, _parse_path, TEXT_SCHEMA)


def folder_or_none() -> ValueKind:
    """A path of a folder, or the word `none`; a folder of that name is `./none`."""
    return ValueKind(
        "DIR|none", lambda value: "none" if _parse_text(value) == "none" else _parse_path(value), TEXT_SCHEMA
    )


def _parse_path(value: Any) -> Path:
    named = _parse_text(value)
    if "\0" in named:
        raise ValueError("is not a path")
    try:
        return Path(named).expanduser()
    except RuntimeError:
        raise ValueError("names the home folder of a user who is not there") from None


def one_of(*choices: str, hidden: str = "") -> ValueKind:
    """One of `choices`, written exactly like that; or `hidden`, which is shown nowhere."""

    def read(value: Any) -> str:
        text = _parse_text(value)
        return text if hidden and text == hidden else _parse_choice(text, choices)

    return ValueKind("|".join(choices), read, {"enum": list(choices)})


def some_of(*choices: str) -> ValueKind:
    """An ordered selection, most preferred first."""
    entry = rf"\s*({'|'.join(choices)})\s*"
    return ValueKind(
        ",".join(choices),
        lambda value: tuple(_parse_choice(one, choices) for one in _parse_texts(value)),
        _list_schema({"type": "string", "pattern": f"^{entry}(,{entry})*$"}),
        many=True,
    )


def _parse_choice(value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"is not one of {', '.join(choices)}")
    return value


def switch() -> ValueKind:
    """A yes-or-no value: on the command line `--name` and `--no-name`."""
    letters = ("".join(f"[{c.upper()}{c}]" if c.isalpha() else c for c in word) for word in TRUE + FALSE)
    words = {"type": "string", "pattern": rf"^\s*({'|'.join(letters)})\s*$"}
    return ValueKind(
        "BOOL", _parse_boolean, {"anyOf": [{"type": "boolean"}, {"enum": [0, 1]}, words]}, switch=True
    )


def _parse_boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    lowered = str(value).strip().lower() if isinstance(value, str | int) else ""
    if lowered not in TRUE + FALSE:
        raise ValueError("is neither true nor false")
    return lowered in TRUE
