"""What happens to streams when something goes wrong: clients that leave or do not read, floods, shutdown, raw HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from services.gateway.generation import answer_memory
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.service import RequestTimeouts
from tests.support.model_folder import make_folder
from tests.system.scripted_gateway import SCRIPT, Running, scripted

WAIT_S = 90.0  # far beyond what anything takes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("toy"), context=1 << 20)


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[Running]:
    """Patient, except that it shows life often: a test on a busy machine is a slow client, too."""
    limits = RequestLimits(max_body_bytes=100_000, body_s=WAIT_S)
    with scripted(folder, limits=limits, patience=RequestTimeouts(stall_s=WAIT_S, ping_s=0.1)) as running:
        yield running


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=WAIT_S) as opened:
        yield opened


def until(true: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def post(
    gateway: Running,
    prompt: str | list[int],
    stream: bool,
    receive_bytes: int | None = None,
    **fields: object,
) -> socket.socket:
    """A raw connection that has sent a completion request and reads nothing."""
    host, port = gateway.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(WAIT_S)
    connection.connect((host, int(port)))
    body = msgspec.json.encode({"model": "toy", "prompt": prompt, "stream": stream, **fields})
    connection.sendall(head(host, len(body)) + body)
    return connection


def head(host: str, num_bytes: int) -> bytes:
    """Of a completion request whose body has so many bytes."""
    lines = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{lines}content-length: {num_bytes}\r\n\r\n".encode()


def read_all(connection: socket.socket) -> tuple[bytes, bool]:
    """Everything until the end, and whether the end was a reset."""
    read = b""
    try:
        while part := connection.recv(65536):
            read += part
    except ConnectionResetError:
        return read, True
    return read, False


def read_to_end(connection: socket.socket) -> bool:
    """Reads an answer; returns whether it has its end, so that the connection may be kept."""
    read = b""
    try:
        while not read.endswith(b"0\r\n\r\n"):
            if not (part := connection.recv(65536)):
                return False
            read += part
    except ConnectionResetError:
        return False
    return True


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["HANG", "SLOW"])
def test_a_client_that_leaves_is_noticed_at_once(gateway: Running, stream: bool, prompt: str) -> None:
    left = gateway.script.left
    connection = post(gateway, prompt, stream, max_tokens=10_000, ignore_eos=True)
    until(lambda: bool(gateway.script.open))
    connection.close()
    until(lambda: not gateway.script.open)
    assert gateway.script.left == left + 1
    until(lambda: not gateway.service.open)


def test_all_sequences_of_a_client_that_leaves_are_given_up(gateway: Running) -> None:
    connection = post(gateway, "SLOW", True, n=4, max_tokens=10_000, ignore_eos=True)
    until(lambda: len(gateway.script.open) == 4)
    connection.close()
    until(lambda: not gateway.script.open)


def test_a_stream_that_waits_after_its_first_token_shows_life(gateway: Running) -> None:
    with post(gateway, "HANG-LATE", True) as connection:
        seen = b""
        while seen.count(b": ping\n\n") < 3:
            seen += connection.recv(65536)
        assert seen.index(b"data:") < seen.index(b": ping")


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_token_keeps_its_status_however_late(
    gateway: Running, stream: bool
) -> None:
    """The script fails after five times the interval of pings."""
    with post(gateway, "FAIL-SLOWLY", stream) as connection:
        seen = b""
        while b"}}" not in seen and b"[DONE]" not in seen:
            seen += connection.recv(65536)
    assert seen.startswith(b"HTTP/1.1 503 "), seen
    assert b'"code":"no_workers"' in seen and b"x-should-retry: true" in seen


def test_a_reader_who_takes_nothing_is_cut_and_others_never_feel_it(folder: Path) -> None:
    asked = {"model": "toy", "prompt": "x", "max_tokens": 20, "stream": True}
    with (
        scripted(folder, patience=RequestTimeouts(stall_s=2.0)) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=WAIT_S) as http,
    ):
        stuck = [post(running, "FLOOD", True, 4096, max_tokens=1_000_000, ignore_eos=True) for _ in range(3)]
        answers = [http.post("/v1/completions", json=asked) for _ in range(5)]
        assert all(answer.text.rstrip().endswith("data: [DONE]") for answer in answers)
        until(lambda: running.script.left == 3)
        assert not running.script.open
        for connection in stuck:
            read, reset = read_all(connection)
            assert reset
            assert b"[DONE]" not in read
            assert not read.endswith(b"0\r\n\r\n")
            connection.close()
        until(lambda: "diptych:slow_readers_cut_total 3.0" in http.get("/metrics").text)


def test_slow_readers_of_complete_answers_do_not_keep_others_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_memory, "MIN_READ_S", 0.2)
    asked: dict[str, object] = {"max_tokens": 1, "echo": True, "logprobs": 5}
    with (
        scripted(folder, patience=RequestTimeouts(stall_s=60.0)) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=WAIT_S) as http,
    ):
        slow = [post(running, [5] * 8_000, False, 4096, **asked) for _ in range(13)]
        memory = running.service._answers
        until(lambda: len(memory._readers.get("", ())) == 13)
        time.sleep(0.5)
        # As if they filled what one tenant may hold, which is everybody here.
        memory.max_bytes = max(1, 2 * memory.held_bytes)
        answer = http.post("/v1/completions", json={"model": "toy", "prompt": "hi", "max_tokens": 5})
        assert answer.status_code == 200, answer.text
        until(lambda: len(running.service.open) == 12)
        assert "diptych:slow_readers_cut_total 1.0" in http.get("/metrics").text
        ends = Counter(read_to_end(connection) for connection in slow)
        assert ends == {True: 12, False: 1}, "no more than needed"
        for connection in slow:
            connection.close()


def test_a_slow_reader_gets_everything(gateway: Running) -> None:
    with post(gateway, "FLOOD", True, 4096, max_tokens=3000, ignore_eos=True) as connection:
        read, deadline_s = b"", time.monotonic() + WAIT_S
        while not read.endswith(b"0\r\n\r\n"):
            read += connection.recv(8192)
            time.sleep(0.001)
            assert time.monotonic() < deadline_s
        assert b"data: [DONE]" in read


def test_a_reader_too_far_behind_is_cut_before_memory_fills(folder: Path) -> None:
    limits = RequestLimits(max_stream_bytes=20_000)
    with (
        scripted(folder, limits=limits, patience=RequestTimeouts(stall_s=60.0)) as running,
        post(running, "FLOOD", True, 4096, max_tokens=1_000_000, ignore_eos=True, logprobs=5),
    ):
        until(lambda: running.script.left == 1)  # given up; it may have been open for a moment only
        assert not running.script.open
        assert (
            sum(voice.answer.waiting_bytes for one in running.service.open for voice in one.streams) < 100_000
        )


def test_a_failure_is_never_a_clean_end(gateway: Running) -> None:
    with post(gateway, "FAIL-LATE", True) as connection:
        read = b""
        while not read.endswith(b"0\r\n\r\n"):
            read += connection.recv(65536)
    assert b'"code":"worker_lost"' in read
    assert read.index(b'"error"') < read.index(b"[DONE]")


def test_our_own_crash_within_a_stream_resets_the_connection(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("inside")

    monkeypatch.setattr("services.gateway.generation.completion_format.CompletionFormat.end_chunk", crash)
    with post(gateway, "x", True, max_tokens=5) as connection:
        read, _ = read_all(connection)
    assert b"data:" not in read or b"[DONE]" not in read
    assert not read.endswith(b"0\r\n\r\n")
    monkeypatch.undo()
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as client:
        monkeypatch.setattr("services.gateway.generation.completion_format.CompletionFormat.end_chunk", crash)
        with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError, httpx.ReadError)):
            list(client.completions.create(model="toy", prompt="x", max_tokens=5, stream=True))


@pytest.mark.parametrize(("tokens", "drain_s"), [(30, WAIT_S), (1_000_000, 0.3)])
def test_a_shutdown_drains_then_says_so_in_the_stream(folder: Path, tokens: int, drain_s: float) -> None:
    """An answer that ends in time is given whole; one that does not ends in an error that its reader sees."""
    texts: list[str] = []
    failed: list[str | None] = []

    def read(running: Running) -> None:
        with openai.OpenAI(base_url=running.api, api_key="none", max_retries=0, timeout=WAIT_S) as client:
            asked: dict[str, Any] = {"model": "toy", "prompt": "SLOW", "max_tokens": tokens}
            try:
                parts = list(client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}))
                texts.append("".join(part.choices[0].text for part in parts))
            except openai.APIError as error:
                failed.append(error.code)

    with scripted(folder, drain_s=drain_s) as running:
        thread = threading.Thread(target=read, args=(running,))
        thread.start()
        until(lambda: bool(running.script.seen))
    thread.join(WAIT_S)
    if tokens == 30:
        assert texts == [SCRIPT[: len(texts[0])]] and texts[0] and not failed
    else:
        assert failed == ["server_shutting_down"] and not texts


# ---- raw HTTP


def raw(gateway: Running, content: bytes) -> bytes:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.sendall(content)
        return read_all(connection)[0]


def test_what_is_not_http_is_refused_in_json(gateway: Running) -> None:
    answer = raw(gateway, b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"code":"invalid_http"' in answer


@pytest.mark.parametrize(
    "endless", [b"x: " + b"a" * 10_000_000, b"".join(b"x%d: y\r\n" % i for i in range(50_000))]
)
def test_endless_headers_are_refused(gateway: Running, endless: bytes) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + endless)
        except (ConnectionResetError, BrokenPipeError):
            return
        read, reset = read_all(connection)
        assert reset or read.startswith(b"HTTP/1.1 431")


def test_a_body_that_is_announced_too_large_is_not_read(gateway: Running) -> None:
    answer = raw(gateway, head("localhost", 999_999_999))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"code":"request_too_large"' in answer


def test_a_body_that_grows_too_large_is_not_read_on(gateway: Running, http: httpx.Client) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 10_000

    answer = http.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_body_that_does_not_come_is_not_waited_for(folder: Path) -> None:
    with scripted(folder, limits=RequestLimits(body_s=0.3)) as running:
        assert raw(running, head("localhost", 10) + b"{").startswith(b"HTTP/1.1 408")
