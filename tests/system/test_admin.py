"""Orders to workers, and what a gateway does with workers that fail in ways of their own; workers are puppets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.messages import Admit, Drain, SwitchRole
from services.gateway.openai.request_limits import MAX_ORDER_BYTES, MAX_REPORT_BYTES
from tests.support.fake_workers import MUTE, Puppet
from tests.support.gateway_process import WAIT_S, Gateway, serving, until
from tests.support.model_folder import make_folder
from tests.system.scripted_gateway import scripted

KEY = "an admin key"
ADMIN = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(tmp_path_factory.mktemp("admin"), admin_key=KEY, recovery_s=WAIT_S, replan=True) as running:
        yield running


@pytest.fixture
def puppets(gateway: Gateway) -> Iterator[list[Puppet]]:
    """Two prefill and two decode workers, all linked; those that a test adds are ended with them."""
    workers = [gateway.puppet(role, number) for role in ("prefill", "decode") for number in range(2)]
    try:
        until(lambda: len(gateway.status()["links"]) == 4 and gateway.ready()["ready"])
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        until(lambda: not gateway.status()["workers"])


def order(gateway: Gateway, worker: str, verb: str, body: Any = None, **headers: str) -> httpx.Response:
    return gateway.http.post(f"/admin/workers/{worker}/{verb}", json=body or {}, headers=ADMIN | headers)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def state(gateway: Gateway, worker: str) -> str | None:
    return next((one["state"] for one in gateway.status()["workers"] if one["worker"] == worker), None)


def wait_for_mute(decode: Puppet) -> None:
    """Until it has the request that is never answered."""
    until(lambda: any(isinstance(one, Admit) and one.prompt[0] == MUTE for one in list(decode.seen)))


def test_only_the_admin_key_opens_these_routes(gateway: Gateway, puppets: list[Puppet]) -> None:
    path = "/admin/workers/decode-0/drain"
    assert code(gateway.http.post(path, json={})) == (401, "invalid_api_key")
    wrong = {"Authorization": "Bearer wrong"}
    assert code(gateway.http.post(path, json={}, headers=wrong)) == (401, "invalid_api_key")
    assert code(gateway.http.post("/admin/nothing", json={}, headers=wrong)) == (401, "invalid_api_key")
    assert gateway.http.get(path, headers=ADMIN).status_code == 405
    assert code(order(gateway, "decode-9", "drain")) == (404, "worker_not_found")
    assert state(gateway, "decode-0") == "up"


def test_without_an_admin_key_there_are_none(tmp_path: Path) -> None:
    with scripted(make_folder(tmp_path), keys=("client",)) as gateway:
        path = f"{gateway.url}/admin/workers/decode-0/drain"
        assert httpx.post(path, json={}, trust_env=False).status_code == 401, "as every unknown route"
        known = {"Authorization": "Bearer client"}
        assert code(httpx.post(path, json={}, headers=known, trust_env=False)) == (404, "unknown_url")


@pytest.mark.parametrize(
    ("verb", "body", "refusal"),
    [
        ("turn", {"role": "decode"}, (409, "same_role")),
        ("turn", {"role": "both"}, (400, "invalid_value")),
        ("turn", {"role": "prefill", "now": True}, (400, "unrecognized_request_argument")),
        ("turn", {}, (400, "missing_required_parameter")),
        ("drain", {"force": "yes"}, (400, "invalid_value")),
    ],
)
def test_wrong_orders_are_refused(
    gateway: Gateway, puppets: list[Puppet], verb: str, body: Any, refusal: tuple[int, str]
) -> None:
    assert code(order(gateway, "decode-0", verb, body)) == refusal


def test_a_worker_drains_and_the_last_of_its_role_only_by_force(
    gateway: Gateway, puppets: list[Puppet]
) -> None:
    answer = order(gateway, "decode-0", "drain")
    assert answer.status_code == 202
    assert answer.json() == {"worker": "decode-0", "order": "drain", "role": "decode"}
    until(lambda: any(isinstance(message, Drain) for message in puppets[2].seen))
    assert state(gateway, "decode-0") == "draining"
    body = {"model": "toy", "prompt": [9], "max_tokens": 4}
    before = len([one for one in puppets[2].seen if isinstance(one, Admit)])
    assert gateway.http.post("/v1/completions", json=body).status_code == 200
    assert len([one for one in puppets[2].seen if isinstance(one, Admit)]) == before
    assert "decode-0 is draining" in gateway.ready()["reasons"]
    assert code(order(gateway, "decode-0", "turn", {"role": "prefill"})) == (409, "worker_draining")
    for verb, wanted in (("drain", {}), ("turn", {"role": "prefill"})):
        assert code(order(gateway, "decode-1", verb, wanted)) == (409, "last_worker")
    assert order(gateway, "decode-1", "drain", {"force": True}).status_code == 202
    until(lambda: not gateway.ready()["ready"])


def test_a_worker_changes_pools(gateway: Gateway, puppets: list[Puppet]) -> None:
    assert order(gateway, "decode-1", "turn", {"role": "prefill"}).json()["role"] == "prefill"
    until(lambda: any(message == SwitchRole("prefill") for message in puppets[3].seen))

    def has_switched() -> bool:
        roles = [worker["role"] for worker in gateway.status()["workers"]]
        return sorted(roles) == ["decode", *["prefill"] * 3] and len(gateway.status()["links"]) == 3

    until(has_switched)
    assert gateway.ready() == {"ready": True, "reasons": []}, "the pools are as they were asked to be"


def test_a_replanner_hears_of_requests_and_what_it_does_becomes_metrics(
    gateway: Gateway, puppets: list[Puppet]
) -> None:
    def meet(**report: Any) -> Any:
        answer = gateway.http.post("/admin/replan", json=report, headers=ADMIN)
        assert answer.status_code == 200
        return answer.json()

    assert code(gateway.http.post("/admin/replan", json={})) == (401, "invalid_api_key")
    before = meet()
    body = {"model": "toy", "prompt": [9, 8, 7], "max_tokens": 4}
    assert gateway.http.post("/v1/completions", json=body).status_code == 200
    known: dict[str, Any] = {"boot": before["boot"], "after": before["after"]}
    until(lambda: len(meet(**known)["events"]) == 2)
    received = meet(**known)
    assert [event[1:] for event in received["events"]] == [["a", 3, 0, False, 0], ["e", 3, 4, True, 0]]
    assert received["lost"] == 0 and received["after"] == before["after"] + 2
    actions = {"flip": {"done": 2, "failed": 1}}
    for _ in range(2):  # totals, however often they are sent
        meet(
            decisions={"first": 1},
            alarms={"rate": 3},
            actions=actions,
            target={"prefill": 2},
            attainment=0.97,
        )
    text = gateway.http.get("/metrics").text
    for line in (
        'diptych:replan_actions_total{action="flip",outcome="done"} 2.0',
        'diptych:replan_alarms_total{what="rate"} 3.0',
        'diptych:replan_decisions_total{trigger="first"} 1.0',
        'diptych:replan_target_workers{role="prefill"} 2.0',
        "diptych:replan_expected_attainment 0.97",
    ):
        assert line in text
    meet(pools=(3, 2))
    assert "2 of 3 prefill workers are up" in gateway.ready()["reasons"]
    meet(pools=(2, 2))
    assert code(gateway.http.post("/admin/replan", json={"after": "now"}, headers=ADMIN))[0] == 400
    meet(pools=(1, 1))


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/admin/replan", MAX_REPORT_BYTES),
        ("/admin/workers/nobody/drain", MAX_ORDER_BYTES),
        ("/admin/workers/nobody/turn", MAX_ORDER_BYTES),
    ],
)
def test_orders_and_reports_have_bounds_of_their_own(gateway: Gateway, path: str, most: int) -> None:
    """The bodies are no JSON: one within the bound is parsed and refused, and a larger one is not parsed."""
    kind = {"content-type": "application/json"}
    answers = [
        gateway.http.post(path, content=b"x" * num_bytes, headers=ADMIN | kind)
        for num_bytes in (most, most + 1)
    ]
    assert [code(answer) for answer in answers] == [(400, "invalid_json"), (413, "request_too_large")]


def test_decode_workers_read_prompts_while_no_prefill_worker_can(
    gateway: Gateway, puppets: list[Puppet]
) -> None:
    for worker in puppets[:2]:
        worker.kill()
    until(lambda: len(gateway.status()["workers"]) == 2 and gateway.ready()["ready"])
    reasons = gateway.ready()["reasons"]
    assert reasons == [
        "0 of 1 prefill workers are up",
        "decode workers prefill the prompts: no prefill worker can",
    ]
    body = {"model": "toy", "prompt": [9], "max_tokens": 4}
    assert gateway.http.post("/v1/completions", json=body).status_code == 200
    assert gateway.status()["local_prefill"]
    text = gateway.http.get("/metrics").text
    assert 'diptych:local_prefills_total{reason="no_prefill_worker"} 1.0' in text


def test_a_worker_whose_engine_stands_still_is_out_until_it_moves(
    gateway: Gateway, puppets: list[Puppet]
) -> None:
    puppets[3].stuck_s = 60.0
    until(lambda: state(gateway, "decode-1") is None)
    puppets[3].stuck_s = 0.0
    until(lambda: state(gateway, "decode-1") == "up")


def test_a_request_that_crashes_workers_is_quarantined(gateway: Gateway) -> None:
    prefill, decode = gateway.puppet("prefill"), gateway.puppet("decode")
    until(lambda: gateway.ready()["ready"])
    answers: list[httpx.Response] = []
    body = {"model": "toy", "prompt": [MUTE, 1, 2], "max_tokens": 50}
    asking = threading.Thread(
        target=lambda: answers.append(gateway.http.post("/v1/completions", json=body)), daemon=True
    )
    asking.start()
    for _ in range(2):  # crashes
        wait_for_mute(decode)
        decode.kill()
        decode = gateway.puppet("decode", ended="crashed")
    asking.join(WAIT_S)
    assert code(answers[0]) == (500, "request_quarantined")
    assert answers[0].headers["x-should-retry"] == "false"
    again = gateway.http.post("/v1/completions", json=body)
    assert code(again) == (500, "request_quarantined") and again.headers["x-should-retry"] == "false"
    until(lambda: gateway.ready()["ready"])
    innocent = gateway.http.post("/v1/completions", json={"model": "toy", "prompt": [9], "max_tokens": 4})
    assert innocent.status_code == 200
    assert gateway.status()["quarantined"] == 1
    for worker in (prefill, decode):
        worker.kill()
    until(lambda: not gateway.status()["workers"])


def test_a_timeout_of_the_client_ends_its_request(gateway: Gateway, puppets: list[Puppet]) -> None:
    body = {"model": "toy", "prompt": [MUTE], "max_tokens": 50}
    headers = {"X-Request-Timeout": "0.5"}
    answer = gateway.http.post("/v1/completions", json=body, headers=headers)
    assert code(answer) == (504, "deadline_exceeded") and answer.headers["x-should-retry"] == "false"
    for bad in ("soon", "-1", "inf", "nan", "0"):
        answer = gateway.http.post("/v1/completions", json=body, headers={"X-Request-Timeout": bad})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")
