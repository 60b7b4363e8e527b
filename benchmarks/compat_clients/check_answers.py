"""Checks answers against the types that the packages openai and anthropic publish: JSON in, JSON out.

Run by an interpreter that has these packages; nothing of Diptych is imported. Standard input is a list of
`RecordedAnswer.as_json()`, standard output a list of what is wrong.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

WHOLE: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
    "/v1/messages": Message,
    "/v1/messages/count_tokens": MessageTokensCount,
    "/v1/embeddings": CreateEmbeddingResponse,
}
EVENTS: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/completions": Completion,
    "/v1/responses": ResponseStreamEvent,
    "/v1/messages": RawMessageStreamEvent,
}
UNCHECKED_EVENTS = {"ping", "error"}  # Anthropic's, for which the package has no type of an event


def fill_first(body: Any) -> None:
    """Fill what an echoed prompt's first token has: null, as of OpenAI, for which its own type has no room."""
    for choice in body.get("choices", []) if isinstance(body, dict) else []:
        found = choice.get("logprobs") or {}
        for name, empty in (("token_logprobs", 0.0), ("top_logprobs", {})):
            if found.get(name) and found[name][0] is None:
                found[name][0] = empty


def check_body(kind: Any, text: str) -> str:
    """Why a JSON body is not of a type, or ""."""
    try:
        body = json.loads(text)
        if kind is Completion:
            fill_first(body)
        TypeAdapter(kind).validate_python(body)
    except (ValidationError, ValueError) as error:
        return str(error)[:400]
    return ""


def bodies_of(answer: dict[str, Any]) -> list[tuple[Any, str]]:
    """The JSON bodies of an answer and their types; of a path without a type nothing."""
    path: str = answer["path"]
    if path.startswith("/v1/models"):
        models = json.loads(answer["text"])
        return [(Model, json.dumps(model)) for model in models.get("data", [models])]
    if not answer["is_stream"]:
        return [(WHOLE[path], answer["text"])] if path in WHOLE else []
    found = []
    for event in answer["text"].split("\n\n"):
        data = "\n".join(line[6:] for line in event.split("\n") if line.startswith("data: "))
        if data and data != "[DONE]" and json.loads(data).get("type") not in UNCHECKED_EVENTS:
            found.append((EVENTS[path], data))
    return found


def main() -> None:
    """Check what standard input has."""
    wrong = []
    for answer in json.load(sys.stdin):
        if answer["status"] >= 400 or answer["method"] == "HEAD":
            continue
        for kind, text in bodies_of(answer):
            if why := check_body(kind, text):
                wrong.append(f"{answer['path']}: {why}: {text[:300]}")
    json.dump(wrong, sys.stdout)


if __name__ == "__main__":
    main()
