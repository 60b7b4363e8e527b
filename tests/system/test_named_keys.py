"""Named keys over a real gateway: rates as an official client meets them, and a file replaced while it serves."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.gateway.keys.key_rates import RATE_HEADERS
from tests.support.deployment import sum_samples
from tests.support.gateway_process import Gateway, serving, until
from tests.unit.gateway.keys.named_file import write_keys

BODY = {"model": "toy", "prompt": [40, 41, 42], "max_tokens": 3}


@dataclass
class Keyed:
    gateway: Gateway
    file: Path
    log: Path
    keys: dict[str, str]
    admin: str

    def entries(self) -> list[dict[str, Any]]:
        limits = {"few": {"requests_per_minute": 2}, "late": {"priority": 3}, "free": {}}
        return [{"name": name, "key": key, **limits[name]} for name, key in self.keys.items()]

    def ask(self, key: str, **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return self.gateway.http.post("/v1/completions", json=BODY | fields, headers=headers)

    def opens(self, key: str) -> bool:
        return self.ask(key).status_code == 200

    def status(self) -> Any:
        return self.gateway.http.get("/status", headers={"Authorization": f"Bearer {self.admin}"}).json()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    keys = {name: secrets.token_hex(20) for name in ("few", "late", "free")}
    admin, own = secrets.token_hex(20), secrets.token_hex(20)
    file = folder / "keys.yaml"
    made = Keyed(None, file, folder / "log", keys, admin)  # type: ignore[arg-type]
    write_keys(file, made.entries())
    fields: dict[str, Any] = {"metrics_keys": (admin,), "status_keys": (admin,), "admin_key": admin}
    with serving(
        folder,
        made.log,
        keys_file=str(file),
        api_keys=(own,),
        log_level="info",
        data_dir=str(folder / "data"),
        **fields,
    ) as gateway:
        made.gateway = gateway
        puppets = [gateway.puppet("prefill"), gateway.puppet("decode")]
        until(lambda: gateway.ready()["ready"])
        yield made
        for puppet in puppets:
            puppet.kill()


def test_an_official_client_is_refused_beyond_its_rate_and_learns_when_to_come_again(keyed: Keyed) -> None:
    with openai.OpenAI(
        base_url=f"{keyed.gateway.url}/v1", api_key=keyed.keys["few"], max_retries=0
    ) as client:
        raw = client.completions.with_raw_response
        left = [raw.create(**BODY).headers["x-ratelimit-remaining-requests"] for _ in range(2)]  # type: ignore[call-overload]
        assert left == ["1", "0"]
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**BODY)  # type: ignore[call-overload]
    assert caught.value.code == "rate_limit_exceeded" and caught.value.type == "rate_limit_error"
    headers = caught.value.response.headers
    assert 50 <= int(headers["retry-after"]) <= 60 and headers["x-should-retry"] == "true"
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert not set(RATE_HEADERS) & set(keyed.ask(keyed.keys["free"]).headers)


def test_names_are_where_operators_look_and_keys_nowhere(keyed: Keyed) -> None:
    keyed.ask(keyed.keys["free"], stream=True)
    by_name = {one["name"]: one for one in keyed.status()["keys"]["names"]}
    assert by_name["free"]["generated_tokens"] >= 3 and by_name["free"]["prompt_tokens"] >= 3
    headers = {"Authorization": f"Bearer {keyed.admin}"}
    shown = keyed.gateway.http.get("/metrics", headers=headers).text
    assert sum_samples(shown, "diptych:key_requests_total", key="free") >= 1
    log = keyed.log.read_text()
    assert "is of key free" in log
    for text in (shown, log, str(keyed.status())):
        assert not any(key in text for key in keyed.keys.values())
    assert (
        keyed.gateway.http.get(
            "/metrics", headers={"Authorization": "Bearer " + keyed.keys["free"]}
        ).status_code
        == 401
    )


def test_a_key_may_come_in_x_api_key_and_has_its_own_best_priority(keyed: Keyed) -> None:
    own = {"x-api-key": keyed.keys["late"]}
    assert keyed.gateway.http.post("/v1/completions", json=BODY, headers=own).status_code == 200
    refused = keyed.gateway.http.post("/v1/completions", json=BODY | {"priority": 2}, headers=own)
    assert refused.status_code == 403 and "below 3" in refused.json()["error"]["message"]
    assert keyed.ask(keyed.keys["late"], priority=3).status_code == 200


def test_the_file_is_replaced_ten_times_under_load(keyed: Keyed) -> None:
    statuses, stop = Counter[int](), threading.Event()

    def load() -> None:
        with httpx.Client(base_url=keyed.gateway.url, trust_env=False, timeout=60) as http:
            while not stop.is_set():
                headers = {"Authorization": "Bearer " + keyed.keys["free"]}
                statuses[http.post("/v1/completions", json=BODY, headers=headers).status_code] += 1

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(10):
            fresh = secrets.token_hex(20)
            write_keys(keyed.file, [*keyed.entries(), {"name": f"fresh-{number}", "key": fresh}])
            until(partial(keyed.opens, fresh))
        write_keys(keyed.file, [{"name": "wrong", "key": "short"}])
        until(lambda: keyed.status()["keys"]["problem"])
        assert keyed.ask(fresh).status_code == 200, "the keys before stay"
        write_keys(keyed.file, keyed.entries())
        until(lambda: keyed.ask(fresh).status_code == 401)
        assert keyed.status()["keys"]["problem"] is None
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(statuses) == {200} and statuses[200] > 40, statuses
    assert keyed.log.read_text().count("keeps the keys that it had") == 1


def test_lines_of_a_batch_wait_for_the_rate_of_their_key(keyed: Keyed) -> None:
    key, file = secrets.token_hex(20), keyed.file
    write_keys(file, [*keyed.entries(), {"name": "batch", "key": key, "requests_per_minute": 4}])
    until(lambda: keyed.ask(key).status_code == 200)
    row = '{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"model": "toy", "prompt": "x", '
    lines = "".join((row + '"max_tokens": 2}}\n') % number for number in range(5))
    with openai.OpenAI(base_url=f"{keyed.gateway.url}/v1", api_key=key, max_retries=0) as client:
        content = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=content.id, endpoint="/v1/completions", completion_window="24h"
        )

        def count_lines() -> tuple[int, int]:
            counts = client.batches.retrieve(batch.id).request_counts
            assert counts is not None
            return counts.completed, counts.failed

        # Three of four are for lines, and one was taken.
        until(lambda: count_lines() == (2, 0))
        assert keyed.ask(key).status_code == 200, "a quarter is left to requests"
        assert keyed.ask(key).status_code == 429
        assert count_lines() == (2, 0) and client.batches.retrieve(batch.id).status == "in_progress"
        assert keyed.ask(keyed.keys["free"]).status_code == 200
        client.batches.cancel(batch.id)
