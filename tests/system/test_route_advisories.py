"""Published faults of other servers that concern what newer routes take, or routes that must not be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.preparation.preparation_job import GrammarFinding
from services.gateway.preparation.preparer import MAX_FINDINGS, GrammarFindings
from tests.system.api_answers import HI

# One pixel.
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8="
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/embeddings": {"input": "hi"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "hi"},
}
IMAGES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]},
    RESPONSES: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}]},
    MESSAGES: {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "data": "AA", "media_type": "image/png"}}
                ],
            }
        ]
    },
}


def send(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    return http.post(path, json={"model": "toy", **BODIES[path], **fields})


def check_refused(answer: httpx.Response, param: str) -> str:
    """A 400 that names the field; returns its message."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param), error
    return str(error["message"])


@pytest.mark.parametrize("path", IMAGES)
def test_cve_2026_22773_an_image_of_one_pixel(http: httpx.Client, path: str) -> None:
    """An image of one pixel ended the engine."""
    check_refused(send(http, path, **IMAGES[path]), "input" if path == RESPONSES else "messages")
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("path", IMAGES)
def test_cve_2026_54236_no_route_s_error_shows_the_process(http: httpx.Client, path: str) -> None:
    """Errors of one route had been cleared of addresses in memory, those of others not."""
    message = check_refused(send(http, path, **IMAGES[path]), "input" if path == RESPONSES else "messages")
    assert "0x" not in message and "object at" not in message and "base64" not in message
    broken = http.post(path, content=b'{"model": \xff}', headers={"content-type": "application/json"})
    assert broken.status_code == 400 and "0x" not in broken.text and "Traceback" not in broken.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["tp_size", "remote_tp_size", "pp_size", "dp_rank"])
def test_cve_2026_94626_sizes_of_pools_in_requests(http: httpx.Client, path: str, field: str) -> None:
    """How many ranks the other pool has was read from requests, and divided by."""
    check_refused(send(http, path, **{field: 0}), field)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["mm_features", "multi_modal_data", "multi_modal_uuids", "features"])
def test_cve_2026_105754_features_of_clients(http: httpx.Client, path: str, field: str) -> None:
    """Features of images came from clients, and their sizes ended the engine."""
    check_refused(send(http, path, **{field: [{"grid": [1, 2**31, 2**31]}]}), field)


@pytest.mark.parametrize("method", ["PUT", "POST", "PATCH", "DELETE"])
@pytest.mark.parametrize(
    "path", ["/route", "/register", "/v1/route", "/pd_register", "/bootstrap", "/workers"]
)
def test_cve_2026_92972_nobody_registers_over_http(http: httpx.Client, path: str, method: str) -> None:
    """A PUT without a key told decode workers to fetch KV from elsewhere."""
    answer = http.request(method, path, json={"role": "prefill", "rank_ip": "10.0.0.1", "rank_port": 1})
    assert answer.status_code == 404


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["custom_logit_processor", "logits_processors", "custom_params"])
def test_cve_2026_7304_no_code_of_clients(http: httpx.Client, path: str, field: str) -> None:
    """A logit processor came as a dill, which is a program."""
    check_refused(send(http, path, **{field: "gASVCg=="}), field)


@pytest.mark.parametrize("path", ["/", "/pd_register", "/kv_move_status", RESPONSES, "/v1/realtime"])
def test_cve_2026_26220_no_web_sockets(http: httpx.Client, path: str) -> None:
    """Workers were taken on a WebSocket by whoever sent them, and what they said was unpickled."""
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    answer = http.get(path, headers=upgrade)
    assert answer.status_code != 101 and "sec-websocket-accept" not in answer.headers


@pytest.mark.parametrize("path", BODIES)
def test_cve_2026_65119_a_model_s_name_loads_nothing(http: httpx.Client, path: str, tmp_path: Path) -> None:
    """A router loaded the tokenizer of whatever model it was told of."""
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "evil.Config"}}', encoding="utf-8")
    for name in (str(tmp_path), "../models/tiny", "evil/model", "https://evil.example/model", "toy@main"):
        answer = http.post(path, json={**BODIES[path], "model": name})
        assert answer.status_code == 404, answer.text
        assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}, {"prompt": []}])
def test_pysec_2026_2303_embeddings_instead_of_a_prompt(http: httpx.Client, prompt: dict[str, Any]) -> None:
    """A request with embeddings and no prompt ended the engine at an assertion."""
    answer = http.post("/v1/completions", json={"model": "toy", "prompt_embeds": "AAAA", **prompt})
    check_refused(answer, "prompt")


def test_cve_2025_32381_findings_about_grammars_are_kept_up_to_a_bound() -> None:
    """Every grammar that was ever compiled stayed in memory."""
    findings, names = GrammarFindings(), [str(i).encode() for i in range(MAX_FINDINGS + 3)]
    for name in names:
        findings.store_finding(name, GrammarFinding("as the test says"))
    assert [findings.get_finding(name) is None for name in names[:4]] == [True, True, True, False]


def test_a_pickle_is_no_body(http: httpx.Client, tmp_path: Path) -> None:
    """Unpickled it would make a file, whatever type it says it is of."""
    made = tmp_path / "made"
    body = f"cbuiltins\nopen\n(S'{made}'\nS'w'\ntR.".encode()
    for path in BODIES:
        for kind in (
            "application/json",
            "application/octet-stream",
            "application/python-pickle",
            "text/plain",
        ):
            answer = http.post(path, content=body, headers={"content-type": kind})
            assert answer.status_code in (400, 415), answer.text
    assert not made.exists()
