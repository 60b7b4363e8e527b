"""What a chat request says about the model's thoughts: whether and how much it thinks, and what begins behind them."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from diptych.request import Grammar, ThoughtBudget
from services.gateway.openai.schemas.request_schema import ChatRequest
from services.gateway.openai.validate import RequestRules, invalid_value_error, unsupported_error
from services.gateway.parsing.answer_parts import AnswerContext
from services.gateway.parsing.answer_reader import AnswerReader

EFFORT, BUDGET = "reasoning_effort", "thinking_token_budget"
# Variables with which templates turn thinking on and off.
SWITCHES = ("enable_thinking", "thinking")


def choose_template_options(request: ChatRequest, rules: RequestRules) -> dict[str, Any] | None:
    """The variables of the chat template: those that the client gives, and else those that `reasoning_effort` sets.

    Raises:
        RequestError: 400, the template cannot do what the effort asks for.
    """
    effort, given = request.reasoning_effort, request.chat_template_kwargs
    template = rules.tokenizer.template
    if effort is None or template is None:
        return given
    switches = [name for name in SWITCHES if name in template.options]
    thinks = effort != "none"
    options: dict[str, Any] = dict.fromkeys(switches, thinks)
    if not thinks:
        if not switches and rules.markup is not None and rules.markup.thinks:
            raise unsupported_error(EFFORT, "cannot be 'none': this model always thinks")
    elif EFFORT in template.options:
        options[EFFORT] = effort
    elif not switches:
        raise unsupported_error(EFFORT, "is not supported by this model")
    return {**options, **(given or {})} or None


def check_thought_budget(request: ChatRequest, rules: RequestRules) -> None:
    """Refuse `thinking_token_budget` where thoughts cannot be ended. Raises RequestError: 400."""
    if request.thinking_token_budget is None:
        return
    if rules.markup is None or not rules.markup.thought_ends:
        raise unsupported_error(BUDGET, "is not supported: no token ends this model's thoughts")


def is_thinking(prefix: str, rules: RequestRules) -> bool:
    """Whether the prompt, which ends in `prefix`, has begun a thought."""
    return rules.markup is not None and AnswerReader(rules.markup.plain, prefix).thinking


def gate_behind_thought(grammar: Grammar, prefix: str, rules: RequestRules) -> Grammar:
    """The grammar of the text, which begins where the thought has ended."""
    if rules.markup is None or not rules.markup.thinks or grammar.kind == "tools":
        # One of calls has thoughts itself.
        return grammar
    return structs.replace(grammar, gate=rules.markup.gate_schema(prefix, is_thinking(prefix, rules)))


def resolve_thought_budget(
    request: ChatRequest, context: AnswerContext, most: int, rules: RequestRules
) -> ThoughtBudget | None:
    """The budget of the answer's thoughts; `most` is its own length. Raises RequestError: 400, it is above that."""
    tokens = request.thinking_token_budget
    if tokens is None or rules.markup is None:
        return None
    if tokens > most:
        raise invalid_value_error(BUDGET, f"({tokens}) is more than the {most} tokens the answer may have")
    is_open = is_thinking(context.prefix, rules)
    return rules.markup.limit_thought(tokens, is_open, context.tools is not None)
