"""Renders chat templates: turns a conversation into the text of a prompt, in a Jinja sandbox.

Templates get the same environment, helpers and variables as in transformers' `apply_chat_template`, so a model's
template renders the same prompt here; tests compare the two. A template comes from the model or the operator, never
from a client. Rendering may still fail on a client's messages, which is an error of the request, or take long, which
the caller has to limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.shown_text import quote_text

TemplateMessage = Mapping[str, Any]

# Appended to the last message while it is rendered, to find the end of that message in the prompt. The space at the
# end reveals whether the template strips messages.
FINAL_MESSAGE_MARK = "DIPTYCH_END_OF_FINAL_MESSAGE "
# Replaces each message's content when `ChatTemplate` tests which messages a template shows.
CONTENT_MARK = re.compile(r"diptych(\d+)shown")
# Most shapes of conversations that are cached, see `_conversation_shape`.
MAX_KNOWN_SHAPES = 256
MAX_SHAPE_MESSAGES = 64
# Variables of a template that clients cannot set.
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Names that different templates use for the same field.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template. `special` are the special tokens by name, which the template can use."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compile `source`. Raises jinja2.TemplateSyntaxError if it is not a template."""
        environment = make_environment()
        self.source, self._special = source, dict(special)
        self._template = environment.from_string(source)
        reads = meta.find_undeclared_variables(environment.parse(source))
        # Variables that clients may set.
        self.shows_tools = "tools" in reads
        self.options = frozenset(reads - RESERVED_VARIABLES - special.keys() - environment.globals.keys())
        self._shapes: dict[tuple[object, ...], int | None] = {}

    def render_conversation(
        self,
        messages: Sequence[TemplateMessage],
        generate: bool = True,
        resume: bool = False,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: the messages, oldest first.
            generate: add the head of the answer.
            resume: leave the last message open, so that the model continues it.
            options: values for variables of the template, such as `enable_thinking`.
            tools: what the model may call, in the form of OpenAI's API.

        Raises:
            RequestError: 400, the template refuses these messages or options, or fails on them.
        """
        options = options or {}
        unknown = sorted(options.keys() - self.options)
        if unknown:
            known = f"; it has {', '.join(sorted(self.options))}" if self.options else ""
            problem = f"this model's chat template has no option {quote_text(unknown[0])}{known}"
            raise _template_error(problem, "chat_template_kwargs")
        given = [_template_message(message) for message in messages]
        choices = [given]
        if any(message.get("role") == "developer" for message in given):
            # "developer" is OpenAI's newer name of the system role. Templates that lack it get the older name.
            choices.insert(
                1 if "developer" in self.source else 0, [_as_system_message(message) for message in given]
            )
        errors: list[RequestError] = []
        for choice in choices:
            try:
                return self._render_all(choice, generate, resume, options, tools)
            except RequestError as error:
                errors.append(error)
        raise errors[0]

    def _render_all(
        self,
        messages: list[dict[str, Any]],
        generate: bool,
        resume: bool,
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """The prompt, which shows every message, call and tool. Raises RequestError if the template cannot do that."""
        index = self._first_omitted_message(messages, options, tools)
        if index is not None:
            role = messages[index].get("role")
            raise _template_error(
                f"this model's chat template has no place for messages[{index}], whose role is '{role}'",
                f"messages[{index}]",
            )
        try:
            if resume:
                text = self._render_unclosed(messages, options, tools)
            else:
                text = self._render(messages, generate, options, tools)
            # What follows an open message's content is not rendered.
            _check_names(text, messages[:-1] if resume else messages, tools)
            return text
        except RequestError:
            raise
        except TemplateError as error:
            problem = f": {error.message}" if type(error) is TemplateError and error.message else ""
            raise _template_error(f"the chat template refuses these messages{problem}") from error
        except Exception as error:
            # A template can raise any exception.
            raise _template_error("the chat template cannot render these messages") from error

    def _first_omitted_message(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int | None:
        """Index of the first message whose content the template never shows; None if it shows all.

        Many templates skip roles that they do not know. The real contents cannot reveal that, because templates also
        cut contents, such as the reasoning in earlier answers. So the conversation is rendered with marks in place of
        contents. Messages with tool calls are not tested, since some templates show only the calls.
        """
        shape = None if options or tools else _conversation_shape(messages)
        if shape is not None and shape in self._shapes:
            return self._shapes[shape]
        marked = [
            message | {"content": f"diptych{i}shown"} if _has_content(message) else message
            for i, message in enumerate(messages)
        ]
        try:
            text = self._render(marked, False, options, tools)
        except Exception:
            # If there is a problem, rendering the real messages will report it.
            return None
        shown = {int(number) for number in CONTENT_MARK.findall(text)}
        missing = (i for i, message in enumerate(messages) if _has_content(message) and i not in shown)
        index = next(missing, None)
        if shape is not None:
            if len(self._shapes) >= MAX_KNOWN_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = index
        return index

    def _render(
        self,
        messages: list[dict[str, Any]],
        generate: bool,
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """Render the template with these messages, options and tools."""
        fixed = {
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": generate,
        }
        return self._template.render({**self._special, **options, **fixed})

    def _render_unclosed(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """The prompt up to the end of the last message's content."""
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise _template_error(
                "the last message has no text to continue", f"messages[{len(messages) - 1}].content"
            )
        if "content" not in self.source:
            raise _template_error("the chat template shows no message's content, so none can be continued")
        text = self._render(
            [*messages[:-1], messages[-1] | {"content": content + FINAL_MESSAGE_MARK}], False, options, tools
        )
        end = text.rfind(FINAL_MESSAGE_MARK.strip())
        if end < 0 or content.strip() not in text:
            raise _template_error("the chat template changes the last message, so it cannot be continued")
        return text[:end] if text[end:].startswith(FINAL_MESSAGE_MARK) else text[:end].rstrip()


def make_environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment of chat templates, with the helpers that they use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _make_dict,
        "namespace": _PlainNamespace,
    }
    return environment


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training. Here it only renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block. Jinja calls this at its opening tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which reach into Python."""

    # `self` is taken from `args`, since templates may use "self" as a name in `values`.
    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args
        initial = dict(*given, **values)
        for name in initial:
            _check_name(name)
        Namespace.__init__(self, initial)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    """Raise SecurityError for a name that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set {name!r}")


def _make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    """The function `dict` of templates."""
    return dict(*args, **values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    """The function with which templates refuse messages."""
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    """The function with which templates insert the date."""
    return datetime.now().strftime(pattern)


def _template_message(message: TemplateMessage) -> dict[str, Any]:
    """A message as templates get it: without null fields, and with reasoning under each of its names."""
    shown = {name: value for name, value in message.items() if value is not None}
    reasoning = next((shown[name] for name in REASONING_FIELDS if name in shown), None)
    if reasoning is not None:
        shown = {"thinking": reasoning, **shown, "reasoning_content": reasoning}
    return shown


def _check_names(
    text: str, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]] | None
) -> None:
    """Raise RequestError unless the prompt shows the names of all tools and of all that were called."""
    for i, tool in enumerate(tools or ()):
        if tool["function"]["name"] not in text:
            raise _template_error("this model's chat template does not show every tool", f"tools[{i}]")
    for i, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] not in text:
                problem = "this model's chat template cannot show calls of tools"
                raise _template_error(problem, f"messages[{i}].tool_calls")


def _has_content(message: TemplateMessage) -> bool:
    """Whether the message has text that the template must show; see `_first_omitted_message`."""
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip()) and not message.get("tool_calls")


def _conversation_shape(messages: Sequence[TemplateMessage]) -> tuple[object, ...] | None:
    """A cache key of all that a template can depend on besides the contents of messages.

    None if messages have more than a role and content, or if there are too many of them to cache.
    """
    if len(messages) > MAX_SHAPE_MESSAGES or any(
        not message.keys() <= {"role", "content"} for message in messages
    ):
        return None
    return tuple((message.get("role"), _has_content(message), "content" in message) for message in messages)


def _as_system_message(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the role "developer" replaced by "system"."""
    return message | {"role": "system"} if message.get("role") == "developer" else message


def _template_error(problem: str, param: str = "messages") -> RequestError:
    return RequestError(RequestFailure(FailureReason.INVALID_VALUE, problem, param))
