"""Every route is closed unless it is on the public list, whatever the request looks like."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.types import Message, Receive, Scope, Send

from services.gateway.http.access_keys import AccessKeys, BearerKeys, presented_key
from services.gateway.http.auth import PUBLIC_ROUTES, AuthMiddleware, is_loopback
from services.gateway.http.connection import CONNECTION_EXTENSION
from services.gateway.openai.tenancy import tenant_of_key

KEYS = ("sk-" + "a" * 40, "sk-" + "b" * 40)


def status(
    path: str,
    headers: dict[str, str],
    keys: tuple[str, ...] = KEYS,
    host: str = "0.0.0.0",
    connection: SimpleNamespace | None = None,
) -> int:
    """The status that a request gets; 200 when it reached the application."""
    answers: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answers.append(message["status"])

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope: Scope = {"type": "http", "method": "GET", "path": path, "headers": raw}
    scope["extensions"] = {CONNECTION_EXTENSION: connection}
    asyncio.run(AuthMiddleware(app, AccessKeys(BearerKeys(keys)), host)(scope, receive, send))
    return answers[0]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(key: str) -> None:
    assert status("/v1/models", bearer(key)) == 200
    assert status("/v1/models", {"Authorization": f"bearer  {key} "}) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer(KEYS[0][:-1]),
        bearer(KEYS[0] + "x"),
        bearer("sk-ключ"),
        {"authorization": KEYS[0]},
        {"authorization": f"Basic {KEYS[0]}"},
        {"x-api-key": KEYS[0][:-1]},
        {"x-api-key": f"Bearer {KEYS[0]}"},
        {"x-api-key": KEYS[0], "authorization": "Bearer "},
        {"x-api-key": KEYS[0], "authorization": f"Basic {KEYS[0]}"},
    ],
)
def test_nothing_else_does(headers: dict[str, str]) -> None:
    assert status("/v1/models", headers) == 401


def test_a_key_may_come_as_clients_of_anthropic_send_it() -> None:
    assert status("/v1/models", {"x-api-key": KEYS[1]}) == 200
    assert status("/v1/models", {"x-api-key": "wrong", **bearer(KEYS[0])}) == 200, "Authorization counts"
    twice = [(b"x-api-key", KEYS[0].encode())] * 2
    assert presented_key(twice) == b"" and presented_key(twice[:1]) == KEYS[0].encode()


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/metrics", "/status", "/openapi.json", "/docs", "/tokenize", "/nowhere", "//", "//health",
     "/index.html", "/health/", "/HEALTH", "/health/../v1/models", "/ready#", "/v1/models?/health", "/version/x"],
)  # fmt: skip
def test_every_route_is_closed_by_default(path: str) -> None:
    assert status(path, {}) == 401


@pytest.mark.parametrize("path", sorted(PUBLIC_ROUTES))
def test_probes_are_open(path: str) -> None:
    assert status(path, {}) == 200


def test_the_host_header_opens_nothing() -> None:
    for host in ("a/health?", "x/v1/models#", "localhost/health"):
        assert status("/v1/models", {"host": host}) == 401


def test_two_authorization_headers_are_none() -> None:
    raw = [(b"authorization", f"Bearer {KEYS[0]}".encode())] * 2
    auth = AuthMiddleware(None, AccessKeys(BearerKeys(KEYS)), "0.0.0.0")  # type: ignore[arg-type]
    assert auth.find_refusal({"path": "/v1/models", "headers": raw}) is not None


def test_without_keys_a_loopback_server_answers_to_its_own_names_only() -> None:
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "app.localhost"):
        assert status("/v1/models", {"host": host}, keys=(), host="127.0.0.1") == 200
    for headers in ({"host": "evil.example"}, {"host": "127.0.0.1.evil.example:8000"}, {}):
        assert status("/v1/models", headers, keys=(), host="127.0.0.1") == 403
    assert status("/v1/models", {"host": "evil.example"}, keys=(), host="0.0.0.0") == 200


def test_what_lies_behind_learns_the_tenant_and_not_the_key() -> None:
    found: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope["state"]["tenant"])

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    async def nowhere(message: Message) -> None:
        raise AssertionError(message)

    def pass_by(keys: tuple[str, ...], *headers: tuple[bytes, bytes]) -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": list(headers)}
        asyncio.run(AuthMiddleware(app, AccessKeys(BearerKeys(keys)), "0.0.0.0")(scope, nothing, nowhere))

    for key in (*KEYS, KEYS[0]):
        pass_by(KEYS, (b"authorization", f"Bearer  {key}".encode()))
    pass_by((), (b"authorization", b"Bearer anything"))
    assert found[0] == found[2] == tenant_of_key(KEYS[0].encode())
    assert found[1] != found[0] and found[3] == ""
    assert not any(key in one for key in KEYS for one in found)


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models"])
def test_whose_request_it_is_follows_from_its_head_and_only_from_accepted_keys(path: str) -> None:
    tenant = tenant_of_key(KEYS[0].encode())

    def find(key: str, keys: AccessKeys, path: str = path) -> str | None:
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        return keys.find_tenant(path, headers)

    keys, chief = BearerKeys(KEYS), BearerKeys(["chief"])
    assert find(KEYS[0], AccessKeys(keys)) == tenant
    for stranger in ("", "sk-" + "c" * 40):
        assert find(stranger, AccessKeys(keys)) is None
        # Without keys all clients are one tenant.
        assert find(stranger, AccessKeys()) == ""
    assert find(KEYS[0], AccessKeys(keys, chief), "/admin/workers/a/drain") is None
    assert find("chief", AccessKeys(keys, chief)) is None
    assert find("chief", AccessKeys(keys, chief), "/admin/workers/a/drain") == tenant_of_key(b"chief")
    assert find("", AccessKeys(admin=chief), "/admin/workers/a/drain") is None
    assert [
        AccessKeys(*given).has_tenants
        for given in ((), (keys,), (BearerKeys(KEYS[:1]),), (BearerKeys(KEYS[:1]), chief), (None, chief))
    ] == [False, True, False, True, False]


@pytest.mark.parametrize(("has_share", "answered"), [(True, 200), (False, 429)])
def test_a_tenant_that_has_its_share_of_the_connections_is_refused(has_share: bool, answered: int) -> None:
    assert status("/v1/models", bearer(KEYS[0]), connection=SimpleNamespace(has_share=has_share)) == answered


def test_all_keys_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def watch(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return left == right

    monkeypatch.setattr("services.gateway.http.access_keys.hmac.compare_digest", watch)
    assert BearerKeys(KEYS).accepts_key(KEYS[0].encode())
    assert len(compared) == len(KEYS)


def test_loopback_names() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "")))


def test_an_admin_key_opens_orders_and_nothing_else() -> None:
    auth = AuthMiddleware(None, AccessKeys(BearerKeys(KEYS), BearerKeys(["chief"])), "0.0.0.0")  # type: ignore[arg-type]

    def opens(path: str, key: str) -> bool:
        return (
            auth.find_refusal({"path": path, "headers": [(b"authorization", f"Bearer {key}".encode())]})
            is None
        )

    path = "/admin/workers/decode-0/drain"
    assert opens(path, "chief") and not opens(path, KEYS[0]) and not opens(path, "")
    assert opens("/v1/models", KEYS[0]) and not opens("/v1/models", "chief")


def test_figures_are_for_their_keys_alone_where_there_are_any() -> None:
    chief = BearerKeys(["chief of workers"])
    operator = {"/metrics": BearerKeys(["watcher of figures", "chief of workers"]), "/status": chief}
    auth = AuthMiddleware(None, AccessKeys(BearerKeys(KEYS), chief, operator), "0.0.0.0")  # type: ignore[arg-type]

    def opens(path: str, key: str) -> bool:
        return (
            auth.find_refusal({"path": path, "headers": [(b"authorization", f"Bearer {key}".encode())]})
            is None
        )

    for path in ("/metrics", "/status"):
        assert opens(path, "chief of workers") and not opens(path, KEYS[0]) and not opens(path, "")
    assert opens("/metrics", "watcher of figures") and not opens("/status", "watcher of figures")
    assert not opens("/v1/models", "watcher of figures") and opens("/v1/models", KEYS[1])
    assert not opens("/admin/workers/decode-0/drain", "watcher of figures")
    assert not opens("/metrics/", "watcher of figures")
    plain = AuthMiddleware(None, AccessKeys(BearerKeys(KEYS)), "0.0.0.0")  # type: ignore[arg-type]
    assert (
        plain.find_refusal(
            {"path": "/metrics", "headers": [(b"authorization", b"Bearer " + KEYS[0].encode())]}
        )
        is None
    )


def test_an_admin_key_alone_leaves_the_rest_open() -> None:
    auth = AuthMiddleware(None, AccessKeys(admin=BearerKeys(["chief"])), "0.0.0.0")  # type: ignore[arg-type]
    assert auth.find_refusal({"path": "/v1/models", "headers": []}) is None
    assert auth.find_refusal({"path": "/admin/workers/decode-0/drain", "headers": []}) is not None
