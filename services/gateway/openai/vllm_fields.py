"""Fields of vLLM beyond plain sampling: structured outputs, tokens that are named, prompts that are cut or scored."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from diptych.request import Grammar, SamplingParams
from services.gateway.openai.schemas.request_schema import GenerationFields, StructuredOutputs
from services.gateway.openai.validate import (
    RequestRules,
    check_schema,
    check_token_ids,
    invalid_value_error,
    schema_error,
    unsupported_error,
)
from services.gateway.tokenization.tokenizer import GatewayTokenizer

STRUCTURED, TRUNCATE = "structured_outputs", "truncate_prompt_tokens"
BAD_WORDS, ALLOWED = "bad_words", "allowed_token_ids"
# What has replaced vLLM's older names.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
GUIDED_OPTIONS = ("guided_decoding_backend", "guided_whitespace_pattern")


def check_vllm_fields(fields: GenerationFields, rules: RequestRules) -> None:
    """Check these fields. Raises RequestError: 400."""
    for old, new in GUIDED.items():
        if getattr(fields, old) is not None:
            raise unsupported_error(old, f"""is not supported: send '{STRUCTURED}': {{"{new}": …}}""")
    for old in GUIDED_OPTIONS:
        if getattr(fields, old) is not None:
            raise unsupported_error(old, f"is not supported: '{STRUCTURED}' has no such option")
    check_token_ids(fields.allowed_token_ids or [], ALLOWED, rules)
    if fields.truncate_prompt_tokens == 0:
        raise invalid_value_error(TRUNCATE, "must be at least 1, or -1 for as many tokens as fit")
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid_value_error("prompt_logprobs", "cannot be streamed; send 'stream': false")


def build_output_grammar(fields: GenerationFields, has_tools: bool, rules: RequestRules) -> Grammar | None:
    """The grammar of `structured_outputs`; None without it. Whether it compiles is checked in a preparer.

    Raises:
        RequestError: 400, it asks for nothing or for several things, or something else binds the answer, too.
    """
    asked = fields.structured_outputs
    if asked is None:
        return None
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) is not None]
    if len(given) != 1:
        found = "has none" if not given else f"has {' and '.join(given)}"
        raise invalid_value_error(
            STRUCTURED, f"must have one of json, regex, choice and grammar, and {found}"
        )
    if fields.response_format is not None and fields.response_format.type != "text":
        raise invalid_value_error(STRUCTURED, "and 'response_format' both bind the answer; send one of them")
    if has_tools:
        raise unsupported_error(STRUCTURED, "is not supported with 'tools'; send 'response_format'")
    return _read_grammar(asked, rules)


def _read_grammar(asked: StructuredOutputs, rules: RequestRules) -> Grammar:
    """The grammar that the one given field asks for. Raises RequestError: 400."""
    if asked.regex is not None:
        if len(asked.regex) > rules.limits.max_pattern_chars:
            problem = f"has a pattern of more than {rules.limits.max_pattern_chars} characters"
            raise schema_error(f"{STRUCTURED}.regex", problem)
        return Grammar("regex", asked.regex)
    if asked.choice is not None:
        return Grammar("choice", msgspec.json.encode(asked.choice).decode())
    if asked.grammar is not None:
        return Grammar("lark", asked.grammar)
    schema = asked.json
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise schema_error(f"{STRUCTURED}.json", "must be a JSON schema, or the text of one") from error
    return Grammar("json_schema", check_schema(schema or {}, f"{STRUCTURED}.json", rules.limits).decode())


def check_some_token_left(sampling: SamplingParams) -> None:
    """Refuse named tokens of which an answer may have none. Raises RequestError: 400."""
    if not sampling.allowed_token_ids:
        return
    left = set(sampling.allowed_token_ids) - {word[0] for word in sampling.bad_words if len(word) == 1}
    if not left:
        raise invalid_value_error(ALLOWED, f"leaves no token beside '{BAD_WORDS}'; allow another one")
    if sampling.min_tokens and left.issubset(sampling.stop_token_ids):
        problem = "leaves no token but those that end the answer, which 'min_tokens' bans; allow another one"
        raise invalid_value_error(ALLOWED, problem)


def tokenize_bad_words(words: Iterable[str], tokenizer: GatewayTokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of words as vLLM forbids them: as they are, and behind a space if that is another beginning of the
    same length.

    Raises:
        RequestError: 400, a word has no tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), special=False))
        if not bare:
            raise invalid_value_error(BAD_WORDS, "holds a text that has no tokens")
        found.append(bare)
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", special=False))
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    return tuple(dict.fromkeys(found))
