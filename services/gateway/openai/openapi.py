"""The OpenAPI document of this API, and an HTML page made from it.

Its schemas come from the classes that decode requests and encode responses, so they cannot disagree with the code.
"""

from __future__ import annotations

import html
from typing import Any

import msgspec

from services.gateway.openai.admin_schema import AdminBatch, AdminBatchList, AdminFileList, TenantList
from services.gateway.openai.schemas.batch_schema import (
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    BatchList,
    BatchObject,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
)
from services.gateway.openai.schemas.messages_objects import (
    BlockDelta,
    BlockStart,
    BlockStop,
    CountedTokens,
    MessageDelta,
    MessageErrorReply,
    MessageObject,
    MessageStart,
    MessageStop,
    Ping,
)
from services.gateway.openai.schemas.messages_request import CountTokensRequest, MessagesRequest
from services.gateway.openai.schemas.pooling_schema import (
    EmbeddingList,
    EmbeddingRequest,
    RerankList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from services.gateway.openai.schemas.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from services.gateway.openai.schemas.response_schema import (
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
from services.gateway.openai.schemas.responses_objects import (
    DeltaEvent,
    DoneEvent,
    ItemEvent,
    PartEvent,
    ResponseEvent,
    ResponseObject,
)
from services.gateway.openai.schemas.responses_request import ResponsesRequest
from services.gateway.openai.schemas.typed_objects import TypedObject

JSON, SSE, PLAIN = "application/json", "text/event-stream", "text/plain"
FORM, BYTES = "multipart/form-data", "application/octet-stream"
SCHEMA_REF = "#/components/schemas/{name}"
REQUEST_SCHEMAS = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
    BatchRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
MESSAGE_EVENTS: tuple[type[Any], ...] = (
    MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, Ping
)  # fmt: skip
RESPONSE_EVENTS: tuple[type[Any], ...] = (ResponseEvent, ItemEvent, PartEvent, DeltaEvent, DoneEvent)
RESPONSE_SCHEMAS: tuple[type[Any], ...] = (
    EmbeddingList,
    RerankList,
    ScoreList,
    ChatCompletion,
    ChatChunk,
    Completion,
    ResponseObject,
    *RESPONSE_EVENTS,
    MessageObject,
    *MESSAGE_EVENTS,
    CountedTokens,
    MessageErrorReply,
    Tokenized,
    Detokenized,
    ModelList,
    ModelCard,
    Readiness,
    Version,
    FileObject,
    FileList,
    FileDeleted,
    BatchObject,
    BatchList,
    TenantList,
    AdminBatch,
    AdminBatchList,
    AdminFileList,
    ErrorReply,
)
UPLOAD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "format": "binary"},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
    },
    "required": ["purpose", "file"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}
ERROR_RESPONSES = {
    "400": "The request is wrong; `param` names the field",
    "401": "No key, or not one of ours",
    "403": "Not for this host, or not for this origin",
    "404": "No such model, file or batch",
    "408": "The body did not arrive in time",
    "409": "The batch has ended",
    "413": "The body is too large",
    "415": "The content type is not JSON",
    "429": "Too many requests are open",
    "500": "The server failed on this request",
    "503": "No worker can serve this now",
    "504": "Not done within the time allowed",
    "507": "The disk for files and batches is full",
}
BOUND_SIGNS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "maxLength": "chars ≤",
    "maxItems": "items ≤",
}
PAGE_TEMPLATE = """\
<!doctype html><meta charset="utf-8"><title>Diptych API</title>
<style>body{{font:15px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em;color-scheme:light dark}}
h2{{font-size:1em;margin:2em 0 0}}td{{padding:0 1em 0 0;vertical-align:top}}</style>
<h1>Diptych {version}</h1>
<p>The OpenAI API, as in <a href="openapi.json">openapi.json</a>. Fields with * are required.
{rows}
"""


def openapi_document(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds = [kind for typed in TypedObject.__subclasses__() for kind in typed.all_kinds()]
    _, components = msgspec.json.schema_components(
        [*REQUEST_SCHEMAS, *RESPONSE_SCHEMAS, *kinds], ref_template=SCHEMA_REF, schema_hook=_typed_schema
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Diptych", "version": version, "description": "OpenAI-compatible text generation"},
        "paths": {
            "/v1/chat/completions": _post_operation(
                "Answer a conversation", ChatRequest, ChatCompletion, ChatChunk
            ),
            "/v1/completions": _post_operation("Continue a text", CompletionRequest, Completion, Completion),
            "/v1/responses": _post_operation(
                "Answer items with items", ResponsesRequest, ResponseObject, *RESPONSE_EVENTS
            ),
            "/v1/messages": _post_operation(
                "Answer messages with blocks",
                MessagesRequest,
                MessageObject,
                *MESSAGE_EVENTS,
                problem=MessageErrorReply,
            ),
            "/v1/messages/count_tokens": _post_operation(
                "Count the tokens of messages", CountTokensRequest, CountedTokens, problem=MessageErrorReply
            ),
            "/v1/embeddings": _post_operation("Embed texts", EmbeddingRequest, EmbeddingList),
            **dict.fromkeys(
                ("/rerank", "/v1/rerank"), _post_operation("Rank documents", RerankRequest, RerankList)
            ),
            **dict.fromkeys(
                ("/score", "/v1/score"), _post_operation("Score pairs of texts", ScoreRequest, ScoreList)
            ),
            "/tokenize": _post_operation("Text or messages to token ids", TokenizeRequest, Tokenized),
            "/detokenize": _post_operation("Token ids to text", DetokenizeRequest, Detokenized),
            "/v1/models": _get_operation("The models served", _json_content(ModelList)),
            "/v1/models/{id}": _get_operation("One model", _json_content(ModelCard), [_path_parameter("id")]),
            **_batch_paths(),
            **_admin_paths(),
            "/health": _get_operation("The gateway is alive", {}),
            "/ping": _get_operation("The gateway is alive", {}),
            "/ready": _get_operation(
                "A canary went through every stage", _json_content(Readiness), down=_json_content(Readiness)
            ),
            "/status": _get_operation("Workers, links and books", {JSON: {"schema": {"type": "object"}}}),
            "/metrics": _get_operation("Prometheus metrics", {PLAIN: {"schema": {"type": "string"}}}),
            "/version": _get_operation("The version", _json_content(Version)),
            "/": _get_operation("The operators' page", {"text/html": {"schema": {"type": "string"}}}),
            "/docs": _get_operation("This page", {"text/html": {"schema": {"type": "string"}}}),
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _typed_schema(kind: type[Any]) -> dict[str, Any]:
    """The schema of an object whose fields depend on its type."""
    if not issubclass(kind, TypedObject):
        raise NotImplementedError(f"schemas have no {kind.__name__}")
    word: list[dict[str, Any]] = [] if kind.word is None else [{"type": "string"}]
    return {"anyOf": [*word, *({"$ref": SCHEMA_REF.format(name=one.__name__)} for one in kind.all_kinds())]}


def _batch_paths() -> dict[str, Any]:
    """The routes of files and batches."""
    file_id, page = _path_parameter("id"), [_query_parameter("after"), _query_parameter("limit", "integer")]
    files = _get_operation("Your files", _json_content(FileList), page)
    files["post"] = {
        "summary": "Upload a file of requests",
        "requestBody": {"required": True, "content": {FORM: {"schema": UPLOAD_SCHEMA}}},
        "responses": {
            "200": {"description": "Done", "content": _json_content(FileObject)},
            **_error_responses(*ERROR_RESPONSES),
        },
    }
    one_file = _get_operation("A file", _json_content(FileObject), [file_id])
    deleted = _get_operation("Delete a file", _json_content(FileDeleted), [file_id])
    one_file["delete"] = deleted["get"]
    cancelled = _get_operation("Cancel a batch", _json_content(BatchObject), [file_id])
    cancelled["get"]["responses"] |= _error_responses("409")
    batches = _post_operation("Answer all requests of a file", BatchRequest, BatchObject)
    return {
        "/v1/files": files,
        "/v1/files/{id}": one_file,
        "/v1/files/{id}/content": _get_operation(
            "What is in a file", {BYTES: {"schema": {"type": "string", "format": "binary"}}}, [file_id]
        ),
        "/v1/batches": batches | _get_operation("Your batches", _json_content(BatchList), page),
        "/v1/batches/{id}": _get_operation("A batch", _json_content(BatchObject), [file_id]),
        "/v1/batches/{id}/cancel": {"post": cancelled["get"]},
    }


def _admin_paths() -> dict[str, Any]:
    """The routes of operators about files and batches of all tenants; they exist only with an admin key."""
    one = _path_parameter("id")
    page = [_query_parameter("tenant"), _query_parameter("after"), _query_parameter("limit", "integer")]
    cancelled = _get_operation("Cancel anybody's batch", _json_content(AdminBatch), [one])["get"]
    cancelled["responses"] |= _error_responses("409")
    deleted = _get_operation("Delete anybody's file", _json_content(FileDeleted), [one])["get"]
    paths = {
        "/admin/tenants": _get_operation("What each tenant keeps", _json_content(TenantList)),
        "/admin/batches": _get_operation("The batches of all tenants", _json_content(AdminBatchList), page),
        "/admin/batches/{id}": _get_operation("Anybody's batch", _json_content(AdminBatch), [one]),
        "/admin/batches/{id}/cancel": {"post": cancelled},
        "/admin/files": _get_operation("The files of all tenants", _json_content(AdminFileList), page),
        "/admin/files/{id}": {"delete": deleted},
    }
    return paths


def docs_page(document: dict[str, Any]) -> str:
    """The OpenAPI document as one HTML page that loads nothing else."""
    rows = [
        f"<h2><b>{method.upper()}</b> {html.escape(path)}</h2><p>{html.escape(operation['summary'])}</p>"
        + _field_table(operation, document["components"]["schemas"])
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return PAGE_TEMPLATE.format(version=html.escape(document["info"]["version"]), rows="\n".join(rows))


def _field_table(operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    """An HTML table of a request body's fields with their types and bounds."""
    if JSON not in operation.get("requestBody", {}).get("content", {}):
        return ""
    name = operation["requestBody"]["content"][JSON]["schema"]["$ref"].rsplit("/", 1)[1]
    required = schemas[name].get("required", [])
    rows = [
        f"<tr><td>{html.escape(field)}{' *' if field in required else ''}"
        f"<td><code>{html.escape(_schema_summary(schema))}</code>"
        for field, schema in schemas[name]["properties"].items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _schema_summary(schema: dict[str, Any]) -> str:
    """A JSON schema in one line."""
    if "anyOf" in schema:
        return " | ".join(_schema_summary(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[1]
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"[{_schema_summary(schema.get('items', {}))}]"
    bounds = [f"{word} {schema[key]}" for key, word in BOUND_SIGNS.items() if key in schema]
    return " ".join([kind, *bounds])


def _json_content(kind: type[Any]) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": SCHEMA_REF.format(name=kind.__name__)}}}


def _sse_content(*chunks: type[Any], problem: type[Any]) -> dict[str, Any]:
    """The content of a stream: the data of each event is a chunk, an error or [DONE]."""
    kinds: list[type[Any]] = [*chunks, problem]
    inside = {"anyOf": [{"$ref": SCHEMA_REF.format(name=kind.__name__)} for kind in kinds]}
    piece = {"type": "string", "contentMediaType": JSON, "contentSchema": inside}
    data = {"anyOf": [{"const": "[DONE]"}, piece]}
    return {SSE: {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}}


def _error_responses(*statuses: str, problem: type[Any] = ErrorReply) -> dict[str, Any]:
    return {
        status: {"description": ERROR_RESPONSES[status], "content": _json_content(problem)}
        for status in statuses
    }


def _post_operation(
    summary: str, body: type[Any], answer: type[Any], *chunks: type[Any], problem: type[Any] = ErrorReply
) -> dict[str, Any]:
    content = _json_content(answer) | (_sse_content(*chunks, problem=problem) if chunks else {})
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _json_content(body)},
            "responses": {
                "200": {"description": "Done", "content": content},
                **_error_responses(*ERROR_RESPONSES, problem=problem),
            },
        }
    }


def _get_operation(
    summary: str,
    content: dict[str, Any],
    parameters: list[Any] | None = None,
    down: dict[str, Any] | None = None,
) -> dict[str, Any]:
    responses = {
        "200": {"description": "Done", "content": content},
        **_error_responses("400", "401", "403", "404", "429", "500"),
    }
    responses["503"] = {"description": "Not now", "content": down or {}}
    return {"get": {"summary": summary, "parameters": parameters or [], "responses": responses}}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query_parameter(name: str, kind: str = "string") -> dict[str, Any]:
    schema = {"type": kind} | ({"minimum": 1, "maximum": 100} if kind == "integer" else {})
    return {"name": name, "in": "query", "required": False, "schema": schema}
