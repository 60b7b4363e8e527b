"""Bodies of requests, checked and resolved as the gateway does."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.openai.resolve import ResolvedRequest, make_prompt, resolve_chat, resolve_completion
from services.gateway.openai.schemas.request_schema import (
    ChatRequest,
    CompletionRequest,
)
from services.gateway.openai.thoughts import check_thought_budget, choose_template_options
from services.gateway.openai.tools import plan_tools
from services.gateway.openai.validate import (
    RequestRules,
    build_grammar,
    check_chat_fields,
    check_completion_fields,
)

USER_MESSAGE = {"role": "user", "content": "hi"}


def chat(rules: RequestRules, prompt_tokens: int = 10, **fields: Any) -> ResolvedRequest:
    body = msgspec.convert({"model": "toy", "messages": [USER_MESSAGE], **fields}, ChatRequest)
    check_chat_fields(body, rules)
    plan_tools(body, rules)
    choose_template_options(body, rules)
    check_thought_budget(body, rules)
    grammar = build_grammar(body.response_format, rules.limits)
    return resolve_chat(body, make_prompt([5] * prompt_tokens, "x"), grammar, rules)


def completion(
    rules: RequestRules, prompts: int = 1, prompt_tokens: int = 10, **fields: Any
) -> ResolvedRequest:
    body = msgspec.convert({"model": "toy", **fields}, CompletionRequest)
    check_completion_fields(body, prompts, rules)
    grammar = build_grammar(body.response_format, rules.limits)
    return resolve_completion(body, [make_prompt([5] * prompt_tokens, "x")] * prompts, grammar, rules)
