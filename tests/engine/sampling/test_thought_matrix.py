"""Thoughts on and off, with and without schema, tools and budget, of models of three kinds: drawn by the sampler and
read by the gateway, against a splitting of the same tokens that is written anew here.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass
from typing import Any

import jsonschema
import msgspec
import pytest
import torch

from diptych.errors import RequestError
from diptych.messages import Logprob, Output
from engine.protocols import SampledToken
from engine.sampling.grammar import build_tokenizer
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from services.gateway.generation.parsed_text import ParsedText
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.parsing.answer_parts import AnswerPart
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.preparation.grammar_check import GrammarChecker
from services.gateway.preparation.resolve_body import resolve_body
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.reasoning_models import MODELS, ReasoningModel

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "string", "maxLength": 5}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("jump", "look")]
WORDS = ("the", "quick", "brown", "fox", "jumps", "über", "世界", "{", '"', "<b>", "\n")
MOST, BUDGET, SEEDS = 300, 7, 6
WISH, END_WISH = 40.0, 6.0


@dataclass(frozen=True)
class Case:
    """What a request asks for."""

    model: ReasoningModel
    is_off: bool
    schema: bool
    tools: str | None
    budget: int | None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its body."""
        found: dict[str, Any] = {"reasoning_effort": "none"} if self.is_off else {}
        if self.schema:
            found["response_format"] = FORMAT
        if self.tools is not None:
            found |= {"tools": TOOLS, "tool_choice": self.tools}
        if self.budget is not None:
            found["thinking_token_budget"] = self.budget
        return found


CASES = [
    Case(*made)
    for made in itertools.product(
        MODELS, (False, True), (False, True), (None, "auto", "required"), (None, 0, BUDGET)
    )
    if made[0].has_switch or not made[1]
]


class MadeUpModel:
    """Draws answers with the product's sampler. What it wishes to say comes from a script; random text follows."""

    def __init__(self, model: ReasoningModel, folder: Any) -> None:
        self.model = model
        self.tokenizer = GatewayTokenizer.load(str(model.write_folder(folder)))
        markup = ModelMarkup.load(self.tokenizer)
        assert markup is not None and markup.thinks
        self.markup = markup
        self.rules = RequestRules(
            self.tokenizer, ("toy",), self.tokenizer.context_tokens, RequestLimits(), markup=markup
        )
        self.checker = GrammarChecker(self.tokenizer)
        self.sampler = Sampler(
            self.tokenizer.size, build_tokenizer(self.tokenizer.backend, self.tokenizer.end_ids)
        )
        self.special = {
            self.tokenizer.backend.token_to_id(one) for one in (*model.markers, "<|user|>", "<|assistant|>")
        }
        self.special |= {*self.tokenizer.end_ids, self.tokenizer.backend.token_to_id("<|end|>")}

    def resolve(self, **fields: Any) -> ResolvedRequest:
        """The request of a body."""
        body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": MOST, **fields}
        resolved = resolve_body(
            "chat", msgspec.json.encode(body), Caller(0.0), self.rules, self.checker.rejection_reason
        )
        assert isinstance(resolved, ResolvedRequest)
        return resolved

    def write_script(self, case: Case, rng: random.Random) -> str:
        """What the model wishes to say: a thought, which may end in a call, and a text or a call."""
        model = self.model
        words = " ".join(rng.choices(WORDS, k=rng.randrange(1, 25)))
        arguments = json.dumps({"a": rng.randrange(99)})
        call = model.call.replace("NAME", rng.choice(["jump", "look"])).replace("ARGS", arguments)
        is_call = rng.random() < 0.6 and case.tools is not None
        said = call if is_call else model.text + " ".join(rng.choices(WORDS, k=rng.randrange(1, 12)))
        may_skip = model.has_switch and rng.random() < 0.3
        if case.is_off or may_skip:
            return said
        if is_call and model.name != "gpt-oss" and rng.random() < 0.4:
            # It calls amid its thought.
            return f"{'' if model.is_open else model.opens}{words}{call}"
        return model.write_answer(words, said)

    def draw(self, resolved: ResolvedRequest, script: str) -> tuple[list[int], str]:
        """The tokens of an answer, and why it ended."""
        wished = self.tokenizer.encode(script, False)
        [prompt], sampling = resolved.prompts, resolved.sampling
        row = self.sampler.open(Sequence("r", 1, prompt.tokens.tolist(), sampling, math.inf))
        tokens: list[int] = []
        closes = self.tokenizer.encode(self.model.closes.strip(), False)
        while len(tokens) < sampling.max_tokens:
            logits = torch.zeros(1, self.tokenizer.size)
            # Of itself it writes markers only where its script has them.
            logits[0, [*self.special]] = -WISH
            logits[0, list(sampling.stop_token_ids)] = WISH if not wished else -WISH
            if wished:
                logits[0, wished[0]] = WISH
            [chosen] = self.sampler.sample([logits], [row])
            if not isinstance(chosen, SampledToken):
                raise chosen
            tokens.append(chosen.token)
            if chosen.token in sampling.stop_token_ids:
                return tokens, "stop"
            row.push(chosen.token)
            if row.done:
                return tokens, "stop"
            if wished and chosen.token == wished[0]:
                wished.pop(0)
            elif chosen.token == closes[0] and closes[0] in wished:
                # The budget has ended its thought.
                wished = wished[wished.index(closes[0]) + 1 :]
            elif chosen.token in self.special:
                wished = []
        return tokens, "length"

    def read(
        self, resolved: ResolvedRequest, tokens: list[int], reason: str, step: int
    ) -> tuple[ParsedText, list[AnswerPart]]:
        """What the gateway reads in an answer whose tokens come `step` at a time."""
        text = ParsedText(resolved, 0, resolved.prompts[0], self.tokenizer, self.markup)
        parts: list[AnswerPart] = []
        for at in range(0, len(tokens), step):
            group = tokens[at : at + step]
            is_last = at + step >= len(tokens)
            ends = reason if is_last and reason == "stop" else None
            text.feed_output(
                Output("r", 0, group, [Logprob(token, -1.0, []) for token in group], finish=ends)
            )
            parts += text.take_piece().parts
            if text.finish is not None:
                break
        text.end_sequence(reason)
        return text, parts + list(text.take_piece().parts)


Models = dict[str, MadeUpModel]
models = pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.name))


@pytest.fixture(scope="module")
def made_up_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return {model.name: MadeUpModel(model, tmp_path_factory.mktemp("model")) for model in MODELS}


@dataclass
class Split:
    """What an answer says, by its tokens alone. `thought` counts the tokens of thoughts with those of their ends."""

    reasoning: str = ""
    content: str = ""
    calls: int = 0
    counted: int = 0
    inner: int = 0


def split_answer(made_up: MadeUpModel, tokens: list[int], prefix: str, has_tools: bool) -> Split:
    """Split an answer at its markers."""
    return (split_channels if made_up.model.name == "gpt-oss" else split_tags)(
        made_up, tokens, prefix, has_tools
    )


def split_tags(made_up: MadeUpModel, tokens: list[int], prefix: str, has_tools: bool) -> Split:
    names = {made_up.tokenizer.backend.token_to_id(one): one for one in made_up.model.markers}
    split = Split()
    pieces: dict[str, list[int]] = {"reasoning": [], "content": []}
    state = "reasoning" if prefix.rstrip().endswith("<think>") else "content"
    for token in tokens:
        name = names.get(token, "")
        begins_call = has_tools and name in ("<tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
        split.counted += state == "reasoning" or name == "<think>"
        split.calls += has_tools and name in ("<tool_call>", "<｜tool▁call▁begin｜>")
        if state == "call":
            if name in ("</tool_call>", "<｜tool▁calls▁end｜>"):
                state = "content"
        elif begins_call:
            state = "call"
        elif state == "reasoning" and name == "</think>":
            state = "content"
        elif state == "content" and name == "<think>":
            state = "reasoning"
        else:
            split.inner += state == "reasoning"
            pieces[state].append(token)
    split.reasoning = made_up.tokenizer.decode(pieces["reasoning"], False)
    split.content = made_up.tokenizer.decode(pieces["content"], False)
    return split


def split_channels(made_up: MadeUpModel, tokens: list[int], prefix: str, has_tools: bool) -> Split:
    ids = {one: made_up.tokenizer.backend.token_to_id(one) for one in (*made_up.model.markers, "<|end|>")}
    ends = {ids[one] for one in ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")}
    split, header = Split(), list[int]()
    pieces: dict[str, list[int]] = {"reasoning": [], "content": []}
    state = "header"
    for token in tokens:
        split.counted += state == "reasoning"
        if state == "header":
            header.append(token)
            if token != ids["<|message|>"]:
                continue
            text = made_up.tokenizer.decode(header, False)
            state = "call" if "functions." in text else "reasoning" if "analysis" in text else "content"
            split.counted += state == "reasoning"
            split.calls += state == "call"
        elif token in ends:
            header, state = [token], "header"
        elif state != "call":
            split.inner += state == "reasoning"
            pieces[state].append(token)
    split.reasoning = made_up.tokenizer.decode(pieces["reasoning"], False)
    split.content = made_up.tokenizer.decode(pieces["content"], False)
    return split


def without_space(text: str) -> str:
    return "".join(text.split())


def join_parts(parts: list[AnswerPart]) -> dict[str, Any]:
    """What parts say, however they were cut."""
    said: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for part in parts:
        if part.kind == "call":
            said["calls"].append([part.text, ""])
        elif part.kind == "arguments":
            said["calls"][part.call][1] += part.text
        else:
            said[part.kind] += part.text
    return said


def case_id(case: Case) -> str:
    words = ["off" if case.is_off else "on", *(["schema"] if case.schema else [])]
    words += [f"tools-{case.tools}"] if case.tools else []
    return "-".join(
        [case.model.name, *words, *([f"budget-{case.budget}"] if case.budget is not None else [])]
    )


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_thought_and_answer_are_separated(made_up_models: Models, case: Case) -> None:
    made_up = made_up_models[case.model.name]
    resolved = made_up.resolve(**case.fields)
    assert resolved.context is not None
    for seed in range(SEEDS):
        rng = random.Random(f"{case_id(case)} {seed}")
        script = made_up.write_script(case, rng)
        tokens, reason = made_up.draw(resolved, script)
        is_end = tokens[-1] in resolved.sampling.stop_token_ids
        split = split_answer(
            made_up, tokens[:-1] if is_end else tokens, resolved.context.prefix, case.tools is not None
        )
        shown = f"{made_up.tokenizer.decode(tokens, False)!r} for {script!r}"
        text, parts = made_up.read(resolved, tokens, reason, 1)
        said = join_parts(parts)
        assert without_space(said["reasoning"]) == without_space(split.reasoning), shown
        content, is_cut = without_space(said["content"]), reason == "length"
        # A call that is cut before its name is text.
        assert content == without_space(split.content) or (is_cut and content.startswith(split.content)), (
            shown
        )
        assert split.calls - is_cut <= len(said["calls"]) <= split.calls, shown
        assert text.reasoning_tokens == split.counted, shown
        for step in (2, 7, MOST):
            other, parts = made_up.read(resolved, tokens, reason, step)
            assert join_parts(parts) == said, shown
            assert (other.finish, other.reasoning_tokens) == (text.finish, text.reasoning_tokens), shown
        if case.is_off:
            assert not said["reasoning"] and not text.reasoning_tokens, shown
        if case.budget is not None:
            # Where a grammar binds the thought, too, it ends with a whole character.
            is_bound = case.model.name == "gpt-oss" and (case.schema or case.tools == "required")
            assert split.inner <= case.budget + 3 * is_bound, shown
        check_bound(case, said, text.finish, shown)


def check_bound(case: Case, said: dict[str, Any], finish: str | None, shown: str) -> None:
    """What grammars bind is as they say."""
    for name, arguments in said["calls"]:
        assert name in ("jump", "look"), shown
        if finish != "length" and (case.model.name != "gpt-oss" or case.tools == "required" or case.schema):
            jsonschema.validate(json.loads(arguments), SCHEMA)
    if finish == "length":
        return
    if case.tools == "required":
        assert said["calls"] and not said["content"].strip() and finish == "tool_calls", shown
    elif case.schema and not said["calls"]:
        jsonschema.validate(json.loads(said["content"]), SCHEMA)
    assert (finish == "tool_calls") == bool(said["calls"]), shown


def test_thoughts_cannot_be_turned_off_where_the_template_has_no_switch(made_up_models: Models) -> None:
    for made_up in made_up_models.values():
        if not made_up.model.has_switch:
            with pytest.raises(RequestError, match="always thinks") as caught:
                made_up.resolve(reasoning_effort="none")
    assert (caught.value.failure.status, caught.value.failure.param) == (400, "reasoning_effort")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_without_its_outer_marker_ends_the_thought(made_up_models: Models, choice: str) -> None:
    made_up = made_up_models["r1"]
    resolved = made_up.resolve(tools=TOOLS, tool_choice=choice, thinking_token_budget=BUDGET)
    assert resolved.context is not None and resolved.sampling.thought is not None
    # No grammar that must have a call begins with this marker, so it binds none of them.
    assert resolved.context.calls_bound == (choice == "auto")
    call = made_up.model.call.replace("NAME", "jump").replace("ARGS", '{"a": 3}')
    script = "the fox" + call.removeprefix("<｜tool▁calls▁begin｜>").removesuffix("<｜tool▁calls▁end｜>")
    tokens, reason = made_up.draw(resolved, script)
    said = join_parts(made_up.read(resolved, tokens, reason, 1)[1])
    assert (said["reasoning"], said["calls"][0]) == ("the fox", ["jump", '{"a": 3}'])


@models
def test_stop_strings_begin_behind_the_thought(made_up_models: Models, model: ReasoningModel) -> None:
    made_up = made_up_models[model.name]
    resolved = made_up.resolve(stop=["fox", "STOP"])
    script = model.write_answer("the fox STOPs", f"{model.text}A brown fox jumps")
    tokens, reason = made_up.draw(resolved, script)
    for step in (1, 3, MOST):
        text, parts = made_up.read(resolved, tokens, reason, step)
        said = join_parts(parts)
        assert said["reasoning"] == "the fox STOPs" and said["content"].strip() == "A brown"
        assert (text.finish, text.stop_reason) == ("stop", "fox")
