"""Published faults of other servers in bodies, each played against this one: refused by name, and it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deployment import wait_for
from tests.support.model_folder import make_folder
from tests.system.api_answers import HI
from tests.system.scripted_gateway import Running
from tests.unit.gateway.thinking_model import MARKERS, THINKING_TEMPLATE

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETION: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
}
SERVED = (CHAT, COMPLETION)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("thinking"), 1024, MARKERS, THINKING_TEMPLATE)


@pytest.fixture(autouse=True)
def goes_on(gateway: Running, http: httpx.Client) -> Iterator[None]:
    """Whatever a test has sent, the next request is answered, and nothing is left open."""
    yield
    assert send(http, COMPLETION, max_tokens=2).status_code == 200
    wait_for(lambda: not gateway.script.open and not gateway.service.open)


def send(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    return http.post(path, json={"model": "toy", **BODIES[path], **fields})


def check_refused(answer: httpx.Response, param: str) -> str:
    """A 400 that names the field; returns its message."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] is not None and error["param"].startswith(param), error
    assert len(error["message"]) <= 500
    return str(error["message"])


@pytest.mark.parametrize("path", SERVED)
def test_cve_2026_34756_many_sequences_of_one_request(http: httpx.Client, path: str) -> None:
    """Any `n` was accepted, and its sequences made before anything counted them."""
    for n in (9, 128, 129, 10**9, 2**70):
        check_refused(send(http, path, n=n), "n")
    if path == COMPLETION:
        check_refused(send(http, path, best_of=10**6), "best_of")
        check_refused(send(http, path, prompt=["a"] * 32, n=8), "n")


@pytest.mark.parametrize("path", SERVED)
def test_cve_2026_114051_more_tokens_at_least_than_at_most(http: httpx.Client, path: str) -> None:
    """`min_tokens` above `max_tokens` ended the engine, while health stayed 200."""
    check_refused(send(http, path, min_tokens=9, max_tokens=8), "min_tokens")
    check_refused(send(http, path, min_tokens=2**31 - 1), "min_tokens")
    assert http.get("/health").status_code == 200 and http.get("/ready").status_code == 200


@pytest.mark.parametrize("path", SERVED)
def test_cve_2026_116173_more_alternatives_than_the_sampler_has_room_for(
    http: httpx.Client, path: str
) -> None:
    """Above 128 ids of log-probabilities the engine ended."""
    for count in (21, 129, 10**6):
        check_refused(send(http, path, prompt_logprobs=count), "prompt_logprobs")
        name = "top_logprobs" if path == CHAT else "logprobs"
        check_refused(
            send(http, path, **{"logprobs": True, name: count} if path == CHAT else {name: count}), name
        )
    check_refused(send(http, path, allowed_token_ids=[1] * 5000), "allowed_token_ids")


@pytest.mark.parametrize("path", SERVED)
def test_cve_2026_105922_token_ids_that_are_counted_outside_the_vocabulary(
    http: httpx.Client, path: str
) -> None:
    """Penalties counted the prompt's ids in an array that was as long as the vocabulary."""
    huge = 2**31 - 1
    check_refused(send(http, path, logit_bias={str(huge): 1.0}), "logit_bias")
    check_refused(send(http, path, stop_token_ids=[huge]), "stop_token_ids")
    check_refused(send(http, path, allowed_token_ids=[huge]), "allowed_token_ids")
    check_refused(
        send(http, COMPLETION, prompt=[huge], repetition_penalty=1.5, frequency_penalty=2), "prompt"
    )
    check_refused(send(http, COMPLETION, prompt=[[1], [-1]], repetition_penalty=1.5), "prompt")


def test_cve_2026_94623_several_prompts_in_one_request(http: httpx.Client) -> None:
    """A second prompt ended the decode worker."""
    answer = send(http, COMPLETION, prompt=["a ", "b ", "c "], max_tokens=2, echo=True)
    assert [choice["text"][0] for choice in answer.json()["choices"]] == ["a", "b", "c"]
    check_refused(send(http, COMPLETION, prompt=["a"] * 33), "prompt")


def test_cve_2026_94627_prompts_have_names_of_their_own(http: httpx.Client, gateway: Running) -> None:
    """One id for the transfers of all prompts of a request left KV behind."""
    gateway.script.seen.clear()
    send(http, COMPLETION, prompt=["a", "b"], n=2, max_tokens=1)
    assert len({request.id for request in gateway.script.seen}) == 4


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "field",
    [
        "kv_transfer_params",
        "ec_transfer_params",
        "request_id",
        "vllm_xargs",
        "bootstrap_host",
        "bootstrap_room",
    ],
)
def test_cve_2026_94622_what_clients_say_of_transfers(http: httpx.Client, path: str, field: str) -> None:
    """Keys of `kv_transfer_params` decided from where, and whose, KV was read."""
    check_refused(send(http, path, **{field: {"remote_host": "127.0.0.1", "remote_block_ids": [0]}}), field)


@pytest.mark.parametrize(
    "schema",
    [{"type": "no type"}, {"type": "string", "pattern": "["}, {"pattern": "(?=a)b", "type": "string"}],
)
def test_cve_2025_48944_tools_with_patterns_and_types_that_are_none(
    http: httpx.Client, schema: dict[str, Any]
) -> None:
    """A worker ended when it compiled them."""
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    answer = send(http, CHAT, tools=[tool], tool_choice="required")
    check_refused(answer, "tools")


@pytest.mark.parametrize("kind", ["regex", "grammar", "json"])
def test_cve_2026_25048_brackets_in_brackets(http: httpx.Client, kind: str) -> None:
    """30,000 of them ended the process by a stack overflow in native code."""
    nested = "(" * 30_000 + "a" + ")" * 30_000
    text = {"regex": nested, "grammar": f"start: {nested}", "json": json.dumps({"pattern": nested})}[kind]
    check_refused(send(http, COMPLETION, structured_outputs={kind: text}), "structured_outputs")
    short = {
        "regex": "(" * 40 + "a" + ")" * 40,
        "grammar": "start: " + "(" * 40 + '"a"' + ")" * 40,
        "json": "[" * 99,
    }
    check_refused(send(http, COMPLETION, structured_outputs={kind: short[kind]}), "structured_outputs")


def test_cve_2025_58446_an_enumeration_without_end(http: httpx.Client) -> None:
    """Its compilation took minutes."""
    many = [f"value number {i}" for i in range(100_000)]
    schema = {"type": "string", "enum": many}
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    check_refused(send(http, CHAT, response_format=wanted), "response_format")
    check_refused(send(http, CHAT, structured_outputs={"choice": many}), "structured_outputs")
    check_refused(send(http, CHAT, structured_outputs={"json": schema}), "structured_outputs")


def test_cve_2026_105757_a_grammar_fails_for_its_own_request(http: httpx.Client) -> None:
    """The error of one request's grammar was one of the engine."""
    for asked in (
        {"grammar": "start: missing_rule"},
        {"regex": "a{99999}{99999}"},
        {"grammar": "?"},
        {"json": "{"},
    ):
        check_refused(send(http, COMPLETION, structured_outputs=asked), "structured_outputs")


def test_cve_2025_29770_grammars_leave_no_files(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each grammar was kept on the disk for ever."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for i in range(20):
        schema = {"type": "object", "properties": {f"field {i}": {"type": "integer"}}}
        assert send(http, COMPLETION, structured_outputs={"json": schema}, max_tokens=1).status_code == 200
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_cve_2026_115918_templates_of_clients_on_every_route(http: httpx.Client, path: str) -> None:
    """One route refused `chat_template`, the other one rendered it."""
    check_refused(send(http, path, chat_template="{% for i in range(10**9) %}x{% endfor %}"), "chat_template")


def test_cve_2026_115911_a_template_that_runs_for_ever(http: httpx.Client) -> None:
    """One rendering held the only worker."""
    loop = "{% for i in range(10**9) %}{% endfor %}"
    asked: list[dict[str, Any]] = [{"chat_template": loop}, {"template": loop}, {"messages": []}]
    for options in asked:
        check_refused(send(http, CHAT, chat_template_kwargs=options), "chat_template_kwargs")


@pytest.mark.parametrize(
    "option", ["chat_template", "tokenize", "return_dict", "tools", "documents", "add_generation_prompt"]
)
def test_cve_2025_62426_options_that_are_no_variables_of_the_template(
    http: httpx.Client, option: str
) -> None:
    """`chat_template_kwargs` replaced arguments of the function that renders."""
    check_refused(send(http, CHAT, chat_template_kwargs={option: True}), "chat_template_kwargs")


@pytest.mark.parametrize("path", SERVED)
def test_cve_2026_105756_salts_of_any_characters(http: httpx.Client, path: str) -> None:
    """A salt ended the engine when it was hashed."""
    for salt in ("\x00", "é" * 256, "\U0010ffff", " ", "../../x", "%s%n"):
        assert send(http, path, cache_salt=salt, max_tokens=1).status_code == 200
    wrong: list[Any] = ["", "x" * 257, 5, ["a"]]
    for value in wrong:
        check_refused(send(http, path, cache_salt=value, max_tokens=1), "cache_salt")
    raw = json.dumps({"model": "toy", **BODIES[path]})[:-1] + ', "cache_salt": "\\ud800"}'
    lone = http.post(path, content=raw.encode(), headers={"content-type": "application/json"})
    assert lone.status_code == 400


def test_cve_2025_46570_prefixes_are_shared_within_a_salt(http: httpx.Client) -> None:
    """How long the first token took said whether somebody else had sent the same prompt."""

    def cached(salt: str) -> int:
        answer = send(http, COMPLETION, prompt=[9] * 200, cache_salt=salt, max_tokens=1)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("one tenant") == 0 and cached("one tenant") > 0 and cached("another one") == 0


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs", "tokenizer_kwargs"])
def test_cve_2026_114053_arguments_for_loading(http: httpx.Client, path: str, field: str) -> None:
    """Keywords of a request reached the function that loads code of a model."""
    check_refused(send(http, path, **{field: {"trust_remote_code": True, "code_revision": "x"}}), field)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("gASVCg==", id="CVE-2025-62164"),
        pytest.param(["UEsDBAoAAAAA"], id="CVE-2026-56340"),
        pytest.param({"indices": [[0], [-1]], "values": [1.0]}, id="CVE-2026-73557"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_cve_2025_62164_embeddings_for_prompts(http: httpx.Client, path: str, value: Any) -> None:
    """A tensor of the client was unpickled, and then, sparse, written out of bounds; three rounds of it."""
    check_refused(send(http, path, prompt_embeds=value), "prompt_embeds")


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest/", "http://127.0.0.1:1/x", "file:///etc/passwd"]
)
def test_cve_2025_6242_addresses_in_messages_are_not_fetched(http: httpx.Client, url: str) -> None:
    """Images were fetched from wherever a message said."""
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "file", "file": {"file_data": url}},
    ):
        message = check_refused(
            send(http, CHAT, messages=[{"role": "user", "content": [part]}]), "messages[0]"
        )
        assert url not in message


def test_cve_2026_22778_errors_show_nothing_of_the_process(http: httpx.Client) -> None:
    """The text of an error of the image library had an address in memory."""
    part = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}}
    message = check_refused(send(http, CHAT, messages=[{"role": "user", "content": [part]}]), "messages[0]")
    assert "0x" not in message and "object at" not in message


def test_an_empty_prompt_is_answered(http: httpx.Client) -> None:
    """vLLM 0.5.4 ended with it."""
    for prompt in ("", [""], None):
        assert send(http, COMPLETION, prompt=prompt, max_tokens=2).status_code == 200
    check_refused(send(http, COMPLETION, prompt=[[]]), "prompt")


def test_cve_2025_62727_ranges_of_a_file(http: httpx.Client) -> None:
    """Many ranges in a header took quadratic time to merge."""
    ranges = "bytes=" + ",".join(f"{i}-" for i in range(2000))
    answer = http.get("/", headers={"range": ranges})
    assert answer.status_code == 200 and "content-range" not in answer.headers
