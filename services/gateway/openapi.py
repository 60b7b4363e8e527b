"""The description of this API for tools: paths from one table, components from the very classes that are decoded."""

from __future__ import annotations

import html
from typing import Any

import msgspec

from services.gateway.replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorReply,
    ModelCard,
    ModelList,
    Readiness,
    Tokenized,
    Version,
)
from services.gateway.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

JSON, SSE, PLAIN = "application/json", "text/event-stream", "text/plain"
REF = "#/components/schemas/{name}"
BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
REPLIES = (
    ChatCompletion,
    ChatChunk,
    Completion,
    Tokenized,
    Detokenized,
    ModelList,
    ModelCard,
    Readiness,
    Version,
    ErrorReply,
)
REFUSALS = {
    "400": "The request is wrong; `param` names the field",
    "401": "No key, or not one of ours",
    "403": "Not for this host",
    "404": "No such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too many requests are open",
    "500": "The server failed on this request",
    "503": "No worker can serve this now",
    "504": "Not done within the time allowed",
}
BOUNDS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "maxLength": "chars ≤",
    "maxItems": "items ≤",
}
PAGE = """\
<!doctype html><meta charset="utf-8"><title>Diptych API</title>
<style>body{{font:15px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em;color-scheme:light dark}}
h2{{font-size:1em;margin:2em 0 0}}td{{padding:0 1em 0 0;vertical-align:top}}</style>
<h1>Diptych {version}</h1>
<p>The OpenAI API, as in <a href="openapi.json">openapi.json</a>. Fields with * are required.
{rows}
"""


def document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    _, components = msgspec.json.schema_components([*BODIES, *REPLIES], ref_template=REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Diptych", "version": version, "description": "OpenAI-compatible text generation"},
        "paths": {
            "/v1/chat/completions": _post("Answer a conversation", ChatRequest, ChatCompletion, ChatChunk),
            "/v1/completions": _post("Continue a text", CompletionRequest, Completion, Completion),
            "/tokenize": _post("Text or messages to token ids", TokenizeRequest, Tokenized),
            "/detokenize": _post("Token ids to text", DetokenizeRequest, Detokenized),
            "/v1/models": _get("The models served", _json(ModelList)),
            "/v1/models/{id}": _get("One model", _json(ModelCard), [_path("id")]),
            "/health": _get("The gateway is alive", {}),
            "/ping": _get("The gateway is alive", {}),
            "/ready": _get("A canary went through every stage", _json(Readiness), down=_json(Readiness)),
            "/status": _get("Workers, links and books", {JSON: {"schema": {"type": "object"}}}),
            "/metrics": _get("Prometheus metrics", {PLAIN: {"schema": {"type": "string"}}}),
            "/version": _get("The version", _json(Version)),
            "/docs": _get("This page", {"text/html": {"schema": {"type": "string"}}}),
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def page(told: dict[str, Any]) -> str:
    """The description as one HTML page that needs nothing from elsewhere."""
    rows = [
        f"<h2><b>{method.upper()}</b> {html.escape(path)}</h2><p>{html.escape(operation['summary'])}</p>"
        + _fields(operation, told["components"]["schemas"])
        for path, methods in told["paths"].items()
        for method, operation in methods.items()
    ]
    return PAGE.format(version=html.escape(told["info"]["version"]), rows="\n".join(rows))


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A table of a body's fields with what they may be."""
    if "requestBody" not in operation:
        return ""
    name = operation["requestBody"]["content"][JSON]["schema"]["$ref"].rsplit("/", 1)[1]
    required = schemas[name].get("required", [])
    rows = [
        f"<tr><td>{html.escape(field)}{' *' if field in required else ''}<td><code>{html.escape(_kind(schema))}</code>"
        for field, schema in schemas[name]["properties"].items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _kind(schema: dict[str, Any]) -> str:
    """A schema in one line."""
    if "anyOf" in schema:
        return " | ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[1]
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"[{_kind(schema.get('items', {}))}]"
    bounds = [f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema]
    return " ".join([kind, *bounds])


def _json(kind: type[Any]) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": REF.format(name=kind.__name__)}}}


def _events(chunk: type[Any]) -> dict[str, Any]:
    """A stream: each event's data is a chunk, or an error, or [DONE]."""
    inside = {"anyOf": [{"$ref": REF.format(name=kind.__name__)} for kind in (chunk, ErrorReply)]}
    piece = {"type": "string", "contentMediaType": JSON, "contentSchema": inside}
    data = {"anyOf": [{"const": "[DONE]"}, piece]}
    return {SSE: {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}}


def _refusals(*statuses: str) -> dict[str, Any]:
    return {status: {"description": REFUSALS[status], "content": _json(ErrorReply)} for status in statuses}


def _post(summary: str, body: type[Any], answer: type[Any], chunk: type[Any] | None = None) -> dict[str, Any]:
    content = _json(answer) | (_events(chunk) if chunk is not None else {})
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _json(body)},
            "responses": {"200": {"description": "Done", "content": content}, **_refusals(*REFUSALS)},
        }
    }


def _get(
    summary: str,
    content: dict[str, Any],
    parameters: list[Any] | None = None,
    down: dict[str, Any] | None = None,
) -> dict[str, Any]:
    responses = {"200": {"description": "Done", "content": content}, **_refusals("401", "403", "404", "500")}
    responses["503"] = {"description": "Not now", "content": down or {}}
    return {"get": {"summary": summary, "parameters": parameters or [], "responses": responses}}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
