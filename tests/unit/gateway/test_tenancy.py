"""Tenants and scopes: equal for equal keys and salts, different for all others, and never the key itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diptych.errors import RequestError
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.schemas.request_schema import ChatRequest, CompletionRequest
from services.gateway.openai.tenancy import (
    SCOPE_HEX,
    TENANT_HEX,
    TIMEOUT_HEADER,
    parse_timeout_header,
    tenancy_of_body,
    tenant_of_key,
)

KINDS: dict[Any, dict[str, Any]] = {
    ChatRequest: {"model": "toy", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "toy", "prompt": "hi"},
}


def body(kind: Any = CompletionRequest, **fields: Any) -> Any:
    return parse_body(msgspec.json.encode(KINDS[kind] | fields), kind, RequestLimits().max_depth)


def test_a_tenant_is_a_digest_of_the_key() -> None:
    names = {tenant_of_key(key) for key in (b"sk-a", b"sk-b", b"sk-a")}
    assert len(names) == 2 and all(len(name) == TENANT_HEX and "sk" not in name for name in names)


def test_the_scope_is_the_salt_or_else_the_tenant() -> None:
    a, b = tenant_of_key(b"a"), tenant_of_key(b"b")
    plain = {tenant: tenancy_of_body(body(), tenant) for tenant in (a, b)}
    assert plain[a].tenant == a and plain[a].scope != plain[b].scope
    salted = [tenancy_of_body(body(cache_salt="ours"), tenant) for tenant in (a, b, "")]
    assert len({one.scope for one in salted}) == 1, "who knows a salt shares by it"
    scopes = {one.scope for one in (*plain.values(), *salted, tenancy_of_body(body(cache_salt="theirs"), a))}
    assert len(scopes) == 4 and all(len(scope) == SCOPE_HEX for scope in scopes)


def test_without_keys_all_share_unless_they_salt() -> None:
    assert tenancy_of_body(body(), "").scope == "" == tenancy_of_body(body(cache_salt=None), "").scope
    assert tenancy_of_body(body(cache_salt="x"), "").scope != ""


def test_a_salt_that_looks_like_a_tenant_is_not_one() -> None:
    tenant = tenant_of_key(b"key")
    mine = tenancy_of_body(body(), tenant).scope
    for salt in (tenant, mine, "key"):
        assert tenancy_of_body(body(cache_salt=salt), "other").scope != mine


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("cache_salt", 7),
        ("cache_salt", ["x"]),
        ("priority", 11),
        ("priority", -11),
        ("priority", 0.5),
        ("priority", "high"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        body(kind, **{field: value})
    assert (caught.value.failure.status, caught.value.failure.code, caught.value.failure.param) == (
        400,
        "invalid_value",
        field,
    )


def test_half_a_character_is_no_salt() -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(b'{"model":"toy","prompt":"hi","cache_salt":"\\ud800"}', CompletionRequest, 9)
    assert caught.value.failure.status == 400


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_in_range_arrives(kind: Any) -> None:
    assert tenancy_of_body(body(kind, priority=-10, cache_salt="x" * 256), "").priority == -10
    assert tenancy_of_body(body(kind, priority=10, cache_salt="日"), "").priority == 10
    assert (
        tenancy_of_body(body(kind), "").priority
        == 0
        == tenancy_of_body(body(kind, priority=None), "").priority
    )


@pytest.mark.parametrize(("value", "seconds"), [(b"20", 20.0), (b" 0.5 ", 0.5), (b"1e3", 1000.0)])
def test_a_client_may_say_how_long_it_waits(value: bytes, seconds: float) -> None:
    assert parse_timeout_header([(b"host", b"here"), (TIMEOUT_HEADER, value)]) == seconds
    assert parse_timeout_header([(b"host", b"here")]) is None


@pytest.mark.parametrize("value", [b"", b"soon", b"0", b"-1", b"nan", b"inf", b"1e999", b"9" * 40, b"\xff"])
def test_any_other_timeout_is_refused(value: bytes) -> None:
    with pytest.raises(RequestError, match="positive number"):
        parse_timeout_header([(TIMEOUT_HEADER, value)])


def test_two_timeouts_are_one_too_many() -> None:
    with pytest.raises(RequestError):
        parse_timeout_header([(TIMEOUT_HEADER, b"1"), (TIMEOUT_HEADER, b"2")])
