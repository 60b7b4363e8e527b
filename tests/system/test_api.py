"""The API as official clients see it: shapes, stream grammar, errors. Tokens come from a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.model_folder import CONTEXT, make_folder
from tests.system.api_answers import HI, check_error, events
from tests.system.scripted_gateway import SCRIPT, Running, scripted
from tests.unit.gateway.chat_template_samples import CHATML

LENGTH = 67  # tokens of the script with its end token


# ---- whole answers
TOOL = {"type": "function", "function": {"name": "f"}}


def test_a_chat_answer_is_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=HI)
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model, answer.system_fingerprint) == ("chat.completion", "toy", "fp_toy")
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        SCRIPT,
        "stop",
    )
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (LENGTH, 5)
    assert answer.usage.total_tokens == LENGTH + 5
    assert answer._request_id is not None


def test_required_fields_are_there_even_when_null(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"model": "toy", "messages": HI, "max_tokens": 2}).json()
    assert isinstance(answer["created"], int)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"content": "Gr", "role": "assistant", "refusal": None},
            "finish_reason": "length",
            "logprobs": None,
            "stop_reason": None,
        }
    ]


def test_a_completion_is_whole(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="org/toy", prompt="hi")
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "org/toy")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_n_choices_have_seeds_of_their_own(client: openai.OpenAI, gateway: Running) -> None:
    gateway.script.seen.clear()
    answer = client.chat.completions.create(model="toy", messages=HI, n=3, max_tokens=4, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [request.sampling.seed for request in gateway.script.seen] == [7, 8, 9]
    assert len({request.id for request in gateway.script.seen}) == 3
    assert answer.usage is not None and answer.usage.completion_tokens == 12


def test_many_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt=["a ", "b "], n=2, max_tokens=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["a Gr", "a Gr", "b Gr", "b Gr"]


def test_best_of_answers_n(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="a", n=2, best_of=4, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage is not None and answer.usage.completion_tokens == 12


@pytest.mark.parametrize("stop", ["STOP", ["zzz", "STOP here"], [" STOP", "here"]])
def test_stop_strings_end_the_answer_without_them(client: openai.OpenAI, gateway: Running, stop: Any) -> None:
    answer: Any = client.chat.completions.create(model="toy", messages=HI, stop=stop)
    text = answer.choices[0].message.content or ""
    assert answer.choices[0].finish_reason == "stop"
    assert SCRIPT.startswith(text)
    assert "STOP" not in text
    assert len(gateway.script.open) == 0


def test_a_kept_stop_string_is_kept(client: openai.OpenAI) -> None:
    extra = {"include_stop_str_in_output": True}
    answer = client.chat.completions.create(model="toy", messages=HI, stop="two", extra_body=extra)
    assert (answer.choices[0].message.content or "").endswith("One two")


def test_chat_logprobs_spell_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=HI, logprobs=True, top_logprobs=2, max_tokens=30, stop="two"
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    spelled = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert spelled.decode().startswith(answer.choices[0].message.content or "")
    assert "two" not in spelled.decode()
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert all(top.logprob >= -9999.0 for entry in logprobs.content for top in entry.top_logprobs)


def test_scoring_a_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="hällo", echo=True, max_tokens=0, logprobs=1)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("hällo", "length")
    scores: Any = choice.logprobs
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    assert all(value is not None for value in scores.token_logprobs[1:])
    assert scores.text_offset[0] == 0
    assert scores.text_offset == sorted(scores.text_offset)
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_text_offsets_point_at_their_tokens(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        model="toy", prompt="hi ", echo=True, max_tokens=20, logprobs=0
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None and choice.logprobs.text_offset is not None
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)


def test_an_empty_prompt_begins_with_the_first_token(client: openai.OpenAI, gateway: Running) -> None:
    gateway.script.seen.clear()
    assert client.completions.create(model="toy", prompt="", max_tokens=1).choices[0].text == "G"
    assert list(gateway.script.seen[-1].prompt) == [0]


# ---- streams


def test_the_grammar_of_a_chat_stream(http: httpx.Client) -> None:
    sent = events(http, "/v1/chat/completions", messages=HI, stream_options={"include_usage": True})
    *chunks, usage = sent
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in sent}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], LENGTH)
    deltas = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1]]
    assert "".join(deltas) == SCRIPT
    assert len(deltas) > 20
    assert not any("\ufffd" in delta for delta in deltas)


def test_usage_is_absent_unless_asked_for(http: httpx.Client) -> None:
    assert all(
        "usage" not in chunk for chunk in events(http, "/v1/chat/completions", messages=HI, max_tokens=2)
    )


def test_choices_of_a_stream_each_begin_and_end_once(http: httpx.Client) -> None:
    chunks = events(http, "/v1/chat/completions", messages=HI, n=3, max_tokens=12)
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice for choice in own if "role" in choice["delta"]] == own[:1]
        assert [choice for choice in own if choice["finish_reason"]] == own[-1:]


def test_the_grammar_of_a_completion_stream(http: httpx.Client) -> None:
    chunks = events(http, "/v1/completions", prompt="say ", echo=True, max_tokens=11)
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "say " + SCRIPT[:8]


def test_padding_hides_the_length_of_chunks(http: httpx.Client) -> None:
    options = {"include_obfuscation": True}
    sent = events(http, "/v1/chat/completions", messages=HI, max_tokens=30, stream_options=options)
    chunks = [chunk for chunk in sent if "obfuscation" in chunk]
    padded = [(chunk["choices"][0]["delta"]["content"], chunk["obfuscation"]) for chunk in chunks]
    assert padded
    assert all((len(text.encode()) + len(padding)) % 16 == 0 for text, padding in padded)


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 9},
        {"stop": ["STOP", "five"]},
        {"stop": "two", "include_stop_str_in_output": True},
        {"logprobs": True, "top_logprobs": 3, "stop": "three f"},
        {"n": 2, "max_tokens": 40, "min_tokens": 30, "stop": "two"},
    ],
)
def test_a_stream_and_a_whole_answer_say_the_same(http: httpx.Client, body: dict[str, Any]) -> None:
    whole = http.post("/v1/chat/completions", json={"model": "toy", "messages": HI, **body}).json()
    chunks = events(http, "/v1/chat/completions", messages=HI, stream_options={"include_usage": True}, **body)
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["delta"].get("content", "") for part in own) == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        scores = [entry for part in own if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert scores == (choice["logprobs"]["content"] if choice["logprobs"] else [])


def test_a_large_whole_answer_comes_in_chunks(http: httpx.Client) -> None:
    asked = {"model": "toy", "messages": HI, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    small = http.post("/v1/chat/completions", json=asked | {"max_tokens": 5, "n": 1})
    assert "content-length" in small.headers
    large = http.post("/v1/chat/completions", json=asked | {"max_tokens": 100, "n": 8})
    assert large.headers["transfer-encoding"] == "chunked" and len(large.content) > 1 << 19
    for choice in large.json()["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == 100 and all(len(entry["top_logprobs"]) == 20 for entry in content)


def test_structured_output_is_checked_before_any_work(http: httpx.Client, gateway: Running) -> None:
    gateway.script.seen.clear()
    for schema in ({"type": "nonsense"}, {"pattern": "(((", "type": "string"}, {"$ref": "#/nowhere"}):
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = http.post(
            "/v1/chat/completions", json={"model": "toy", "messages": HI, "response_format": asked}
        )
        check_error(answer, 400, "invalid_schema", "response_format")
    assert not gateway.script.seen
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    answer = http.post(
        "/v1/chat/completions", json={"model": "toy", "messages": HI, "response_format": asked}
    )
    assert answer.status_code == 200
    grammar = gateway.script.seen[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema"


# ---- errors


def test_an_early_failure_is_an_http_error(client: openai.OpenAI, http: httpx.Client) -> None:
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "FAIL-EARLY"}], stream=stream
            )
        assert (caught.value.status_code, caught.value.code) == (503, "no_workers")


def test_a_late_failure_is_seen_in_the_stream(client: openai.OpenAI) -> None:
    seen = ""
    with pytest.raises(openai.APIError) as caught:
        for chunk in client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "FAIL-LATE"}], stream=True
        ):
            seen += chunk.choices[0].delta.content or ""
    assert caught.value.code == "worker_lost"
    assert seen and SCRIPT.startswith(seen)


def test_a_late_failure_of_a_whole_answer_is_an_http_error(http: httpx.Client) -> None:
    check_error(
        http.post("/v1/completions", json={"model": "toy", "prompt": "FAIL-LATE"}), 503, "worker_lost"
    )


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"messages": HI}, "missing_required_parameter", "model"),
        ({"model": "toy"}, "missing_required_parameter", "messages"),
        ({"model": "toy", "messages": HI, "temperature": 9}, "invalid_value", "temperature"),
        ({"model": "toy", "messages": HI, "cache_salt": ""}, "invalid_value", "cache_salt"),
        (
            {"model": "toy", "messages": HI, "repetition_penalty": 1e-50},
            "invalid_value",
            "repetition_penalty",
        ),
        ({"model": "toy", "messages": HI, "priority": 99}, "invalid_value", "priority"),
        ({"model": "toy", "messages": HI, "tools": [TOOL]}, "unsupported_parameter", "tools"),
        ({"model": "toy", "messages": HI, "frobnicate": 1}, "unrecognized_request_argument", "frobnicate"),
        ({"model": "toy", "messages": HI, "max_tokens": CONTEXT}, "context_length_exceeded", "max_tokens"),
        ({"model": "toy", "messages": HI * 500}, "context_length_exceeded", "messages"),
        ({"model": "toy", "messages": [{"role": "function", "content": "x"}]}, "invalid_value", "messages"),
    ],
)
def test_bad_requests_are_400_and_named(
    http: httpx.Client, body: dict[str, Any], code: str, param: str
) -> None:
    check_error(http.post("/v1/chat/completions", json=body), 400, code, param)


def test_a_wrong_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=HI)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nowhere", 404, "unknown_url"),
        ("GET", "/index.html", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/toy", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_methods_answer_in_json(
    http: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    answer = http.request(method, path)
    check_error(answer, status, code)
    assert (status == 405) == ("allow" in answer.headers)


def test_other_content_types_are_refused(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/completions", content=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"}
    )
    check_error(answer, 415, "unsupported_media_type", "content-type")


def test_a_crash_of_ours_tells_nothing_but_the_request_id(
    http: httpx.Client, gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("secret of the inside")

    monkeypatch.setattr(gateway.script, "submit_requests", crash)
    answer = http.post("/v1/completions", json={"model": "toy", "prompt": "x"})
    check_error(answer, 500, "internal_error")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in answer.text


# ---- the other routes


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy", "org/toy"]
    model = client.models.retrieve("org/toy")
    assert (model.id, model.object, getattr(model, "max_model_len", None)) == ("org/toy", "model", CONTEXT)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/nothing")


def test_tokenize_and_back(http: httpx.Client) -> None:
    body = http.post(
        "/tokenize", json={"model": "toy", "prompt": "größer 👩", "return_token_strs": True}
    ).json()
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), CONTEXT)
    assert len(body["token_strs"]) == body["count"]
    assert http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "größer 👩"}
    chat = http.post("/tokenize", json={"messages": HI}).json()
    assert chat["tokens"][0] == 1
    check_error(http.post("/tokenize", json={}), 400, "invalid_value", "prompt")
    check_error(http.post("/detokenize", json={"tokens": [99999]}), 400, "invalid_value", "tokens")


def test_a_developer_message_changes_the_prompt_of_a_template_without_that_role(tmp_path: Path) -> None:
    template = make_folder(tmp_path) / "chat_template.jinja"
    template.write_text(CHATML)
    developer = {"role": "developer", "content": "Be kind."}
    with (
        scripted(tmp_path) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        prompts = []
        for messages in (HI, [developer, *HI], [developer | {"role": "system"}, *HI]):
            answer = http.post("/v1/chat/completions", json={"model": "toy", "messages": messages})
            assert answer.status_code == 200, answer.text
            prompts.append(running.script.seen[-1].prompt)
        assert prompts[0] != prompts[1] == prompts[2]
        dropped = [*HI, {"role": "function", "content": "found", "name": "f"}]
        answer = http.post("/v1/chat/completions", json={"model": "toy", "messages": dropped})
        check_error(answer, 400, "invalid_value", "messages[1]")
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 900 + "]" * 900}}
        nested = [*HI, {"role": "assistant", "tool_calls": [call]}]
        answer = http.post("/v1/chat/completions", json={"model": "toy", "messages": nested})
        # Too deep to be written out or, where the stack has room for it, too long.
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_probes_and_pages(http: httpx.Client) -> None:
    health = http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert http.head("/health").status_code == 200
    assert http.get("/ready").json() == {"ready": True, "reasons": []}
    assert "version" in http.get("/version").json()
    # Of requests there are figures as soon as there was one.
    asked = http.post("/v1/chat/completions", json={"model": "toy", "messages": HI, "max_tokens": 2})
    assert asked.status_code == 200
    assert "vllm:time_to_first_token_seconds_bucket" in http.get("/metrics").text
    assert "src=" not in http.get("/docs").text
    assert http.get("/openapi.json").json()["openapi"].startswith("3.1")


def test_the_page_is_there_without_a_key_and_has_no_data(folder: Path) -> None:
    with (
        scripted(folder, keys=("sk-right",)) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        page = http.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert (
            page.headers["cache-control"] == "no-cache"
            and "'none'" in page.headers["content-security-policy"]
        )
        assert 'data-needs-key="true"' in page.text
        for secret in ("sk-right", "toy"):
            assert secret not in page.text
        with_key = http.get("/", headers={"authorization": "Bearer sk-right"})
        assert (with_key.content, with_key.headers["etag"]) == (page.content, page.headers["etag"])
        head = http.head("/")
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", page.headers["etag"])
        again = http.get("/", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", page.headers["etag"])


def test_the_page_of_a_loopback_gateway_answers_to_its_own_names_only(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200 and 'data-needs-key="false"' in page.text
    check_error(http.get("/", headers={"host": "elsewhere.example"}), 403, "host_not_allowed")
    check_error(http.post("/", json={}), 405, "method_not_allowed")


def test_request_ids_are_ours(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["x-client-request-id"] == "mine-1"
    odd = http.get("/v1/models", headers={"x-request-id": "a b\tc"})
    assert "x-client-request-id" not in odd.headers


def test_pages_of_this_machine_may_speak_to_it(http: httpx.Client) -> None:
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    good = http.options("/v1/chat/completions", headers={"origin": "http://localhost:3000", **asked})
    assert good.headers["access-control-allow-origin"] == "http://localhost:3000"
    bad = http.options("/v1/chat/completions", headers={"origin": "https://evil.example", **asked})
    assert "access-control-allow-origin" not in bad.headers


def test_a_better_priority_is_for_keys_that_may(folder: Path) -> None:
    routes: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
    }
    with (
        scripted(folder, keys=("sk-usual", "sk-urgent"), urgent=("sk-urgent",)) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        for path, fields in routes.items():
            for key, priority, status in (
                ("sk-usual", -1, 403),
                ("sk-usual", 0, 200),
                ("sk-usual", 10, 200),
                ("sk-usual", None, 200),
                ("sk-urgent", -10, 200),
            ):
                body: dict[str, object] = {"model": "toy", "max_tokens": 2, "priority": priority, **fields}
                answer = http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == status, (path, key, priority)
                if status == 403:
                    error = answer.json()["error"]
                    assert (error["code"], error["param"]) == ("priority_not_allowed", "priority")
                    assert "--priority-keys" in error["message"]
        assert [request.tenancy.priority for request in running.script.seen] == 2 * [0, 10, 0, -10]
    with (
        scripted(folder) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):  # without keys there are no strangers
        body = {"model": "toy", "max_tokens": 2, "priority": -10, "prompt": "x"}
        assert http.post("/v1/completions", json=body).status_code == 200


def test_keys_close_everything_but_the_probes(folder: Path) -> None:
    with (
        scripted(folder, keys=("sk-right",)) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        for path in ("/v1/models", "/metrics", "/status", "/docs", "/nowhere"):
            answer = http.get(path)
            check_error(answer, 401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert http.get(path, headers={"authorization": "Bearer sk-wrong"}).status_code == 401
        assert http.get("/v1/models", headers={"authorization": "Bearer sk-right"}).status_code == 200
        assert http.get("/health").status_code == 200
        with (
            openai.OpenAI(base_url=running.api, api_key="sk-wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError) as caught,
        ):
            client.models.list()
        assert caught.value.code == "invalid_api_key"
