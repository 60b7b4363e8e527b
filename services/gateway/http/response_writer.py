"""Writes responses, as fast as their clients read."""

from __future__ import annotations

from starlette.types import Message, Scope, Send

from services.gateway.http.connection import CONNECTION_EXTENSION, HttpConnection


class ResponseWriter:
    """Writes one response. Each write waits for a slow client.

    Raises ClientStalled from every write if the client reads too little for `stall_s`.
    """

    def __init__(self, scope: Scope, send: Send, stall_s: float) -> None:
        self._connection: HttpConnection | None = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
        self._send = send
        self.started = False
        if self._connection is not None:
            self._connection.stall_s = stall_s

    async def start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers. Raises ClientStalled if the client reads too little."""
        self.started = True
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def write_body(self, body: bytes) -> None:
        """Send a part of the body. Raises ClientStalled if the client reads too little."""
        await self._put({"type": "http.response.body", "body": body, "more_body": True})

    @property
    def can_write_now(self) -> bool:
        """Whether a part of the body can be sent without waiting."""
        return self.started and self._connection is not None and self._connection.can_write_now

    def write_now(self, body: bytes) -> None:
        """Send a part of the body without waiting: to be called if `can_write_now`."""
        assert self._connection is not None
        self._connection.write_now(body)

    async def end_response(self) -> None:
        """Complete the response, once the client has taken all but what the kernel buffers.

        Raises ClientStalled if the client reads too little.
        """
        if self._connection is not None:
            await self._connection.wait_drained(high=0)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def abort(self) -> None:
        """Reset the connection, so that no client takes the response for complete."""
        if self._connection is not None:
            self._connection.abort()

    async def _put(self, message: Message) -> None:
        """Send a message when the client has read enough of the answer so far."""
        if self._connection is not None:
            await self._connection.wait_drained()
        await self._send(message)
