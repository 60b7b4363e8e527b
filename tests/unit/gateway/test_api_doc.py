"""docs/api.md, docs/api_fields.md and docs/api_routes.md have every field that a client may send."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.openai.schemas.message_blocks import ContentBlock, MessageTool
from services.gateway.openai.schemas.message_parts import PastFunctionCall, TextPart
from services.gateway.openai.schemas.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    OutputOptions,
    ThinkingOptions,
    ToolPick,
)
from services.gateway.openai.schemas.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from services.gateway.openai.schemas.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FunctionTool,
    Message,
    StreamOptions,
    StructuredOutputs,
    TokenizeRequest,
)
from services.gateway.openai.schemas.response_items import InputItem, ItemChoice, ItemPart, ResponseTool
from services.gateway.openai.schemas.responses_request import (
    ReasoningOptions,
    ResponsesRequest,
    ResponseStreamOptions,
)
from services.gateway.openai.schemas.typed_objects import TypedObject

DOCS = Path(__file__).parents[3] / "docs"
# Fields that need no words: they are what their parents' rows say.
PLAIN = {
    "role",
    "content",
    "refusal",
    "description",
    "parameters",
    "tokens",
    "type",
    "text",
    "id",
    "function",
}
# The same in items and blocks of other routes.
PLAIN_INNER = PLAIN | {
    "name", "arguments", "output", "call_id", "summary", "strict", "mode", "input", "thinking", "tool_use_id",
    "input_schema", "is_error", "encrypted_content", "tools",
}  # fmt: skip


def names_in(text: str) -> set[str]:
    """What is in code, by all its parts: `messages[].name` counts for `name`."""
    return {part for code in re.findall(r"`([^`]+)`", text) for part in re.split(r"[.\[\]\"]+", code)}


@pytest.mark.parametrize(
    "kind",
    [
        ChatRequest,
        CompletionRequest,
        TokenizeRequest,
        DetokenizeRequest,
        Message,
        StreamOptions,
        StructuredOutputs,
        FunctionTool,
        TextPart,
        PastFunctionCall,
    ],
)
def test_every_field_has_its_place(kind: type[Any]) -> None:
    names = {field.encode_name for field in msgspec.structs.fields(kind)} - PLAIN
    pages = [(DOCS / page).read_text(encoding="utf-8") for page in ("api.md", "api_fields.md")]
    assert names - names_in("".join(pages)) == set()


ROUTE_KINDS: dict[str, tuple[type[Any], ...]] = {
    "Responses": (ResponsesRequest, ReasoningOptions, ResponseStreamOptions),
    "Messages": (MessagesRequest, CountTokensRequest, ThinkingOptions, OutputOptions, ToolPick),
}


@pytest.mark.parametrize(
    ("route", "kind"), [(name, one) for name, kinds in ROUTE_KINDS.items() for one in kinds]
)
def test_every_field_of_another_route_has_its_place(route: str, kind: type[Any]) -> None:
    page = (DOCS / "api_routes.md").read_text(encoding="utf-8")
    section = page.partition(f"## Fields of {route}\n")[2].partition("\n## ")[0]
    assert {field.encode_name for field in msgspec.structs.fields(kind)} - names_in(section) == set()


ITEM_KINDS: dict[str, tuple[type[TypedObject], ...]] = {
    "Responses": (InputItem, ItemPart, ResponseTool, ItemChoice),
    "Messages": (ContentBlock, MessageTool),
}


@pytest.mark.parametrize(
    ("route", "kind"), [(name, one) for name, kinds in ITEM_KINDS.items() for one in kinds]
)
def test_every_field_within_items_has_its_place(route: str, kind: type[TypedObject]) -> None:
    page = (DOCS / "api_routes.md").read_text(encoding="utf-8")
    section = page.partition(f"## Fields of {route}\n")[2].partition("\n## ")[0]
    fields = {field.encode_name for one in kind.all_kinds() for field in msgspec.structs.fields(one)}
    assert fields - PLAIN_INNER - names_in(section) == set()


@pytest.mark.parametrize("kind", [EmbeddingRequest, RerankRequest, ScoreRequest])
def test_every_field_of_what_is_pooled_has_its_place(kind: type[Any]) -> None:
    page = (DOCS / "api_pooling.md").read_text(encoding="utf-8")
    assert {field.encode_name for field in msgspec.structs.fields(kind)} - names_in(page) == set()
