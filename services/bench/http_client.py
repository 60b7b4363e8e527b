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
from services.bench.sse import StreamedAnswer, error_words

MAX_ERROR_BYTES = 64 << 10
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is. `path` is in front of every route, and ends without a slash or `/v1`."""

    host: str
    port: int
    path: str = ""
    tls: bool = False

    @classmethod
    def from_url(cls, url: str) -> ServerAddress:
        """The address in `url`. Raises ConfigError if `url` is not the address of a server."""
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _url_error(url, str(error)) from None
        if parts.scheme not in ("http", "https") or not host:
            raise _url_error(url, "it is neither http:// nor https:// with a host")
        tls = parts.scheme == "https"
        return cls(host, port or (443 if tls else 80), parts.path.rstrip("/").removesuffix("/v1"), tls)

    @property
    def url(self) -> str:
        """The base URL, without a slash or `/v1` at the end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


def _url_error(url: str, why: str) -> ConfigError:
    return ConfigError(f"{url!r} is not the address of a server", why, "--url http://127.0.0.1:8000")


class BenchConnection(asyncio.Protocol):
    """One connection, which carries one request after another. httptools calls the `on_` methods."""

    def __init__(self) -> None:
        # Whether it has carried a response before.
        self.was_used = False
        self._transport: asyncio.Transport | None = None
        self._answer: StreamedAnswer | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._received = False
        self._status, self._error, self._now_s = 0, b"", 0.0

    @property
    def is_open(self) -> bool:
        """Whether the connection can carry another request."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_received(self) -> bool:
        """Whether any byte of the current response has arrived."""
        return self._received

    async def send_request(self, request: bytes, answer: StreamedAnswer) -> None:
        """Send a request, and read the response into `answer` until its end. If cancelled, the connection is closed."""
        assert self._transport is not None
        self._answer, self._parser = answer, httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._received, self._status, self._error = False, 0, b""
        self._transport.write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._answer = None
        self.was_used = True

    def abort(self) -> None:
        """Close the connection at once; what was to be sent is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is up."""
        # A cast, since uvloop's transport is not an instance of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes have arrived. The time of their events is now."""
        if self._answer is None:  # nobody asked
            self.abort()
            return
        self._now_s = time.monotonic()
        self._received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._answer.record_failure("not HTTP", str(error))
            self.abort()
            self._resolve()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: the connection is closed. The response is complete if its stream had ended; else it has failed."""
        if self._answer is None:
            return
        if self._status == 200 and self._answer.ended:
            # The stream ended with its final event; a server that gives no length closes the connection after it.
            self._complete_answer()
        else:
            self._answer.record_failure("broken off", str(error or "the connection was closed"))
            self._resolve()

    def on_headers_complete(self) -> None:
        """httptools: status and headers are read."""
        self._status = int(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        """httptools: a part of the body: events of a response, or the text of an error."""
        if self._answer is None:
            return
        if self._status == 200:
            self._answer.feed_bytes(body, self._now_s)
        elif len(self._error) < MAX_ERROR_BYTES:
            self._error += body

    def on_message_complete(self) -> None:
        """httptools: the response is complete."""
        # An interim response such as "100 Continue" is not the answer.
        if self._status >= 200:
            if not self._parser.should_keep_alive():
                self._close()
            self._complete_answer()

    def _complete_answer(self) -> None:
        if self._answer is None:
            return
        if self._status == 200:
            self._answer.end_stream(self._now_s)
        else:
            kind, reason = refusal_reason(self._status, self._error)
            self._answer.record_failure(kind, reason)
        self._resolve()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _resolve(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


def refusal_reason(status: int, body: bytes) -> tuple[str, str]:
    """(short name of the failure, by which failures are counted; the server's own words)."""
    with contextlib.suppress(msgspec.DecodeError):
        document = msgspec.json.decode(body)
        if isinstance(document, dict):
            code, words = error_words(document.get("error", document), "")
            return f"{status} {code}".strip(), words
    return str(status), body.decode(errors="replace").strip()


class BenchClient:
    """Asks one server. Connections that are idle are used again, the latest first."""

    def __init__(self, address: ServerAddress, key: str | None = None) -> None:
        self.address = address
        self._idle: deque[BenchConnection] = deque()
        host = f"[{address.host}]" if ":" in address.host else address.host
        head = [f"host: {host}:{address.port}", "content-type: application/json", "accept: text/event-stream"]
        head += [f"authorization: Bearer {key}"] if key else []
        self._head = "\r\n".join(head)
        self._tls = ssl.create_default_context() if address.tls else None

    async def post_stream(self, route: str, body: bytes, timeout_s: float, answer: StreamedAnswer) -> None:
        """Post `body` and read the stream into `answer`, to its end.

        What goes wrong is in the answer; nothing is raised. Cancelled, it hangs up.
        """
        begin = (
            f"POST {self.address.path}{route} HTTP/1.1\r\n{self._head}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self._send_request(begin.encode() + body, answer)
        except TimeoutError:
            answer.record_failure("timeout", f"no end after {timeout_s:g} s")
        except OSError as error:
            answer.record_failure("no connection", str(error))

    def close_idle(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().abort()

    async def _send_request(self, request: bytes, answer: StreamedAnswer) -> None:
        while True:
            connection = await self._idle_connection()
            again = connection.was_used
            await connection.send_request(request, answer)
            if again and answer.failed and not connection.has_received:
                # The server had closed the kept-alive connection before the request came, so it has not seen the
                # request: it is sent again.
                answer.failed = answer.error_text = ""
                continue
            # The connection can be reused if the response is complete, even if it was a refusal (its failure is then
            # a status code).
            if connection.is_open and (not answer.failed or answer.failed[:1].isdigit()):
                self._idle.append(connection)
            else:
                connection.abort()
            return

    async def _idle_connection(self) -> BenchConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        made = asyncio.get_running_loop().create_connection(
            BenchConnection, self.address.host, self.address.port, ssl=self._tls
        )
        try:
            return (await asyncio.wait_for(made, CONNECT_TIMEOUT_S))[1]
        except TimeoutError:
            raise OSError(f"no connection after {CONNECT_TIMEOUT_S:g} s") from None
