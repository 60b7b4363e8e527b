"""Named keys: what they open, whose they are, and what stays when the file is replaced."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from diptych.keys.named_key import NamedKey, digest_key
from services.gateway.http.access_keys import AccessKeys, BearerKeys
from services.gateway.keys.key_metrics import KeyCollector
from services.gateway.keys.named_keys import NamedKeys, tenant_of_name
from services.gateway.openai.tenancy import tenant_of_key

A, B, PLAIN = "a" * 20, "b" * 20, "p" * 20


def named(name: str, key: str, priority: int = 0, requests: int | None = None) -> NamedKey:
    return NamedKey(name, digest_key(key), requests, None, priority)


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_named_and_plain_keys_open_the_same_routes() -> None:
    keys = NamedKeys([named("team", A)], (PLAIN,))
    access = AccessKeys(keys)
    assert len(keys) == 2 and access.has_tenants
    for key, tenant in ((A, tenant_of_name("team")), (PLAIN, tenant_of_key(PLAIN.encode()))):
        assert access.find_tenant("/v1/models", bearer(key)) == tenant and keys.accepts_tenant(tenant)
    for wrong in (B, "", A[:-1], A + "x", digest_key(A).hex(), "team"):
        assert access.find_tenant("/v1/models", bearer(wrong)) is None
    assert access.find_tenant("/v1/models", [(b"x-api-key", A.encode())]) == tenant_of_name("team")
    assert tenant_of_name("team") != tenant_of_key(b"team"), "no key stands for a name's tenant"


def test_priorities() -> None:
    access = AccessKeys(
        NamedKeys([named("soon", A, -5), named("late", B, 4)], (PLAIN, "u" * 20)),
        urgent=BearerKeys(("u" * 20,)),
    )
    best = {key: access.best_priority(key.encode()) for key in (A, B, PLAIN, "u" * 20)}
    assert list(best.values()) == [-5, 4, 0, -10]
    assert AccessKeys().best_priority(b"") == -10, "without keys everybody may"


def test_a_name_keeps_what_it_has_when_its_key_changes() -> None:
    keys = NamedKeys([named("team", A, requests=10), named("other", B)])
    tenant = tenant_of_name("team")
    rates = keys.rates_of_tenant(tenant)
    assert rates is not None
    rates.admit_request(3, 0.0)
    keys.replace_keys([named("team", "c" * 20, requests=5)])
    assert not keys.accepts_key(A.encode()) and not keys.accepts_key(B.encode())
    assert keys.tenant_of_headers(bearer("c" * 20)) == tenant
    assert keys.rates_of_tenant(tenant) is rates and rates.use.requests == 1
    assert rates.windows["requests"].limit == 5 and rates.windows["requests"].used(1.0) == 1
    assert set(keys.tenants) == {tenant} and tenant in keys.tenants
    assert keys.rates_of_tenant(tenant_of_name("other")) is None and not keys.accepts_tenant(
        tenant_of_name("other")
    )
    keys.replace_keys([named("team", A)])
    assert rates.windows == {}, "a limit that is gone binds no more"


def test_metrics_name_the_names_that_there_are() -> None:
    keys = NamedKeys([named("team", A), named("other", B)])
    rates = keys.rates_of_tenant(tenant_of_name("team"))
    assert rates is not None
    rates.admit_request(7, 0.0)
    rates.count_generated(3, 0.0)
    samples = {
        (one.name, *one.labels.values()): one.value
        for family in KeyCollector(keys).collect()
        for one in family.samples
    }
    assert samples["diptych:key_requests_total", "team"] == 1
    assert samples["diptych:key_tokens_total", "team", "prompt"] == 7
    assert samples["diptych:key_tokens_total", "team", "generation"] == 3
    assert samples["diptych:key_refused_total", "other", "requests"] == 0
    keys.replace_keys([named("other", B)])
    left = {one.labels["key"] for family in KeyCollector(keys).collect() for one in family.samples}
    assert left == {"other"}


def test_a_key_is_found_without_comparing_it_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-59425, CVE-2026-23996: the time of a check told how much of a key was right.

    Keys without names are all compared in constant time; those with names are looked up by a digest that nobody
    outside can predict.
    """
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return known == given

    monkeypatch.setattr(hmac, "compare_digest", compare)
    plain = tuple(f"{letter * 20}" for letter in "pqrs")
    keys = NamedKeys([named("team", A)], plain)
    for presented in (A, plain[0], plain[-1], "nothing"):
        compared.clear()
        keys.accepts_key(presented.encode())
        assert compared == [hashlib.sha256(key.encode()).digest() for key in plain]
    again = NamedKeys([named("team", A)], plain)
    assert keys._find_slot(digest_key(A)) != again._find_slot(digest_key(A))
    assert digest_key(A) not in keys._by_digest
