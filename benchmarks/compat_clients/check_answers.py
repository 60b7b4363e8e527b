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


def fill_nulls(body: Any, is_event: bool) -> None:
    """Fill what is null, as of OpenAI, where its own type has no room for that.

    These are the log-probability of an echoed prompt's first token, and the finish reason of an event with text.
    """
    for choice in body.get("choices", []) if isinstance(body, dict) else []:
        if is_event and choice.get("finish_reason", "") is None:
            choice["finish_reason"] = "stop"
        found = choice.get("logprobs") or {}
        for name, empty in (("token_logprobs", 0.0), ("top_logprobs", {})):
            if found.get(name) and found[name][0] is None:
                found[name][0] = empty


def check_body(kind: Any, text: str, is_event: bool = False) -> str:
    """Why a JSON body, or that of an event, is not of a type, or ""."""
    try:
        body = json.loads(text)
        if kind is Completion:
            fill_nulls(body, is_event)
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
            if why := check_body(kind, text, answer["is_stream"]):
                wrong.append(f"{answer['path']}: {why}: {text[:300]}")
    json.dump(wrong, sys.stdout)


if __name__ == "__main__":
    main()
