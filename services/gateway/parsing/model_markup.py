"""Finds the format of a model's answers, and what of it is told in tokens: where thoughts begin and end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import msgspec

from diptych.request import Grammar, GrammarGate, ThoughtBudget
from engine.sampling.tool_grammar import CallSyntax, ToolGrammar
from services.gateway.parsing.answer_format import CHANNEL, MESSAGE, MESSAGE_ENDS, START, AnswerFormat
from services.gateway.parsing.answer_markup import AnswerMarkup
from services.gateway.parsing.call_writing import choose_syntax
from services.gateway.parsing.families import choose_format
from services.gateway.parsing.own_template import convert_template
from services.gateway.tokenization.tokenizer import GatewayTokenizer

JSON_KINDS = ("json_schema", "json_object")


@dataclass(frozen=True)
class ModelMarkup:
    """The format of a model's answers in its vocabulary: `calls` for requests with tools, `plain` for others."""

    tokenizer: GatewayTokenizer
    calls: AnswerMarkup
    plain: AnswerMarkup

    @classmethod
    def load(
        cls,
        tokenizer: GatewayTokenizer,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> ModelMarkup | None:
        """The markup of a model: as the settings say, else its own, else as its chat template tells; or None.

        Raises:
            ModelError: its own `response_template` cannot be used.
        """
        own = tokenizer.model.response_template
        template = "" if tokenizer.template is None else tokenizer.template.source
        if own is not None and tool_parser is None and reasoning_parser is None:
            answer_format: AnswerFormat | None = convert_template(own, "this model")
        else:
            answer_format = choose_format(template, tool_parser, reasoning_parser)
        if answer_format is None or tokenizer.template is None:
            return None
        added = {one.content: token for token, one in tokenizer.backend.get_added_tokens_decoder().items()}
        return cls(
            tokenizer,
            AnswerMarkup(answer_format, added.get),
            AnswerMarkup(answer_format.without_calls(), added.get),
        )

    @property
    def thinks(self) -> bool:
        """Whether answers may have thoughts."""
        return bool(self.calls.format.reasoning)

    @cached_property
    def thought_begin(self) -> tuple[int, ...]:
        """The tokens that begin a thought."""
        found = self.calls.format
        if found.channels:
            return self._encode(f"{CHANNEL}analysis{MESSAGE}")
        return self._encode(found.reasoning.opens[0]) if found.reasoning and found.reasoning.opens else ()

    @cached_property
    def thought_ends(self) -> tuple[int, ...]:
        """The tokens of which each ends a thought, its own end first; empty if that is not one token."""
        found = self.calls.format
        closes = found.reasoning.closes if found.reasoning else ()
        own = ("<|end|>", *MESSAGE_ENDS, START, CHANNEL) if found.channels else closes
        ends = [self._token_of(literal) for literal in dict.fromkeys(own)]
        return tuple(end for end in ends if end is not None) if ends and ends[0] is not None else ()

    @cached_property
    def call_markers(self) -> tuple[int, ...]:
        """The tokens that end a thought since they begin a call, or are around several."""
        calls = self.calls.format.calls
        literals = () if calls is None else (*calls.opens, *calls.wraps)
        found = map(self._token_of, dict.fromkeys(literals))
        return tuple(token for token in found if token is not None)

    @cached_property
    def call_starts(self) -> tuple[int, ...]:
        """The tokens of `call_markers` with which a grammar of calls begins, so that it can bind from them on."""
        syntax = self.call_syntax
        first = () if syntax is None else (*syntax.outer[0], *syntax.opener)[:1]
        return tuple(token for token in first if isinstance(token, int) and not self.calls.format.channels)

    @cached_property
    def call_syntax(self) -> CallSyntax | None:
        """How calls are written, for a grammar; None: none is known."""
        return choose_syntax(self.calls)

    @cached_property
    def call_opener(self) -> int | None:
        """The token that begins a call; None: calls do not begin with one that nothing else begins with."""
        calls = self.calls.format.calls
        return self._token_of(calls.opens[0]) if calls is not None and calls.opens else None

    def limit_thought(self, tokens: int, is_open: bool, has_tools: bool) -> ThoughtBudget:
        """The budget of an answer whose prompt has begun a thought, or not. It must have `thought_ends`."""
        ends = (*self.thought_ends, *(self.call_markers if has_tools else ()))
        return ThoughtBudget(tokens, self.thought_begin, ends, is_open)

    def sees_calls(self, gate: GrammarGate) -> bool:
        """Whether `gate` binds from each marker on that is read as the beginning of a call."""
        calls, syntax = self.calls.format.calls, self.call_syntax
        if calls is None or syntax is None or (gate.repeats and not syntax.opener):
            # Behind one call others may follow without a marker.
            return False
        seen = {*gate.starts, *(bind[0] for bind in gate.binds if len(bind) == 1)}
        return all(self._token_of(literal) in seen for literal in calls.opens)

    def bind_text(self, grammar: Grammar) -> Grammar:
        """The grammar of a JSON text, with the messages around it if an answer consists of messages."""
        if not self.calls.format.channels or self.call_syntax is None or grammar.kind not in JSON_KINDS:
            return grammar
        schema = json.loads(grammar.text) if grammar.text else {"type": "object"}
        return Grammar(
            "tools", msgspec.json.encode(ToolGrammar(self.call_syntax, (), content=schema)).decode()
        )

    def gate_schema(self, prefix: str, is_open: bool) -> GrammarGate | None:
        """Where the grammar of the text begins in an answer behind `prefix`; None: at once."""
        found = self.calls.format
        if found.channels:
            return GrammarGate((self._encode(f"{CHANNEL}final{MESSAGE}"),))
        if found.reasoning is None:
            return None
        binds = tuple(self._encode(literal) for literal in found.reasoning.closes)
        if is_open:
            return GrammarGate(binds)
        has_thought = any(literal in prefix for literal in found.reasoning.closes)
        return None if has_thought else GrammarGate(binds, is_free=False, frees=self.thought_begin[0])

    def _encode(self, literal: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(literal, False))

    def _token_of(self, literal: str) -> int | None:
        return self.calls.markers.token_of(literal)
