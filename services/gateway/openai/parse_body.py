"""Decodes the bytes of a body into a struct, with errors that name the field.

Only types and ranges are checked here. `validate` checks what depends on the meaning of fields.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
import numpy as np

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure

T = TypeVar("T")

JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
ERROR_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
ERROR_FIELD = re.compile(r"field `([^`]*)`")


def json_depth(body: bytes) -> int:
    """How deep the brackets of a JSON text nest, without parsing it. Brackets inside strings do not count."""
    brackets = np.frombuffer(JSON_STRING.sub(b"", body).translate(None, NOT_BRACKETS), dtype=np.uint8)
    if brackets.size == 0:
        return 0
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    return int(np.cumsum(np.where(opens, 1, -1)).max())


def parse_body(body: bytes, kind: type[T], max_depth: int) -> T:
    """`body` decoded as a `kind`, with at most `max_depth` levels of nesting.

    Raises:
        RequestError: 400, with the field at fault in `param`.
    """
    if json_depth(body) > max_depth:
        raise _invalid_json_error(f"the JSON body is nested deeper than {max_depth} levels")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = (
            str(error) if isinstance(error, msgspec.DecodeError) else "it is not valid UTF-8 or too deep"
        )
        raise _invalid_json_error(f"the body is not valid JSON: {message}") from error


def validation_error(message: str) -> RequestError:
    """msgspec's error message as an OpenAI error, with the field in `param` and in OpenAI's words where it has some."""
    found = ERROR_PATH.search(message)
    path = found.group(1) if found else ""
    message = message[: found.start()] if found else message
    field = ERROR_FIELD.search(message)
    inner = ".".join(part for part in (path, field.group(1) if field else "") if part)
    if message.startswith("Object missing required field"):
        return missing_parameter_error(inner)
    if message.startswith("Object contains unknown field"):
        problem = f"unrecognized request argument supplied: {inner}"
        return RequestError(RequestFailure(FailureReason.UNRECOGNIZED_REQUEST_ARGUMENT, problem, inner))
    message = message.replace("`", "'")
    message = message[0].lower() + message[1:]
    where = f"invalid value for '{path}'" if path else "invalid body"
    return RequestError(RequestFailure(FailureReason.INVALID_VALUE, f"{where}: {message}", path or None))


def missing_parameter_error(field: str) -> RequestError:
    """The error of a request that lacks `field`."""
    problem = f"missing required parameter: '{field}'"
    return RequestError(RequestFailure(FailureReason.MISSING_REQUIRED_PARAMETER, problem, field))


def _invalid_json_error(problem: str) -> RequestError:
    return RequestError(RequestFailure(FailureReason.INVALID_JSON, problem))
