"""Conversations over `/v1/messages`, each as a stream and whole: the order and the fields of every event, what the
client sees, and what the workers are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.model_folder import make_folder
from tests.support.waiting import wait_for
from tests.system.conversations import check_alike, play_conversation
from tests.system.message_events import check_events, check_message, read_events
from tests.system.scripted_gateway import Running, scripted
from tests.unit.gateway.thinking_model import MARKERS, THINKING_TEMPLATE

KEY = "sk-" + "k" * 40
THOUGHT, TEXT = "<think>\nthe fox\n</think>\n\n", "Grüße, 世界! One moment."
JUMP = '<tool_call>\n{"name": "jump", "arguments": {"x": 1}}\n</tool_call>'
UNREAD = '<tool_call>\n{"name": "jump", "arguments": "high"}\n</tool_call>'
LOOK = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {"name": name, "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    for name in ("jump", "look_up")
]
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "jump", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "so it is", "signature": "s"},
        {"type": "tool_use", "id": "c1", "name": "jump", "input": {"x": 2}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "high"}]},
        {"type": "text", "text": "and?"}]},
]  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """What is sent, what the model says, and the blocks and the reason that must come."""

    name: str
    blocks: str
    said: str = TEXT
    messages: list[dict[str, Any]] = field(default_factory=lambda: HI)
    fields: dict[str, Any] = field(default_factory=dict)
    reason: str = "end_turn"


# fmt: off
CONVERSATIONS = [
    Conversation("a text", "text"),
    Conversation("blocks", "text", messages=[{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
    Conversation("a system", "text", fields={"system": "Be brief."}),
    Conversation("a system of blocks", "text", fields={"system": [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}),
    Conversation("a second question", "text", messages=[*HI, {"role": "assistant", "content": [
        {"type": "text", "text": "Hello."}]}, *HI]),
    Conversation("an answer to continue", "text", messages=[*HI, {"role": "assistant", "content": "Hell"}]),
    Conversation("a system in between", "text", messages=[*HI, {"role": "system", "content": "Now."}, *HI]),
    Conversation("a schema", "text", '{"a": 1}', fields={
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    Conversation("one call", "tool_use", JUMP, fields={"tools": TOOLS}, reason="tool_use"),
    Conversation("two calls", "tool_use tool_use", f"{JUMP}\n{LOOK}", fields={"tools": TOOLS}, reason="tool_use"),
    Conversation("a text and a call", "text tool_use", f"{TEXT}\n{JUMP}", fields={"tools": TOOLS}, reason="tool_use"),
    Conversation("a thought, a text, two calls", "thinking text tool_use tool_use",
                 f"{THOUGHT}{TEXT}\n{JUMP}\n{LOOK}", fields={"tools": TOOLS}, reason="tool_use"),
    Conversation("one call at most", "tool_use", f"{JUMP}\n{LOOK}", fields={
        "tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, reason="tool_use"),
    Conversation("any call", "tool_use", JUMP, fields={"tools": TOOLS, "tool_choice": {"type": "any"}},
                 reason="tool_use"),
    Conversation("a call that must be", "tool_use", JUMP, fields={
        "tools": TOOLS, "tool_choice": {"type": "tool", "name": "jump"}}, reason="tool_use"),
    Conversation("no calls", "text", fields={"tools": TOOLS, "tool_choice": {"type": "none"}}),
    Conversation("a tool's answer", "text", messages=CALLED, fields={"tools": TOOLS}),
    Conversation("a tool's error", "text", messages=[*CALLED[:2], {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": "no"}]}], fields={"tools": TOOLS}),
    Conversation("hosted tools", "text", fields={"tools": [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, *TOOLS]}),
    Conversation("a thought", "thinking text", THOUGHT + TEXT, fields={
        "thinking": {"type": "enabled", "budget_tokens": 50}}),
    Conversation("a thought that is not shown", "thinking text", THOUGHT + TEXT, fields={
        "thinking": {"type": "adaptive", "display": "omitted"}}),
    Conversation("a thought that nobody can read", "text", messages=[*HI, {"role": "assistant", "content": [
        {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Hello."}]}, *HI]),
    Conversation("a stop sequence", "text", fields={"stop_sequences": ["One"]}, reason="stop_sequence"),
    Conversation("a text too long", "text", fields={"max_tokens": 9}, reason="max_tokens"),
    Conversation("a thought too long", "thinking", THOUGHT, fields={"max_tokens": 4}, reason="max_tokens"),
    Conversation("a length beyond the context", "text", "a" * 2000, fields={"max_tokens": 32000},
                 reason="model_context_window_exceeded"),
    Conversation("a call without an object", "text", UNREAD, fields={"tools": TOOLS}),
    Conversation("a call that does not end", "text", JUMP[:47], fields={"tools": TOOLS, "stop_token_ids": [2]}),
    Conversation("a text, a call without an object, and another", "text text tool_use",
                 f"{TEXT}\n{UNREAD}\n{JUMP}", fields={"tools": TOOLS}, reason="tool_use"),
    Conversation("nothing", "", ""),
]
# fmt: on


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_folder(tmp_path_factory.mktemp("thinking"), 1024, MARKERS, THINKING_TEMPLATE)
    with scripted(folder, keys=(KEY,)) as running:
        yield running


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx.Client]:
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=60, headers=headers) as opened:
        yield opened


def play(gateway: Running, http: httpx.Client, conversation: Conversation, stream: bool) -> httpx.Response:
    body = {"max_tokens": 200, "messages": conversation.messages, "stream": stream, **conversation.fields}
    return play_conversation(gateway, http, "/v1/messages", conversation.said, body)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda one: str(one.name))
def test_conversations(gateway: Running, http: httpx.Client, conversation: Conversation) -> None:
    streamed = check_events(read_events(play(gateway, http, conversation, True).text))
    whole = play(gateway, http, conversation, False).json()
    check_message(whole)
    check_alike(streamed["content"], whole["content"], conversation.blocks)
    assert streamed["stop_reason"] == whole["stop_reason"] == conversation.reason
    assert streamed["stop_sequence"] == whole["stop_sequence"]
    usage = whole["usage"]
    assert streamed["usage"]["output_tokens"] == usage["output_tokens"]
    # The same prompt is cached the second time, and counted once.
    inputs = [
        one["usage"]["input_tokens"] + one["usage"]["cache_read_input_tokens"] for one in (streamed, whole)
    ]
    assert inputs[0] == inputs[1]


def test_a_call_too_long_has_no_input(gateway: Running, http: httpx.Client) -> None:
    conversation = Conversation("", "", JUMP, fields={"tools": TOOLS, "max_tokens": 18})
    [block] = play(gateway, http, conversation, False).json()["content"]
    assert block["input"] == {} and block["name"] == "jump"
    events = read_events(play(gateway, http, conversation, True).text)
    assert events[-2]["delta"]["stop_reason"] == "max_tokens" and events[-1] == {"type": "message_stop"}


def partial_pieces(events: list[dict[str, Any]]) -> list[str]:
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]


def test_arguments_that_a_grammar_binds_are_sent_as_they_come(gateway: Running, http: httpx.Client) -> None:
    """Other ones wait: they may turn out to be no object."""
    long = JUMP.replace('"x": 1', f'"x": {"1" * 40}')
    events = read_events(play(gateway, http, Conversation("", "", long, fields={"tools": TOOLS}), True).text)
    pieces = partial_pieces(events)
    assert len(pieces) > 5 and json.loads("".join(pieces)) == {"x": int("1" * 40)}
    # An end that the client names may come anywhere.
    ended = Conversation("", "", long, fields={"tools": TOOLS, "stop_token_ids": [2]})
    assert len(partial_pieces(read_events(play(gateway, http, ended, True).text))) == 1


@pytest.mark.parametrize(
    ("said", "arguments"), [(JUMP[:47], '{"x":'), (JUMP.replace('"x": 1', '"x": oops'), '{"x": oops}')]
)
def test_a_bound_call_without_an_object_is_not_to_be_run(
    gateway: Running, http: httpx.Client, said: str, arguments: str
) -> None:
    """No grammar allows it; should it come, clients drop what is cut."""
    conversation = Conversation("", "", said, fields={"tools": TOOLS})
    events = read_events(play(gateway, http, conversation, True).text)
    assert "".join(partial_pieces(events)) == arguments
    assert events[-2]["delta"]["stop_reason"] == "max_tokens" and events[-1] == {"type": "message_stop"}


def test_a_call_without_an_object_becomes_text(gateway: Running, http: httpx.Client) -> None:
    """A client would run a tool with an empty object."""
    conversation = Conversation("", "", UNREAD, fields={"tools": TOOLS})
    [block] = play(gateway, http, conversation, False).json()["content"]
    assert (block["type"], block["text"]) == ("text", "jump high")


def test_limits_are_those_of_this_route(http: httpx.Client) -> None:
    body = {"model": "toy", "max_tokens": 3, "messages": HI}
    for count, length, status in ((16, 128, 200), (17, 128, 400), (16, 129, 400)):
        tools = [{"name": "a" * length, "input_schema": {}}]
        fields = {"stop_sequences": [f"Z{i}" for i in range(count)], "tools": tools}
        answer = http.post("/v1/messages", json=body | fields)
        assert answer.status_code == status, answer.text


def shown_prompt(gateway: Running) -> str:
    return gateway.script.tokens.decode(list(gateway.script.seen[-1].prompt), skip_special=False)


def test_what_the_model_is_shown_is_what_a_chat_shows(gateway: Running, http: httpx.Client) -> None:
    gateway.script.text = TEXT
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
        for tool in TOOLS
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "jump", "arguments": '{"x": 2}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "jump"},
        {"role": "assistant", "content": None, "reasoning_content": "so it is", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "high"},
        {"role": "user", "content": "and?"},
    ]
    fields = {"model": "toy", "seed": 7, "temperature": 0.5, "max_tokens": 9}
    chat_body = {**fields, "messages": messages, "tools": tools, "thinking_token_budget": 5, "stop": ["Z"]}
    http.post("/v1/chat/completions", json=chat_body).raise_for_status()
    chat = gateway.script.seen[-1]
    body = {
        **fields, "messages": CALLED, "system": "Be brief.", "tools": TOOLS, "stop_sequences": ["Z"],
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }  # fmt: skip
    http.post("/v1/messages", json=body).raise_for_status()
    assert list(gateway.script.seen[-1].prompt) == list(chat.prompt)
    assert gateway.script.seen[-1].sampling == chat.sampling
    del body["max_tokens"], body["stop_sequences"], body["temperature"]
    counted = http.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len(chat.prompt)}


@pytest.mark.parametrize("form", ["text", "blocks"])
def test_the_line_for_billing_stays_out_of_the_prompt(
    gateway: Running, http: httpx.Client, form: str
) -> None:
    """Claude Code's first block is another one in each request."""
    prompts = []
    for number in range(2):
        line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number}a0f{number};"
        blocks = [{"type": "text", "text": line}, {"type": "text", "text": "You are a coding agent."}]
        system: Any = f"{line}\nYou are a coding agent." if form == "text" else blocks
        play(gateway, http, Conversation("", "", fields={"system": system}), False)
        prompts.append(shown_prompt(gateway))
    assert prompts[0] == prompts[1] and "billing" not in prompts[0]
    assert "You are a coding agent." in prompts[0]
    # What a user writes is a part of the prompt, whatever it looks like.
    said = [{"role": "user", "content": "x-anthropic-billing-header: what is it?"}]
    play(gateway, http, Conversation("", "", messages=said), False)
    assert "billing" in shown_prompt(gateway)


def test_an_answer_sent_back_is_the_prompt_it_came_from(gateway: Running, http: httpx.Client) -> None:
    said = Conversation("", "", f"{THOUGHT}{TEXT}\n{JUMP}", fields={"tools": TOOLS})
    content = play(gateway, http, said, False).json()["content"]
    result = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": "done"}
    again = [*HI, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    play(gateway, http, Conversation("", "", messages=again, fields={"tools": TOOLS}), False)
    assert TEXT in shown_prompt(gateway) and '"name": "jump"' in shown_prompt(gateway)


def test_a_message_of_the_system_is_shown_as_long_as_it_says(gateway: Running, http: httpx.Client) -> None:
    said = {"role": "system", "content": "Be quick.", "output_config": {"effort": "low"}}
    for clear_at, is_last, is_shown in (
        ("next_user_message", False, False), ("next_user_message", True, True), ("never", False, True)
    ):  # fmt: skip
        brief = {**said, "clear_at": clear_at}
        sent = [*HI, brief] if is_last else [*HI, brief, {"role": "assistant", "content": "Hello."}, *HI]
        play(gateway, http, Conversation("", "", messages=sent), False)
        assert ("Be quick." in shown_prompt(gateway)) is is_shown


# fmt: off
@pytest.mark.parametrize(("fields", "is_off"), [
    ({"thinking": {"type": "disabled"}}, True),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, True),
    # What the client says of the template itself counts first.
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, False),
    ({"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False}}, True),
])
# fmt: on
def test_thinking_can_be_turned_off(
    gateway: Running, http: httpx.Client, fields: dict[str, Any], is_off: bool
) -> None:
    play(gateway, http, Conversation("", "", fields=fields), False)
    assert ("<think>\n\n</think>" in shown_prompt(gateway)) is is_off


def check_error(answer: httpx.Response, status: int, kind: str, code: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"], body["error"]["code"]) == ("error", kind, code), body
    assert body["error"]["param"] == param, body
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_failure_before_the_stream_is_an_error_with_its_status(http: httpx.Client) -> None:
    for stream in (False, True):
        body = {"model": "toy", "max_tokens": 9, "stream": stream}
        answer = http.post(
            "/v1/messages", json=body | {"messages": [{"role": "user", "content": "FAIL-EARLY"}]}
        )
        check_error(answer, 503, "overloaded_error", "no_workers")


def test_a_failure_within_the_stream_is_its_last_event(gateway: Running, http: httpx.Client) -> None:
    gateway.script.text = TEXT
    messages = [{"role": "user", "content": "FAIL-LATE"}]
    body = {"model": "toy", "max_tokens": 99, "stream": True, "messages": messages}
    answer = http.post("/v1/messages", json=body)
    *_, last = read_events(answer.text)
    assert (last["type"], last["error"]["type"], last["error"]["code"]) == (
        "error",
        "overloaded_error",
        "worker_lost",
    )
    assert last["request_id"] == answer.headers["request-id"]


def test_a_client_that_leaves_frees_its_request(gateway: Running, http: httpx.Client) -> None:
    gateway.script.text = TEXT
    left = gateway.script.left
    body = {
        "model": "toy",
        "max_tokens": 99,
        "stream": True,
        "messages": [{"role": "user", "content": "HANG-LATE"}],
    }
    with http.stream("POST", "/v1/messages", json=body) as answer:
        next(answer.iter_text())
    wait_for(lambda: gateway.script.left == left + 1, 60.0)


def test_the_official_client_reads_both(gateway: Running) -> None:
    gateway.script.text = f"{THOUGHT}{TEXT}\n{JUMP}"
    with anthropic.Anthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        tools: Any = TOOLS
        messages: Any = HI
        message = client.messages.create(model="toy", max_tokens=200, messages=messages, tools=tools)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        with client.messages.stream(model="toy", max_tokens=200, messages=messages, tools=tools) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == TEXT and final.stop_reason == "tool_use"
        call: Any = final.content[2]
        assert call.input == {"x": 1}
        assert client.messages.count_tokens(model="toy", messages=messages).input_tokens > 3
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(model="other", max_tokens=9, messages=messages)
        assert caught.value.status_code == 404
        bad: Any = [{"role": "user", "content": "FAIL-LATE"}]
        with (
            pytest.raises(anthropic.APIStatusError),
            client.messages.stream(model="toy", max_tokens=99, messages=bad) as failing,
        ):
            failing.get_final_message()


def test_a_key_is_needed_in_either_header(gateway: Running) -> None:
    body = {"model": "toy", "max_tokens": 3, "messages": HI}
    for headers, status in (({}, 401), ({"x-api-key": "no"}, 401), ({"Authorization": f"Bearer {KEY}"}, 200)):
        answer = httpx.post(f"{gateway.api}/messages", json=body, headers=headers, trust_env=False)
        assert answer.status_code == status
        if status == 401:
            check_error(answer, 401, "authentication_error", "invalid_api_key")


# fmt: off
@pytest.mark.parametrize(("fields", "code", "param"), [
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"container": "c"}, "unsupported_parameter", "container"),
    ({"mcp_servers": [{"url": "u"}]}, "unsupported_parameter", "mcp_servers"),
    ({"context_management": {"edits": []}}, "unsupported_parameter", "context_management"),
    ({"thinking": {"type": "enabled"}}, "missing_required_parameter", "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "invalid_value", "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "invalid_value", "thinking.budget_tokens"),
    ({"stop_sequences": [""]}, "invalid_value", "stop_sequences"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "invalid_value", "tools[0].name"),
    ({"tools": [{"name": "a"}]}, "missing_required_parameter", "tools[0].input_schema"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "invalid_schema", "tools[0].input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}, *TOOLS, TOOLS[0]]}, "invalid_value", "tools[3].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "missing_required_parameter", "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "z"}}, "invalid_value", "tool_choice.name"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "unsupported_parameter",
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": []}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "invalid_value",
     "messages[0].content[0].tool_use_id"),
    ({"messages": [*HI, CALLED[1]]}, "invalid_value", "messages[1]"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "invalid_schema",
     "output_config.format"),
    ({"n": 2}, "unrecognized_request_argument", "n"),
    ({"messages": [{**HI[0], "x": 1}]}, "unrecognized_request_argument", "messages[0].x"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
     "unrecognized_request_argument", "messages[0].content[0].x"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]},
     "invalid_value", "messages[0].content[0].cache_control.type"),
    ({"system": [{"type": "text", "text": "a", "thinking": "b"}]}, "unrecognized_request_argument",
     "system[0].thinking"),
    ({"tools": [{**TOOLS[0], "x": 1}]}, "unrecognized_request_argument", "tools[0].x"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "unsupported_parameter", "tools[0].defer_loading"),
    ({"tools": [{**TOOLS[0], "input_examples": [{}]}]}, "unsupported_parameter", "tools[0].input_examples"),
    ({"tools": TOOLS, "tool_choice": {"type": "auto", "name": "jump"}}, "invalid_value", "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "none", "disable_parallel_tool_use": True}}, "invalid_value",
     "tool_choice.disable_parallel_tool_use"),
    ({"thinking": {"type": "between_tools"}}, "unsupported_parameter", "thinking.type"),
    ({"thinking": {"type": "disabled", "display": "omitted"}}, "invalid_value", "thinking.display"),
    ({"messages": [{**HI[0], "clear_at": "never"}]}, "invalid_value", "messages[0].clear_at"),
    ({"metadata": {"x": "u"}}, "unrecognized_request_argument", "metadata.x"),
])
# fmt: on
def test_what_is_refused_is_named(http: httpx.Client, fields: dict[str, Any], code: str, param: str) -> None:
    answer = http.post("/v1/messages", json={"model": "toy", "max_tokens": 9, "messages": HI, **fields})
    check_error(answer, 400, "invalid_request_error", code, param)


def test_what_asks_for_nothing_is_accepted(http: httpx.Client) -> None:
    fields: dict[str, Any] = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "container": None,
        "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global", "evicts": False},
        "thinking": {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}},
        "inference_geo": "eu", "speed": "standard", "diagnostics": {}, "user_profile_id": "u", "workspace_id": "w",
        "mcp_servers": [], "stop_sequences": [],
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 9}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    answer = http.post("/v1/messages", json={"model": "toy", "max_tokens": 3, "messages": HI, **fields})
    assert answer.status_code == 200, answer.text


def test_a_model_without_thoughts_has_none_whatever_their_budget(tmp_path_factory: pytest.TempPathFactory) -> None:
    with scripted(make_folder(tmp_path_factory.mktemp("plain"))) as running:
        for thinking in ({"type": "enabled", "budget_tokens": 3}, {"type": "disabled"}, {"type": "adaptive"}):
            body = {"model": "toy", "max_tokens": 9, "messages": HI, "thinking": thinking}
            answer = httpx.post(f"{running.api}/messages", json=body, trust_env=False)
            assert answer.status_code == 200, answer.text
            assert [block["type"] for block in answer.json()["content"]] == ["text"]


def test_a_schema_reaches_the_worker(gateway: Running, http: httpx.Client) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    play(gateway, http, Conversation("", "", fields={"output_config": config}), False)
    grammar = gateway.script.seen[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text) == SCHEMA
