"""28 conversations over `/v1/responses`, each as a stream and whole: the order and the fields of every event, what
the client sees, and what the workers are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.gateway.openai.request_limits import RequestLimits
from tests.support.model_folder import make_folder
from tests.support.waiting import wait_for
from tests.system.conversations import check_alike, play_conversation
from tests.system.response_events import check_events, check_response, read_events
from tests.system.scripted_gateway import Running, scripted
from tests.unit.gateway.thinking_model import MARKERS, THINKING_TEMPLATE

THOUGHT, TEXT = "<think>\nthe fox\n</think>\n\n", "Grüße, 世界! One moment."
JUMP = '<tool_call>\n{"name": "jump", "arguments": {"x": 1}}\n</tool_call>'
LOOK = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": name,
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    }
    for name in ("jump", "look_up")
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "jump"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so it is"}]},
    {"type": "function_call", "call_id": "c1", "name": "jump", "arguments": '{"x": 2}'},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "high"}]},
]


@dataclass(frozen=True)
class Conversation:
    """What is sent, what the model says, and the items and the status that must come."""

    name: str
    items: str
    said: str = TEXT
    sent: Any = "hi"
    fields: dict[str, Any] = field(default_factory=dict)
    status: str = "completed"


# fmt: off
CONVERSATIONS = [
    Conversation("a text", "message"),
    Conversation("a message", "message", sent=[{"role": "user", "content": "hi"}]),
    Conversation("a message of parts", "message", sent=[
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}]}]),
    Conversation("instructions", "message", fields={"instructions": "Be brief."}, sent=[
        {"role": "developer", "content": "Never shout."}, {"role": "user", "content": "hi"}]),
    Conversation("a second question", "message", sent=[
        {"role": "user", "content": "hi"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]},
        {"role": "user", "content": "go on"}]),
    Conversation("what clients keep of an answer", "message", sent=[
        {"type": None, "role": "user", "name": "ada", "content": "hi"},
        {"type": "message", "role": "assistant", "end_turn": True, "content": [
            {"type": "output_text", "text": "{}", "parsed": {}}]},
        {"type": "function_call", "call_id": "c1", "name": "jump", "arguments": "{}", "parsed_arguments": {}},
        {"type": "function_call_output", "call_id": "c1", "output": "high"}], fields={"tools": TOOLS}),
    Conversation("a refusal in the history", "message", sent=[
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "please"}]),
    Conversation("a schema", "message", '{"a": 1}', fields={"text": FORMAT}),
    Conversation("an object", "message", '{"a": 1}', fields={"text": {"format": {"type": "json_object"}}}),
    Conversation("log-probabilities", "message", fields={
        "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    Conversation("hidden lengths", "message", fields={"stream_options": {"include_obfuscation": True}}),
    Conversation("one call", "function_call", JUMP, fields={"tools": TOOLS}),
    Conversation("two calls", "function_call function_call", f"{JUMP}\n{LOOK}", fields={"tools": TOOLS}),
    Conversation("a text and a call", "message function_call", f"{TEXT}\n{JUMP}", fields={"tools": TOOLS}),
    Conversation("a thought, a text, two calls", "reasoning message function_call function_call",
                 f"{THOUGHT}{TEXT}\n{JUMP}\n{LOOK}", fields={"tools": TOOLS}),
    Conversation("one call at most", "function_call", f"{JUMP}\n{LOOK}", fields={
        "tools": TOOLS, "parallel_tool_calls": False}),
    Conversation("a call that must be", "function_call", JUMP, fields={
        "tools": TOOLS, "tool_choice": {"type": "function", "name": "jump"}}),
    Conversation("a tool's answer", "message", sent=CALLED, fields={"tools": TOOLS}),
    Conversation("hosted tools", "message", fields={"tools": [{"type": "web_search"}, *TOOLS]}),
    Conversation("a thought", "reasoning message", THOUGHT + TEXT),
    Conversation("a summary", "reasoning message", THOUGHT + TEXT, fields={"reasoning": {"summary": "auto"}}),
    Conversation("a sealed thought", "reasoning message", THOUGHT + TEXT, fields={
        "include": ["reasoning.encrypted_content"], "store": False}),
    Conversation("a thought with log-probabilities", "reasoning message", THOUGHT + TEXT, fields={
        "include": ["message.output_text.logprobs"]}),
    Conversation("two texts with log-probabilities", "message function_call message",
                 f"One moment.\n{JUMP}\nIt jumps.", fields={
                     "tools": TOOLS, "include": ["message.output_text.logprobs"]}),
    Conversation("a text too long", "message", fields={"max_output_tokens": 9}, status="incomplete"),
    Conversation("a thought too long", "reasoning", THOUGHT, fields={"max_output_tokens": 4}, status="incomplete"),
    Conversation("a call too long", "function_call", JUMP, fields={"tools": TOOLS, "max_output_tokens": 18},
                 status="incomplete"),
    Conversation("nothing", "message", ""),
]
# fmt: on


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_folder(tmp_path_factory.mktemp("thinking"), 1024, MARKERS, THINKING_TEMPLATE)
    with scripted(folder) as running:
        yield running


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=60) as opened:
        yield opened


def play(gateway: Running, http: httpx.Client, conversation: Conversation, stream: bool) -> httpx.Response:
    body = {"input": conversation.sent, "stream": stream, **conversation.fields}
    if not stream:
        body.pop("stream_options", None)
    return play_conversation(gateway, http, "/v1/responses", conversation.said, body)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda one: str(one.name))
def test_conversations(gateway: Running, http: httpx.Client, conversation: Conversation) -> None:
    streamed = check_events(read_events(play(gateway, http, conversation, True).text))
    whole = play(gateway, http, conversation, False).json()
    check_response(whole)
    check_alike(streamed["output"], whole["output"], conversation.items)
    for response in (streamed, whole):
        assert response["status"] == conversation.status
        statuses = [item["status"] for item in response["output"]]
        assert statuses == ["completed"] * (len(statuses) - 1) + [conversation.status]
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_each_text_has_its_own_log_probabilities(gateway: Running, http: httpx.Client) -> None:
    said = Conversation("", "", f"One moment.\n{JUMP}\nIt jumps.\n{LOOK}", fields={
        "tools": TOOLS, "include": ["message.output_text.logprobs"]})  # fmt: skip
    streamed = check_events(read_events(play(gateway, http, said, True).text))
    whole = play(gateway, http, said, False).json()
    for response in (streamed, whole):
        parts = [item["content"][0] for item in response["output"] if item["type"] == "message"]
        assert [part["text"].strip() for part in parts] == ["One moment.", "It jumps."]
        for part in parts:
            assert "".join(entry["token"] for entry in part["logprobs"]).strip() == part["text"].strip()


def prompt_of(gateway: Running) -> str:
    return gateway.script.tokens.decode(list(gateway.script.seen[-1].prompt), skip_special=False)


def test_what_the_model_is_shown_is_what_a_chat_shows(gateway: Running, http: httpx.Client) -> None:
    gateway.script.text = TEXT
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "jump", "arguments": '{"x": 2}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "jump"},
        {"role": "assistant", "content": None, "reasoning_content": "so it is", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "high"},
    ]
    fields = {"model": "toy", "seed": 7, "temperature": 0.5, "min_tokens": 2, "tool_choice": "required"}
    http.post("/v1/chat/completions", json={**fields, "messages": messages, "tools": tools, "max_tokens": 9})
    chat = gateway.script.seen[-1]
    body = {**fields, "input": CALLED, "instructions": "Be brief.", "tools": TOOLS, "max_output_tokens": 9}
    http.post("/v1/responses", json=body).raise_for_status()
    assert list(gateway.script.seen[-1].prompt) == list(chat.prompt)
    assert gateway.script.seen[-1].sampling == chat.sampling


def test_an_answer_sent_back_is_the_prompt_it_came_from(gateway: Running, http: httpx.Client) -> None:
    """Items of an answer go back as they are, with the thought that only `encrypted_content` has."""
    said = Conversation("", "", f"{THOUGHT}{TEXT}\n{JUMP}", fields={
        "tools": TOOLS, "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"},
    })  # fmt: skip
    output = play(gateway, http, said, False).json()["output"]
    output[0]["summary"] = []
    call = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "done"}
    again = [{"role": "user", "content": "hi"}, *output, call]
    play(gateway, http, Conversation("", "", sent=again, fields={"tools": TOOLS}), False)
    assert TEXT in prompt_of(gateway) and '"name": "jump"' in prompt_of(gateway)


def test_a_failure_before_the_stream_is_an_error_with_its_status(http: httpx.Client) -> None:
    for stream in (False, True):
        answer = http.post("/v1/responses", json={"model": "toy", "input": "FAIL-EARLY", "stream": stream})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_workers"


def test_a_failure_within_the_stream_is_the_failed_response(gateway: Running, http: httpx.Client) -> None:
    gateway.script.text = TEXT
    answer = http.post("/v1/responses", json={"model": "toy", "input": "FAIL-LATE", "stream": True})
    response = check_events(read_events(answer.text))
    assert response["status"] == "failed" and response["output"][0]["status"] == "incomplete"
    assert (response["error"]["code"], response["error"]["type"]) == ("server_error", "worker_lost")


def test_a_client_that_leaves_frees_its_request(gateway: Running, http: httpx.Client) -> None:
    gateway.script.text = TEXT
    left = gateway.script.left
    body = {"model": "toy", "input": "HANG-LATE", "stream": True}
    with http.stream("POST", "/v1/responses", json=body) as answer:
        next(answer.iter_text())
    wait_for(lambda: gateway.script.left == left + 1, 60.0)


def test_the_official_client_reads_both(gateway: Running) -> None:
    gateway.script.text = f"{THOUGHT}{TEXT}\n{JUMP}"
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as client:
        tools: Any = TOOLS
        response = client.responses.create(model="toy", input="hi", tools=tools)
        assert response.output_text == TEXT and response.output[2].type == "function_call"
        with client.responses.stream(model="toy", input="hi", tools=tools) as stream:
            names = [event.type for event in stream]
            final = stream.get_final_response()
        assert names[-1] == "response.completed" and final.output_text == TEXT
        gateway.script.text = TEXT
        with pytest.raises(openai.InternalServerError):
            client.responses.create(model="toy", input="FAIL-EARLY")


# fmt: off
@pytest.mark.parametrize(("fields", "code", "param"), [
    ({"store": True}, "unsupported_parameter", "store"),
    ({"background": True}, "unsupported_parameter", "background"),
    ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
    ({"conversation": {"id": "conv_1"}}, "unsupported_parameter", "conversation"),
    ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
    ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
    ({"moderation": {"model": "m"}}, "unsupported_parameter", "moderation"),
    ({"reasoning": {"context": "all_turns"}}, "unsupported_parameter", "reasoning.context"),
    ({"reasoning": {"mode": "pro"}}, "unsupported_parameter", "reasoning.mode"),
    ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"stream_options": {"include_obfuscation": True}}, "invalid_value", "stream_options"),
    ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    ({"max_output_tokens": 100000}, "context_length_exceeded", "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "missing_required_parameter", "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 3}}}}, "invalid_schema",
     "text.format"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "invalid_value", "tools[0].name"),
    ({"tools": [{"type": "web_search"}, *TOOLS, TOOLS[0]]}, "invalid_value", "tools[3].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "z"}}, "invalid_value", "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "unsupported_parameter", "tool_choice.type"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"input": []}, "invalid_value", "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported_parameter", "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "unsupported_parameter",
     "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "invalid_value", "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "missing_required_parameter",
     "input[0].arguments"),
    ({"input": [{"type": "reasoning", "encrypted_content": "diptych.!"}]}, "invalid_value",
     "input[0].encrypted_content"),
    ({"model": "other"}, "model_not_found", "model"),
    ({"n": 2}, "unrecognized_request_argument", "n"),
    ({"input": [{"role": "user", "content": "a", "x": 1}]}, "unrecognized_request_argument", "input[0].x"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}]},
     "unrecognized_request_argument", "input[0].content[0].x"),
    ({"input": [*CALLED[:2], {**CALLED[2], "output": "a"}]}, "unrecognized_request_argument", "input[2].output"),
    ({"input": [*CALLED[:2], {**CALLED[2], "caller": {"type": "program", "caller_id": "a"}}]}, "unsupported_parameter",
     "input[2].caller.type"),
    ({"input": [*CALLED[:2], {**CALLED[2], "namespace": "a"}]}, "unsupported_parameter", "input[2].namespace"),
    ({"input": [*CALLED[:2], {**CALLED[2], "async": True}]}, "unsupported_parameter", "input[2].async"),
    ({"tools": [{**TOOLS[0], "x": 1}]}, "unrecognized_request_argument", "tools[0].x"),
    ({"tools": [{**TOOLS[0], "async": True}]}, "unsupported_parameter", "tools[0].async"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "unsupported_parameter", "tools[0].defer_loading"),
    ({"tools": [{**TOOLS[0], "output_schema": {}}]}, "unsupported_parameter", "tools[0].output_schema"),
    ({"tools": [{**TOOLS[0], "allowed_callers": ["programmatic"]}]}, "unsupported_parameter",
     "tools[0].allowed_callers"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "jump", "x": 1}}, "unrecognized_request_argument",
     "tool_choice.x"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "invalid_value",
     "tool_choice.tools"),
    ({"text": {"format": {"type": "text", "name": "a"}}}, "unrecognized_request_argument", "text.format.name"),
])
# fmt: on
def test_what_is_refused_is_named(http: httpx.Client, fields: dict[str, Any], code: str, param: str) -> None:
    answer = http.post("/v1/responses", json={"model": "toy", "input": "hi", **fields})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and (error["code"], error["param"]) == (code, param), error


def test_what_asks_for_nothing_is_accepted(http: httpx.Client) -> None:
    fields = {
        "store": False, "background": False, "truncation": "disabled", "previous_response_id": None,
        "metadata": {"a": "b"},
        "user": "me", "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3,
        "client_metadata": {"a": "b"}, "access_programs": {"a": "b"},
        "include": ["file_search_call.results"], "text": {"verbosity": "low"}, "context_management": [], "tools": [],
        "tool_choice": "auto", "reasoning": {"effort": None, "context": "auto", "mode": "standard"},
    }  # fmt: skip
    answer = http.post("/v1/responses", json={"model": "toy", "input": "hi", "max_output_tokens": 3, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["metadata"] == {"a": "b"} and body["user"] == "me" and body["store"] is False
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def test_a_schema_reaches_the_worker(gateway: Running, http: httpx.Client) -> None:
    play(gateway, http, Conversation("", "", fields={"text": FORMAT}), False)
    grammar = gateway.script.seen[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text) == SCHEMA


@pytest.mark.parametrize(("max_bytes", "status"), [(20_000, "failed"), (200_000, "incomplete")])
def test_what_is_kept_of_an_answer_counts_as_memory_once(tmp_path: Path, max_bytes: int, status: str) -> None:
    """Half of the memory is for one tenant; the log-probabilities of 800 tokens have 50,000 bytes."""
    limits = RequestLimits(max_answer_bytes=max_bytes)
    folder = make_folder(tmp_path, 1024, MARKERS, THINKING_TEMPLATE)
    with scripted(folder, limits=limits, text="a" * 900) as running:
        body = {
            "model": "toy", "input": "hi", "stream": True, "include": ["message.output_text.logprobs"],
            "max_output_tokens": 800, "min_tokens": 800,
        }  # fmt: skip
        text = httpx.post(f"{running.api}/responses", json=body, trust_env=False, timeout=60).text
        response = check_events(read_events(text))
        assert response["status"] == status
        assert status != "failed" or response["error"]["type"] == "answer_memory_full"
