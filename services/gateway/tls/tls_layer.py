"""TLS between a client's socket and `HttpConnection`.

    socket ── ciphertext ─▶ TlsLayer ── plaintext ─▶ HttpConnection
       ◀── ciphertext ── TlsTransport ◀── plaintext ──┘

The connection exists for `HttpConnection` from the moment it is accepted. So whatever bounds clients bounds handshakes
too: a connection in a handshake is one whose request has not arrived, is counted, may have to make room for others,
and ends after `HEAD_TIMEOUT_S`. asyncio's own TLS would hide it until the handshake is done, and would keep a second
buffer of unsent bytes that nothing counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any, Protocol, cast

# Bytes that are decrypted at a time.
READ_BYTES = 64 << 10
NOT_TLS = b"this port speaks HTTPS\n"
PLAIN_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
    % (len(NOT_TLS), NOT_TLS)
)


class CertificateSource(Protocol):
    """Has the certificate that the next handshake uses."""

    @property
    def context(self) -> ssl.SSLContext:
        """What the next handshake uses."""


class HandshakePacing(Protocol):
    """Lets handshakes begin, which cost the server more than the client."""

    def begin_request(self, connection: Any, address: str, begin: Any) -> None:
        """Call `begin` when the next handshake with `address` may begin."""

    def forget_connection(self, connection: Any, address: str) -> None:
        """The connection has ended: its handshake does not begin."""


class TlsLayer(asyncio.Protocol):
    """asyncio's protocol of a connection: does TLS, and hands what is in it to `http`."""

    def __init__(self, http: asyncio.Protocol, source: CertificateSource, pacing: HandshakePacing) -> None:
        self._http, self._source, self._pacing = http, source, pacing
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._is_paced = self._is_secure = False
        # Whether the connection has ended.
        self.aborted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: a client has connected."""
        # A cast, since uvloop's transport is not an instance of asyncio.Transport.
        self._tcp = cast(asyncio.Transport, transport)
        self._context = self._source.context
        self._tls = self._context.wrap_bio(self._received, self._to_send, server_side=True)
        peer = self._tcp.get_extra_info("peername")
        self._address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        self._transport = TlsTransport(self, self._tcp)
        self._http.connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is closed."""
        self.aborted = True
        self._pacing.forget_connection(self, self._address)
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """asyncio: ciphertext has arrived."""
        self._received.write(data)
        if self._is_secure:
            self._decrypt()
        elif self._is_paced:
            self._shake_hands()
        else:
            # What else this client sends waits in the kernel until it is its turn.
            self._tcp.pause_reading()
            self._is_paced = True
            self._pacing.begin_request(self, self._address, self._begin_handshake)

    def eof_received(self) -> bool | None:
        """asyncio: the client sends no more; the connection closes."""
        return self._http.eof_received()

    def pause_writing(self) -> None:
        """asyncio: the write buffer is full."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """asyncio: the write buffer has drained."""
        self._http.resume_writing()

    def encrypt(self, data: bytes | bytearray | memoryview) -> None:
        """Send plaintext. Before the end of the handshake nothing can be sent, and what would be is dropped."""
        if not self._is_secure or self._tcp.is_closing():
            return
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        self._flush()

    def close(self) -> None:
        """Close once everything is sent, with TLS's own end; within the handshake at once."""
        if not self._is_secure:
            return self._tcp.abort()
        # The client's own end is not awaited.
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self._flush()
        self._tcp.close()

    def find_extra(self, name: str) -> Any:
        """What the transport knows of TLS under this name; None of other names."""
        return {"sslcontext": self._context, "ssl_object": self._tls}.get(name)

    def _begin_handshake(self) -> None:
        """It is this client's turn."""
        if self._tcp.is_closing():
            return
        self._shake_hands()
        if not self._tcp.is_closing():
            self._tcp.resume_reading()

    def _shake_hands(self) -> None:
        """Do what can be done of the handshake."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return self._flush()
        except ssl.SSLError as error:
            # What a client of plain HTTP can read.
            if (error.reason or "").lower() == "http_request":
                self._tcp.write(PLAIN_ANSWER)
            else:
                self._flush()
            return self._tcp.close()
        self._is_secure = True
        self._flush()
        self._decrypt()

    def _decrypt(self) -> None:
        """Hand on what has arrived."""
        parts, has_ended = [], False
        try:
            while part := self._tls.read(READ_BYTES):
                parts.append(part)
            has_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            has_ended = True
        except ssl.SSLError:
            # What arrived was tampered with, or is no TLS.
            self._flush()
            return self._tcp.abort()
        if parts:
            self._http.data_received(b"".join(parts))
        self._flush()
        if has_ended and not self._tcp.is_closing():
            self._http.eof_received()
            self.close()

    def _flush(self) -> None:
        """Send the ciphertext that is ready."""
        if self._to_send.pending:
            self._tcp.write(self._to_send.read())


class TlsTransport(asyncio.Transport):
    """The transport of a connection as `HttpConnection` sees it: plaintext. Its buffer is the socket's."""

    def __init__(self, layer: TlsLayer, tcp: asyncio.Transport) -> None:
        super().__init__()
        self._layer, self._tcp = layer, tcp

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the socket, or of TLS, under this name."""
        found = self._layer.find_extra(name)
        return self._tcp.get_extra_info(name, default) if found is None else found

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send plaintext."""
        self._layer.encrypt(data)

    def close(self) -> None:
        """Close once everything is sent."""
        if not self._tcp.is_closing():
            self._layer.close()

    def abort(self) -> None:
        """Close at once."""
        self._tcp.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closed, or will be."""
        return self._tcp.is_closing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """From which number of unsent bytes on writing pauses, and goes on again."""
        self._tcp.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        """Unsent bytes, of ciphertext."""
        return self._tcp.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Receive no more."""
        self._tcp.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        self._tcp.resume_reading()

    def can_write_eof(self) -> bool:
        """TLS closes both directions at once."""
        return False
