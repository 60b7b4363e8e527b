"""Clients that are as much work as their bounds allow, for `benchmarks.hostile`. They go on until they are cancelled.

`unread_answers` and `returning_sockets` have no key. All others have one key, and use files and batches too. Each
client counts what became of its requests, by its own name and the status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.gateway.http.connection import MAX_PIPELINED

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Sockets of `unread_answers`, as many of `returning_sockets`, and how long each lives.
UNREAD_SOCKETS, UNREAD_S = 400, 6.0
# As many requests at a time as may be pipelined; so many times that the answers are more than the kernel takes.
UNREAD_REQUESTS = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * MAX_PIPELINED
UNREAD_BURSTS, UNREAD_PAUSE_S = 4, 0.5
SLOW_READERS, SLOW_PIECE, SLOW_PAUSE_S = 13, 4096, 1.0
LINE_BYTES = (8 << 20) - 4096
ANSWER_S = 120.0
# What a client meets whose connection is closed; anyio reads the address of one that was closed at once.
NO_ANSWER = (httpx.HTTPError, AttributeError)
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class HostileTarget:
    """The gateway, its model with the context in tokens, the clients' key, and what became of their requests."""

    port: int
    model: str
    context: int
    key: str
    outcomes: Counter[str] = field(default_factory=Counter)

    def open_http(self) -> httpx.AsyncClient:
        """A client with the key, over new connections."""
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=ANSWER_S)

    def count(self, client: str, outcome: object) -> None:
        """Count one outcome of a client."""
        self.outcomes[f"{client} {outcome}"] += 1


async def unread_answers(target: HostileTarget) -> None:
    """Sockets with small buffers that send many requests for the page, without a key, and read nothing."""
    await hold_sockets(target, "unread_answers", returns=False)


async def returning_sockets(target: HostileTarget) -> None:
    """The same, but a socket that is cut comes again at once."""
    await hold_sockets(target, "returning_sockets", returns=True)


async def hold_sockets(target: HostileTarget, client: str, returns: bool) -> None:
    """Sockets that read nothing, without a key. Without `returns` one that is cut lives for its time all the same."""

    async def hold_socket() -> None:
        while True:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(UNREAD_S):
                    await loop.sock_connect(connection, ("127.0.0.1", target.port))
                    try:
                        for _ in range(UNREAD_BURSTS):
                            await loop.sock_sendall(connection, UNREAD_REQUESTS)
                            await asyncio.sleep(UNREAD_PAUSE_S)
                    except ConnectionError:
                        if returns:
                            raise
                    await asyncio.sleep(UNREAD_S)
            except OSError as error:
                # TimeoutError is one: the socket has lived for its time.
                target.count(client, type(error).__name__)
                await asyncio.sleep(0.1)
            finally:
                connection.close()

    async with asyncio.TaskGroup() as sockets:
        for _ in range(UNREAD_SOCKETS):
            sockets.create_task(hold_socket())


async def slow_readers(target: HostileTarget) -> None:
    """Complete answers of many megabytes, each read at 4 KiB per second."""
    length = target.context - 48
    body = {
        "model": target.model, "prompt": [[5] * length] * 2, "n": 8, "echo": True, "logprobs": 5, "max_tokens": 1,
    }  # fmt: skip

    async def read_slowly() -> None:
        async with target.open_http() as http:
            while True:
                async with (
                    counted(target, "slow_readers"),
                    http.stream("POST", COMPLETIONS, json=body) as answer,
                ):
                    target.count("slow_readers", answer.status_code)
                    async for _ in answer.aiter_raw(SLOW_PIECE):
                        await asyncio.sleep(SLOW_PAUSE_S)

    async with asyncio.TaskGroup() as readers:
        for _ in range(SLOW_READERS):
            readers.create_task(read_slowly())


async def slow_downloads(target: HostileTarget) -> None:
    """Many downloads of one file, each at 4 KiB per second."""
    async with target.open_http() as http:
        file_id = await upload_file(target, http, "slow_downloads", b"x" * (4 << 20))

    async def download() -> None:
        async with target.open_http() as http:
            while True:
                path = f"/v1/files/{file_id}/content"
                async with counted(target, "slow_downloads"), http.stream("GET", path) as answer:
                    target.count("slow_downloads", answer.status_code)
                    async for _ in answer.aiter_raw(SLOW_PIECE):
                        await asyncio.sleep(SLOW_PAUSE_S)

    async with asyncio.TaskGroup() as downloads:
        for _ in range(4 * SLOW_READERS):
            downloads.create_task(download())


async def boundary_uploads(target: HostileTarget) -> None:
    """Uploads whose content looks like the boundary of the form at every step."""
    content = b"\r\n--" + BOUNDARY[:3].encode()
    content *= (8 << 20) // len(content)

    async def send_forms() -> None:
        async with target.open_http() as http:
            while True:
                await upload_file(target, http, "boundary_uploads", content)

    async with asyncio.TaskGroup() as forms:
        for _ in range(2):
            forms.create_task(send_forms())


async def nested_lines(target: HostileTarget) -> None:
    """Batches over a file whose lines have a model of millions of lists."""
    head, tail = b'{"model":[', b'[]],"messages":[]}}'
    filler = b"[[]]," * ((LINE_BYTES - 200) // 5)
    await run_batches(target, "nested_lines", [_line(str(n), head + filler + tail) for n in range(3)])


async def long_names(target: HostileTarget) -> None:
    """Batches over a file whose lines have one unknown field each, with a name of megabytes."""
    name = b"k" * (LINE_BYTES - 200)
    lines = [
        b'{"custom_id":"%d","method":"POST","url":"/v1/completions","%s":1,"body":{}}\n' % (n, name)
        for n in range(3)
    ]
    await run_batches(target, "long_names", lines)


async def long_ids(target: HostileTarget) -> None:
    """Batches over a file of 50,000 lines with the longest custom_ids."""
    body = json.dumps({"model": target.model, "prompt": "a", "max_tokens": 1}).encode()
    lines = [_line(f"{n:06d}" + "\U0001f600" * 506, body) for n in range(50_000)]
    await run_batches(target, "long_ids", lines, pause_s=2.0)


async def many_batches(target: HostileTarget) -> None:
    """Batches that fail at once, and beside each of them one that stays open, as many as there may be."""
    body = {"model": target.model, "prompt": "a", "max_tokens": target.context - 64, "ignore_eos": True}
    async with target.open_http() as http:
        wrong = await upload_file(target, http, "many_batches", b"x")
        long = await upload_file(target, http, "many_batches", _line("a", json.dumps(body).encode()))
        while True:
            for file_id in (wrong, long):
                async with counted(target, "many_batches"):
                    await create_batch(target, http, "many_batches", file_id)


async def long_answers(target: HostileTarget) -> None:
    """Batches whose answers are the longest that there are."""
    body = {
        "model": target.model, "messages": [{"role": "user", "content": "a"}], "n": 8, "ignore_eos": True,
        "logprobs": True, "top_logprobs": 20, "max_tokens": target.context - 64,
    }  # fmt: skip
    lines = [_line(str(n), json.dumps(body).encode(), CHAT) for n in range(8)]
    await run_batches(target, "long_answers", lines, CHAT)


HOSTILE_CLIENTS: tuple[Callable[[HostileTarget], Coroutine[Any, Any, None]], ...] = (
    unread_answers, returning_sockets, slow_readers, slow_downloads, boundary_uploads, nested_lines, long_names,
    long_ids, many_batches, long_answers,
)  # fmt: skip
BOUNDARY = "X_0123456789"


async def run_batches(
    target: HostileTarget, client: str, lines: list[bytes], endpoint: str = COMPLETIONS, pause_s: float = 0.2
) -> None:
    """Upload a file and run one batch over it after the other."""
    async with target.open_http() as http:
        file_id = await upload_file(target, http, client, b"".join(lines))
        while True:
            async with counted(target, client):
                batch = await create_batch(target, http, client, file_id, endpoint)
                while batch.get("status", "failed") not in ENDED:
                    await asyncio.sleep(pause_s)
                    batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
                target.count(client, batch.get("status"))
            await asyncio.sleep(pause_s)


async def create_batch(
    target: HostileTarget, http: httpx.AsyncClient, client: str, file_id: str, endpoint: str = COMPLETIONS
) -> dict[str, Any]:
    """The body of the answer. A refusal is followed by a pause."""
    asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
    answer = await http.post("/v1/batches", json=asked)
    target.count(client, answer.status_code)
    if answer.status_code != 200:
        await asyncio.sleep(1.0)
    found: dict[str, Any] = answer.json()
    return found


async def upload_file(target: HostileTarget, http: httpx.AsyncClient, client: str, content: bytes) -> str:
    """The id of a file with this content, after as many tries as are necessary."""
    form = (
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    ).encode()
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    body = form + content + f"\r\n--{BOUNDARY}--\r\n".encode()
    while True:
        async with counted(target, client):
            answer = await http.post("/v1/files", content=body, headers=headers)
            target.count(client, f"upload {answer.status_code}")
            if answer.status_code == 200:
                return str(answer.json()["id"])
        await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def counted(target: HostileTarget, client: str) -> AsyncIterator[None]:
    """Counts what ends a request without an answer."""
    try:
        yield
    except (*NO_ANSWER, json.JSONDecodeError) as error:
        target.count(client, type(error).__name__)
        await asyncio.sleep(0.2)


def _line(custom_id: str, body: bytes, url: str = COMPLETIONS) -> bytes:
    """A line of an input file."""
    head = json.dumps({"custom_id": custom_id, "method": "POST", "url": url}, ensure_ascii=False).encode()
    return head[:-1] + b',"body":' + body + b"}\n"
