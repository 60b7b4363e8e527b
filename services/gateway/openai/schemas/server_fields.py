"""The fields that routes of other shapes than chats take beside their own, with the meaning that they have in chats."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from services.gateway.openai.schemas.request_schema import (
    INT64_RANGE,
    Count,
    DiptychOptions,
    LogitBias,
    MinP,
    Penalty,
    RepetitionPenalty,
    TemplateOptions,
    TokenId,
)


class ServerFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Extensions of vLLM and of this server; see `request_schema.ChatRequest`."""

    seed: Annotated[int, INT64_RANGE] | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    skip_special_tokens: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-10, le=10)] | None = None
    diptych: DiptychOptions | None = None


NAMES = tuple(field.name for field in structs.fields(ServerFields))


def server_options(fields: ServerFields) -> dict[str, Any]:
    """These fields of a body, as those of a chat."""
    return {name: getattr(fields, name) for name in NAMES}
