"""Refuses requests from web pages of other sites, where no API key protects the server.

A browser lets any page send a POST to any address. It names the page's site in `Origin` and hides the answer from the
page, but by then the work is done. So a server without keys accepts only origins on this machine, or on the host that
the request is addressed to. Clients other than browsers send no `Origin`.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.http.error_response import error_response

LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


class CrossOriginMiddleware:
    """ASGI middleware that answers requests from pages of other sites with 403."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._local = re.compile(LOCAL_ORIGINS.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self.allows_origin(scope):
            problem = "pages of other sites may not use this server; give it an API key to allow them"
            refusal = RequestFailure(FailureReason.ORIGIN_NOT_ALLOWED, problem)
            return await error_response(refusal)(scope, receive, send)
        await self.app(scope, receive, send)

    def allows_origin(self, scope: Scope) -> bool:
        """Whether the request has no origin, or one on this machine or on the requested host."""
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        return all(
            self._local.fullmatch(origin) is not None or origin.partition(b"://")[2] in hosts
            for origin in origins
        )
