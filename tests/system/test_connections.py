"""Clients that hold connections and ask for nothing, in every way there is: all are closed, and others are served."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway import server
from services.gateway.http import connection as http_connection
from services.gateway.http import request_body
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.service import RequestTimeouts
from tests.support.gateway_process import serving
from tests.support.model_folder import make_folder
from tests.support.waiting import wait_for
from tests.system.held_connections import WAIT_S, held, port_of
from tests.system.scripted_gateway import Running, scripted

KEY = "sk-" + "k" * 40
SHORT_S = 0.3
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 999999\r\n"
BEARER = b"authorization: Bearer " + KEY.encode() + b"\r\n"

Connect = Callable[[], socket.socket]


def silent(connection: socket.socket) -> None:
    """Sends nothing."""


def half_a_head(connection: socket.socket) -> None:
    connection.sendall(GET)


def after_an_answer(connection: socket.socket) -> None:
    answered(connection, GET + b"\r\n")


def empty_line_after_an_answer(connection: socket.socket) -> None:
    answered(connection, GET + b"\r\n")
    connection.sendall(b"\r\n")


def half_a_head_after_an_answer(connection: socket.socket) -> None:
    answered(connection, GET + b"\r\n")
    connection.sendall(GET)


def half_a_body_of_a_refused_request(connection: socket.socket) -> None:
    answered(connection, POST + b"\r\n")
    connection.sendall(b"x")


def half_a_body_of_a_get(connection: socket.socket) -> None:
    answered(connection, GET + b"content-length: 999999\r\n\r\n")
    connection.sendall(b"x")


def half_a_body(connection: socket.socket) -> None:
    connection.sendall(POST + BEARER + b"\r\n{")


def upgrade(connection: socket.socket) -> None:
    connection.sendall(GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\nx")


def answered(connection: socket.socket, request: bytes) -> None:
    """Send a request, and read the head of its answer."""
    connection.sendall(request)
    read = b""
    while b"\r\n\r\n" not in read:
        part = connection.recv(65536)
        assert part, read
        read += part


KINDS = (
    silent,
    half_a_head,
    after_an_answer,
    empty_line_after_an_answer,
    half_a_head_after_an_answer,
    half_a_body_of_a_refused_request,
    half_a_body_of_a_get,
    half_a_body,
    upgrade,
)


def ends(connections: list[socket.socket], deadline_s: float) -> int:
    """How many connections the server ends until `deadline_s` on the monotonic clock; reads what it sends before."""
    left = 0
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map() and (patience_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(patience_s):
                with contextlib.suppress(BlockingIOError):
                    try:
                        over = not key.fileobj.recv(65536)  # type: ignore[union-attr]
                    except ConnectionResetError:
                        over = True
                    if over:
                        selector.unregister(key.fileobj)
        left = len(selector.get_map())
    return len(connections) - left


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("toy"), context=1 << 20)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All timers of connections are short."""
    for module, name in (
        (http_connection, "HEAD_TIMEOUT_S"),
        (http_connection, "FLUSH_TIMEOUT_S"),
        (http_connection, "STALLED_GRACE_S"),
        (http_connection, "STALL_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, SHORT_S)
    monkeypatch.setattr(http_connection.HttpConnection, "stall_s", SHORT_S)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", SHORT_S)
    monkeypatch.setattr(request_body, "LINGER_S", SHORT_S)


@pytest.fixture
def keyed(impatient: None, folder: Path) -> Iterator[Running]:
    with scripted(folder, keys=(KEY,), limits=RequestLimits(body_s=SHORT_S)) as running:
        yield running


@pytest.fixture
def patient(folder: Path) -> Iterator[Running]:
    """With the product's timers: a test on a busy machine is a slow client, too."""
    with scripted(folder, keys=(KEY,)) as running:
        yield running


@pytest.mark.parametrize("behave", KINDS)
def test_a_connection_that_asks_for_nothing_is_closed(
    keyed: Running, behave: Callable[[socket.socket], None]
) -> None:
    with held(port_of(keyed.url), 3, behave) as connections:
        assert ends(connections, time.monotonic() + WAIT_S) == 3


@pytest.mark.parametrize("then", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_an_answer_that_nobody_takes_is_given_up(
    keyed: Running, monkeypatch: pytest.MonkeyPatch, then: bytes
) -> None:
    """It is larger than what the kernel takes; uvicorn would wait for ever until it can write the rest."""
    monkeypatch.setattr(keyed.service.metrics, "render_text", lambda: b"x" * (8 << 20))
    ask = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n" + BEARER + b"\r\n" + then

    def behave(connection: socket.socket) -> None:
        connection.sendall(ask)

    port = port_of(keyed.url)
    with held(port, 2, behave, receive_bytes=4096) as connections:
        wait_for(lambda: open_connections(port) == 0, WAIT_S)
        assert ends(connections, time.monotonic() + WAIT_S) == 2


def open_connections(port: int) -> int:
    """Connections of others that this process has accepted on `port` and not closed."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
        # Once it is answered, those that were made before it are accepted.
        answered(connection, GET + b"\r\n")
        own = f":{connection.getsockname()[1]:04X}"
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    rows = [line.split() for line in lines]
    there = [row for row in rows if row[1].endswith(f":{port:04X}") and not row[2].endswith(own)]
    return sum(row[3] in ("01", "08") for row in there)


def test_a_reader_below_the_least_rate_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes something all the time, and so little that it would hold its answer for very long."""
    monkeypatch.setattr(http_connection, "MIN_READ_BYTES_PER_S", 1 << 30, raising=False)
    limits, body = (
        RequestLimits(max_stream_bytes=1 << 30),
        b'{"model":"toy","prompt":"FLOOD","max_tokens":1000000',
    )
    body += b',"stream":true,"ignore_eos":true,"logprobs":5}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    def behave(connection: socket.socket) -> None:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)

    with (
        scripted(folder, limits=limits, patience=RequestTimeouts(stall_s=1.0)) as running,
        held(port_of(running.url), 1, behave, receive_bytes=4096) as (reader,),
    ):
        deadline_s = time.monotonic() + WAIT_S
        with pytest.raises(ConnectionResetError):
            while reader.recv(1024) and time.monotonic() < deadline_s:
                time.sleep(0.02)
        wait_for(lambda: running.script.left == 1, WAIT_S)


def test_a_full_house_makes_room_for_a_new_client(folder: Path) -> None:
    """The oldest connection without a request goes; those with one stay, and when all have one nobody comes in."""
    stream = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = b'{"model":"toy","prompt":"HANG","max_tokens":5}'

    def hang(connection: socket.socket) -> None:
        connection.sendall(stream + b"content-length: %d\r\n\r\n" % len(body) + body)

    with scripted(folder, max_connections=8) as running:
        port = port_of(running.url)
        with held(port, 4, hang) as busy, held(port, 4, silent) as idle:
            wait_for(lambda: len(running.script.open) == 4, WAIT_S)
            with held(port, 2, after_an_answer):
                assert ends(idle[:2], time.monotonic() + WAIT_S) == 2
                assert ends(idle[2:] + busy, time.monotonic() + 0.2) == 0
            with held(port, 4, hang) as more:
                wait_for(lambda: len(running.script.open) == 8, WAIT_S)
                with held(port, 1, silent) as (refused,):
                    answer = refused.recv(65536)
                assert answer.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in answer
                assert ends(busy + more, time.monotonic() + 0.2) == 0


def test_too_many_requests_ahead_of_their_answers_end_the_connection(keyed: Running) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"

    def behave(connection: socket.socket) -> None:
        connection.sendall(request * 1000)

    with held(port_of(keyed.url), 1, behave) as connections:
        assert ends(connections, time.monotonic() + WAIT_S) == 1


@pytest.mark.parametrize(
    "head",
    [GET + b"a:\r\n" * 60_001 + b"\r\n", GET + b"a: " + b"b" * 250_000, b"GET /" + b"a" * 250_000],
    ids=["headers", "one header", "line"],
)
def test_a_head_costs_no_more_than_it_may_have(
    patient: Running, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """However much of it comes in one read; strangers may send it."""
    kept, parsed = list[bytes](), list[int]()
    keep, parse = HttpToolsProtocol.on_header, HttpToolsProtocol.data_received

    def on_header(self: HttpToolsProtocol, name: bytes, value: bytes) -> None:
        kept.append(name)
        keep(self, name, value)

    def data_received(self: HttpToolsProtocol, data: bytes) -> None:
        parsed.append(len(data))
        parse(self, data)

    monkeypatch.setattr(HttpToolsProtocol, "on_header", on_header)
    monkeypatch.setattr(HttpToolsProtocol, "data_received", data_received)
    with held(port_of(patient.url), 1, lambda connection: connection.sendall(head)) as (connection,):
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"headers_too_large" in answer
    assert len(kept) <= http_connection.MAX_HEADERS and sum(parsed) <= http_connection.MAX_HEAD_BYTES + 1


def test_as_many_headers_as_are_allowed_are_taken(patient: Running) -> None:
    def ask(num_headers: int) -> bytes:
        request = GET + b"a: b\r\n" * (num_headers - 1) + b"\r\n"
        with held(port_of(patient.url), 1, lambda connection: connection.sendall(request)) as (connection,):
            return connection.recv(65536)

    assert ask(http_connection.MAX_HEADERS).startswith(b"HTTP/1.1 200 ")
    assert ask(http_connection.MAX_HEADERS + 1).startswith(b"HTTP/1.1 431 ")


def test_a_head_that_comes_right_behind_a_large_body_is_no_larger_for_it(patient: Running) -> None:
    body = b"x" * 200_000
    first = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % len(body)
    with held(port_of(patient.url), 1, lambda connection: None) as (connection,):
        connection.sendall(first + BEARER + b"content-type: application/json\r\n\r\n")
        connection.sendall(body + GET)
        connection.sendall(b"\r\n")
        read = b""
        while read.count(b"HTTP/1.1 ") < 2:
            read += connection.recv(65536)
    assert b"HTTP/1.1 200 " in read and b"HTTP/1.1 431 " not in read


def test_refusals_with_small_bodies_keep_the_connection(patient: Running) -> None:
    """The rest of such a body comes a moment after its head."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\n"

    def behave(connection: socket.socket) -> None:
        connection.sendall(head)
        connection.sendall(b"x" * 5000)

    with held(port_of(patient.url), 1, behave) as (connection,):
        read = b""
        while b"}}" not in read:
            read += connection.recv(65536)
        assert read.startswith(b"HTTP/1.1 401 ") and b"connection: close" not in read
        answered(connection, GET + b"\r\n")


def test_strangers_do_not_fill_the_log(keyed: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "uvicorn.error"), held(port_of(keyed.url), 30, upgrade) as upgrades:
        assert ends(upgrades, time.monotonic() + WAIT_S) == 30
        with held(
            port_of(keyed.url), 30, lambda connection: connection.sendall(b"nonsense\r\n\r\n")
        ) as wrong:
            assert ends(wrong, time.monotonic() + WAIT_S) == 30
    assert len([record for record in caplog.records if record.name == "uvicorn.error"]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("max_connections", [4096, 1000])
@pytest.mark.parametrize("behave", KINDS)
def test_two_thousand_connections(
    tmp_path: Path, behave: Callable[[socket.socket], None], max_connections: int
) -> None:
    """The real process with its real timers: a new client is served within 1 s, and all are closed within 35 s."""
    with (
        serving(tmp_path, api_keys=(KEY,), max_connections=max_connections) as gateway,
        held(gateway.spec.port, 2000, behave) as connections,
    ):
        connected_s = time.monotonic()
        for _ in range(
            2
        ):  # once the first is answered, what the 2,000 have sent is handled: now they are idle
            began_s = time.monotonic()
            assert httpx.get(f"{gateway.url}/health", trust_env=False, timeout=WAIT_S).status_code == 200
        served_s = time.monotonic() - began_s
        assert ends(connections, connected_s + 35) == 2000
        print(f"served in {served_s:.3f} s, closed in {time.monotonic() - connected_s:.1f} s")
        assert served_s < 1.0
