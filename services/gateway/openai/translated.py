"""A request of another route as a chat, and how that route calls the fields that errors name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from diptych.errors import RequestError
from diptych.failure_statuses import RequestFailure
from diptych.request import Grammar
from services.gateway.openai.schemas.request_schema import ChatRequest, Message
from services.gateway.openai.validate import unsupported_error

# Takes a grammar, and what the client calls the field that asks for it.
GrammarCheck = Callable[[Grammar, str], str | None]

INDEXED = re.compile(r"(messages|tools)\[(\d+)\].*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How a route calls the fields of a chat.

    `fields` has the names of fields, with what is below them; the first that fits counts. `messages` and `tools` are
    where each message and each tool comes from, and `parts` what is called otherwise in them.
    """

    fields: Mapping[str, str]
    messages: Sequence[str] = ()
    tools: Sequence[str] = ()
    parts: Mapping[str, str] = field(default_factory=dict)

    def rename_field(self, name: str) -> str:
        """What the route calls the field `name` of a chat."""
        found = INDEXED.fullmatch(name)
        for old, new in self.parts.items():
            name = name.replace(old, new)
        if found is not None:
            places, index = self.messages if found[1] == "messages" else self.tools, int(found[2])
            rest = name.partition("]")[2]
            return f"{places[index]}{rest}" if index < len(places) else name
        for old, new in self.fields.items():
            if name == old or name.startswith((f"{old}.", f"{old}[")):
                return new + name[len(old) :]
        return name

    def rename_failure(self, failure: RequestFailure) -> RequestFailure:
        """The failure with the route's names, in its text too, where they are in quotes."""
        named = re.sub(r"'([\w.\[\]]+)'", lambda found: f"'{self.rename_field(found[1])}'", failure.message)
        param = None if failure.param is None else self.rename_field(failure.param)
        return replace(failure, message=named, param=param)

    def rename_check(self, check: GrammarCheck) -> GrammarCheck:
        """The check with the route's name of the field that asks for a grammar."""
        return lambda grammar, field: check(grammar, self.rename_field(field))

    @contextmanager
    def rename_errors(self) -> Iterator[None]:
        """Errors of the body have the route's names. Raises them again."""
        try:
            yield
        except RequestError as error:
            raise RequestError(self.rename_failure(error.failure)) from error


@dataclass(slots=True)
class PlacedMessages:
    """The messages of a chat, and where in the route's body each comes from, as errors name it."""

    messages: list[Message] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def append_message(self, message: Message, where: str) -> None:
        """Add a message that comes from the field `where`."""
        self.messages.append(message)
        self.places.append(where)


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """The chat that a request asks for.

    `route_fields` is what the format of its answer needs to know beside. With `clips_length` the answer is as long as
    the context allows, if its length is beyond that. With `text_logprobs` only tokens of the text have
    log-probabilities.
    """

    chat: ChatRequest
    names: FieldNames
    route_fields: bytes = b""
    clips_length: bool = False
    text_logprobs: bool = False


def check_caller(caller: str | None, where: str) -> None:
    """Refuse a past call that the model has not made itself; None: it has. Raises RequestError (400)."""
    if caller not in (None, "direct"):
        raise unsupported_error(
            f"{where}.caller.type", "other than 'direct' is not supported: no program runs here"
        )


def check_callers(callers: list[str] | None, is_deferred: bool | None, where: str) -> None:
    """Refuse a tool that the model may not call itself, or not yet. Raises RequestError (400)."""
    if callers is not None and "direct" not in callers:
        raise unsupported_error(
            f"{where}.allowed_callers",
            "without 'direct' is not supported: only the model itself calls tools here",
        )
    if is_deferred:
        raise unsupported_error(
            f"{where}.defer_loading", "cannot be true: no tool is searched for here, and all are shown"
        )
