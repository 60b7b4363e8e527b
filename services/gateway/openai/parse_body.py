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
from services.gateway.openai.schemas.typed_objects import read_typed

T = TypeVar("T")

# How msgspec's message of a field begins that a class does not have.
UNKNOWN_FIELD = "Object contains unknown field"
# Most names of unknown fields in one body that are passed over; each costs a pass over the body.
MAX_IGNORED = 16

JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
ERROR_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
ELEMENT = re.compile(r"\[\d+\]")
PATH_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
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
    # Few brackets cannot nest deeply.
    if body.count(b"[") + body.count(b"{") > max_depth and json_depth(body) > max_depth:
        raise _invalid_json_error(f"the JSON body is nested deeper than {max_depth} levels")
    try:
        return _decode(body, kind)
    except msgspec.ValidationError as error:
        if ignored is None or not str(error).startswith(UNKNOWN_FIELD):
            raise validation_error(error) from error
        return _parse_known(body, kind, ignored)


def _decode(body: bytes, kind: type[T]) -> T:
    """Decode JSON. Raises msgspec.ValidationError if it is no `kind`, and RequestError if it is no JSON."""
    try:
        return msgspec.json.decode(body, type=kind, dec_hook=read_typed)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = (
            str(error) if isinstance(error, msgspec.DecodeError) else "it is not valid UTF-8 or too deep"
        )
        raise _invalid_json_error(f"the body is not valid JSON: {message}") from error


def _parse_known(body: bytes, kind: type[T], ignored: list[str]) -> T:
    """Decode what `kind` has of a JSON body, and list the other fields. Raises RequestError as `parse_body`."""
    found: Any = _decode(body, dict)
    while True:
        try:
            known = msgspec.convert(found, kind, str_keys=True, dec_hook=read_typed)
            ignored[:] = dict.fromkeys(ignored)
            return known
        except msgspec.ValidationError as error:
            message, path = _split_path(error)
            field = ERROR_FIELD.search(message)
            if not message.startswith(UNKNOWN_FIELD) or field is None or len(ignored) == MAX_IGNORED:
                raise validation_error(error) from error
            # Every element of a list that is of the same type is treated alike.
            types = {str(node.get("type")) for node in _find_objects(found, path)}
            path = ELEMENT.sub("[]", path)
            for node in _find_objects(found, path):
                if str(node.get("type")) in types:
                    node.pop(field[1], None)
            ignored.append(f"{path}.{field[1]}" if path else field[1])


def _find_objects(found: Any, path: str) -> list[dict[str, Any]]:
    """The objects at a path such as `messages[2].content[0]`; `[]` is every element of a list."""
    nodes = [found]
    for step in PATH_STEP.findall(path):
        lists = [node for node in nodes if isinstance(node, list)]
        if step == "[]":
            nodes = [one for node in lists for one in node]
        elif step[0] == "[" and step[1:-1].isdecimal():
            index = int(step[1:-1])
            nodes = [node[index] for node in lists if index < len(node)]
        else:
            nodes = [node[step] for node in nodes if isinstance(node, dict) and step in node]
    return [node for node in nodes if isinstance(node, dict)]


def _split_path(error: msgspec.ValidationError) -> tuple[str, str]:
    """msgspec's message without the path that it ends in, and that path: `messages[2].content[0]`.

    Each `TypedObject` around the fault has added the path to itself. It is told from the text by its length, since the
    text may have a name in it that a client has made up.
    """
    places = []
    while isinstance(cause := error.__cause__, ValueError):
        inner = cause.__cause__
        if not isinstance(inner, msgspec.ValidationError):
            break
        places.append(str(error)[len(str(inner)) :])
        error = inner
    message, path = str(error), ""
    if (found := ERROR_PATH.search(message)) is not None:
        message = message[: found.start()]
        places.append(found[0])
    for place in places:
        step = ERROR_PATH.sub(r"\1", place)
        path += "." * bool(path and step and step[0] != "[") + step
    return message, path


def validation_error(error: msgspec.ValidationError) -> RequestError:
    """msgspec's error as one of OpenAI's, with the field in `param` and in OpenAI's words where it has some."""
    message, path = _split_path(error)
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
