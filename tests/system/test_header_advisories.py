"""Published faults of other servers in keys and headers, each played against this one over a real socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.gateway.http.connection import MAX_HEAD_BYTES, MAX_HEADERS
from tests.system.scripted_gateway import Running, scripted

KEY, OTHER = "sk-" + "a" * 40, "sk-" + "b" * 40
BODY = json.dumps({"model": "toy", "prompt": "SLOW", "max_tokens": 40, "stream": True}).encode()


@pytest.fixture(scope="module")
def keyed(folder: Path) -> Iterator[Running]:
    with scripted(folder, keys=(KEY, OTHER)) as running:
        yield running


def send(running: Running, raw: bytes) -> bytes:
    """The answer to bytes that a client sends, until the server closes."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as one:
        one.sendall(raw)
        found = b""
        while part := one.recv(65536):
            found += part
    return found


def status(running: Running, target: str, *headers: str, method: str = "GET") -> int:
    """The status of a request with exactly these headers."""
    lines = [f"{method} {target} HTTP/1.1", *headers, "connection: close", "", ""]
    answer = send(running, "\r\n".join(lines).encode("latin-1"))
    return int(answer.split(b" ", 2)[1])


def bearer(key: str) -> str:
    return f"authorization: Bearer {key}"


@pytest.mark.parametrize(
    "host", ["a/health?x=", "localhost/health#", "health", "x/v1/models/../health?", "a:80/ping?"]
)
def test_cve_2026_48710_the_host_header_is_no_part_of_the_path(keyed: Running, host: str) -> None:
    """Starlette put URLs together from the Host header, so that a check of the path saw another one than the router."""
    for target in ("/v1/models", "/metrics", "/status", "/openapi.json"):
        assert status(keyed, target, f"host: {host}") == 401
    assert status(keyed, "/v1/models", f"host: {host}", bearer(KEY)) == 200


@pytest.mark.parametrize(
    "target",
    ["/v1/models?/health", "/v1/models/?x=/health", "//v1/models", "/v1//models", "/v1/models/", "/v1/%6dodels",
     "/%76%31/models", "/V1/MODELS", "/health/../v1/models", "/v1/models;/health", "/v1/models%2f", "/invocations",
     "/tokenize", "/metrics", "/llm/v1/models", "http://health/v1/models"],
)  # fmt: skip
def test_cve_2026_48746_no_spelling_of_a_path_needs_no_key(keyed: Running, target: str) -> None:
    """vLLM guarded some prefixes of paths alone: other spellings, and other routes, were open."""
    for method in ("GET", "POST", "HEAD", "PUT", "DELETE"):
        assert status(keyed, target, "host: localhost", "content-length: 0", method=method) in (400, 401), (
            method
        )


def test_cve_2026_49468_forwarded_headers_open_nothing(keyed: Running) -> None:
    """A proxy's headers were believed, whoever sent them."""
    for header in (
        "x-forwarded-for: 127.0.0.1", "x-forwarded-host: localhost", "x-original-url: /health",
        "x-rewrite-url: /health",
        "x-forwarded-prefix: /health", "forwarded: for=127.0.0.1;host=localhost", "x-http-method-override: OPTIONS",
    ):  # fmt: skip
        assert status(keyed, "/v1/models", "host: localhost", header) == 401


def test_cve_2025_48956_a_giant_header_is_refused_before_it_is_kept(keyed: Running) -> None:
    """A header of many megabytes was kept whole, before any key was looked at."""
    for headers in (("x: " + "y" * (MAX_HEAD_BYTES + 1),), tuple(f"x{i}: y" for i in range(MAX_HEADERS + 1))):
        assert status(keyed, "/v1/models", "host: localhost", *headers) == 431
    assert status(keyed, "/v1/models", "host: localhost", bearer(KEY + "a" * 30_000)) == 401
    assert status(keyed, "/v1/models", "host: localhost", "x-api-key: " + "a" * 30_000) == 401


def test_cve_2026_112266_a_clients_request_id_names_nobodys_request(keyed: Running) -> None:
    """An id of one character, and a client that left, ended all requests whose ids began with it."""
    host, _, port = keyed.url.removeprefix("http://").partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{bearer(KEY)}\r\ncontent-type: application/json\r\n"
    kept = socket.create_connection((host, int(port)), timeout=60)
    kept.sendall(f"{head}connection: close\r\ncontent-length: {len(BODY)}\r\n\r\n".encode() + BODY)
    kept.recv(1)
    for name in ("r", "c", "0", "a", "f", "cmpl", "chatcmpl-"):
        leaving = socket.create_connection((host, int(port)), timeout=60)
        request = head.replace(KEY, OTHER) + f"x-request-id: {name}\r\ncontent-length: {len(BODY)}\r\n\r\n"
        leaving.sendall(request.encode() + BODY)
        leaving.recv(1)
        leaving.close()
    found = b""
    while part := kept.recv(65536):
        found += part
    kept.close()
    assert found.rstrip().endswith(b"data: [DONE]\n\n\r\n0") and b'"error"' not in found


def test_cve_2026_116176_no_header_names_an_address(keyed: Running) -> None:
    """X-Request-Id held the address of a decode worker, so a client could have its KV sent anywhere."""
    before = len(keyed.script.seen)
    content = json.dumps({"model": "toy", "prompt": "hi", "max_tokens": 1}).encode()
    name = "___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_abc"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{bearer(KEY)}\r\ncontent-type: application/json\r\n"
    raw = (
        f"{head}x-request-id: {name}\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    )
    assert b"HTTP/1.1 200" in send(keyed, raw + content)
    [request] = keyed.script.seen[before:]
    assert "10.0.0" not in request.id


@pytest.mark.parametrize(
    "framing",
    [
        b"transfer-encoding: chunked\r\n\r\n5\r\nhello!!0\r\n\r\n",  # no line end behind a chunk
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"content-length: +5\r\n\r\nhello",
        b"transfer-encoding: chunked, identity\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
)
def test_cve_2025_43859_bodies_with_two_ends_are_refused(keyed: Running, framing: bytes) -> None:
    """h11 took what is no chunk for one, so two servers saw two requests in the same bytes."""
    answer = send(keyed, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + framing)
    statuses = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses and set(statuses) <= {400, 401} and len(statuses) == 1


def test_cve_2025_62593_a_page_of_another_site_reaches_nothing_without_keys(gateway: Running) -> None:
    """DNS rebinding: a page's name becomes 127.0.0.1, and a browser sends its requests there."""
    for headers in (("host: evil.example",), ("host: localhost", "origin: https://evil.example")):
        assert status(gateway, "/v1/models", *headers) == 403
    assert status(gateway, "/v1/models", "host: localhost") == 200
