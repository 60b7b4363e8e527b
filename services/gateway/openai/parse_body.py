"""Decodes the bytes of a body into a struct, with errors that name the field.

Only types and ranges are checked here. `validate` checks what depends on the meaning of fields.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import numpy as np

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure

T = TypeVar("T")

# How msgspec's message of a field begins that a class does not have.
UNKNOWN_FIELD = "Object contains unknown field"
# Most names of unknown fields in one body that are passed over; each costs a pass over the body.
MAX_IGNORED = 16

JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
ERROR_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
ELEMENT = re.compile(r"\[[^\]]*\]")
ERROR_FIELD = re.compile(r"field `([^`]*)`")


def json_depth(body: bytes) -> int:
    """How deep the brackets of a JSON text nest, without parsing it. Brackets inside strings do not count."""
    brackets = np.frombuffer(JSON_STRING.sub(b"", body).translate(None, NOT_BRACKETS), dtype=np.uint8)
    if brackets.size == 0:
        return 0
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    return int(np.cumsum(np.where(opens, 1, -1)).max())


def parse_body(body: bytes, kind: type[T], max_depth: int, ignored: list[str] | None = None) -> T:
    """`body` decoded as a `kind`, with at most `max_depth` levels of nesting.

    With a list `ignored`, fields that `kind` does not have are passed over, and their names added to the list.

    Raises:
        RequestError: 400, with the field at fault in `param`.
    """
    if json_depth(body) > max_depth:
        raise _invalid_json_error(f"the JSON body is nested deeper than {max_depth} levels")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if ignored is not None and str(error).startswith(UNKNOWN_FIELD):
            return _parse_known(body, kind, ignored)
        raise validation_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = (
            str(error) if isinstance(error, msgspec.DecodeError) else "it is not valid UTF-8 or too deep"
        )
        raise _invalid_json_error(f"the body is not valid JSON: {message}") from error


def _parse_known(body: bytes, kind: type[T], ignored: list[str]) -> T:
    """Decode what `kind` has of a JSON body, and list the other fields. Raises RequestError as `parse_body`."""
    found = msgspec.json.decode(body)
    while True:
        try:
            return msgspec.convert(found, kind, str_keys=True)
        except msgspec.ValidationError as error:
            message, field = str(error), ERROR_FIELD.search(str(error))
            if not message.startswith(UNKNOWN_FIELD) or field is None or len(ignored) == MAX_IGNORED:
                raise validation_error(message) from error
            place = ERROR_PATH.search(message)
            # Every element of a list is treated alike.
            path = [ELEMENT.sub("[]", part) for part in (place.group(1) if place else "").split(".") if part]
            _drop_field(found, path, field.group(1))
            ignored.append(".".join([*path, field.group(1)]))


def _drop_field(node: Any, path: list[str], field: str) -> None:
    """Remove a field at a path: `name[]` is any element of the list `name`."""
    if not path:
        node.pop(field, None)
        return
    name, *lists = path[0].split("[")
    nodes = [node.get(name)]
    for _ in lists:
        nodes = [inner for outer in nodes if isinstance(outer, list) for inner in outer]
    for inner in nodes:
        if isinstance(inner, dict):
            _drop_field(inner, path[1:], field)


def validation_error(message: str) -> RequestError:
    """msgspec's error message as an OpenAI error, with the field in `param` and in OpenAI's words where it has some."""
    found = ERROR_PATH.search(message)
    path = found.group(1) if found else ""
    message = message[: found.start()] if found else message
    field = ERROR_FIELD.search(message)
    inner = ".".join(part for part in (path, field.group(1) if field else "") if part)
    if message.startswith("Object missing required field"):
        return missing_parameter_error(inner)
    if message.startswith(UNKNOWN_FIELD):
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
