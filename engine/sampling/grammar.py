"""Structured output: computes which tokens a grammar allows next. llguidance parses; this module bounds its work.

A grammar comes from a client, so its source is bounded before it is parsed, and parsing is bounded by llguidance's
fuel, which counts work instead of seconds, so that a grammar is refused on every machine or on none.

    compile_grammar(grammar, tokenizer) ─▶ GrammarMatcher: token_mask() ─▶ sample ─▶ push(token) ─▶ token_mask() ...

An end token is allowed exactly if the text so far satisfies the grammar.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import llguidance
import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from diptych.errors import GrammarError
from diptych.request import Grammar
from engine.sampling.tool_grammar import read_tool_grammar, write_lark

# Most bytes of a grammar's source, by kind. A few lines of a Lark grammar can mean much work (rules that double each
# other), so its limit is the smallest.
MAX_SOURCE_BYTES = {
    "json_object": 0,
    "json_schema": 64 * 1024,
    "regex": 8 * 1024,
    "choice": 64 * 1024,
    "lark": 4 * 1024,
    "tools": 512 * 1024,
}
# Most choices in a Lark grammar. Parsing ambiguous choices takes time proportional to the square of their number.
MAX_LARK_CHOICES = 256
# Most symbols that {m,n} repeats may expand to. llguidance writes out the copies before it begins to count fuel.
MAX_EXPANDED_SYMBOLS = 100_000
# Most nested brackets in the source; about ten levels of objects in a JSON schema.
MAX_NESTING = 32
# Whitespace between JSON tokens is bounded: a confused model could fill its whole answer with it.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"

# Limits of llguidance in its own units of fuel. By its estimates they allow 4 ms of lexer building, 14 ms of lexing
# and 2.5 ms of parsing per mask.
PARSER_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    # Each state takes about 1 to 2 kB.
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    # An error message then never repeats the text or the grammar.
    verbose_errors=False,
)


def build_tokenizer(tokenizer: Any, end_ids: Iterable[int]) -> LLTokenizer:
    """Prepare a tokenizer for `compile_grammar`, once per model (about a second for 150 k entries).

    `tokenizer` is a `tokenizers.Tokenizer`, or a fast tokenizer of transformers; `end_ids` are the model's end tokens.

    Raises:
        GrammarError: the tokenizer has no fast form that llguidance can read.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    try:
        # Work on a copy: the caller's tokenizer keeps its settings of padding and truncation.
        plain = type(backend).from_str(backend.to_str())
        plain.no_padding()
        plain.no_truncation()
        return LLTokenizer(plain.to_str(), eos_token=sorted(set(end_ids)))
    except Exception as error:
        raise GrammarError("structured output is not possible with this tokenizer", str(error)) from error


class TokenMatcher(Protocol):
    """The position of one sequence's output in its grammar, as samplers need it."""

    @property
    def binds(self) -> bool:
        """Whether the grammar says which token may come next."""

    @property
    def may_end(self) -> bool:
        """Whether the answer may end here, as far as the grammar does not bind it."""

    @property
    def done(self) -> bool:
        """Whether the text so far satisfies the grammar and nothing can follow."""

    def token_mask(self, width: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which tokens may come next, `[width]`. Raises GrammarError."""

    def push(self, token: int) -> None:
        """Advance by one token. Raises GrammarError if the grammar does not allow it here."""

    def replay(self, tokens: Iterable[int]) -> None:
        """Advance by the tokens that an earlier attempt generated. Raises GrammarError."""


class GrammarMatcher:
    """The position of one sequence's output in its grammar, which binds every token."""

    binds = may_end = True

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def token_mask(self, width: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which tokens may come next, `[width]`; ids that the tokenizer does not have are never allowed.

        Raises:
            GrammarError: the grammar exceeded its limits, or allows no token at all.
        """
        bits = self._matcher.compute_bitmask()
        self._check_error()
        known = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[
            : min(self._vocab_size, width)
        ]
        allowed = np.zeros(width, np.bool_)
        allowed[: len(known)] = known
        if not allowed.any():
            raise GrammarError("the grammar allows no token here")
        return allowed

    def push(self, token: int) -> None:
        """Advance by one token. Raises GrammarError if the grammar does not allow it here."""
        if not 0 <= token < self._vocab_size or not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not fit the grammar", self._matcher.get_error())

    def replay(self, tokens: Iterable[int]) -> None:
        """Advance by the tokens that an earlier attempt generated. Raises GrammarError."""
        for token in tokens:
            self.push(token)

    def copy(self) -> GrammarMatcher:
        """Another matcher at the same position. It is cheap: both share what was computed of the grammar."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)

    def warm(self) -> None:
        """Compute the first mask, often the slowest; later copies share the result. Raises GrammarError."""
        self._matcher.compute_bitmask()
        self._check_error()

    @property
    def accepting(self) -> bool:
        """Whether the text so far satisfies the grammar; more text may still follow."""
        return bool(self._matcher.is_accepting())

    @property
    def done(self) -> bool:
        """Whether the text so far satisfies the grammar and nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _check_error(self) -> None:
        """Raises GrammarError if llguidance has reported an error, such as an exceeded limit."""
        if self._matcher.is_error():
            raise GrammarError("the grammar is too complex", self._matcher.get_error())


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> GrammarMatcher:
    """A matcher at the beginning of the text.

    Raises:
        GrammarError: the source is too long, nested too deeply, malformed, or too complex for its limits.
    """
    source = _llguidance_source(grammar)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=PARSER_LIMITS)
    if matcher.is_error():
        raise GrammarError(f"the {grammar.kind} grammar does not compile", matcher.get_error())
    return GrammarMatcher(matcher, tokenizer.vocab_size)


def check_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    """Check that `grammar` compiles and allows a first token, before any work. Raises GrammarError if not."""
    compile_grammar(grammar, tokenizer).token_mask(tokenizer.vocab_size)


def _llguidance_source(grammar: Grammar) -> str:
    """The grammar in llguidance's own format, after all bounds were checked."""
    text, limit = grammar.text, MAX_SOURCE_BYTES.get(grammar.kind)
    if limit is None:
        raise GrammarError(
            f"there is no grammar of kind {grammar.kind!r}", "", f"use one of {', '.join(MAX_SOURCE_BYTES)}"
        )
    if len(text.encode("utf-8", "replace")) > limit:
        raise GrammarError(f"the {grammar.kind} grammar is longer than {limit} bytes")
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise GrammarError("the grammar has a lone surrogate, which no text can have")
    if grammar.kind == "choice":
        return _choice_source(text)
    if _bracket_depth(text) > MAX_NESTING:
        raise GrammarError(f"the grammar is nested more than {MAX_NESTING} levels deep")
    if grammar.kind == "json_object":
        return _json_grammar({"type": "object"})
    if grammar.kind == "json_schema":
        return _json_grammar(_parse_schema(text))
    if grammar.kind == "tools":
        tool_grammar = read_tool_grammar(text)
        content = [] if tool_grammar.content is None else [tool_grammar.content]
        _check_schemas([*content, *(tool.schema for tool in tool_grammar.tools)], text)
        return str(LLMatcher.grammar_from_lark(write_lark(tool_grammar, WHITESPACE)))
    if grammar.kind == "regex":
        _check_copies(_expanded_size(text))
        return str(LLMatcher.grammar_from_regex(text))
    if text.count("|") > MAX_LARK_CHOICES:
        raise GrammarError(f"the grammar has more than {MAX_LARK_CHOICES} choices")
    # A rule may repeat a rule that repeats a third one, so all counts are multiplied.
    _check_copies(math.prod(max(1, int(low[:9]), int(high[:9] or 0)) for low, high in _COUNTED.findall(text)))
    return str(LLMatcher.grammar_from_lark(text))


def _choice_source(text: str) -> str:
    """The source of a grammar that allows the texts of a JSON list. Raises GrammarError."""
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise GrammarError("the choices are no list of texts", str(error)) from error
    if not choices or not all(choices):
        raise GrammarError("there must be choices, and none may be empty")
    return str(LLMatcher.grammar_from_regex("|".join(_LITERAL.sub(r"\\\g<0>", choice) for choice in choices)))


def _parse_schema(text: str) -> dict[str, Any]:
    """Parse a JSON schema and check its size. Raises GrammarError."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise GrammarError("the JSON schema is not valid JSON", str(error)) from error
    if not isinstance(schema, dict):
        raise GrammarError("the JSON schema is not an object")
    _check_schemas([schema], text)
    return schema


def _check_schemas(schemas: list[dict[str, Any]], text: str) -> None:
    """Check the size of schemas whose JSON is in `text`. Raises GrammarError."""
    if _COUNTED.search(text) is None and "\\u" not in text:
        # Nothing in them is repeated, so they are as long as they look.
        return
    _check_copies(sum(_expanded_size(string) for schema in schemas for string in _schema_strings(schema)))


def _schema_strings(node: Any) -> Iterator[str]:
    """Every string of a schema, keys too, since each could be a pattern."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield key
            yield from _schema_strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _schema_strings(value)


def _json_grammar(schema: dict[str, Any]) -> str:
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))
    except ValueError as error:
        raise GrammarError("the JSON schema does not compile", str(error)) from error


def _bracket_depth(text: str) -> int:
    """The deepest nesting of brackets (escaped ones excepted), counted up to `MAX_NESTING` + 1.

    A closing bracket closes the nearest open bracket of its kind and all brackets opened since; without one it is
    ignored. Brackets in strings count too, since the result only has to be an upper bound.
    """
    opened: list[str] = []
    deepest = 0
    for found in _BRACKET.finditer(text):
        char = found[0]
        if char in _CLOSING:
            opened.append(_CLOSING[char])
            deepest = max(deepest, len(opened))
            if deepest > MAX_NESTING:
                break
        elif char in opened:
            while opened.pop() != char:
                pass
    return deepest


def _check_copies(copies: int) -> None:
    """Raises GrammarError if counted repeats expand to too many symbols."""
    if copies > MAX_EXPANDED_SYMBOLS:
        raise GrammarError(f"the grammar's counted repeats multiply it beyond {MAX_EXPANDED_SYMBOLS} symbols")


# What a regular expression reads as more than the character itself.
_LITERAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_BRACKET = re.compile(r"\\.|[()\[\]{}]", re.DOTALL)
_COUNTED = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ATOM = re.compile(r"\\[xuU]\{\w*\}|\\.|\{\d+(?:,\d*)?\}|.", re.DOTALL)


def _regex_atoms(pattern: str) -> Iterator[str]:
    """The parts of a regular expression that a repeat can follow: escapes, classes, counts, single characters."""
    at, has_classes = 0, True
    while at < len(pattern):
        found = _CLASS.match(pattern, at) if has_classes and pattern[at] == "[" else None
        if found is None:
            # The bracket is never closed, so no later one is either. Searching the end of each would take quadratic
            # time.
            has_classes = has_classes and pattern[at] != "["
            found = _ATOM.match(pattern, at)
            assert found is not None
        yield found[0]
        at = found.end()


def _expanded_size(pattern: str) -> int:
    """Number of symbols of a regular expression once its counted repeats are written out; at most
    `MAX_EXPANDED_SYMBOLS` + 1.

    The result is never too small: where a pattern is ambiguous, the larger number is used. The time is linear in the
    length of the pattern.
    """
    most = MAX_EXPANDED_SYMBOLS + 1
    if not any(char in pattern for char in "{[\\"):
        # Nothing is repeated, and each character but those of groups is a symbol.
        return min(most, len(pattern) - pattern.count("(") - pattern.count(")"))
    # The size of the pattern before each open group.
    before: list[int] = []
    total = last = 0
    for atom in _regex_atoms(pattern):
        if atom == "(":
            before.append(total)
            total = last = 0
        elif atom == ")":
            last = total
            total = min(most, total + (before.pop() if before else 0))
        elif counted := _COUNTED.fullmatch(atom):
            times = max(1, int(counted[1][:9]), int((counted[2] or "0")[:9]))
            total, last = min(most, total + last * (times - 1)), min(most, last * times)
        else:
            total, last = min(most, total + 1), 1
    return min(most, total + sum(before))
