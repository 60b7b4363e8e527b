"""A small HTTP/1.1 client for streams: httptools reads the bytes, connections are kept, every event is stamped.

It does what a load generator needs and no more: one request at a time per connection, no redirects, no proxies. An
answer takes a fraction of the CPU that a general client spends on it; the report says how much it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from diptych.errors import ConfigError
from services.bench.events import Answer, error_of

MAX_ERROR_BYTES = 64 << 10
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is. `path` is in front of every route, and ends without a slash or `/v1`."""

    host: str
    port: int
    path: str = ""
    tls: bool = False

    @classmethod
    def of(cls, url: str) -> Origin:
        """Raises ConfigError if that is no address of a server."""
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _no_url(url, str(error)) from None
        if parts.scheme not in ("http", "https") or not host:
            raise _no_url(url, "it is neither http:// nor https:// with a host")
        tls = parts.scheme == "https"
        return cls(host, port or (443 if tls else 80), parts.path.rstrip("/").removesuffix("/v1"), tls)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


def _no_url(url: str, why: str) -> ConfigError:
    return ConfigError(f"{url!r} is not the address of a server", why, "--url http://127.0.0.1:8000")


class Connection(asyncio.Protocol):
    """One connection, which carries one request after another. httptools calls the `on_` methods."""

    def __init__(self) -> None:
        self.used = False  # it has carried an answer before
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._over: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._heard = False
        self._status, self._error, self._now_s = 0, b"", 0.0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def heard(self) -> bool:
        """Something of the present answer has arrived."""
        return self._heard

    async def ask(self, request: bytes, answer: Answer) -> None:
        """Send, and read into `answer` until its end. Cancelled, it hangs up."""
        assert self._transport is not None
        self._answer, self._parser = answer, httptools.HttpResponseParser(self)
        self._over = asyncio.get_running_loop().create_future()
        self._heard, self._status, self._error = False, 0, b""
        self._transport.write(request)
        try:
            await self._over
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._answer = None
        self.used = True

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not an instance of it

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nobody asked
            self.abort()
            return
        self._now_s = time.monotonic()
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._answer.fail("not HTTP", str(error))
            self.abort()
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is None:
            return
        if self._status == 200 and self._answer.ended:  # its length was not given
            self._complete()
        else:
            self._answer.fail("broken off", str(error or "the connection was closed"))
            self._end()

    def on_headers_complete(self) -> None:
        self._status = int(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._answer is None:
            return
        if self._status == 200:
            self._answer.feed(body, self._now_s)
        elif len(self._error) < MAX_ERROR_BYTES:
            self._error += body

    def on_message_complete(self) -> None:
        if self._status >= 200:  # not "100 Continue"
            if not self._parser.should_keep_alive():
                self._close()
            self._complete()

    def _complete(self) -> None:
        if self._answer is None:
            return
        if self._status == 200:
            self._answer.finish(self._now_s)
        else:
            kind, told = refusal(self._status, self._error)
            self._answer.fail(kind, told)
        self._end()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _end(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


def refusal(status: int, body: bytes) -> tuple[str, str]:
    """A name that can be counted, and the server's words."""
    with contextlib.suppress(msgspec.DecodeError):
        told = msgspec.json.decode(body)
        if isinstance(told, dict):
            code, words = error_of(told.get("error", told), "")
            return f"{status} {code}".strip(), words
    return str(status), body.decode(errors="replace").strip()


class Client:
    """Asks one server. Connections that are idle are used again, the latest first."""

    def __init__(self, origin: Origin, key: str | None = None) -> None:
        self.origin = origin
        self._idle: deque[Connection] = deque()
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        head = [f"host: {host}:{origin.port}", "content-type: application/json", "accept: text/event-stream"]
        head += [f"authorization: Bearer {key}"] if key else []
        self._head = "\r\n".join(head)
        self._tls = ssl.create_default_context() if origin.tls else None

    async def ask(self, route: str, body: bytes, timeout_s: float, answer: Answer) -> None:
        """Post `body` and read the stream into `answer`, to its end.

        What goes wrong is in the answer; nothing is raised. Cancelled, it hangs up.
        """
        begin = (
            f"POST {self.origin.path}{route} HTTP/1.1\r\n{self._head}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(begin.encode() + body, answer)
        except TimeoutError:
            answer.fail("timeout", f"no end after {timeout_s:g} s")
        except OSError as error:
            answer.fail("no connection", str(error))

    def close(self) -> None:
        """Hang up what is idle."""
        while self._idle:
            self._idle.pop().abort()

    async def _send(self, request: bytes, answer: Answer) -> None:
        while True:
            connection = await self._connection()
            again = connection.used
            await connection.ask(request, answer)
            if again and answer.failed and not connection.heard:
                answer.failed = answer.told = ""  # the server had hung up before it came: it has not seen it
                continue
            if connection.open and (
                not answer.failed or answer.failed[:1].isdigit()
            ):  # or refused, but whole
                self._idle.append(connection)
            else:
                connection.abort()
            return

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        made = asyncio.get_running_loop().create_connection(
            Connection, self.origin.host, self.origin.port, ssl=self._tls
        )
        try:
            return (await asyncio.wait_for(made, CONNECT_S))[1]
        except TimeoutError:
            raise OSError(f"no connection after {CONNECT_S:g} s") from None
