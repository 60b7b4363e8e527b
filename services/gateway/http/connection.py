"""Handles a client's HTTP connection: uvicorn's protocol class, with limits on memory and time.

uvicorn can end a response cleanly, or close the connection once all buffered bytes have left. Neither is right for a
client that reads nothing, or for an answer that must not look complete. So this class can also reset a connection.
At every moment some time limit ends a connection whose client does nothing:

    no complete request head         `HEAD_TIMEOUT_S` after its first byte, or after the connection was made
    a body that is being read        `request_body`
    an answer that is being made     the deadline of its request
    an answer that is read slowly    `stall_s`, in which less than `MIN_READ_BYTES_PER_S` was read
    nothing after an answer          `KEEP_ALIVE_S`
    closed, but not flushed          `FLUSH_TIMEOUT_S`
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import struct
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.log_format import about_request
from diptych.logs.request_ids import RequestIds, new_request_id
from services.gateway.http.access_keys import AccessKeys
from services.gateway.http.connection_table import PROGRESS_BYTES, ConnectionPhase, ConnectionTable
from services.gateway.http.log_rate_limit import LogRateLimit
from services.gateway.http.stranger_pacing import StrangerPacing

# Limits of a request's head: bytes of its request line and headers together, and number of its headers and trailers.
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
# Bytes that a header counts in addition to its name and value: ": " and the line end.
HEADER_OVERHEAD_BYTES = 4
# The whole head must have arrived within this many seconds.
HEAD_TIMEOUT_S = 15.0
KEEP_ALIVE_S = 15
# Seconds that a closed connection may take to send what is buffered.
FLUSH_TIMEOUT_S = 15.0
# Seconds for which a client may read too little of its answer. A connection's `stall_s` replaces this default.
STALL_TIMEOUT_S = 30.0
# Seconds that the task which writes the answer has to give it up after a stall.
STALLED_GRACE_S = 1.0
MIN_READ_BYTES_PER_S = 4 << 10
# Most requests on one connection that wait for the answer to an earlier one. The heads of all that have arrived are
# parsed at once, before anything else is done.
MAX_PIPELINED = 4
# Most bytes of an answer that are buffered per connection, in this process and in the kernel.
BUFFER_BYTES = 16 << 10
KERNEL_BYTES = 128 << 10
# The value of SO_LINGER that makes closing reset the connection: on, with 0 seconds.
LINGER_RESET = struct.pack("ii", 1, 0)
CONNECTION_EXTENSION = "diptych.connection"
# This extension is in a request's scope once the whole body has arrived.
BODY_ARRIVED_EXTENSION = "diptych.arrived"

# Strangers can cause its lines without limit.
log = logging.getLogger(__name__)
log.addFilter(LogRateLimit())


class ClientStalled(Exception):
    """The client reads its answer too slowly, or not at all."""


class HttpConnection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, with bounds on what a client may hold.

    Each request's scope has its connection under `CONNECTION_EXTENSION`. The parser calls the methods `on_...`.
    asyncio, uvicorn and `ResponseWriter` call the other public ones.
    """

    # Bytes of the request line and of the headers parsed so far.
    _head_bytes = 0
    _num_headers = 0
    # Number of bytes that arrived before the head was complete.
    _raw_bytes = 0
    # Whether the head is not complete, or no request has begun.
    _in_head = True
    # Ends a connection whose head, or whose last bytes, take too long.
    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    # Number of buffered bytes at the last check of the client.
    _unsent_bytes = 0
    # Number of bytes of bodies since the client last made progress.
    _new_body_bytes = 0
    # Whether a part of the body that is being parsed has not arrived.
    _in_body = False
    # Whether an accepted key came with the request that is being answered, or no key is needed.
    is_known = False
    # Whether the tenant of this request has a share of the connections left for it.
    has_share = True
    # Whether the next pipelined request waits until the answer before it is sent.
    _next_waits = False
    stalled = False
    # Whether the connection was reset or has ended, so that nobody is there for an answer.
    aborted = False
    # The request whose answer began last.
    _answered: RequestResponseCycle | None = None
    stall_s = STALL_TIMEOUT_S

    def __init__(
        self,
        *arguments: Any,
        connections: ConnectionTable,
        keys: AccessKeys,
        strangers: StrangerPacing,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._table, self._keys, self._strangers = connections, keys, strangers
        if not self.logger.filters:
            # Every invalid request logs a warning, so warnings are limited.
            self.logger.addFilter(LogRateLimit())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Add the connection to the table. If the table is full and nothing in it can be evicted, answer 503."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        if self._table.add_connection(self):
            self._arm_timer(HEAD_TIMEOUT_S)
        else:
            self._refuse_request(FailureReason.TOO_MANY_CONNECTIONS, "too many connections are open")

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the table, stop its timers, and tell the request that is being answered."""
        self._table.remove_connection(self)
        self._disarm_timer()
        self._stop_stall_timer()
        self.aborted = True
        self._strangers.forget_connection(self, self._address)
        if (answered := self._answered) is not None:
            # uvicorn tells the last request that has arrived, which may be a pipelined one.
            answered.disconnected = answered.disconnected or not answered.response_complete
            answered.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived. A request head that is too large is refused before more of it is parsed."""
        rest = memoryview(data)
        while rest and not self.transport.is_closing():
            part = bytes(rest[: MAX_HEAD_BYTES + 1 - self._raw_bytes])
            rest = rest[len(part) :]
            self._raw_bytes += len(part) if self._in_head else 0
            super().data_received(part)
            if self._raw_bytes > MAX_HEAD_BYTES:
                # A single header without an end is too large.
                self._head_bytes = self._raw_bytes
                self.send_400_response("")
        # Once for all requests of which a part has arrived.
        self._update_phase()
        if self._idle and self._timer is None and not self.transport.is_closing():
            # uvicorn stops its own timer as soon as any byte arrives.
            self._arm_timer(HEAD_TIMEOUT_S)

    def on_message_begin(self) -> None:
        """A request begins. Raises ValueError, and resets the connection, if too many are pipelined."""
        super().on_message_begin()
        self._head_bytes, self._num_headers, self._in_head = 0, 0, True
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {CONNECTION_EXTENSION: self}
        if len(self.pipeline) >= MAX_PIPELINED:
            self.abort()
            raise ValueError("too many requests ahead of their answers")

    def on_url(self, url: bytes) -> None:
        """Count the URL as a part of the head. Raises ValueError, which leads to a 431, if the head is too large."""
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header as a part of the head. Raises ValueError, which leads to a 431, if the head is too large."""
        self._num_headers += 1
        self._count_head_bytes(len(name) + len(value) + HEADER_OVERHEAD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: stop its timer. The body follows."""
        self._disarm_timer()
        self._in_head, self._raw_bytes = False, 0
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived: the client makes progress."""
        super().on_body(body)
        self._new_body_bytes += len(body)
        if self._new_body_bytes >= PROGRESS_BYTES:
            self._new_body_bytes = 0
            self._table.note_progress(self)

    def on_message_complete(self) -> None:
        """The request has arrived whole; the scope says so under `BODY_ARRIVED_EXTENSION`."""
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"][BODY_ARRIVED_EXTENSION] = True
        self._in_body = False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """A request begins to be answered: the table learns whose it is, before anything waits.

        uvicorn's `cycle` is the last one that has arrived.
        """
        self._answered = cycle
        self._update_phase()
        tenant = self._keys.find_tenant(cycle.scope["path"], cycle.scope["headers"])
        self.is_known = tenant is not None
        # Where no keys are needed, the clients of an address are one tenant.
        owner = (self._address or tenant) if tenant == "" else tenant
        self.has_share = self._table.begin_request(self, owner, self._keys.has_tenants)
        begin = functools.partial(super()._start_asgi_task, cycle, app)
        if self.is_known:
            begin()
        else:
            self._strangers.begin_request(self, self._address, begin)

    def on_response_complete(self) -> None:
        """The response is written: the connection is idle, or closes once it is flushed.

        The next pipelined request begins. After an answer to a client without a key it begins only when that answer is
        sent, so that a stranger who reads nothing has one answer at a time in this process.
        """
        if self.pipeline and not self.is_known and not self.transport.is_closing():
            # This pauses writing at once if anything is buffered.
            self.transport.set_write_buffer_limits(high=0)
            if self._is_blocked:
                self._next_waits = True
                return
            self._begin_pipelined()
        else:
            self._complete_response()

    def _begin_pipelined(self) -> None:
        """Begin the next request of a client without a key: the answer before it is sent."""
        self.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._complete_response()

    def _complete_response(self) -> None:
        """Begin the next pipelined request, if there is one."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._arm_timer(FLUSH_TIMEOUT_S)
        self._update_phase()

    def pause_writing(self) -> None:
        """The write buffer is full: check after `stall_s` that the client has read enough of it."""
        super().pause_writing()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.stall_s, self._check_reader)
        self._update_phase()
        self._table.set_unsent(self, self._unsent_bytes)

    def resume_writing(self) -> None:
        """The write buffer has drained: stop checking the client."""
        self._stop_stall_timer()
        self._table.set_unsent(self, 0)
        super().resume_writing()
        if self._next_waits:
            self._next_waits = False
            self._begin_pipelined()
        self._update_phase()

    def timeout_keep_alive_handler(self) -> None:
        """No request came for `KEEP_ALIVE_S`: close the connection."""
        self._close_after_flush()

    def shutdown(self) -> None:
        """The server stops: close an idle connection at once, another one after its response."""
        super().shutdown()
        if self.transport.is_closing():
            self._arm_timer(FLUSH_TIMEOUT_S)

    def evict(self) -> None:
        """Close the connection, to make room for another one."""
        if self._idle and not self.unsent_bytes():
            self._close_after_flush()
        else:
            self.abort()

    def has_unread_body(self, scope: Scope) -> bool:
        """Whether a part of this request's body has not arrived yet."""
        return BODY_ARRIVED_EXTENSION not in scope["extensions"]

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed, and close. `msg` is ignored: clients see only the gateway's texts."""
        if self._head_too_large:
            message = f"the request has more than {MAX_HEAD_BYTES} bytes of line and headers, or {MAX_HEADERS} headers"
            self._refuse_request(FailureReason.HEADERS_TOO_LARGE, message)
        else:
            self._refuse_request(FailureReason.INVALID_HTTP, "this is not HTTP")

    def _unsupported_upgrade_warning(self) -> None:
        """Answer a request for a protocol upgrade as plain HTTP, and close: what follows cannot be parsed."""
        if not self._idle:
            self.cycle.keep_alive = False

    @property
    def _idle(self) -> bool:
        """Whether no request is open."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _address(self) -> str:
        """The client's address; "" if it has none."""
        return self.client[0] if self.client else ""

    @property
    def _is_blocked(self) -> bool:
        """Whether the client has to read before more is written."""
        return self._stall_timer is not None

    def _update_phase(self) -> None:
        """Tell the table for whom the connection waits now."""
        if self._is_blocked or self.transport.is_closing():
            phase = ConnectionPhase.BLOCKED
        elif self._idle:
            phase = ConnectionPhase.IDLE
        else:
            phase = ConnectionPhase.SENDING if self._in_body else ConnectionPhase.ANSWERING
        self._table.set_phase(self, phase)

    def _refuse_request(self, reason: FailureReason, message: str) -> None:
        """Answer with an error, without calling the application, and close."""
        if self.transport.is_closing():
            return
        failure, request_id = RequestFailure(reason, message), new_request_id()
        about = about_request(RequestIds(request_id), failure.code)
        log.warning("fails with %d %s: %s", failure.status, failure.code, message, extra=about)
        status = HTTPStatus(failure.status)
        body = msgspec.json.encode(failure.error_body())
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
            b"x-request-id: %s\r\n\r\n%s"
            % (status, status.phrase.encode(), len(body), request_id.encode(), body)
        )
        self._close_after_flush()

    @property
    def _head_too_large(self) -> bool:
        """Whether the request's head exceeds one of the limits."""
        return self._head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS

    def _count_head_bytes(self, num_bytes: int) -> None:
        """Count bytes of the head; raises ValueError if the head is too large."""
        self._head_bytes += num_bytes
        if self._head_too_large:
            # The parser turns this error into `send_400_response`.
            raise ValueError("head too large")

    def _close_after_flush(self) -> None:
        """Close the connection once its buffer is empty, or after `FLUSH_TIMEOUT_S`."""
        self.transport.close()
        self._arm_timer(FLUSH_TIMEOUT_S)
        self._update_phase()

    def _arm_timer(self, seconds: float) -> None:
        """Reset the connection in `seconds`, unless the timer is stopped or set again before."""
        self._disarm_timer()
        self._timer = self.loop.call_later(seconds, self.abort)

    def _disarm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_reader(self) -> None:
        """The buffer was full for `stall_s`: give up the client unless it has read enough meanwhile."""
        left_bytes = self.transport.get_write_buffer_size()
        if self._unsent_bytes - left_bytes < MIN_READ_BYTES_PER_S * self.stall_s:
            self.stalled = True
            self._stall_timer = self.loop.call_later(STALLED_GRACE_S, self.abort)
            # This wakes the writer of the answer, if it waits.
            self.flow.resume_writing()
        else:
            self._unsent_bytes = left_bytes
            self._stall_timer = self.loop.call_later(self.stall_s, self._check_reader)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    @property
    def can_write_now(self) -> bool:
        """Whether the answer that is being sent is a stream whose client reads fast enough for more of it."""
        cycle = self._answered
        if cycle is None or cycle.disconnected or not cycle.response_started or cycle.response_complete:
            return False
        blocked = self.flow.write_paused or self.stalled or self.transport.is_closing()
        return bool(cycle.chunked_encoding) and not blocked

    def write_now(self, body: bytes) -> None:
        """Write a part of a stream past the application: to be called if `can_write_now`."""
        self.transport.write(b"%x\r\n%s\r\n" % (len(body), body))

    def unsent_bytes(self) -> int:
        """Bytes of answers that are buffered in this process."""
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Reset the connection: what is buffered is dropped, and the client sees that the answer is not complete."""
        raw = self.transport.get_extra_info("socket")
        if raw is not None and not self.transport.is_closing():
            # The kernel then drops its part of the buffered bytes too.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
        self.transport.abort()
        self.aborted = True
        if self._answered is not None:
            # The event loop tells of the end in its next iteration only, and writing fails until then.
            self._answered.disconnected = True

    async def wait_drained(self, high: int = BUFFER_BYTES) -> None:
        """Wait while more than `high` bytes are buffered.

        Raises:
            ClientStalled: the client read too little for `stall_s`.
        """
        if not self.transport.is_closing():
            self.transport.set_write_buffer_limits(high=high)
        await self.flow.drain()
        if self.stalled:
            raise ClientStalled
