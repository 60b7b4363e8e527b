"""A proxy on this machine that keeps what went through it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from benchmarks.load.deployment import ANSWER_S
from services.host.ports import claim_port

HOP_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding"})


@dataclass(slots=True)
class RecordedAnswer:
    """One answer: of which route, and its whole body as text; `is_stream` for server-sent events."""

    method: str
    path: str
    status: int
    is_stream: bool
    request: str = ""
    parts: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The body."""
        return b"".join(self.parts).decode(errors="replace")

    def as_json(self) -> dict[str, Any]:
        """What `check_answers.py` reads."""
        return {
            "method": self.method, "path": self.path, "status": self.status, "is_stream": self.is_stream,
            "text": self.text,
        }  # fmt: skip


class RecordingProxy:
    """Passes each request on to `target`, and keeps the answers in `answers`. A context manager."""

    def __init__(self, target: str) -> None:
        self.answers: list[RecordedAnswer] = []
        self._target, self._port = target, claim_port("127.0.0.1", 0)
        app = FastAPI(openapi_url=None)
        app.add_api_route("/{path:path}", self._pass_on, methods=["GET", "POST", "DELETE", "HEAD"])
        config = uvicorn.Config(app, host="127.0.0.1", port=self._port, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), name="proxy")
        self._http: httpx.AsyncClient | None = None

    @property
    def url(self) -> str:
        """Where clients shall connect."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _pass_on(self, request: Request, path: str) -> Response:
        """One request. Its body is read whole, its answer is passed on as it comes."""
        if self._http is None:
            self._http = httpx.AsyncClient(base_url=self._target, timeout=ANSWER_S, trust_env=False)
        body = await request.body()
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_HEADERS]
        query = f"?{request.url.query}" if request.url.query else ""
        asked = self._http.build_request(request.method, f"/{path}{query}", headers=headers, content=body)
        answer = await self._http.send(asked, stream=True)
        kind = answer.headers.get("content-type", "")
        kept = RecordedAnswer(
            request.method,
            f"/{path}",
            answer.status_code,
            "event-stream" in kind,
            body.decode(errors="replace"),
        )
        self.answers.append(kept)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_bytes():
                    kept.parts.append(piece)
                    yield piece
            finally:
                await answer.aclose()

        passed = {name: value for name, value in answer.headers.items() if name not in HOP_HEADERS}
        passed.pop("content-encoding", None)
        return StreamingResponse(pieces(), answer.status_code, passed)
