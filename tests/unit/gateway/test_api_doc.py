"""docs/api.md has every field that a client may send."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.openai.schemas.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FunctionTool,
    Message,
    StreamOptions,
    TokenizeRequest,
)

API = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
# What is in code, by its last part: `messages[].name` counts for `name`.
NAMED = {re.split(r"[.\]\"]", code.strip('"'))[-1] for code in re.findall(r"`([^`]+)`", API)}
# Fields that need no words: they are what their parents' rows say.
PLAIN = {"role", "content", "refusal", "description", "parameters", "tokens"}


@pytest.mark.parametrize(
    "kind",
    [
        ChatRequest,
        CompletionRequest,
        TokenizeRequest,
        DetokenizeRequest,
        Message,
        StreamOptions,
        FunctionTool,
    ],
)
def test_every_field_has_its_place(kind: type[Any]) -> None:
    names = {field.encode_name for field in msgspec.structs.fields(kind)} - PLAIN
    assert names - NAMED == set()
