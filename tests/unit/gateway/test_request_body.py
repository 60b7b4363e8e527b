"""Bodies are read after everything that can refuse a request, and their sum is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp, Message, Scope

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.api_routes import ApiRoutes
from services.gateway.app import build_app
from services.gateway.http.access_keys import AccessKeys, BearerKeys
from services.gateway.http.request_body import BodyMemory, RequestBody
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.request_limits import MAX_HELD_BODIES, RequestLimits
from services.gateway.openai.validate import RequestRules
from services.gateway.preparation.preparer_pool import PreparerPool
from services.gateway.service import GatewayService
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.healthy_probes import HealthyProbes
from tests.system.scripted_gateway import Script

KEY = "sk-" + "k" * 40
FULL = RequestFailure(FailureReason.TOO_MANY_REQUESTS, "full")
JSON_TYPE = (b"content-type", b"application/json")


class Client:
    """Speaks ASGI with an application, and counts how often a body is asked for."""

    def __init__(self, app: ASGIApp, body: bytes = b"{}") -> None:
        self.app, self.body = app, body
        self.reads = 0

    async def post(self, path: str, *headers: tuple[bytes, bytes], method: str = "POST") -> tuple[int, Any]:
        """The status and the decoded body of the answer."""
        sent: list[Message] = []

        async def receive() -> Message:
            self.reads += 1
            if self.reads > 1:
                await asyncio.Event().wait()  # the client stays
            return {"type": "http.request", "body": self.body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        given = [(b"host", b"localhost"), (b"content-length", b"%d" % len(self.body)), *headers]
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": given,
            "server": ("localhost", 80),
            "scheme": "http",
        }
        await self.app(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], msgspec.json.decode(body) if body else None


@pytest.fixture
async def service(tokens: GatewayTokenizer, rules: RequestRules) -> AsyncIterator[GatewayService]:
    made = GatewayService(rules, Script(tokens), GatewayMetrics(), PreparerPool(rules), lambda: "fp")
    made.preparers.open()
    yield made
    made.close()


def client(service: GatewayService, keys: Sequence[str] = (), body: bytes = b"{}") -> Client:
    return Client(
        build_app(ApiRoutes(service, HealthyProbes(), "0", 0), AccessKeys(BearerKeys(keys)), "127.0.0.1"),
        body,
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_full_or_draining_service_refuses_without_reading(
    service: GatewayService, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = client(service)
    monkeypatch.setattr(service.backend, "refuses", FULL)
    assert (await one.post(path, JSON_TYPE))[0] == 429
    service.draining = True
    assert (await one.post(path, JSON_TYPE))[0] == 503
    assert one.reads == 0


async def test_other_refusals_come_before_the_body_too(service: GatewayService) -> None:
    keyed, open_to_all = client(service, (KEY,)), client(service)
    assert (await keyed.post("/v1/completions", JSON_TYPE))[0] == 401
    assert (await open_to_all.post("/nowhere", JSON_TYPE))[0] == 404
    assert (await open_to_all.post("/v1/models", JSON_TYPE))[0] == 405
    assert (await open_to_all.post("/tokenize", (b"content-type", b"text/plain")))[0] == 415
    assert (await open_to_all.post("/tokenize", JSON_TYPE, (b"host", b"evil.example")))[0] == 403
    assert keyed.reads == open_to_all.reads == 0


@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"http://localhost.evil.example"])
async def test_without_a_key_pages_of_other_sites_are_refused(service: GatewayService, origin: bytes) -> None:
    body = b'{"model": "toy", "prompt": "x"}'
    one = client(service, body=body)
    status, reply = await one.post("/tokenize", JSON_TYPE, (b"origin", origin))
    assert (status, reply["error"]["code"]) == (403, "origin_not_allowed") and one.reads == 0
    bearer = (b"authorization", f"Bearer {KEY}".encode())
    assert (await client(service, (KEY,), body).post("/tokenize", JSON_TYPE, bearer, (b"origin", origin)))[
        0
    ] == 200


@pytest.mark.parametrize(
    "origin", [b"http://localhost:3000", b"https://127.0.0.1", b"http://[::1]:1", b"http://localhost"]
)
async def test_without_a_key_pages_of_this_machine_are_served(service: GatewayService, origin: bytes) -> None:
    one = client(service, body=b'{"model": "toy", "prompt": "x"}')
    assert (await one.post("/tokenize", JSON_TYPE, (b"origin", origin)))[0] == 200


async def test_a_missing_content_type_is_json_only_behind_a_key(service: GatewayService) -> None:
    body = b'{"model": "toy", "prompt": "x"}'
    one = client(service, body=body)
    status, reply = await one.post("/tokenize")
    assert (status, reply["error"]["code"]) == (415, "unsupported_media_type") and one.reads == 0
    bearer = (b"authorization", f"Bearer {KEY}".encode())
    assert (await client(service, (KEY,), body).post("/tokenize", bearer))[0] == 200


# ---- one body


def request_body(
    parts: Sequence[bytes], memory: BodyMemory, max_bytes: int = 100, tenant: str = "", body_s: float = 60.0
) -> RequestBody:
    """A body that arrives in these parts and then, if the last one is empty, not further."""
    waiting = list(parts)

    async def receive() -> Message:
        if waiting == [b""]:
            await asyncio.Event().wait()
        part = waiting.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    scope: Scope = {"type": "http", "headers": [], "state": {"tenant": tenant}}
    return RequestBody(scope, receive, memory, max_bytes, body_s)


async def test_a_body_is_held_until_it_is_left() -> None:
    memory = BodyMemory(200)
    async with request_body([b"one ", b"two"], memory) as body:
        assert body == b"one two" and memory.held_bytes == 7
    assert memory.held_bytes == 0


@pytest.mark.parametrize(("parts", "status"), [([b"x" * 60, b"x" * 60], 413), ([b"x" * 60, b""], 408)])
async def test_a_body_that_fails_is_not_held(parts: list[bytes], status: int) -> None:
    memory = BodyMemory(200)
    with pytest.raises(RequestError) as refused:
        async with request_body(parts, memory, body_s=0.05):
            raise AssertionError("read")
    assert refused.value.failure.status == status and memory.held_bytes == 0


@pytest.mark.parametrize("announced", [True, False])
async def test_a_route_bounds_its_own_bodies(announced: bool) -> None:
    """By what is announced before anything is read, and else while it arrives."""
    memory, reads = BodyMemory(1 << 20), 0

    async def receive() -> Message:
        nonlocal reads
        reads += 1
        return {"type": "http.request", "body": b"x" * 40, "more_body": True}

    headers = [(b"content-length", b"101")] if announced else []
    body = RequestBody({"type": "http", "headers": headers}, receive, memory, 1 << 20, 60.0).limit_bytes(100)
    with pytest.raises(RequestError) as refused:
        async with body:
            raise AssertionError("read")
    assert refused.value.failure.status == 413
    assert reads == (0 if announced else 3)
    assert memory.held_bytes == 0


async def test_a_route_does_not_extend_what_a_body_may_have() -> None:
    with pytest.raises(RequestError):
        async with request_body([b"x" * 101], BodyMemory(1 << 20), 100).limit_bytes(200):
            raise AssertionError("read")


async def test_a_body_whose_reading_is_cancelled_is_not_held() -> None:
    memory = BodyMemory(200)
    body = request_body([b"x" * 60, b""], memory)
    task = asyncio.ensure_future(body.__aenter__())
    while not memory.held_bytes:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert memory.held_bytes == 0


async def test_the_sum_of_all_bodies_is_bounded_and_leaves_room_for_others() -> None:
    memory = BodyMemory(200)
    first, second = request_body([b"x" * 100], memory, tenant="a"), request_body([b"x"], memory, tenant="a")
    async with first:
        with pytest.raises(RequestError) as refused:
            await second.__aenter__()
        error = refused.value
        assert (error.failure.status, error.failure.code, error.failure.client_may_retry) == (
            503,
            "body_memory_full",
            True,
        )
        assert error.failure.retry_after_s is not None
        async with request_body([b"x" * 50], memory, tenant="b"):
            assert memory.held_bytes == 150 <= memory.max_bytes
    assert memory.held_bytes == 0


def test_the_largest_body_always_fits_into_an_empty_memory() -> None:
    limits = RequestLimits()
    assert MAX_HELD_BODIES >= 2
    BodyMemory(limits.max_bodies_bytes).hold_bytes("", limits.max_body_bytes)


async def test_a_body_is_released_before_the_answer_is_written(service: GatewayService, folder: Path) -> None:
    """A stream runs for minutes: the text of its request must not be held so long."""
    body = msgspec.json.encode({"model": "toy", "prompt": "HANG", "stream": True})
    memory = BodyMemory(1 << 20)
    one = client(service, body=body)
    layer: Any = one.app
    while not hasattr(layer, "memory"):
        layer = layer.app
    layer.memory = memory
    task = asyncio.ensure_future(one.post("/v1/completions", JSON_TYPE))
    while not service.open:
        await asyncio.sleep(0)
    assert memory.held_bytes == 0 and one.reads >= 1
    service.end_generations()
    await task
