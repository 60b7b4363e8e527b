"""schemathesis against `/openapi.json`: whatever is sent, no 5xx, and every answer is what the description says.

The soak sends 20,000 cases, over all routes, and says how many had a 5xx or no answer. Routes that pool are asked of a
model that embeds, of one that scores, and of one that can do neither.

Valid bodies name the served model, so that they get past the first check; a 400 is still right for some of them (a
token id beyond the vocabulary cannot be expressed in a schema).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from diptych.request import Pooling
from services.gateway.openai.openapi import openapi_document
from services.gateway.openai.request_limits import RequestLimits
from tests.support.model_folder import make_folder
from tests.system.scripted_gateway import Running, scripted

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# fmt: off
REFUSED = frozenset({
    "tools", "tool_choice", "functions", "function_call", "audio", "prediction", "web_search_options",
    "moderation", "store", "suffix", "best_of", "prompt_cache_options", "chat_template",
    "chat_template_kwargs", "reasoning_effort", "modalities", "continue_final_message", "top_logprobs",
    "stream_options", "logit_bias", "stop_token_ids", "response_format",
    "background", "truncation", "previous_response_id", "conversation", "context_management",
    "access_programs", "image", "text", "reasoning", "thinking_token_budget",
    "thinking", "output_config", "container", "mcp_servers", "system"
})
# fmt: on
MESSAGE_SCHEMA = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string", "maxLength": 30}},
    "required": ["role", "content"],
    "additionalProperties": False,
}
KNOWN: dict[str, Any] = {
    "model": {"enum": ["toy"]},
    "messages": {"type": "array", "items": MESSAGE_SCHEMA, "minItems": 1, "maxItems": 3},
    "input": {"type": "array", "items": MESSAGE_SCHEMA, "minItems": 1, "maxItems": 3},
    "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 20},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 20},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": 20},
    "min_tokens": {"enum": [0, 1]},
    "prompt": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 319},
        "minItems": 1,
        "maxItems": 9,
    },
    "stop": {"type": "string", "minLength": 1, "maxLength": 9},
}
POOLED = ("/v1/embeddings", "/rerank", "/v1/rerank", "/score", "/v1/score")
POOLINGS = {"embeds": Pooling("last", normalize=True), "scores": Pooling("score", tokens=(3, 4))}
# A model that scores gives no vectors.
NEVER_SERVED = {("scores", "/v1/embeddings")}
SOAK_CASES, HANG_S = 20_000, 60.0
ADMIN_KEY = "sk-admin"
BUDGET_S = 6.0  # per operation and mode
EXAMPLES = {"post": 40, "get": 5, "delete": 5}
OPERATIONS = [
    (path, method) for path, methods in openapi_document("test")["paths"].items() for method in methods
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder, data = make_folder(tmp_path_factory.mktemp("toy")), tmp_path_factory.mktemp("data")
    with scripted(folder, data_dir=data / "batches", admin_key=ADMIN_KEY) as running:
        yield running


@pytest.fixture(scope="module", params=POOLINGS)
def pooling(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PoolingGateway]:
    name = str(request.param)
    # Long enough for the instruction that stands before each pair.
    folder = make_folder(tmp_path_factory.mktemp(name), 2048)
    with scripted(folder, pooling=POOLINGS[name]) as running:
        yield PoolingGateway(name, running)


def published(gateway: Running) -> dict[str, Any]:
    schema: dict[str, Any] = httpx.get(f"{gateway.url}/openapi.json", trust_env=False, timeout=60).json()
    return schema


def described(gateway: Running) -> dict[str, Any]:
    """The published description as a client of this very server would have it: its model, vocabulary and limits."""
    schema = published(gateway)
    for name in (
        "ChatRequest",
        "CompletionRequest",
        "ResponsesRequest",
        "MessagesRequest",
        "CountTokensRequest",
    ):
        fields = schema["components"]["schemas"][name]["properties"]
        fields |= {field: known for field, known in KNOWN.items() if field in fields}
        for field in REFUSED & fields.keys():
            del fields[field]
    for name in ("EmbeddingRequest", "RerankRequest", "ScoreRequest"):
        schema["components"]["schemas"][name]["properties"]["model"] = KNOWN["model"]
    # Of its two pairs of fields one, which a schema cannot say.
    score = schema["components"]["schemas"]["ScoreRequest"]
    for field in ("queries", "documents"):
        del score["properties"][field]
    score["properties"] |= dict.fromkeys(("text_1", "text_2"), KNOWN["stop"])
    score["required"] = ["text_1", "text_2"]
    # Here it names a stored template.
    del schema["components"]["schemas"]["ResponsesRequest"]["properties"]["prompt"]
    fields = schema["components"]["schemas"]["BatchRequest"]["properties"]
    if gateway.batches is not None:
        fields |= {
            "input_file_id": {"enum": [uploaded(gateway)]},
            "completion_window": {"enum": ["24h", "1h"]},
        }
    fields["metadata"] = {"type": "object", "properties": {"k": {"type": "string", "maxLength": 9}}}
    return schema


def uploaded(gateway: Running) -> str:
    """The id of a file that a batch can be made of."""
    answer = httpx.post(
        f"{gateway.url}/v1/files",
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", b"{}\n")},
        trust_env=False,
        timeout=60,
    )
    name: str = answer.raise_for_status().json()["id"]
    return name


def test_the_description_is_what_the_code_says(gateway: Running) -> None:
    assert set(published(gateway)["paths"]) == {path for path, _ in OPERATIONS}


MODES = pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))


@MODES
@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda part: str(part))
def test_nothing_sent_breaks_it(gateway: Running, path: str, method: str, mode: GenerationMode) -> None:
    tally = Tally()
    # The toy model cannot pool, so these are refused, whatever is sent.
    wanted = "{id}" not in path and path not in POOLED
    send_cases(gateway, tally, path, method, mode, EXAMPLES[method], wanted)
    tally.check()


@MODES
@pytest.mark.parametrize("path", POOLED)
def test_nothing_sent_breaks_a_model_that_pools(
    pooling: PoolingGateway, path: str, mode: GenerationMode
) -> None:
    tally = Tally()
    wanted = (pooling.name, path) not in NEVER_SERVED
    send_cases(pooling.running, tally, path, "post", mode, EXAMPLES["post"], wanted)
    tally.check()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_thousand_cases(gateway: Running, tmp_path: Path) -> None:
    """Prints what was counted; with `-s` it is seen."""
    tally, begun_s = Tally(), time.monotonic()
    with scripted(make_folder(tmp_path / "toy"), pooling=POOLINGS["embeds"]) as embedder:
        posts = [path for path, method in OPERATIONS if method == "post"]
        share = SOAK_CASES // (2 * len(posts))
        for path, method in OPERATIONS:
            running = embedder if path in POOLED else gateway
            for mode in GenerationMode:
                send_cases(
                    running, tally, path, method, mode, share if method == "post" else 50, False, 3600.0
                )
        while tally.cases < SOAK_CASES:
            for path in posts:
                running = embedder if path in POOLED else gateway
                send_cases(running, tally, path, "post", GenerationMode.POSITIVE, 200, False, 3600.0)
    print(f"fuzz_cases={tally.cases} fuzz_5xx={tally.failures} fuzz_hangs={tally.hangs}")
    print(f"fuzz_s={time.monotonic() - begun_s:.0f}")
    tally.check()


@dataclass
class PoolingGateway:
    name: str
    running: Running


@dataclass
class Tally:
    """How many cases were sent, and how many of them had a 5xx or no answer in time."""

    cases: int = 0
    failures: int = 0
    hangs: int = 0

    def check(self) -> None:
        assert (self.failures, self.hangs) == (0, 0)


def send_cases(
    running: Running,
    tally: Tally,
    path: str,
    method: str,
    mode: GenerationMode,
    count: int,
    wanted: bool,
    budget_s: float = BUDGET_S,
) -> None:
    """Send so many cases of one operation, or fewer where they take long. One must be served, if it is `wanted`."""
    if mode is GenerationMode.NEGATIVE and (method != "post" or path.endswith("/cancel")):
        mode = GenerationMode.POSITIVE  # there is nothing to get wrong
    is_valid = mode is GenerationMode.POSITIVE
    operation = schemathesis.openapi.from_dict(described(running) if is_valid else published(running))[path][
        method
    ]
    # What is wrong with a form may be lost where its fields are written as parts.
    is_form = path == "/v1/files"
    checks = CHECKS if is_valid or is_form else [*CHECKS, negative_data_rejection]
    answers: set[int] = set()
    begun_s, wanted = time.monotonic(), wanted and is_valid

    with requests.Session() as session:
        session.trust_env = False
        if path.startswith("/admin/"):
            session.headers["Authorization"] = f"Bearer {ADMIN_KEY}"

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        def send(case: schemathesis.Case[Any]) -> None:
            if time.monotonic() - begun_s > budget_s and (200 in answers or not wanted):
                return  # on a slow machine it goes on until one went through
            tally.cases += 1
            try:
                answer = case.call(base_url=running.url, session=session, timeout=HANG_S)
            except requests.Timeout:
                tally.hangs += 1
                raise
            tally.failures += answer.status_code >= 500
            answers.add(answer.status_code)
            if answer.status_code == 413:
                # The first thing that is wrong with it, whatever else is; the check wants a 400.
                body = answer.request.body
                assert isinstance(body, bytes | str) and len(body) > RequestLimits().max_body_bytes
                return
            case.validate_response(answer, checks=checks)

        send()
    if is_valid:
        assert 200 in answers or not wanted
    else:
        assert answers <= {400, 404, 413, 415} | ({200} if is_form else set())
