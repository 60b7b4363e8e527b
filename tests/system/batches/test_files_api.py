"""Files as official clients see them, and uploads that go wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import openai
import pytest

from services.gateway.batches.files.file_routes import MAX_FILES_LISTED
from tests.support.deployment import wait_for
from tests.system.batches.batch_lines import (
    CHAT,
    MAX_FILE_BYTES,
    MINE,
    THREE,
    YOURS,
    client_of,
    finished,
    kept,
)
from tests.system.scripted_gateway import Running


def test_a_file_can_be_uploaded_found_read_and_deleted(client: openai.OpenAI, gateway: Running) -> None:
    before = kept(gateway)
    file = client.files.create(file=("näme.jsonl", THREE), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (
        len(THREE),
        "näme.jsonl",
        "batch",
        "processed",
    )
    assert file.expires_at == file.created_at + 30 * 86400
    assert client.files.retrieve(file.id) == file
    assert file in list(client.files.list())
    assert client.files.content(file.id).content == THREE
    assert client.files.delete(file.id).deleted
    assert kept(gateway) == before
    for attempt in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            attempt(file.id)
        assert refused.value.code == "file_not_found"


def test_a_file_may_be_larger_than_a_body_and_is_streamed(client: openai.OpenAI, gateway: Running) -> None:
    gateway.batches.files._max_file_bytes = 40 << 20  # type: ignore[union-attr]
    try:
        large = b"x" * (20 << 20)
        file = client.files.create(
            file=("large", large),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert file.expires_at == file.created_at + 3600
        assert client.files.content(file.id).content == large
        client.files.delete(file.id)
    finally:
        gateway.batches.files._max_file_bytes = MAX_FILE_BYTES  # type: ignore[union-attr]


def form(*parts: tuple[str, bytes], file: bytes | None = None, end: bool = True) -> bytes:
    """A form of fields and perhaps a file."""
    text = b"".join(
        b'--B\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), value)
        for name, value in parts
    )
    if file is not None:
        head = b'--B\r\nContent-Disposition: form-data; name="file"; filename="../../x"\r\n\r\n'
        text += head + file + b"\r\n"
    return text + (b"--B--\r\n" if end else b"")


BATCH = ("purpose", b"batch")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (form(("purpose", b"fine-tune"), file=b"x"), 400, "invalid_value", "purpose"),
        (form(("purpose", b"b" * 5000), file=b"x"), 400, "invalid_value", "purpose"),
        (form(file=b"x"), 400, "missing_required_parameter", "purpose"),
        (form(BATCH), 400, "missing_required_parameter", "file"),
        (form(BATCH, ("colour", b"red"), file=b"x"), 400, "unrecognized_request_argument", "colour"),
        (form(BATCH, BATCH, file=b"x"), 400, "invalid_value", "purpose"),
        (
            form(BATCH, ("expires_after[anchor]", b"now"), file=b"x"),
            400,
            "invalid_value",
            "expires_after[anchor]",
        ),
        (
            form(
                BATCH, ("expires_after[anchor]", b"created_at"), ("expires_after[seconds]", b"1"), file=b"x"
            ),
            400,
            "invalid_value",
            "expires_after[seconds]",
        ),
        (form(BATCH, file=b"x", end=False), 400, "body_incomplete", None),
        (b"no form at all", 400, "invalid_value", None),
        (b"", 400, "body_incomplete", None),
        (form(BATCH, file=b"x" * (MAX_FILE_BYTES + 1)), 413, "request_too_large", "file"),
    ],
)
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_a_wrong_upload_is_refused_and_nothing_is_kept(
    http: httpx.Client,
    gateway: Running,
    body: bytes,
    status: int,
    code: str,
    param: str | None,
    announced: bool,
) -> None:
    before = kept(gateway)
    content = body if announced else iter([body[:100], body[100:]])
    answer = http.post(
        "/v1/files", content=content, headers={"content-type": "multipart/form-data; boundary=B"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
    assert kept(gateway) == before


def test_a_form_has_a_content_type(http: httpx.Client) -> None:
    for kind, status in (("application/json", 415), ("multipart/form-data", 400), ("", 415)):
        answer = http.post("/v1/files", content=b"{}", headers={"content-type": kind})
        assert answer.status_code == status, answer.text


def test_an_announced_size_that_is_too_large_is_refused_before_a_byte(
    http: httpx.Client, gateway: Running
) -> None:
    address = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), 30) as raw:
        raw.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 9000000000\r\n"
            b"Content-Type: multipart/form-data; boundary=B\r\n\r\n" % MINE.encode()
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_an_upload_that_stops_in_the_middle_leaves_nothing(gateway: Running) -> None:
    before = kept(gateway)
    address = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), 30) as raw:
        raw.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 5000\r\n"
            b"Content-Type: multipart/form-data; boundary=B\r\n\r\n%s"
            % (MINE.encode(), form(BATCH, file=b"x" * 1000, end=False))
        )
        wait_for(lambda: kept(gateway) != before)
    wait_for(lambda: kept(gateway) == before)


def test_an_upload_that_is_too_slow_is_given_up(http: httpx.Client, gateway: Running) -> None:
    assert gateway.batches is not None
    files, before = gateway.batches.files, kept(gateway)
    stall_s, files._stall_s = files._stall_s, 1.0
    try:
        body = form(BATCH, file=b"x" * 1000)

        def stalls() -> Iterator[bytes]:
            yield body[:200]
            wait_for(lambda: kept(gateway) != before)
            wait_for(lambda: kept(gateway) == before)

        answer = http.post(
            "/v1/files", content=stalls(), headers={"content-type": "multipart/form-data; boundary=B"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "body_timeout")
    finally:
        files._stall_s = stall_s


def test_pages_of_files_and_batches(gateway: Running) -> None:
    with client_of(gateway, YOURS) as client:
        files = [client.files.create(file=(f"{n}", THREE), purpose="batch").id for n in range(5)]
        assert [one.id for one in client.files.list(limit=2)] == files[::-1], "the client turns the pages"
        page = client.files.list(limit=2, order="asc", after=files[1])
        assert ([one.id for one in page.data], page.has_more) == (files[2:4], True)
        made = [
            client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h").id
            for file in files
        ]
        assert [one.id for one in client.batches.list(limit=2)] == made[::-1]
        for batch in made:
            finished(client, batch)
        assert len(list(client.files.list(purpose="batch_output"))) == 10
        for wrong in ({"limit": 0}, {"limit": MAX_FILES_LISTED + 1}, {"after": "file-x"}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError):
                client.files.list(**wrong)
        for file in client.files.list(limit=3):
            client.files.delete(file.id)
        assert not client.files.list().data, "what is listed can be deleted page by page"
        for limit in (0, 101):
            with pytest.raises(openai.BadRequestError):
                client.batches.list(limit=limit)
