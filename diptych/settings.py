"""What a setting is: a name with a flag, a YAML key and an environment name, a parser with units, and one line of help.

`option` declares one as a field of a frozen dataclass (see `diptych.config.Config`); everything else, including the
command line, the generated documentation and the messages, is derived from that declaration.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Parse = Callable[[Any], Any]

ENV_PREFIX = "DIPTYCH_"
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
SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
NUMBER = re.compile(r"\s*([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is read from text or YAML. `parse` raises ValueError with the reason."""

    metavar: str
    parse: Parse
    many: bool = False  # may be given several times, or as a list
    switch: bool = False  # on the command line `--name` and `--no-name`


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, under all its names."""

    name: str
    kind: Kind
    default: Any
    help: str
    group: str
    commands: tuple[str, ...]
    shown: str  # the default as text
    rare: bool  # left out of --help, shown by --help-all

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()


def option(
    default: T,
    kind: Kind,
    help: str,
    group: str,
    commands: tuple[str, ...] = ("serve",),
    shown: str = "",
    rare: bool = False,
) -> T:
    """A dataclass field that is a setting of these commands; typed as its default, for mypy."""
    told = {"kind": kind, "help": help, "group": group, "commands": commands, "rare": rare}
    declared: T = dataclasses.field(default=default, metadata=told | {"shown": shown or show(default)})
    return declared


def settings(config: type[Any], command: str | None = None) -> list[Setting]:
    """All settings declared in `config`, in order; only those of one command when it is named."""
    found = [Setting(name=f.name, default=f.default, **f.metadata) for f in dataclasses.fields(config)]
    return [one for one in found if command is None or command in one.commands]


def show(value: Any) -> str:
    """A value as a person would write it in YAML or on the command line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(one) for one in value)
    return str(value)


def _number(value: Any, scales: dict[str, int] | dict[str, float], what: str) -> float:
    if isinstance(value, bool):
        raise ValueError(f"is not {what}")
    if isinstance(value, int | float):
        return value
    match = NUMBER.fullmatch(str(value))
    if not match or match[2] not in scales:
        raise ValueError(f"is not {what}")
    digits = match[1].replace("_", "")
    return (float(digits) if "." in digits else int(digits)) * scales[match[2]]


def _whole(value: Any, scales: dict[str, int], what: str, least: int, most: int | None) -> int:
    number = _number(value, scales, what)
    if number != int(number):
        raise ValueError(f"is not {what}")
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"is out of range: it must be {bounds}")
    return int(number)


def whole(least: int = 0, most: int | None = None, metavar: str = "N") -> Kind:
    """A whole number; `2k` is 2,000 and `2K` 2,048, as in vLLM."""
    return Kind(metavar, lambda value: _whole(value, SCALES, "a whole number", least, most))


def size(least: int = 1) -> Kind:
    """A number of bytes: `512MiB`, `8GiB`, `1.5GB` or plain bytes."""
    return Kind("SIZE", lambda value: _whole(value, BYTE_SCALES, "a size such as 512MiB", least, None))


def positive(metavar: str = "NUM") -> Kind:
    """A number above 0, without unit."""
    return Kind(metavar, lambda value: _above_zero(_number(value, {"": 1.0}, "a number")))


def seconds() -> Kind:
    """A duration above 0: `30s`, `500ms`, `2m`, `1h`, or plain seconds."""
    return Kind(
        "TIME", lambda value: _above_zero(float(_number(value, SECONDS, "a duration such as 30s or 2m")))
    )


def milliseconds() -> Kind:
    """A duration above 0 in milliseconds when it has no unit; `0.5s` works too."""
    scales = {unit: scale * 1e3 for unit, scale in SECONDS.items() if unit} | {"": 1.0}
    return Kind(
        "MS", lambda value: _above_zero(float(_number(value, scales, "a duration such as 200 or 0.5s")))
    )


def _above_zero(value: float) -> float:
    if not value > 0:
        raise ValueError("is out of range: it must be above 0")
    return value


def text(metavar: str = "TEXT") -> Kind:
    return Kind(metavar, _text)


def _text(value: Any) -> str:
    if isinstance(value, bool | dict | list) or value is None or not str(value).strip():
        raise ValueError("is not a text")
    return str(value)


def texts(metavar: str = "TEXT") -> Kind:
    """Several texts: the flag repeated, a YAML list, or one value with commas."""
    return Kind(metavar, _texts, many=True)


def _texts(value: Any) -> tuple[str, ...]:
    given: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    found = [part.strip() for one in given for part in _text(one).split(",")]
    if not all(found):
        raise ValueError("has an empty entry")
    if len(set(found)) != len(found):
        raise ValueError("names the same thing twice")
    return tuple(found)


def key() -> Kind:
    """A secret that a client shows in a header; never repeated in a message. Space around it is not part of it."""
    return Kind("KEY", _key)


def keys() -> Kind:
    return Kind("KEY", lambda value: tuple(_key(one) for one in _texts(value)), many=True)


def _key(value: Any) -> str:
    found = _text(value).strip()
    if not found.isprintable():
        raise ValueError("has a line break or another control character, which no client can send")
    return found


def path(metavar: str = "FILE") -> Kind:
    return Kind(metavar, lambda value: Path(_text(value)).expanduser())


def one_of(*choices: str) -> Kind:
    return Kind("|".join(choices), lambda value: _choice(_text(value), choices))


def some_of(*choices: str) -> Kind:
    """An ordered selection, most preferred first."""
    return Kind(
        ",".join(choices), lambda value: tuple(_choice(one, choices) for one in _texts(value)), many=True
    )


def _choice(value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"is not one of {', '.join(choices)}")
    return value


def switch() -> Kind:
    return Kind("BOOL", _boolean, switch=True)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    lowered = str(value).strip().lower()
    if lowered not in TRUE + FALSE:
        raise ValueError("is neither true nor false")
    return lowered in TRUE
