"""Random answers to requests that must call a tool: the product's sampler draws them, and its reader reads them."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import torch

from benchmarks.tool_parts.schemas import random_tools, wide_tools
from diptych.messages import Output
from engine.protocols import SampledToken
from engine.sampling.grammar import build_tokenizer
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from services.gateway.generation.parsed_text import make_text
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.translated import GrammarCheck
from services.gateway.openai.validate import RequestRules
from services.gateway.parsing.answer_parts import AnswerPart
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.preparation.grammar_check import GrammarChecker
from services.gateway.preparation.resolve_body import resolve_body
from services.gateway.tokenization.tokenizer import GatewayTokenizer

MODEL = Path(__file__).parents[2] / "models" / "tiny"
MAX_TOKENS, NUM_CHECKS = 1500, 9
ASKED = [{"role": "user", "content": "Call a tool."}]


class ToolWalks:
    """Requests with tools, and random answers to them."""

    def __init__(self) -> None:
        tokenizer = GatewayTokenizer.load(str(MODEL))
        self._rules = RequestRules(
            tokenizer, ("tiny",), 1 << 20, RequestLimits(), markup=ModelMarkup.load(tokenizer)
        )
        self._checker = GrammarChecker(tokenizer)
        self._vocab = tokenizer.size
        self._sampler = Sampler(self._vocab, build_tokenizer(tokenizer.backend, tokenizer.end_ids))

    def check_validity(self, num_schemas: int, seed: int) -> dict[str, Any]:
        """Of so many requests, the share whose answer calls a tool that it may, with arguments of its schema."""
        problems = Counter[str]()
        num_tokens = 0
        for number in range(num_schemas):
            rng = random.Random(f"{seed} {number}")
            tools = random_tools(rng)
            names = [tool["function"]["name"] for tool in tools]
            if rng.random() < 0.5:
                names = [rng.choice(names)]
                choice: Any = {"type": "function", "function": {"name": names[0]}}
            else:
                choice = "required"
            resolved = self._resolve(tools, choice, rng.randrange(1 << 32))
            found, finish, count = self._answer(resolved)
            num_tokens += count
            functions = [tool["function"] for tool in tools]
            known = {one["name"]: one["parameters"] for one in functions if one["name"] in names}
            if (problem := find_problem(found, finish, known)) is not None:
                problems[problem] += 1
        return {
            "tool_valid": round(1 - problems.total() / num_schemas, 6),
            "schemas": num_schemas,
            "mean_tokens": round(num_tokens / num_schemas, 1),
            "problems": dict(problems),
        }

    def measure_check(self, num_tools: int, num_arguments: int) -> dict[str, float]:
        """Median seconds, and those of CPU time, to validate a request with so many tools and compile its grammar; and
        for a request whose grammar is known.
        """
        body = self._make_body(wide_tools(num_tools, num_arguments), "required", 0)

        def check(reason: GrammarCheck) -> tuple[float, float]:
            begun_s, cpu_s = time.perf_counter(), time.process_time()
            resolve_body("chat", body, Caller(0.0), self._rules, reason)
            return time.perf_counter() - begun_s, time.process_time() - cpu_s

        pairs = [
            (check(self._checker.rejection_reason), check(lambda grammar, field: None))
            for _ in range(NUM_CHECKS)
        ]
        columns = zip(*((*new, *known) for new, known in pairs), strict=True)
        names = ("check_s", "check_cpu_s", "recheck_s", "recheck_cpu_s")
        return {
            name: round(statistics.median(values), 4) for name, values in zip(names, columns, strict=True)
        }

    def _make_body(self, tools: list[dict[str, Any]], choice: Any, seed: int) -> bytes:
        asked = {"model": "tiny", "messages": ASKED, "tools": tools, "tool_choice": choice, "seed": seed}
        return msgspec.json.encode(asked | {"max_tokens": MAX_TOKENS})

    def _resolve(self, tools: list[dict[str, Any]], choice: Any, seed: int) -> ResolvedRequest:
        body = self._make_body(tools, choice, seed)
        resolved = resolve_body("chat", body, Caller(0.0), self._rules, lambda grammar, field: None)
        assert isinstance(resolved, ResolvedRequest)
        return resolved

    def _answer(self, resolved: ResolvedRequest) -> tuple[list[AnswerPart], str, int]:
        """The parts of a random answer, its finish reason, and its tokens."""
        [prompt], sampling = resolved.prompts, resolved.sampling
        sequence = Sequence("r", 1, prompt.tokens.tolist(), sampling, math.inf)
        row = self._sampler.open(sequence)
        text = make_text(resolved, 0, prompt, self._rules.tokenizer, self._rules.markup)
        # Flat, so that the seed's noise decides alone.
        logits, parts = torch.zeros(1, self._vocab), list[AnswerPart]()
        finish, count = "length", 0
        while finish == "length" and count < MAX_TOKENS:
            [chosen] = self._sampler.sample([logits], [row])
            if not isinstance(chosen, SampledToken):
                raise chosen
            count += 1
            ends = chosen.token in sampling.stop_token_ids
            if not ends:
                row.push(chosen.token)
            finish = "stop" if ends or row.done else "length"
            done = finish if finish == "stop" or count == MAX_TOKENS else None
            text.feed_output(Output("r", 0, [chosen.token], finish=done))
            if text.finish is not None:
                finish = text.finish
        text.end_sequence(finish)
        parts += text.take_piece().parts
        return parts, text.finish or finish, count


def find_problem(parts: list[AnswerPart], finish: str, known: dict[str, dict[str, Any]]) -> str | None:
    """What is wrong with an answer that must call one of the `known` tools; None: nothing."""
    if finish != "tool_calls":
        return f"it ends with {finish}"
    calls: dict[int, list[str]] = {}
    for part in parts:
        if part.kind == "call":
            calls[part.call] = [part.text, ""]
        elif part.kind == "arguments":
            calls[part.call][1] += part.text
        elif part.kind == "content" and part.text.strip():
            return "it has text beside calls"
    for name, arguments in calls.values():
        if name not in known:
            return "it calls another tool"
        try:
            jsonschema.validate(json.loads(arguments), known[name])
        except ValueError:
            return "arguments are no JSON"
        except jsonschema.ValidationError:
            return "arguments are not as in the schema"
    return None if calls else "it calls nothing"
