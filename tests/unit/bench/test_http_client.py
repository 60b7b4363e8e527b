"""The lean HTTP client against servers that do well and badly."""

from __future__ import annotations

import asyncio

import pytest

from diptych.errors import ConfigError
from services.bench.http_client import ServerAddress
from services.bench.sse import StreamedAnswer
from tests.unit.bench import fake_server
from tests.unit.bench.fake_server import Asked, Fake

ROUTE = "/v1/completions"
WELL = fake_server.whole(fake_server.text("a"), fake_server.text("b", "length"), fake_server.DONE)


async def ask(server: Fake, timeout_s: float = 30.0) -> StreamedAnswer:
    answer = StreamedAnswer()
    await server.client().post_stream(ROUTE, b"{}", timeout_s, answer)
    return answer


async def test_connections_are_used_again() -> None:
    async def well(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(WELL)

    async with fake_server.serving(well) as server:
        client = server.client()
        for _ in range(3):
            answer = StreamedAnswer()
            await client.post_stream(ROUTE, b'{"n": 1}', 30.0, answer)
            assert (answer.tokens, answer.failed) == (2, "")
        client.close_idle()
    assert server.connections == 1
    assert [(one.method, one.path, one.body) for one in server.asked] == [("POST", ROUTE, {"n": 1})] * 3


async def test_a_kept_connection_that_the_server_has_closed_is_not_an_error() -> None:
    async def once(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(server.asked) == 2:  # hangs up instead of answering, as one whose idle time is over does
            writer.transport.abort()
        else:
            writer.write(WELL)

    async with fake_server.serving(once) as server:
        client = server.client()
        for _ in range(2):
            answer = StreamedAnswer()
            await client.post_stream(ROUTE, b"{}", 30.0, answer)
            assert (answer.tokens, answer.failed) == (2, "")
        client.close_idle()
    assert server.connections == 2 and len(server.asked) == 3


@pytest.mark.parametrize(
    ("response", "failed"),
    [
        (fake_server.refusal(429, "queue_full"), "429 queue_full"),
        (fake_server.plain(503, "nothing"), "503"),
        (b"HTTP/1.1 502 Bad\r\ncontent-length: 4\r\n\r\n<ht>", "502"),
        (b"SSH-2.0\r\n\r\n", "not HTTP"),
        (fake_server.SSE + fake_server.chunk(fake_server.text("a")), "broken off"),
        (fake_server.whole(fake_server.text("a")), "broken off"),
        (b"", "broken off"),
        (fake_server.plain(200, {"choices": []}), "broken off"),
    ],
)
async def test_failures_are_named(response: bytes, failed: str) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(response)
        writer.close()

    async with fake_server.serving(answer) as server:
        assert (await ask(server)).failed == failed


async def test_a_stream_whose_end_is_that_of_its_connection() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + fake_server.text("a", "stop") + fake_server.DONE
        )
        writer.close()

    async with fake_server.serving(answer) as server:
        answer_ = await ask(server)
    assert (answer_.tokens, answer_.failed) == (1, "")


async def test_a_refusal_that_comes_whole_keeps_the_connection() -> None:
    async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(fake_server.refusal(429, "queue_full", "later"))

    async with fake_server.serving(refuse) as server:
        client = server.client()
        for _ in range(2):
            answer = StreamedAnswer()
            await client.post_stream(ROUTE, b"{}", 30.0, answer)
            assert (answer.failed, answer.error_text) == ("429 queue_full", "later")
        client.close_idle()
    assert server.connections == 1


async def test_silence_ends_by_the_timeout_and_the_server_sees_the_client_leave() -> None:
    async def silence(asked: Asked, writer: asyncio.StreamWriter) -> None:
        pass

    async with fake_server.serving(silence) as server:
        assert (await ask(server, 0.2)).failed == "timeout"
        async with asyncio.timeout(30):
            while not server.left:
                await asyncio.sleep(0.01)


async def test_nobody_there() -> None:
    async with fake_server.serving(lambda asked, writer: asyncio.sleep(0)) as server:
        gone = server
    assert (await ask(gone)).failed == "no connection"


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://h:8000/v1/", ServerAddress("h", 8000)),
        ("h:8000", ServerAddress("h", 8000)),
        ("https://api.example.org/v1", ServerAddress("api.example.org", 443, "", True)),
        ("http://h/openai/v1", ServerAddress("h", 80, "/openai")),
        ("http://[::1]:9", ServerAddress("::1", 9)),
    ],
)
def test_addresses(url: str, origin: ServerAddress) -> None:
    assert ServerAddress.from_url(url) == origin
    assert ServerAddress.from_url(origin.url) == origin


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "http://h:99999999"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="not the address of a server"):
        ServerAddress.from_url(url)
