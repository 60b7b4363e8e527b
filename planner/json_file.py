"""What plan and profile files have in common: strict models, messages that name the place of a fault, JSON Schemas.

Only the modules that read or write such files import this one, because it imports pydantic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from planner.types import MAX_NUMBER

# Most characters of a wrong value that an error shows.
MAX_SHOWN = 60
SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class FileModel(BaseModel):
    """A part of a file. Unknown fields, wrong types, NaN and infinity are refused; so it is with dataclasses in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _check_integer(value: Any) -> Any:
    if type(value) is not int:
        raise ValueError(f"should be a whole number, not {_shorten(value)}")
    return value


# `Literal` alone compares by value, and would take true and 1.0 for 1.
FileVersion = Annotated[Literal[1], BeforeValidator(_check_integer)]


def one_of(*values: str) -> Callable[[str], str]:
    """A pydantic validator that lets only these values pass."""

    def check(value: str) -> str:
        if value not in values:
            raise ValueError(f"should be one of {', '.join(values)}, not {value!r}")
        return value

    return check


def describe_fault(error: ValidationError) -> str:
    """The first fault of a file on one line: its place, what is wrong there, what would be right, and how many follow.

    A wrong version comes first, because the other faults may follow from it.
    """
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["loc"] != ("version",))
    first = faults[0]
    place = _format_place(first["loc"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{place}{': ' if place else ''}{_describe(first)}{more}"


def json_schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """The JSON Schema of a file. Infinite defaults are left out: JSON has no such number."""
    schema = _drop_infinite_defaults(model.model_json_schema())
    return {"$schema": SCHEMA_DIALECT, **schema, "title": title}


def _describe(fault: Any) -> str:
    kind, given = fault["type"], _shorten(fault["input"])
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return "there is no such field"
    if kind in ("missing", "missing_argument"):
        return "the field is missing"
    if kind == "json_invalid":
        return str(fault["msg"])
    what = str(fault["msg"]).replace("Input should", "should").replace("greater than or equal to", "at least")
    what = (
        what.replace("less than or equal to", "at most")
        .replace(f"{MAX_NUMBER:g}", "1e18")
        .replace(f"{MAX_NUMBER:.0f}", "1e18")
    )
    return f"{what}, not {given}"


def _shorten(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "…"


def _format_place(place: tuple[int | str, ...]) -> str:
    """A place in a file: `pools[0].tp`."""
    found = ""
    for part in place:
        if isinstance(part, str) and part.isidentifier():
            found += f".{part}" if found else part
        else:
            found += f"[{part!r}]"
    return found


def _drop_infinite_defaults(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: _drop_infinite_defaults(value)
            for key, value in schema.items()
            if not (key == "default" and isinstance(value, float) and math.isinf(value))
        }
    return [_drop_infinite_defaults(one) for one in schema] if isinstance(schema, list) else schema
