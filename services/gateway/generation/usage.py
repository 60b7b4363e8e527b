"""Counts the tokens that a request has used."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from services.gateway.generation.output_text import OutputText
from services.gateway.openai.schemas.response_schema import (
    CompletionDetails,
    KvDetails,
    PromptDetails,
    Usage,
)


def count_usage(
    prompt_tokens: int, cached_tokens: int, texts: Sequence[OutputText], kv: KvDetails | None
) -> Usage:
    """The `usage` of answers: `texts` to prompts of so many tokens, of which so many were cached."""
    new = sum(text.num_tokens for text in texts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=new,
        total_tokens=prompt_tokens + new,
        prompt_tokens_details=PromptDetails(cached_tokens=cached_tokens),
        completion_tokens_details=CompletionDetails(sum(text.reasoning_tokens for text in texts)),
        diptych=kv or UNSET,
    )
