"""Every error code of docs/api.md is provoked at the default log level, and the id of its answer finds the cause in
the log: `ids_lost == []`. Every line is JSON, and every line about a request has the client's id too.

Codes of bodies, keys and connections are provoked in a gateway of this process; those of workers and orders in a
gateway process with puppets. For those that need a full queue or memory, the backend says so itself.
"""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.config.options import Config
from diptych.errors import RequestError
from diptych.failure_statuses import RULES, FailureReason, RequestFailure
from diptych.logs.log_format import JsonFormatter
from diptych.messages import Admit
from diptych.specs import StorageShares
from services.gateway.batches.files import file_routes
from services.gateway.http import connection, connection_table, error_response
from services.gateway.http.log_rate_limit import LogRateLimit
from services.gateway.openai.request_limits import RequestLimits
from tests.support import fake_workers
from tests.support.fake_workers import MUTE, Puppet
from tests.support.gateway_process import Gateway, serving, until
from tests.support.model_folder import make_folder
from tests.support.waiting import wait_for
from tests.system import scripted_gateway
from tests.system.batches.batch_lines import CHAT, THREE
from tests.system.scripted_gateway import Running, scripted

WAIT_S = 90.0
KEY, ADMIN = "sk-" + "k" * 40, "the admin's secret key"
LEVEL = Config().log_level
MINE = "mine-17"  # the client's id of each request
API = Path(__file__).parents[2] / "docs/api.md"
# Reasons that only the relay, its limits or a full process find.
BY_BACKEND = (
    FailureReason.QUEUE_FULL,
    FailureReason.QUEUE_TOO_LONG,
    FailureReason.DISPLACED,
    FailureReason.TOO_MANY_REQUESTS,
    FailureReason.ANSWER_MEMORY_FULL,
    FailureReason.REQUEST_QUARANTINED,
    FailureReason.INVALID_GRAMMAR,
    FailureReason.NO_TOKEN_LEFT,
    FailureReason.NOT_CONTINUABLE,
    FailureReason.RATE_LIMIT_EXCEEDED,
)
BY_PREPARER = (
    FailureReason.PREPARATION_OUT_OF_MEMORY,
    FailureReason.PREPARATION_FULL,
    FailureReason.BODY_MEMORY_FULL,
    FailureReason.NOT_SPLIT,
)

PARTIAL = (
    f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {MINE}\r\n"
    "content-type: application/json\r\ncontent-length: 9\r\n\r\n{"
).encode()


class Provoked:
    """The codes that clients have been answered with, and the ids of these answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, str, str]] = []  # code, id, what the log has to say

    def add(self, code: str, answer: httpx.Response, cause: str = "") -> None:
        assert json.loads(answer.content)["error"]["code"] == code, (code, answer.text)
        self.answers.append((code, answer.headers["x-request-id"], cause))

    @property
    def codes(self) -> set[str]:
        return {code for code, _, _ in self.answers}

    def lost(self, lines: list[dict[str, str]], client: str = MINE) -> list[str]:
        """Codes whose id leads to no line with the code, the cause and the client's id."""
        return [
            code
            for code, request_id, cause in self.answers
            if not any(
                line.get("request_id") == (request_id or line.get("request_id"))
                and line.get("code") == code
                and cause in line["message"]
                and line.get("client_request_id", client) == client
                for line in lines
            )
        ]


def documented_codes() -> set[str]:
    table = API.read_text(encoding="utf-8").partition("## Errors")[2].partition("\n| status |")[2]
    return set(re.findall(r"`([a-z_]+)`", table.partition("\n\n")[0])) - {"retry-after"}


@contextmanager
def logged() -> Iterator[Callable[[], list[dict[str, str]]]]:
    """The lines that this process logs at the default level, as JSON. What it logged before counts for no limit."""
    text, root = io.StringIO(), logging.getLogger()
    limited = [connection.log, connection_table.log, error_response.client_log]
    limits = [one.filters for one in limited]
    for one, burst in zip(limited, (1, 1, error_response.MAX_CLIENT_LINES_PER_S), strict=True):
        one.filters = [LogRateLimit(burst=burst)]
    handler, before = logging.StreamHandler(text), root.level
    handler.setFormatter(JsonFormatter("gateway"))
    handler.setLevel(LEVEL.upper())
    root.addHandler(handler)
    root.setLevel(LEVEL.upper())
    try:
        yield lambda: [json.loads(line) for line in text.getvalue().splitlines()]
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        for one, filters in zip(limited, limits, strict=True):
            one.filters = filters


def ask(prompt: Any = "x", **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": prompt, "max_tokens": 5, **fields}


def raw_reply(url: str, data: bytes, leave: bool = True) -> bytes:
    """What comes back for bytes that no HTTP client would send."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(data)
        if leave:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def raw(url: str, data: bytes, leave: bool = True) -> httpx.Response:
    """The same as an answer."""
    head, _, body = raw_reply(url, data, leave).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return httpx.Response(int(status.split()[1]), headers=headers, content=body)


def provoke_open(running: Running, http: httpx.Client, seen: Provoked) -> None:
    """Refusals of a gateway without keys: bodies, hosts, origins, connections."""
    post = http.post
    said = scripted_gateway.CAUSE
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}
    for code, body, cause in (
        ("invalid_value", ask(temperature=-1), "temperature"),
        ("missing_required_parameter", {"prompt": "x"}, "model"),
        ("unrecognized_request_argument", ask(colour="red"), "colour"),
        ("unsupported_parameter", ask(suffix="x"), "suffix"),
        ("invalid_schema", ask(response_format=schema), "schema"),
        ("context_length_exceeded", ask(max_tokens=1 << 20), "tokens"),
        ("model_not_found", ask() | {"model": "another"}, "another"),
        *((RequestFailure(one, "").code, ask(f"FAIL-WITH {one.value} ."), said) for one in BY_BACKEND),
    ):
        seen.add(code, post("/v1/completions", json=body), cause)
    typed = {"content-type": "application/json"}
    seen.add("invalid_json", post("/v1/completions", content=b"{", headers=typed))
    seen.add(
        "unsupported_media_type",
        post("/v1/completions", content=b"x", headers={"content-type": "text/plain"}),
    )
    seen.add("request_too_large", post("/v1/completions", content=b"x" * 200_000, headers=typed))
    seen.add("unknown_url", http.get("/nowhere"), "/nowhere")
    seen.add("method_not_allowed", http.delete("/v1/models"), "DELETE")
    seen.add("host_not_allowed", http.get("/v1/models", headers={"host": "evil.example"}))
    seen.add(
        "origin_not_allowed", post("/v1/completions", json=ask(), headers={"origin": "http://evil.example"})
    )
    assert raw_reply(running.url, PARTIAL) == b"", "who leaves gets no answer: its own id is in the log"
    seen.answers.append(("body_incomplete", "", ""))
    seen.add("batches_not_enabled", http.get("/v1/files"), "--data-dir")
    seen.add("invalid_http", raw(running.url, b"SSH-2.0\r\n\r\n"))
    seen.add("headers_too_large", raw(running.url, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n"))


def provoke_full(running: Running, seen: Provoked) -> None:
    """The refusal of a gateway that has its only connection open already."""
    hanging = ask("HANG-LATE", stream=True, max_tokens=50)
    with httpx.stream("POST", f"{running.url}/v1/completions", json=hanging, timeout=WAIT_S) as answer:
        pieces = answer.iter_bytes()  # kept: a generator that is dropped closes the connection
        next(pieces)
        seen.add("too_many_connections", raw(running.url, b""))


def provoke_batches(running: Running, http: httpx.Client, seen: Provoked, patch: pytest.MonkeyPatch) -> None:
    """Refusals of a gateway with a folder for files and batches, and what its disk does to them."""
    assert running.batches is not None
    folder = running.batches.store.data_dir

    def upload(content: bytes = THREE) -> httpx.Response:
        return http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})

    def create(file: str) -> httpx.Response:
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        return http.post("/v1/batches", json=asked)

    seen.add("file_not_found", http.get("/v1/files/file-nowhere"), "file-nowhere")
    seen.add("batch_not_found", http.get("/v1/batches/batch-nowhere"), "batch-nowhere")
    good, wrong = upload().json()["id"], upload(b"no JSON").json()["id"]
    with patch.context() as patched:
        patched.setattr(running.batches.store, "shares", StorageShares(max_batches=0))
        seen.add("too_many_batches", create(good), "batches are open")
        patched.setattr(running.batches.store, "shares", StorageShares(max_bytes=0))
        seen.add("tenant_storage_full", create(good), "--max-tenant-bytes 0")
    batch = create(wrong).json()["id"]
    wait_for(lambda: http.get(f"/v1/batches/{batch}").json()["status"] == "failed", WAIT_S)
    seen.add("batch_has_ended", http.post(f"/v1/batches/{batch}/cancel"), "'failed'")
    with patch.context() as patched:
        patched.setattr(folder, "free_bytes", lambda: 0)
        seen.add("storage_full", upload(), "too little is left")
    folder.content_path(good).unlink()
    seen.add("storage_failed", http.get(f"/v1/files/{good}/content"), "No such file or directory")
    with ExitStack() as open_uploads:
        for _ in range(most := file_routes.MAX_TENANT_UPLOADS):
            open_uploads.enter_context(begin_upload(running.url))
        wait_for(lambda: len([*folder.uploads.iterdir()]) == most, WAIT_S)
        seen.add("too_many_uploads", upload(), "too many uploads are open")
    wait_for(lambda: not [*folder.uploads.iterdir()], WAIT_S)


def begin_upload(url: str) -> socket.socket:
    """A connection on which the beginning of an upload was sent."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
    connection.sendall(
        b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n"
        b"content-type: multipart/form-data; boundary=B\r\n\r\n--B\r\n"
    )
    return connection


def provoke_keyed(running: Running, http: httpx.Client, seen: Provoked, patch: pytest.MonkeyPatch) -> None:
    """Refusals of a gateway with keys, and of one that is short of time or memory, has bulk workers alone, or ends."""
    seen.add("invalid_api_key", http.get("/v1/models", headers={"authorization": "Bearer wrong"}))
    seen.add("priority_not_allowed", http.post("/v1/completions", json=ask(priority=-1)))
    for reason in BY_PREPARER:
        failure = RequestFailure(reason, f"said of {reason.value}")

        async def refuse(job: object, failure: RequestFailure = failure) -> None:
            raise RequestError(failure)

        with patch.context() as patched:
            patched.setattr(running.service.preparers, "prepare_body", refuse)
            seen.add(failure.code, http.post("/v1/completions", json=ask()), failure.message)
    running.service.only_batches = True
    seen.add("only_batches", http.post("/v1/completions", json=ask()), "serves batches only")
    running.service.only_batches = False
    running.service.only_pools = True
    seen.add("only_pooling", http.post("/v1/completions", json=ask()), "no decode workers")
    running.service.only_pools = False
    running.service.draining = True
    seen.add("server_shutting_down", http.post("/v1/completions", json=ask()))


def provoke_workers(gateway: Gateway, http: httpx.Client, seen: Provoked) -> None:
    """Failures of workers and of orders to them; there are none at first."""
    order = {"authorization": f"Bearer {ADMIN}"}

    def post(prompt: int, **headers: str) -> httpx.Response:
        return http.post("/v1/completions", json=ask([prompt]), headers=headers)

    def give(name: str, what: str, **body: Any) -> httpx.Response:
        return http.post(f"/admin/workers/{name}/{what}", json=body, headers=order)

    seen.add("no_workers", post(9))
    workers = [gateway.puppet("prefill"), gateway.puppet("decode")]
    try:
        until(lambda: gateway.ready()["ready"])
        for prompt, reason in fake_workers.FAILING.items():
            code = {"transfer_failed": "kv_transfer_failed"}.get(reason, reason)
            seen.add(code, post(prompt), fake_workers.CAUSE)
        seen.add("deadline_exceeded", post(MUTE, **{"x-request-timeout": "0.3"}), "deadline")
        seen.add("worker_not_found", give("prefill-7", "drain"), "prefill-7")
        seen.add("last_worker", give("prefill-0", "drain"), "prefill-0")
        seen.add("same_role", give("prefill-0", "turn", role="prefill"), "prefill-0")
        lose_worker(gateway, workers[1], post, seen)
        workers[1] = gateway.puppet("decode")
        until(lambda: gateway.ready()["ready"])
        assert give("decode-0", "drain", force=True).status_code == 202
        seen.add("worker_draining", give("decode-0", "turn", role="prefill"), "decode-0")
    finally:
        for worker in workers:
            worker.kill()


def lose_worker(
    gateway: Gateway, decode: Puppet, post: Callable[[int], httpx.Response], seen: Provoked
) -> None:
    """Kill the only decode worker while it has a request."""
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(post(MUTE)))

    def muted() -> set[str]:
        """The requests of clients that it was sent and never answers."""
        admitted = [one for one in list(decode.seen) if isinstance(one, Admit)]
        return {one.request for one in admitted if one.prompt[0] == MUTE}

    known = muted()
    client.start()
    until(lambda: muted() - known)
    decode.kill()
    client.join(WAIT_S)
    seen.add("worker_lost", answers[0], "decode-0")
    until(lambda: len(gateway.status()["workers"]) == 1)


def test_every_code_leads_from_its_id_to_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, process = Provoked(), Provoked()
    folder, log = make_folder(tmp_path / "toy"), tmp_path / "gateway.log"
    small = RequestLimits(max_body_bytes=100_000)
    named = {"x-request-id": MINE}
    with logged() as lines, ExitStack() as stack:
        running = stack.enter_context(scripted(folder, limits=small))
        http = stack.enter_context(
            httpx.Client(base_url=running.url, timeout=WAIT_S, trust_env=False, headers=named)
        )
        provoke_open(running, http, seen)
        impatient = stack.enter_context(scripted(folder, limits=RequestLimits(body_s=0.2)))
        seen.add("body_timeout", raw(impatient.url, PARTIAL, leave=False))
        provoke_full(stack.enter_context(scripted(folder, max_connections=1)), seen)
        keeping = stack.enter_context(scripted(folder, data_dir=tmp_path / "data"))
        http = stack.enter_context(
            httpx.Client(base_url=keeping.url, timeout=WAIT_S, trust_env=False, headers=named)
        )
        provoke_batches(keeping, http, seen, monkeypatch)
        keyed = stack.enter_context(scripted(folder, keys=(KEY,), limits=small))
        own = named | {"authorization": f"Bearer {KEY}"}
        http = stack.enter_context(
            httpx.Client(base_url=keyed.url, timeout=WAIT_S, trust_env=False, headers=own)
        )
        provoke_keyed(keyed, http, seen, monkeypatch)
        wait_for(lambda: not seen.lost(lines()), WAIT_S, explain=lambda: seen.lost(lines()))
    with ExitStack() as stack:
        spec: dict[str, Any] = {
            "admin_key": ADMIN,
            "recovery_s": 0.5,
            "log_level": LEVEL,
            "log_format": "json",
        }
        gateway = stack.enter_context(serving(tmp_path, log, local_prefill="never", **spec))
        http = stack.enter_context(
            httpx.Client(base_url=gateway.url, timeout=WAIT_S, trust_env=False, headers=named)
        )
        provoke_workers(gateway, http, process)

    written = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    ids_lost = process.lost(written)
    assert ids_lost == []
    about = [line for line in written if "request_id" in line]
    assert about and all(line["client_request_id"] == MINE for line in about)
    assert seen.codes | process.codes == documented_codes()
    assert documented_codes() == {RequestFailure(reason, "").code for reason in RULES}
