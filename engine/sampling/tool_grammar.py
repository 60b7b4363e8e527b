"""Grammars of calls: which tools may be called, and with which arguments, in the form that a model's family writes.

    outer begin, (opener, begin, NAME, name end, ARGUMENTS, end) (join, the same …), outer end

The text of a `Grammar` of kind "tools" is a `ToolGrammar` as JSON; here it becomes a Lark grammar of llguidance. Token
ids stand for themselves, so a marker that is one token is only this token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from diptych.errors import GrammarError

# Literals and token ids, in order.
Markup = tuple[str | int, ...]
# Text up to whatever the grammar allows behind it; it holds no special token.
ANY_TEXT = r"/(.|\n)*/"
# Where llguidance finds its options in a schema. (It is no header, which names with "x-" are elsewhere.)
OPTIONS_KEY = "-".join(("x", "guidance"))
# Most levels of a schema that are written in another form than JSON; below them any value is allowed.
MAX_LEVELS = 8


class CallSyntax(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a family writes calls. `style` is that of the arguments: "json", "tagged" or "gemma".

    `key` and `value` are around the parameters of tagged calls; `flags` come behind a key for texts and for other
    values. `quote` is around texts of Gemma's form. `thought` begins and ends what may come before the calls, or before
    a text, which begins with `text_begin`.
    """

    opener: Markup
    begin: Markup
    name_end: Markup
    end: Markup
    join: Markup = ()
    outer: tuple[Markup, Markup] = ((), ())
    style: str = "json"
    key: tuple[Markup, Markup] = ((), ())
    value: tuple[Markup, Markup] = ((), ())
    flags: tuple[Markup, Markup] = ((), ())
    quote: Markup = ()
    thought: tuple[Markup, Markup] | None = None
    text_begin: Markup = ()


class ToolForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that may be called. With `exact`, what llguidance does not know in its schema is an error."""

    name: str
    schema: dict[str, Any]
    exact: bool = False


class ToolGrammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """Calls of `tools`: one, or with `many` several. `is_open`: the opener of the first one has been written.

    An answer may be a JSON text of the schema `content` instead; without tools it must be one.
    """

    syntax: CallSyntax
    tools: tuple[ToolForm, ...]
    many: bool = False
    is_open: bool = False
    content: dict[str, Any] | None = None


def read_tool_grammar(text: str) -> ToolGrammar:
    """The grammar in the text of a `Grammar`. Raises GrammarError if it is none."""
    try:
        return msgspec.json.decode(text, type=ToolGrammar)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GrammarError("the grammar of tools is malformed", str(error)) from error


def write_lark(tool_grammar: ToolGrammar, whitespace: str) -> str:
    """The grammar in Lark. `whitespace` is the pattern of what may stand between JSON tokens."""
    return "\n".join(_LarkRules(tool_grammar, whitespace).iter_lines()) + "\n"


class _LarkRules:
    """The rules of one grammar. `_more` collects those that others need."""

    def __init__(self, tool_grammar: ToolGrammar, whitespace: str) -> None:
        self._grammar, self._whitespace = tool_grammar, whitespace
        self._more: list[str] = []
        # The rule of each JSON that was written, by its text: many tools have the same arguments.
        self._json_rules: dict[str, str] = {}

    def iter_lines(self) -> Iterator[str]:
        """All rules."""
        grammar, syntax = self._grammar, self._grammar.syntax
        call, calls = [write_markup(syntax.opener), "inner"], ["inner"]
        if not grammar.is_open:
            more = f"({write_markup(syntax.join)} call)*" if grammar.many else ""
            calls = [write_markup(syntax.outer[0]), "call", more, write_markup(syntax.outer[1])]
        before = ""
        if syntax.thought is not None and not grammar.is_open:
            begin, end = map(write_markup, syntax.thought)
            before = f"({begin} TEXT {end})? "
        kinds = [*(["calls"] if grammar.tools else []), *([] if grammar.content is None else ["content"])]
        yield f"start: {before}({' | '.join(kinds)})"
        yield f"TEXT: {ANY_TEXT}"
        if grammar.content is not None:
            yield f"content: {write_markup(syntax.text_begin)} {self._json(grammar.content, True)}"
        if not grammar.tools:
            yield from self._more
            return
        yield "calls: " + " ".join(part for part in calls if part)
        yield "call: " + " ".join(part for part in call if part)
        names = " | ".join(f"tool_{i}" for i in range(len(grammar.tools)))
        parts = [write_markup(syntax.begin), f"({names})", write_markup(syntax.end)]
        yield "inner: " + " ".join(part for part in parts if part)
        for i, tool in enumerate(grammar.tools):
            head = write_markup((tool.name, *syntax.name_end))
            yield f"tool_{i}: {head} {self._write_arguments(tool)}"
        yield from self._more

    def _write_arguments(self, tool: ToolForm) -> str:
        style = self._grammar.syntax.style
        if style == "json":
            return self._json({"type": "object", **tool.schema}, tool.exact)
        if style == "tagged":
            return " ".join(self._tagged_parameters(tool)) or '""'
        return self._write_gemma({"type": "object", **tool.schema}, 0)

    def _json(self, schema: dict[str, Any], exact: bool) -> str:
        """JSON of a schema: the name of its rule."""
        options = {"whitespace_pattern": self._whitespace, **({} if exact else {"lenient": True})}
        text = json.dumps({**schema, OPTIONS_KEY: options})
        if text not in self._json_rules:
            self._json_rules[text] = f"json_{len(self._json_rules)}"
            self._more.append(f"{self._json_rules[text]}: %json {text}")
        return self._json_rules[text]

    def _tagged_parameters(self, tool: ToolForm) -> Iterator[str]:
        """The parameters of a tool in the order of its schema."""
        syntax = self._grammar.syntax
        required = tool.schema.get("required") or ()
        for key, schema in (tool.schema.get("properties") or {}).items():
            schema = schema if isinstance(schema, dict) else {}
            is_text = _may_be_text(schema)
            flag = write_markup(syntax.flags[0 if is_text else 1])
            head = f"{write_markup((*syntax.key[0], key, *syntax.key[1]))} {flag} {write_markup(syntax.value[0])}"
            value, close = self._tagged_value(schema, tool), write_markup(syntax.value[1])
            if value == "TEXT" and all(isinstance(part, str) for part in syntax.value[1]):
                # The text ends where its closing tag begins, wherever that stands within a token.
                name = f"text_{len(self._more)}"
                self._more.append(f"{name}[suffix={close}]: {ANY_TEXT}")
                value, close = name, ""
            part = " ".join(piece for piece in (head, value, close) if piece.strip())
            yield part if key in required else f"({part})?"

    def _tagged_value(self, schema: dict[str, Any], tool: ToolForm) -> str:
        choices = schema.get("enum")
        if not _may_be_text(schema):
            return self._json(schema, tool.exact)
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(json.dumps(choice) for choice in choices)})"
        return "TEXT"

    def _write_gemma(self, schema: Any, level: int) -> str:
        """A value of a schema in Gemma's form."""
        kind = schema.get("type") if isinstance(schema, dict) else None
        quote = write_markup(self._grammar.syntax.quote)
        if kind in ("integer", "number", "boolean", "null"):
            return self._json(schema, False)
        if kind == "object" and level < MAX_LEVELS:
            return self._gemma_object(schema, level)
        if kind == "array" and level < MAX_LEVELS:
            item = self._write_gemma(schema.get("items"), level + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        choices = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return f"{quote} ({' | '.join(json.dumps(choice) for choice in choices)}) {quote}"
        return f"{quote} TEXT {quote}"

    def _gemma_object(self, schema: dict[str, Any], level: int) -> str:
        """An object: required keys first, in the order of its schema, then the others."""
        required, fields = schema.get("required") or (), schema.get("properties") or {}
        written = {
            key: f"{json.dumps(key + ':')} {self._write_gemma(fields[key], level + 1)}"
            for key in sorted(fields, key=lambda key: key not in required)
        }
        needed = [text for key, text in written.items() if key in required]
        optional = [text for key, text in written.items() if key not in required]
        if needed:
            body = ' "," '.join(needed) + "".join(f' ("," {text})?' for text in optional)
        else:
            # Any of them may be the first one, which has no comma before it.
            heads = [
                text + "".join(f' ("," {later})?' for later in optional[i + 1 :])
                for i, text in enumerate(optional)
            ]
            body = f"({' | '.join(heads)})?" if heads else ""
        return f'"{{" {body} "}}"'


def _may_be_text(schema: dict[str, Any]) -> bool:
    """Whether a tagged value of a schema may be a text, which is written without quotes."""
    kind = schema.get("type", "string")
    return "string" in kind if isinstance(kind, str | list) else True


def write_markup(markup: Sequence[str | int]) -> str:
    """Literals and token ids in Lark; neighbouring literals as one."""
    pieces: list[str] = []
    text = ""
    for part in (*markup, -1):
        if isinstance(part, str):
            text += part
            continue
        if text:
            pieces.append(json.dumps(text, ensure_ascii=False))
            text = ""
        if part >= 0:
            pieces.append(f"<[{part}]>")
    return " ".join(pieces)
