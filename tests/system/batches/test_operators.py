"""Operators see and stop everybody's batches; keys that are taken away stop their own; shares have clear errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from diptych.specs import StorageShares
from services.gateway.openai.tenancy import tenant_of_key
from tests.support.deployment import wait_for
from tests.support.model_folder import make_folder
from tests.system.batches.batch_lines import (
    MINE,
    THREE,
    YOURS,
    chat_body,
    client_of,
    finished,
    input_file,
    results,
    start,
)
from tests.system.scripted_gateway import Running, scripted

ADMIN = "key-of-the-operator-01"
HANGING = input_file([("hangs", chat_body("HANG")), ("too", chat_body("HANG"))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def gateway(folder: Path, tmp_path: Path) -> Iterator[Running]:
    with scripted(folder, keys=(MINE, YOURS), data_dir=tmp_path / "data", admin_key=ADMIN) as running:
        yield running


@pytest.fixture
def admin(gateway: Running) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=gateway.url, headers=headers, trust_env=False, timeout=60) as one:
        yield one


def test_an_operator_lists_and_cancels_anybodys_batches(gateway: Running, admin: httpx.Client) -> None:
    with client_of(gateway, MINE) as mine, client_of(gateway, YOURS) as yours:
        first, second = start(mine, HANGING, metadata={"of": "mine"}), start(yours, HANGING)
        listed = admin.get("/admin/batches").json()
        tenants = [tenant_of_key(key.encode()) for key in (YOURS, MINE)]
        assert [(one["id"], one["tenant"]) for one in listed["data"]] == list(
            zip((second.id, first.id), tenants, strict=True)
        )
        assert "metadata" not in listed["data"][1] and "mine" not in admin.get("/admin/batches").text
        page = admin.get("/admin/batches", params={"limit": 1}).json()
        assert page["has_more"] and [one["id"] for one in page["data"]] == [second.id]
        rest = admin.get("/admin/batches", params={"after": second.id}).json()
        assert [one["id"] for one in rest["data"]] == [first.id]
        only = admin.get("/admin/batches", params={"tenant": tenants[1]}).json()
        assert [one["id"] for one in only["data"]] == [first.id]
        assert admin.get(f"/admin/batches/{first.id}").json()["tenant"] == tenants[1]

        assert admin.post(f"/admin/batches/{first.id}/cancel").json()["status"] == "cancelling"
        done = finished(mine, first.id)
        assert done.status == "cancelled"
        assert set(results(mine, done.error_file_id)) == {"hangs", "too"}
        again = admin.post(f"/admin/batches/{first.id}/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "batch_has_ended")
        assert yours.batches.retrieve(second.id).status in ("validating", "in_progress")

        keeps = {one["tenant"]: one for one in admin.get("/admin/tenants").json()["data"]}
        assert keeps[tenants[0]]["open_batches"] == 1 and keeps[tenants[0]]["accepted"]


def test_an_operator_deletes_anybodys_files(gateway: Running, admin: httpx.Client) -> None:
    with client_of(gateway, MINE) as mine:
        file = mine.files.create(file=("secret name", THREE), purpose="batch")
        listed = admin.get("/admin/files")
        assert listed.json()["data"][0]["id"] == file.id and "secret name" not in listed.text
        assert admin.delete(f"/admin/files/{file.id}").json()["deleted"]
        with pytest.raises(openai.NotFoundError):
            mine.files.retrieve(file.id)
        # Nothing can be made of it any more.
        with pytest.raises(openai.NotFoundError) as refused:
            mine.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert refused.value.code == "file_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/admin/batches/batch_none/cancel", 404, "batch_not_found"),
        ("GET", "/admin/batches/batch_none", 404, "batch_not_found"),
        ("DELETE", "/admin/files/file-none", 404, "file_not_found"),
        ("GET", "/admin/batches?limit=0", 400, "invalid_value"),
        ("GET", "/admin/batches?after=batch_none", 400, "invalid_value"),
        ("GET", "/admin/files?limit=101", 400, "invalid_value"),
    ],
)
def test_what_does_not_exist_is_one_clear_error(
    admin: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    answer = admin.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_no_other_key_opens_these_routes(gateway: Running) -> None:
    for key in (MINE, "wrong"):
        for path in ("/admin/batches", "/admin/files", "/admin/tenants"):
            answer = httpx.get(
                f"{gateway.url}{path}", headers={"authorization": f"Bearer {key}"}, trust_env=False
            )
            assert answer.status_code == 401


def test_a_key_that_is_taken_away_takes_its_batches_along(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        scripted(folder, keys=(MINE, YOURS), data_dir=data) as before,
        client_of(before, MINE) as mine,
        client_of(before, YOURS) as yours,
    ):
        gone, stays = start(mine, HANGING), start(yours, HANGING)
        wait_for(lambda: before.batches.feeder.num_running == 4)  # type: ignore[union-attr]
    with scripted(folder, keys=(YOURS,), data_dir=data, admin_key=ADMIN) as after:
        admin = httpx.Client(
            base_url=after.url, headers={"authorization": f"Bearer {ADMIN}"}, trust_env=False
        )
        with admin:

            def status_of(batch: str) -> str:
                return str(admin.get(f"/admin/batches/{batch}").json()["status"])

            wait_for(lambda: status_of(gone.id) == "cancelled")
            wait_for(lambda: status_of(stays.id) == "in_progress")
            wait_for(lambda: len(after.script.seen) == 2)
            time.sleep(0.2)
            assert len(after.script.seen) == 2, "no line of the other batch ran"
            counts = admin.get(f"/admin/batches/{gone.id}").json()["request_counts"]
            assert counts == {"total": 2, "completed": 0, "failed": 2}


def test_a_tenant_at_its_share_gets_one_clear_answer(folder: Path, tmp_path: Path) -> None:
    shares = StorageShares(max_bytes=64 << 10, max_batches=1)
    with (
        scripted(folder, keys=(MINE, YOURS), data_dir=tmp_path / "data", shares=shares) as gateway,
        client_of(gateway, MINE) as mine,
        client_of(gateway, YOURS) as yours,
    ):
        large = mine.files.create(file=("in", b"x" * (40 << 10)), purpose="batch")
        with pytest.raises(openai.APIStatusError) as refused:
            mine.files.create(file=("in", b"x" * (40 << 10)), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (413, "tenant_storage_full")
        assert "--max-tenant-bytes 65536" in refused.value.message and "delete files" in refused.value.message
        yours.files.create(file=("in", b"x" * (40 << 10)), purpose="batch")
        mine.files.delete(large.id)
        batch = start(mine, HANGING)
        with pytest.raises(openai.RateLimitError) as limited:
            start(mine, HANGING)
        assert limited.value.code == "too_many_batches" and "--max-tenant-batches" in limited.value.message
        mine.batches.cancel(batch.id)
        finished(mine, batch.id)
        start(mine, THREE)


def test_a_batch_whose_file_was_lost_says_so(folder: Path, tmp_path: Path) -> None:
    with (
        scripted(folder, keys=(MINE,), data_dir=tmp_path / "data") as gateway,
        client_of(gateway, MINE) as mine,
    ):
        file = mine.files.create(file=("in", THREE), purpose="batch")
        assert gateway.batches is not None
        gateway.batches.store.content_path(file.id).unlink()
        batch = mine.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        done = finished(mine, batch.id)
        assert done.status == "failed" and done.errors is not None and done.errors.data is not None
        assert [problem.code for problem in done.errors.data] == ["file_unreadable"]
