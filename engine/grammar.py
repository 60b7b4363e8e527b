"""Structured output: which tokens may come next. llguidance does the parsing; here are its bounds and its errors.

A grammar comes from a client, so its source is bounded before it is parsed, and parsing it is bounded by llguidance's
fuel, counted in work and not in seconds, so that the same grammar is refused on every machine or on none.

    compile(grammar, tokenizer) ─▶ Matcher: mask() ─▶ sample ─▶ push(token) ─▶ mask() ... done

An end token is allowed exactly when the text so far satisfies the grammar.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from diptych.errors import GrammarError
from diptych.request import Grammar

# Lark is the kind in which a few lines can be a lot of work (rules that double each other), so it gets the least room.
SOURCE_BYTES = {"json_object": 0, "json_schema": 64 * 1024, "regex": 8 * 1024, "lark": 4 * 1024}
LARK_CHOICES = 256  # parsing ambiguous choices takes their number squared
# What {m,n} may multiply a grammar's patterns to: llguidance writes the copies out before it begins to count fuel.
WRITTEN_OUT = 100_000
NESTING = 32  # brackets within brackets in the source: about ten levels of objects in a JSON schema
# Whitespace between JSON tokens is bounded: a model that has lost the thread would fill its whole answer with it.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"

# Fuel, at llguidance's own figures: 4 ms of lexer building, 14 ms of lexing and 2.5 ms of parsing for one mask.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,  # about 1 to 2 kB each
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,  # an error message never repeats the text or the grammar
)


def load(tokenizer: Any, end_ids: Iterable[int]) -> LLTokenizer:
    """Prepare a tokenizer for `compile`, once per model (about a second for 150 k entries).

    `tokenizer` is a `tokenizers.Tokenizer`, or a fast tokenizer of transformers; `end_ids` are the model's end tokens.

    Raises:
        GrammarError: the tokenizer has no fast form that llguidance can read.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    try:
        # A copy: padding and truncation are settings of the caller's tokenizer, and must not reach this one.
        plain = type(backend).from_str(backend.to_str())
        plain.no_padding()
        plain.no_truncation()
        return LLTokenizer(plain.to_str(), eos_token=sorted(set(end_ids)))
    except Exception as error:
        raise GrammarError("structured output is not possible with this tokenizer", str(error)) from error


class Matcher:
    """How far one sequence's output has come in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def mask(self, width: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which tokens may come next, `[width]`; ids that the tokenizer does not have never may.

        Raises:
            GrammarError: the grammar became too complex for its limits, or no token at all may come next.
        """
        bits = self._matcher.compute_bitmask()
        self._healthy()
        known = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[
            : min(self._vocab_size, width)
        ]
        allowed = np.zeros(width, np.bool_)
        allowed[: len(known)] = known
        if not allowed.any():
            raise GrammarError("the grammar allows no token here")
        return allowed

    def push(self, token: int) -> None:
        """Advance by one token. Raises GrammarError if it may not come next."""
        if not 0 <= token < self._vocab_size or not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not fit the grammar", self._matcher.get_error())

    def replay(self, tokens: Iterable[int]) -> None:
        """Advance by the tokens that an earlier attempt wrote. Raises GrammarError."""
        for token in tokens:
            self.push(token)

    @property
    def accepting(self) -> bool:
        """The text so far satisfies the grammar; it may be that more can follow."""
        return bool(self._matcher.is_accepting())

    @property
    def done(self) -> bool:
        """The text so far satisfies the grammar, and nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _healthy(self) -> None:
        if self._matcher.is_error():
            raise GrammarError("the grammar is too complex", self._matcher.get_error())


def compile(grammar: Grammar, tokenizer: LLTokenizer) -> Matcher:
    """A matcher at the beginning of the text.

    Raises:
        GrammarError: the source is too long, nested too deeply, malformed, or too complex for its limits.
    """
    source = _source(grammar)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(f"the {grammar.kind} grammar does not compile", matcher.get_error())
    return Matcher(matcher, tokenizer.vocab_size)


def check(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    """Raise GrammarError unless `grammar` compiles and a first token exists; what a gateway asks before any work."""
    compile(grammar, tokenizer).mask(tokenizer.vocab_size)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    text, limit = grammar.text, SOURCE_BYTES.get(grammar.kind)
    if limit is None:
        raise GrammarError(
            f"there is no grammar of kind {grammar.kind!r}", "", f"use one of {', '.join(SOURCE_BYTES)}"
        )
    if len(text.encode("utf-8", "replace")) > limit:
        raise GrammarError(f"the {grammar.kind} grammar is longer than {limit} bytes")
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise GrammarError("the grammar has a lone surrogate, which no text can have")
    if _depth(text) > NESTING:
        raise GrammarError(f"the grammar is nested more than {NESTING} levels deep")
    if grammar.kind == "json_object":
        return _json({"type": "object"})
    if grammar.kind == "json_schema":
        return _json(_schema(text))
    if grammar.kind == "regex":
        _bounded(_written_out(text))
        return str(LLMatcher.grammar_from_regex(text))
    if text.count("|") > LARK_CHOICES:
        raise GrammarError(f"the grammar has more than {LARK_CHOICES} choices")
    # One rule may repeat another that repeats a third, so here all counts multiply.
    _bounded(math.prod(max(1, int(low[:9]), int(high[:9] or 0)) for low, high in _COUNTED.findall(text)))
    return str(LLMatcher.grammar_from_lark(text))


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise GrammarError("the JSON schema is not valid JSON", str(error)) from error
    if not isinstance(schema, dict):
        raise GrammarError("the JSON schema is not an object")
    _bounded(sum(_written_out(string) for string in _strings(schema)))
    return schema


def _strings(node: Any) -> Iterator[str]:
    """Every string of a schema, keys too: each could be a pattern."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield key
            yield from _strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value)


def _json(schema: dict[str, Any]) -> str:
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))
    except ValueError as error:
        raise GrammarError("the JSON schema does not compile", str(error)) from error


def _depth(text: str) -> int:
    """The deepest nesting of brackets, escaped ones aside. Brackets in strings count too: this is only a bound."""
    depth = deepest = 0
    escaped = False
    for char in text:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _bounded(copies: int) -> None:
    if copies > WRITTEN_OUT:
        raise GrammarError(f"the grammar's counted repeats multiply it beyond {WRITTEN_OUT} symbols")


_COUNTED = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_ATOM = re.compile(r"\\[xuU]\{\w*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}|.", re.DOTALL)


def _written_out(pattern: str) -> int:
    """How many symbols a regular expression has once its counted repeats are written out.

    Never too few: where the reading of a pattern could be doubtful, the larger one is taken.
    """
    before: list[int] = []  # sums of the open groups
    total = last = 0
    for atom in _ATOM.findall(pattern):
        if atom == "(":
            before.append(total)
            total = last = 0
        elif atom == ")":
            last = total
            total += before.pop() if before else 0
        elif counted := _COUNTED.fullmatch(atom):
            times = max(1, int(counted[1][:9]), int((counted[2] or "0")[:9]))
            total, last = total + last * (times - 1), last * times
        else:
            total, last = total + 1, 1
    return total + sum(before)
