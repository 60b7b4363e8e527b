"""From the bytes of a body to a checked struct, with errors that name the field.

Nothing here depends on what the field means; see `validate` for that.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
import numpy as np

from diptych.errors import RequestError

T = TypeVar("T")

STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
FIELD = re.compile(r"field `([^`]*)`")


def depth(body: bytes) -> int:
    """How deep the brackets of a JSON text nest, without parsing it; brackets inside strings do not count."""
    brackets = np.frombuffer(STRING.sub(b"", body).translate(None, NOT_BRACKETS), dtype=np.uint8)
    if brackets.size == 0:
        return 0
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    return int(np.cumsum(np.where(opens, 1, -1)).max())


def parse(body: bytes, kind: type[T], max_depth: int) -> T:
    """`body` as a `kind`.

    Raises:
        RequestError: 400 with the field at fault in `param`.
    """
    if depth(body) > max_depth:
        raise RequestError(f"the JSON body is nested deeper than {max_depth} levels", code="invalid_json")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise problem(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        told = str(error) if isinstance(error, msgspec.DecodeError) else "it is not valid UTF-8 or too deep"
        raise RequestError(f"the body is not valid JSON: {told}", code="invalid_json") from error


def problem(told: str) -> RequestError:
    """msgspec's message as an OpenAI error: the field in `param`, and in OpenAI's words where it has some."""
    found = PATH.search(told)
    path = found.group(1) if found else ""
    told = told[: found.start()] if found else told
    field = FIELD.search(told)
    inner = ".".join(part for part in (path, field.group(1) if field else "") if part)
    if told.startswith("Object missing required field"):
        return RequestError(
            f"missing required parameter: '{inner}'", code="missing_required_parameter", param=inner
        )
    if told.startswith("Object contains unknown field"):
        return RequestError(
            f"unrecognized request argument supplied: {inner}",
            code="unrecognized_request_argument",
            param=inner,
        )
    told = told.replace("`", "'")
    told = told[0].lower() + told[1:]
    where = f"invalid value for '{path}'" if path else "invalid body"
    return RequestError(f"{where}: {told}", code="invalid_value", param=path or None)
