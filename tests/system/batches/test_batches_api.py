"""Files and batches as official clients see them. Tokens come from a script."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.slo import Slo
from services.gateway.batches import data_dir, database_thread
from services.gateway.openai.request_limits import MAX_BATCH_BYTES
from services.gateway.preparation import preparation_job
from tests.support.deployment import wait_for
from tests.support.model_folder import make_folder
from tests.system.batches.batch_lines import (
    CHAT,
    COMPLETION,
    MESSAGES,
    RESPONSES,
    THREE,
    YOURS,
    answers_of,
    chat_body,
    client_of,
    finished,
    input_file,
    results,
    start,
)
from tests.system.scripted_gateway import SCRIPT, Running, scripted

HANGS = input_file([("a", chat_body("HANG")), ("b", chat_body())])


def test_every_line_gets_what_http_would_have_answered(client: openai.OpenAI, http: httpx.Client) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "plain": chat_body("hi"),
        "several": chat_body("hi", n=3, seed=7, temperature=0.5),
        "stops": chat_body("hi", stop=["two"], max_tokens=60),
        "scored": chat_body("hi", logprobs=True, top_logprobs=2),
        "wrong field": chat_body("hi", colour="red"),
        "wrong model": chat_body("hi") | {"model": "toy", "max_tokens": -1},
        "too long": chat_body("hi " * 5000),
        "fails": chat_body("CRASH"),
        "no object": [],  # type: ignore[dict-item]
        "line ends \u2028 \x85": chat_body("hi"),
    }
    batch = start(client, input_file(bodies.items()), metadata={"for": "test"})
    assert (batch.status, batch.metadata) == ("validating", {"for": "test"})
    done = finished(client, batch.id)
    assert done.status == "completed" and done.model == "toy"
    good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
    assert set(good) | set(bad) == set(bodies) and not set(good) & set(bad)
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (len(bodies), len(good), len(bad)) == (10, 5, 5)
    for name, body in bodies.items():
        answer = http.post(CHAT, json=body)
        mine = (good | bad)[name]["response"]
        assert mine["status_code"] == answer.status_code
        if answer.status_code == 200:
            assert answers_of(mine["body"]) == answers_of(answer.json())
            assert mine["body"]["id"].removeprefix("chatcmpl-") == mine["request_id"].removeprefix("req_")
        elif name != "fails":
            assert mine["body"] == answer.json()
    used = sum(one["response"]["body"]["usage"]["total_tokens"] for one in good.values())
    assert done.usage is not None and done.usage.total_tokens == used


def test_completions_too(client: openai.OpenAI) -> None:
    bodies = [(str(n), {"model": "toy", "prompt": f"{n}", "max_tokens": 2}) for n in range(3)]
    done = finished(client, start(client, input_file(bodies, COMPLETION), COMPLETION).id)
    texts = [
        one["response"]["body"]["choices"][0]["text"] for one in results(client, done.output_file_id).values()
    ]
    assert texts == [SCRIPT[:2]] * 3


def test_other_shapes_of_chats_too(client: openai.OpenAI) -> None:
    bodies = [(str(n), {"model": "toy", "input": f"{n}", "max_output_tokens": 2}) for n in range(3)]
    done = finished(client, start(client, input_file(bodies, RESPONSES), RESPONSES).id)
    answers = [one["response"]["body"] for one in results(client, done.output_file_id).values()]
    assert [answer["output"][0]["content"][0]["text"] for answer in answers] == [SCRIPT[:2]] * 3
    assert done.usage is not None and done.usage.output_tokens == 6
    lines = [
        (str(n), {"model": "toy", "max_tokens": n, "messages": chat_body()["messages"]}) for n in range(3)
    ]
    endpoint: Any = MESSAGES
    done = finished(client, start(client, input_file(lines, MESSAGES), endpoint).id)
    good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
    assert [good[name]["response"]["body"]["content"][0]["text"] for name in ("1", "2")] == [
        SCRIPT[:1],
        SCRIPT[:2],
    ]
    failed = bad["0"]["response"]["body"]
    assert (failed["type"], failed["error"]["type"]) == ("error", "invalid_request_error")
    assert failed["request_id"] == bad["0"]["response"]["request_id"]


def test_hundreds_of_lines_run_in_a_window(client: openai.OpenAI, gateway: Running) -> None:
    assert gateway.batches is not None
    names = [f"n{n}" for n in range(400)]
    batch = start(client, input_file((name, chat_body()) for name in names))
    most = [0]

    def watch() -> bool:
        most[0] = max(most[0], len(gateway.script.open))
        return client.batches.retrieve(batch.id).status == "completed"

    wait_for(watch)
    assert set(results(client, finished(client, batch.id).output_file_id)) == set(names)
    assert most[0] <= 64


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"", [("empty_file", None)]),
        (b"not json\n", [("invalid_json_line", 1)]),
        (THREE + b"\xff\n", [("invalid_json_line", 4)]),
        (THREE + THREE, [("duplicate_custom_id", n) for n in (4, 5, 6)]),
        (input_file([("a", chat_body(stream=True))]), [("invalid_request", 1)]),
        (THREE + input_file([("z", chat_body(model="org/toy"))]), [("model_mismatch", 4)]),
        (input_file([("a", {})], COMPLETION), [("url_mismatch", 1)]),
    ],
)
def test_a_wrong_file_fails_its_batch_before_any_line_runs(
    client: openai.OpenAI, gateway: Running, content: bytes, codes: list[tuple[str, int | None]]
) -> None:
    gateway.script.seen.clear()
    done = finished(client, start(client, content).id)
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.errors is not None and done.failed_at is not None
    assert [(one.code, one.line) for one in done.errors.data or []] == codes
    assert not gateway.script.seen


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"metadata": {f"{n}": "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_a_wrong_batch_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    file = client.files.create(file=("in", THREE), purpose="batch")
    options: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h"} | fields
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(input_file_id=file.id, **options)
    assert refused.value.param == param


@pytest.mark.parametrize("chunked", [False, True])
def test_a_batch_has_a_bound_of_its_own_for_its_body(http: httpx.Client, chunked: bool) -> None:
    """It is no JSON: a body within the bound is parsed and refused, and a larger one is not parsed."""

    def post(num_bytes: int) -> int:
        body = b"x" * num_bytes
        content: Any = iter([body[:1000], body[1000:]]) if chunked else body
        headers = {"content-type": "application/json"}
        return http.post("/v1/batches", content=content, headers=headers).status_code

    assert post(MAX_BATCH_BYTES) == 400
    assert post(MAX_BATCH_BYTES + 1) == 413


def test_a_large_body_of_a_batch_is_parsed_beside_the_event_loop(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(body: bytes) -> bytes:
        raise AssertionError(f"{len(body)} bytes are parsed in the gateway's process")

    monkeypatch.setattr(preparation_job, "check_batch_body", parse)
    metadata = {f"{number:02}".ljust(64, "é"): "語" * 512 for number in range(16)}
    assert start(client, THREE, metadata=metadata).metadata == metadata


def test_a_batch_is_accepted_while_requests_are_refused(
    client: openai.OpenAI, gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full queues are no reason to refuse work that can wait."""
    monkeypatch.setattr(gateway.script, "refuses", RequestFailure(FailureReason.QUEUE_FULL, "full"))
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
    batch = start(client, THREE)
    assert batch.status == "validating"
    monkeypatch.undo()
    assert finished(client, batch.id).status == "completed"


def test_only_files_for_batches_can_be_run(client: openai.OpenAI) -> None:
    done = finished(client, start(client, THREE).id)
    assert done.output_file_id is not None
    with pytest.raises(openai.BadRequestError, match="purpose 'batch'"):
        client.batches.create(input_file_id=done.output_file_id, endpoint=CHAT, completion_window="24h")


def test_tenants_see_only_their_own(client: openai.OpenAI, gateway: Running) -> None:
    batch = finished(client, start(client, THREE).id)
    with client_of(gateway, YOURS) as other:
        assert batch.id not in [one.id for one in other.batches.list()]
        assert batch.input_file_id not in [one.id for one in other.files.list()]
        for attempt in (
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.output_file_id or ""),
            lambda: other.files.delete(batch.output_file_id or ""),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
    assert client.files.content(batch.output_file_id or "").content


def test_a_cancelled_batch_keeps_what_was_answered(client: openai.OpenAI, gateway: Running) -> None:
    batch = start(client, HANGS)
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)  # type: ignore[union-attr]
    left = gateway.script.left
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = finished(client, batch.id)
    assert done.status == "cancelled" and done.cancelling_at is not None and done.cancelled_at is not None
    assert set(results(client, done.output_file_id)) == {"b"}
    (lost,) = results(client, done.error_file_id).values()
    assert (lost["custom_id"], lost["error"]["code"], lost["response"]) == ("a", "batch_cancelled", None)
    assert gateway.script.left == left + 1, "what ran was aborted"
    with pytest.raises(openai.ConflictError) as refused:
        client.batches.cancel(batch.id)
    assert refused.value.code == "batch_has_ended"


def test_a_batch_expires(client: openai.OpenAI, gateway: Running) -> None:
    # Times of batches are whole seconds: of a window's first second there may be little left.
    done = finished(client, start(client, HANGS, completion_window="3s").id)
    assert done.status == "expired" and done.expired_at is not None and done.expires_at == done.created_at + 3
    (lost,) = results(client, done.error_file_id).values()
    assert (lost["custom_id"], lost["error"]["code"]) == ("a", "batch_expired")
    assert set(results(client, done.output_file_id)) == {"b"}
    assert not gateway.script.open


def test_a_deleted_input_does_not_stop_its_batch(client: openai.OpenAI, gateway: Running) -> None:
    batch = start(client, input_file((str(n), chat_body()) for n in range(200)))
    client.files.delete(batch.input_file_id)
    done = finished(client, batch.id)
    assert (done.status, len(results(client, done.output_file_id))) == ("completed", 200)
    assert gateway.batches is not None
    wait_for(lambda: not gateway.batches.store.content_path(batch.input_file_id).exists())  # type: ignore[union-attr]


def test_lines_for_which_there_is_no_room_wait(client: openai.OpenAI, gateway: Running) -> None:
    batch = start(client, input_file([("a", chat_body("FAIL-WITH queue_full now")), ("b", chat_body())]))
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)  # type: ignore[union-attr]
    count = len(gateway.script.seen)
    wait_for(lambda: len(gateway.script.seen) >= count + 2)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    assert finished(client, batch.id).status == "cancelled"


def test_while_the_disk_is_full_batches_wait_and_requests_go_on(
    client: openai.OpenAI, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, gateway: Running
) -> None:
    assert gateway.batches is not None
    real = data_dir.write_whole

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(database_thread, "write_whole", full)
    batch = start(client, input_file((str(n), chat_body()) for n in range(70)))
    store = gateway.batches.store
    wait_for(lambda: store.trouble == "the disk is full")
    assert http.post(CHAT, json=chat_body()).status_code == 200
    assert client.batches.retrieve(batch.id).request_counts.completed == 0  # type: ignore[union-attr]
    monkeypatch.setattr(store.data_dir, "free_bytes", lambda: 0)
    with pytest.raises(openai.InternalServerError) as refused:
        client.files.create(file=("in", THREE), purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (507, "storage_full")
    monkeypatch.setattr(database_thread, "write_whole", real)
    done = finished(client, batch.id)
    assert len(results(client, done.output_file_id)) == 70 and store.trouble == ""


def test_lines_are_counted_apart_from_requests(client: openai.OpenAI, http: httpx.Client) -> None:
    def counted() -> dict[str, float]:
        rows = [
            row.rsplit(" ", 1) for row in http.get("/metrics").text.splitlines() if not row.startswith("#")
        ]
        return {name: float(value) for name, value in rows}

    before = counted()
    finished(client, start(client, THREE).id)
    after = counted()
    counters = [name for name in after if "_total" in name or "_count" in name]
    changed = {name.partition("{")[0] for name in counters if after[name] != before.get(name, 0)}
    ours = {"diptych:batch_lines_ended_total", "diptych:batch_tokens_total"}
    assert {name for name in changed if "vllm:" in name or "diptych:" in name} == {
        *ours,
        "diptych:http_requests_total",
    }
    ended = 'diptych:batch_lines_ended_total{outcome="%s"}'
    assert after[ended % "completed"] - before[ended % "completed"] == 2
    assert after[ended % "failed"] - before[ended % "failed"] == 1


def test_requests_that_miss_their_slos_hold_lines_back_and_lines_do_not(tmp_path: Path) -> None:
    with scripted(make_folder(tmp_path), data_dir=tmp_path / "own", objectives=Slo(ttft_s=1e-9)) as served:
        assert served.batches is not None
        window = served.batches.feeder.window
        with client_of(served, "none") as client:
            finished(client, start(client, THREE).id)
            assert window.cuts == 0, "lines have no SLOs"
            hanging = start(client, HANGS)
            wait_for(lambda: served.batches is not None and served.batches.feeder.num_running)
            for _ in range(2):
                assert window.cuts == 0
                client.completions.create(model="toy", prompt="x", max_tokens=2)
            # A request is judged after its answer was written.
            wait_for(lambda: window.cuts)
            client.batches.cancel(hanging.id)
            assert window.cuts == 1


def test_without_a_folder_the_routes_name_the_setting(tmp_path: Path) -> None:
    with (
        scripted(make_folder(tmp_path)) as plain,
        httpx.Client(base_url=plain.api, trust_env=False, timeout=60) as http,
    ):
        for method, path in (
            ("POST", "/files"),
            ("GET", "/files"),
            ("POST", "/batches"),
            ("GET", "/batches/x"),
        ):
            answer = http.request(method, path)
            assert answer.status_code == 404, answer.text
            error = answer.json()["error"]
            assert error["code"] == "batches_not_enabled" and "--data-dir" in error["message"]


def test_a_gateway_goes_on_where_another_one_stopped(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    names = [f"n{n}" for n in range(100)]
    bodies = [(name, chat_body("SLOW", max_tokens=3)) for name in names]
    with scripted(folder, data_dir=tmp_path / "data") as first, client_of(first, "none") as client:
        batch = start(client, input_file(bodies))
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed)  # type: ignore[union-attr]
    with scripted(folder, data_dir=tmp_path / "data") as second, client_of(second, "none") as client:
        done = finished(client, batch.id)
        assert set(results(client, done.output_file_id)) == set(names)
        assert done.request_counts is not None and done.request_counts.completed == 100
        assert len(second.script.seen) < 100, "what was answered is not asked again"
        assert json.loads(client.files.content(batch.input_file_id).text.splitlines()[0])["custom_id"] == "n0"
