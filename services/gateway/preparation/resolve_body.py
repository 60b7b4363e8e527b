"""Turns the bytes of a body into a `ResolvedRequest`, or into the bytes of a response. All routes share the steps:

    bytes ─ parse ─▶ fields ─ validate ─▶ ValidBody ─ tokenize ─▶ prompts ─ resolve ─▶ ResolvedRequest or bytes

Each step is done once. The client decides how long they take; `preparer_pool` decides in which process they run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from diptych.request import Grammar
from services.gateway.generation.output_text import with_echo
from services.gateway.messages.translate import translate_count, translate_messages
from services.gateway.openai.chat_messages import parse_chat_messages
from services.gateway.openai.keep_options import count_shared_tokens, find_system_end
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.resolve import (
    Prompt,
    ResolvedRequest,
    count_kept,
    make_prompt,
    resolve_chat,
    resolve_completion,
    truncate_prompts,
)
from services.gateway.openai.schemas.messages_objects import CountedTokens
from services.gateway.openai.schemas.messages_request import CountTokensRequest, MessagesRequest
from services.gateway.openai.schemas.pooling_schema import (
    EmbeddingRequest,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.openai.schemas.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    Message,
    TokenizeRequest,
)
from services.gateway.openai.schemas.response_schema import Detokenized, Tokenized
from services.gateway.openai.schemas.responses_request import ResponsesRequest
from services.gateway.openai.tenancy import Caller, check_priority
from services.gateway.openai.thoughts import (
    check_thought_budget,
    choose_template_options,
    gate_behind_thought,
    is_thinking,
)
from services.gateway.openai.tools import (
    TOOLS,
    ToolPlan,
    binds_calls,
    build_tool_grammar,
    gate_calls,
    plan_tools,
)
from services.gateway.openai.translated import GrammarCheck, TranslatedRequest
from services.gateway.openai.validate import (
    RequestRules,
    build_grammar,
    check_chat_fields,
    check_completion_fields,
    check_model_name,
    check_text_length,
    context_length_error,
    invalid_value_error,
    split_prompts,
)
from services.gateway.openai.vllm_fields import STRUCTURED, build_output_grammar, check_vllm_fields
from services.gateway.parsing.answer_parts import AnswerContext
from services.gateway.pooling.pooled_inputs import (
    PooledInputs,
    read_embedding,
    read_rerank,
    read_score,
    resolve_pooled,
)
from services.gateway.preparation.checked_beside import checked_grammar
from services.gateway.responses.translate import translate_responses

GRAMMAR_FIELD = "response_format"
# Of a prompt that is cut to its last tokens so many more are made, since the first ones depend on the text before them.
MARGIN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat, with what the chat template needs to render them as one prompt."""

    messages: list[dict[str, Any]]
    # Whether the template begins the assistant's message.
    generate: bool
    # Whether the last message is left open, to be continued.
    resume: bool
    options: dict[str, Any] | None
    # What the model may call, in the form of OpenAI's API.
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ValidBody:
    """What validation has found in a body.

    `sources` are its prompts before they are tokenized: text, token ids or a conversation. `special`: the tokenizer
    adds its special tokens to them.
    """

    sources: list[str | list[int] | Conversation]
    special: bool = False
    grammar: Grammar | None = None
    plan: ToolPlan | None = None
    # The field that asks for the grammar.
    grammar_field: str = GRAMMAR_FIELD
    # Of a body whose prompts are pooled.
    pooled: PooledInputs | None = None

    @property
    def field(self) -> str:
        """The field with the texts of its prompts."""
        return "prompt" if self.pooled is None else self.pooled.field


ValidateBody = Callable[[Any, Caller, RequestRules], ValidBody]


@dataclass(frozen=True, slots=True)
class BodyRoute:
    """What differs between routes: the schema of a body, and a function for the second and the last step."""

    schema: type[Any]
    validate: ValidateBody
    resolve: Callable[[Any, ValidBody, list[Prompt], Caller, RequestRules], ResolvedRequest | bytes]
    # Of a route that is a chat in another shape: makes the chat, which the two other functions take then.
    translate: Callable[[Any, RequestRules], TranslatedRequest] | None = None

    @property
    def generates(self) -> bool:
        """Whether it asks for generation."""
        return self.schema not in (TokenizeRequest, DetokenizeRequest)


def resolve_body(
    route: str, body: bytes, caller: Caller, rules: RequestRules, check: GrammarCheck
) -> ResolvedRequest | bytes:
    """The request that `body` asks for, or the body of the response if it needs no generation.

    `route` is a key of `ROUTES`. `check` returns the reason why a grammar cannot be served, None if it can; it may
    compile the grammar, and is called at most once, with what this route calls the field that asks for it.

    Raises:
        RequestError: the body is refused.
    """
    steps = ROUTES[route]
    ignored: list[str] | None = [] if rules.ignore_unknown and steps.generates else None
    fields = parse_body(body, steps.schema, rules.limits.max_depth, ignored)
    if steps.translate is None:
        resolved = _resolve_fields(steps, fields, len(body), caller, rules, check)
    else:
        translated = steps.translate(fields, rules)
        with translated.names.rename_errors():
            renamed = translated.names.rename_check(check)
            resolved = _resolve_fields(steps, translated, len(body), caller, rules, renamed)
    if ignored and isinstance(resolved, ResolvedRequest):
        return replace(resolved, ignored_fields=tuple(ignored))
    return resolved


def _resolve_fields(
    steps: BodyRoute, fields: Any, body_bytes: int, caller: Caller, rules: RequestRules, check: GrammarCheck
) -> ResolvedRequest | bytes:
    """The same as `resolve_body`, for a body that is decoded."""
    valid = steps.validate(fields, caller, rules)
    with checked_grammar(valid.grammar, valid.grammar_field, check, body_bytes):
        kept = count_kept(fields, rules) if isinstance(fields, ChatRequest | CompletionRequest) else None
        prompts = [_tokenize_source(source, valid, kept, rules) for source in valid.sources]
    if isinstance(fields, ChatRequest | CompletionRequest):
        prompts = truncate_prompts(fields, prompts, rules)
    resolved = steps.resolve(fields, valid, prompts, caller, rules)
    if rules.prefix_caching and isinstance(resolved, ResolvedRequest):
        return resolved.with_chunk_names()
    return resolved


def _tokenize_source(
    source: str | list[int] | Conversation, valid: ValidBody, kept: int | None, rules: RequestRules
) -> Prompt:
    """The tokens of a prompt; of one that is longer than the `kept` tokens (None: all are), of its end alone."""
    if isinstance(source, list):
        return make_prompt(source)
    if isinstance(source, Conversation):
        text, param = _render_conversation(source, rules), "messages"
    else:
        text, param = source, valid.field
    if kept is None or kept > rules.context_tokens:
        check_text_length(text, rules, param)
        return make_prompt(rules.tokenizer.encode(text, valid.special), text)
    end = _cut_text(text, (kept + MARGIN_TOKENS) * rules.tokenizer.longest_bytes)
    whole = len(end) == len(text) or isinstance(source, Conversation)
    return make_prompt(rules.tokenizer.encode(end, valid.special), text if whole else None)


def _cut_text(text: str, most: int) -> str:
    """The last `most` bytes of a text, without a character of which only a part is left."""
    # A character has at least one byte, so what is encoded is never long.
    return text[-most:].encode()[-most:].decode(errors="ignore")


def _render_conversation(conversation: Conversation, rules: RequestRules) -> str:
    return rules.tokenizer.render_conversation(
        conversation.messages,
        conversation.generate,
        conversation.resume,
        conversation.options,
        conversation.tools,
    )


def _validate_chat(request: ChatRequest, caller: Caller, rules: RequestRules) -> ValidBody:
    check_priority(request, caller)
    check_chat_fields(request, rules)
    check_vllm_fields(request, rules)
    check_thought_budget(request, rules)
    plan = plan_tools(request, rules)
    grammar, field = _build_grammar(request, plan is not None, rules)
    if plan is not None and rules.markup is not None:
        grammar, field = build_tool_grammar(plan, request.response_format, rules.markup), TOOLS
    elif grammar is not None and rules.markup is not None:
        grammar = rules.markup.bind_text(grammar)
    options = choose_template_options(request, rules)
    conversation = _validate_conversation(request, request.messages, options)
    if plan is not None:
        conversation = replace(conversation, tools=plan.template_tools())
    return ValidBody([conversation], bool(request.add_special_tokens), grammar, plan, field)


def _build_grammar(
    fields: GenerationFields, has_tools: bool, rules: RequestRules
) -> tuple[Grammar | None, str]:
    """The grammar of a text, and the field that asks for it. Raises RequestError: 400, it is invalid."""
    grammar = build_output_grammar(fields, has_tools, rules)
    if grammar is not None:
        return grammar, STRUCTURED
    return build_grammar(fields.response_format, rules.limits), GRAMMAR_FIELD


def _validate_conversation(
    request: ChatRequest | TokenizeRequest, messages: list[Message], options: dict[str, Any] | None
) -> Conversation:
    resume = bool(request.continue_final_message)
    generate = request.add_generation_prompt is not False and not resume
    return Conversation(parse_chat_messages(messages), generate, resume, options)


def _resolve_chat(
    request: ChatRequest, valid: ValidBody, prompts: list[Prompt], caller: Caller, rules: RequestRules
) -> ResolvedRequest:
    [source], [prompt] = valid.sources, prompts
    assert isinstance(source, Conversation)
    system_tokens = (
        _count_system_tokens(source, prompt, valid.special, rules) if _may_evict(request, rules) else 0
    )
    context = _find_context(prompt, valid.plan, rules)
    grammar = valid.grammar
    if grammar is not None and context is not None:
        grammar = _gate_grammar(grammar, valid.plan, context.prefix, rules)
        assert rules.markup is not None
        context = replace(context, calls_bound=binds_calls(grammar, context.prefix, rules.markup))
    plain = Prompt(prompt.ids)
    return resolve_chat(request, plain, grammar, rules, caller.tenant, system_tokens, context)


def _validate_translated(translated: TranslatedRequest, caller: Caller, rules: RequestRules) -> ValidBody:
    return _validate_chat(translated.chat, caller, rules)


def _resolve_translated(
    translated: TranslatedRequest,
    valid: ValidBody,
    prompts: list[Prompt],
    caller: Caller,
    rules: RequestRules,
) -> ResolvedRequest:
    chat, room = translated.chat, rules.context_tokens - len(prompts[0].tokens)
    if translated.clips_length and 0 < room < (chat.max_completion_tokens or 0):
        budget = chat.thinking_token_budget
        chat = msgspec.structs.replace(
            chat,
            max_completion_tokens=room,
            thinking_token_budget=None if budget is None else min(budget, room),
        )
    resolved = _resolve_chat(chat, valid, prompts, caller, rules)
    return replace(
        resolved,
        text_logprobs=translated.text_logprobs,
        route_fields=translated.route_fields,
        clips_length=translated.clips_length,
    )


def _count_prompt(
    translated: TranslatedRequest,
    valid: ValidBody,
    prompts: list[Prompt],
    caller: Caller,
    rules: RequestRules,
) -> bytes:
    return msgspec.json.encode(CountedTokens(len(prompts[0].tokens)))


def _find_context(prompt: Prompt, plan: ToolPlan | None, rules: RequestRules) -> AnswerContext | None:
    """What a reader of the answer needs to know; None: the answer is plain text."""
    if rules.markup is None or not (rules.markup.thinks or plan):
        return None
    prefix = rules.markup.plain.find_prefix(prompt.text or "")
    if plan is None:
        return AnswerContext(prefix)
    return AnswerContext(prefix, plan.types, not plan.many, rules.markup.calls.format.short_ids)


def _gate_grammar(grammar: Grammar, plan: ToolPlan | None, prefix: str, rules: RequestRules) -> Grammar:
    """The grammar with where in the answer it binds."""
    if plan is None or rules.markup is None:
        return gate_behind_thought(grammar, prefix, rules)
    return gate_calls(plan, grammar, prefix, is_thinking(prefix, rules), rules.markup)


def _may_evict(request: ChatRequest, rules: RequestRules) -> bool:
    """Whether it may count where the system message ends: only requests that drop KV need to know."""
    return rules.keep_threshold < 1 or (request.diptych is not None and request.diptych.keep is not None)


def _count_system_tokens(
    conversation: Conversation, prompt: Prompt, special: bool, rules: RequestRules
) -> int:
    """The tokens of a rendered conversation up to the end of its system message."""
    assert prompt.text is not None
    end = find_system_end(conversation.messages, prompt.text)
    # More bytes than its tokens have room for: it is cut, and so is its system message.
    most = len(prompt.tokens) * rules.tokenizer.longest_bytes
    if not end or len(prompt.text[: min(end, most + 1)].encode()) > most:
        return 0
    return count_shared_tokens(rules.tokenizer.encode(prompt.text[:end], special), prompt.tokens)


def _validate_completion(request: CompletionRequest, caller: Caller, rules: RequestRules) -> ValidBody:
    check_priority(request, caller)
    prompts = split_prompts(request.prompt, rules, request.truncate_prompt_tokens is not None)
    check_completion_fields(request, len(prompts), rules)
    check_vllm_fields(request, rules)
    grammar, field = _build_grammar(request, False, rules)
    special = request.add_special_tokens is not False
    return ValidBody([*prompts], special, grammar, grammar_field=field)


def _resolve_completion(
    request: CompletionRequest, valid: ValidBody, prompts: list[Prompt], caller: Caller, rules: RequestRules
) -> ResolvedRequest:
    start, skip_special = make_prompt([rules.tokenizer.start_id]), request.skip_special_tokens is not False
    if request.echo:
        prompts = [
            with_echo(Prompt(prompt.ids or start.ids, prompt.text), rules.tokenizer, skip_special)
            for prompt in prompts
        ]
    else:
        prompts = [Prompt(prompt.ids or start.ids) for prompt in prompts]
    return resolve_completion(request, prompts, valid.grammar, rules, caller.tenant)


def _validate_tokenize(request: TokenizeRequest, caller: Caller, rules: RequestRules) -> ValidBody:
    check_model_name(request.model, rules)
    if (request.prompt is None) == (request.messages is None):
        raise invalid_value_error("prompt", "or 'messages' must be given, and not both")
    if request.messages is not None:
        return ValidBody(
            [_validate_conversation(request, request.messages, request.chat_template_kwargs)],
            bool(request.add_special_tokens),
        )
    return ValidBody([request.prompt or ""], request.add_special_tokens is not False)


def _resolve_tokenize(
    request: TokenizeRequest, valid: ValidBody, prompts: list[Prompt], caller: Caller, rules: RequestRules
) -> bytes:
    ids = prompts[0].tokens.tolist()
    if len(ids) > rules.context_tokens:
        param = "prompt" if request.messages is None else "messages"
        raise context_length_error(f"has {len(ids)} tokens", rules.context_tokens, param)
    names = [rules.tokenizer.token_text(token) for token in ids] if request.return_token_strs else None
    return msgspec.json.encode(Tokenized(len(ids), rules.context_tokens, ids, names))


def _validate_detokenize(request: DetokenizeRequest, caller: Caller, rules: RequestRules) -> ValidBody:
    check_model_name(request.model, rules)
    if len(request.tokens) > rules.context_tokens:
        raise context_length_error(f"has {len(request.tokens)} tokens", rules.context_tokens, "tokens")
    if any(token >= rules.tokenizer.size for token in request.tokens):
        raise invalid_value_error("tokens", f"holds ids beyond the vocabulary of {rules.tokenizer.size}")
    return ValidBody([])


def _resolve_detokenize(
    request: DetokenizeRequest, valid: ValidBody, prompts: list[Prompt], caller: Caller, rules: RequestRules
) -> bytes:
    text = rules.tokenizer.decode(request.tokens, bool(request.skip_special_tokens))
    return msgspec.json.encode(Detokenized(text))


def _pool_by(read: Callable[[Any, Caller, RequestRules], PooledInputs]) -> ValidateBody:
    """The step that checks a body whose prompts are pooled; `read` finds them."""

    def validate(request: Any, caller: Caller, rules: RequestRules) -> ValidBody:
        inputs = read(request, caller, rules)
        return ValidBody([*inputs.sources], inputs.special, pooled=inputs)

    return validate


def _resolve_pooled(
    fields: PoolingFields, valid: ValidBody, prompts: list[Prompt], caller: Caller, rules: RequestRules
) -> ResolvedRequest:
    assert valid.pooled is not None
    return resolve_pooled(fields, valid.pooled, prompts, caller.tenant, rules)


ROUTES = {
    "chat": BodyRoute(ChatRequest, _validate_chat, _resolve_chat),
    "completion": BodyRoute(CompletionRequest, _validate_completion, _resolve_completion),
    "responses": BodyRoute(ResponsesRequest, _validate_translated, _resolve_translated, translate_responses),
    "messages": BodyRoute(MessagesRequest, _validate_translated, _resolve_translated, translate_messages),
    "count_tokens": BodyRoute(CountTokensRequest, _validate_translated, _count_prompt, translate_count),
    "tokenize": BodyRoute(TokenizeRequest, _validate_tokenize, _resolve_tokenize),
    "detokenize": BodyRoute(DetokenizeRequest, _validate_detokenize, _resolve_detokenize),
    "embedding": BodyRoute(EmbeddingRequest, _pool_by(read_embedding), _resolve_pooled),
    "rerank": BodyRoute(RerankRequest, _pool_by(read_rerank), _resolve_pooled),
    "score": BodyRoute(ScoreRequest, _pool_by(read_score), _resolve_pooled),
}
