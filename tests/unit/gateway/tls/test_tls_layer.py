"""TLS over a real server: the bounds on clients hold within the handshake too, and answers are whole."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from services.gateway.http import connection
from services.gateway.server import GatewayServer, open_listener
from services.gateway.tls.certificates import load_certificate
from services.gateway.tls.trust import trust_certificate
from tests.support.certificates import CertificateFiles, write_certificate

LARGE = 3 << 20
REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Source:
    """A certificate that a test may exchange."""

    def __init__(self, files: CertificateFiles) -> None:
        self.context = load_certificate(files.certfile, files.keyfile).context


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """How many bytes came, and for a request of /large so many bytes."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    content = b"x" * LARGE if scope["path"] == "/large" else f"{scope['scheme']} {len(body)}".encode()
    headers = [(b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def served(
    source: Source, max_connections: int = 64, app: Any = answer
) -> AsyncIterator[tuple[int, Any]]:
    """A server that speaks HTTPS: its port, and the server."""
    bound, listening = open_listener("127.0.0.1", 0), asyncio.Event()
    service: Any = SimpleNamespace(draining=False, end_generations=lambda: None)
    server = GatewayServer(app, service, 0.1, listening.set, max_connections, None, source)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    await listening.wait()
    try:
        yield bound.getsockname()[1], server
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return write_certificate(tmp_path)


async def ask(port: int, context: ssl.SSLContext, request: bytes = REQUEST) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
    content = await reader.read()
    writer.close()
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        await writer.wait_closed()
    return content


async def read_end(one: socket.socket) -> bytes:
    """All that a socket receives until its end; `reset` if it ends so."""
    loop, found = asyncio.get_running_loop(), b""
    try:
        while part := await loop.sock_recv(one, 65536):
            found += part
    except ConnectionResetError:
        return b"reset"
    return found


async def connect(port: int) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", port))
    return one


def test_requests_and_answers_are_whole_over_both_versions(files: CertificateFiles) -> None:
    async def play() -> None:
        trusted = trust_certificate(str(files.certfile))
        trusted.set_alpn_protocols(["h2", "http/1.1"])
        async with served(Source(files)) as (port, _):
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                trusted.maximum_version = trusted.minimum_version = version
                assert (await ask(port, trusted)).endswith(b"https 0")
                body = b"y" * 700_000
                head = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
                assert (await ask(port, trusted, head + body)).endswith(b"https 700000")
                large = await ask(port, trusted, REQUEST.replace(b"/ ", b"/large ", 1))
                assert len(large.partition(b"\r\n\r\n")[2]) == LARGE
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            old.set_ciphers("ALL:@SECLEVEL=0")
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await ask(port, old)

    with pytest.warns(DeprecationWarning):
        uvloop.run(play())


def test_new_connections_get_the_new_certificate_and_open_ones_go_on(
    files: CertificateFiles, tmp_path: Path
) -> None:
    async def play() -> None:
        source = Source(files)
        before = trust_certificate(str(files.certfile))
        async with served(source) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=before)
            source.context = Source(write_certificate(tmp_path)).context
            after = trust_certificate(str(files.certfile))
            assert (await ask(port, after)).endswith(b"https 0")
            with pytest.raises(ssl.SSLError):
                await ask(port, before)
            writer.write(REQUEST)
            assert (await reader.readuntil(b"https 0")).startswith(b"HTTP/1.1 200")
            writer.close()

    uvloop.run(play())


def test_a_client_of_plain_http_learns_what_is_wrong(files: CertificateFiles) -> None:
    async def play() -> None:
        async with served(Source(files)) as (port, _):
            for sent, expected in ((REQUEST, b"this port speaks HTTPS"), (b"\x00" * 100, b"")):
                one = await connect(port)
                await asyncio.get_running_loop().sock_sendall(one, sent)
                assert expected in await read_end(one)
                one.close()

    uvloop.run(play())


def test_a_handshake_without_end_is_cut_like_a_head_without_end(
    files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)

    async def play() -> None:
        async with served(Source(files)) as (port, server):
            hello = ssl.MemoryBIO()
            client = ssl.create_default_context().wrap_bio(
                ssl.MemoryBIO(), hello, server_hostname="localhost"
            )
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
            content = hello.read()
            sockets = [await connect(port) for _ in range(3)]
            # Nothing, half of a hello, and a hello whose answer is not answered.
            for one, part in zip(sockets, (b"", content[:60], content), strict=True):
                await asyncio.get_running_loop().sock_sendall(one, part)
            async with asyncio.timeout(20):
                ends = [await read_end(one) for one in sockets]
            assert ends[:2] == [b"reset", b"reset"]
            assert not server.connections._entries
            for one in sockets:
                one.close()

    uvloop.run(play())


def test_connections_within_a_handshake_count_and_make_room(files: CertificateFiles) -> None:
    """With all places taken by clients that never speak, one that does is served: they are replaced."""

    async def play() -> None:
        trusted = trust_certificate(str(files.certfile))
        async with served(Source(files), max_connections=8) as (port, server):
            silent = [await connect(port) for _ in range(8)]
            while len(server.connections._entries) < 8:
                await asyncio.sleep(0.01)
            assert (await ask(port, trusted)).endswith(b"https 0")
            assert len(server.connections._entries) <= 8
            for one in silent:
                one.close()

    uvloop.run(play())


def test_a_client_that_reads_nothing_pauses_its_answer(files: CertificateFiles) -> None:
    """What is buffered for it is bounded, and is counted: TLS keeps no buffer of its own."""

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        open_connection = scope["extensions"][connection.CONNECTION_EXTENSION]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2000):
            await open_connection.wait_drained()
            await send({"type": "http.response.body", "body": b"x" * 8192, "more_body": True})

    async def play() -> None:
        trusted = trust_certificate(str(files.certfile))
        async with served(Source(files), app=flood) as (port, server):
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted, limit=1024)
            writer.write(REQUEST)
            most = 0
            for _ in range(100):
                await asyncio.sleep(0.01)
                most = max(most, *(one.unsent_bytes() for one in server.connections._entries))
            assert 0 < most <= 2 * connection.BUFFER_BYTES + 8192
            assert [one._is_blocked for one in server.connections._entries] == [True]
            for task in list(server.server_state.tasks):
                task.cancel()
            writer.transport.abort()

    uvloop.run(play())


def test_a_stopping_server_ends_handshakes(files: CertificateFiles) -> None:
    async def play() -> None:
        async with asyncio.timeout(10):
            async with served(Source(files)) as (port, server):
                one = await connect(port)
                while not server.connections._entries:
                    await asyncio.sleep(0.01)
            one.close()

    uvloop.run(play())
