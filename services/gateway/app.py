"""Routes and layers, outermost first:

    Envelope (id, count, 500) ─▶ CORS ─▶ Auth ─▶ BodyLimit ─▶ routes

All layers are plain ASGI: nothing buffers a stream or hides a disconnect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from diptych.errors import RequestError
from services.gateway.admin import Admin
from services.gateway.auth import Auth, Keys
from services.gateway.envelope import Envelope
from services.gateway.errors import JSON, error_response, internal_error, not_allowed, not_found
from services.gateway.limits import BodyLimit
from services.gateway.openapi import document, page
from services.gateway.origin import Caller, timeout_of
from services.gateway.parse import parse
from services.gateway.replies import ModelCard, ModelList, Readiness, Version
from services.gateway.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from services.gateway.service import Service
from services.gateway.validate import check_model

LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Endpoint = Callable[[Request], Awaitable[Response]]


class Probes:
    """What the gateway says about itself. The defaults are those of a gateway without workers (tests)."""

    def alive(self) -> bool:
        return True

    async def ready(self) -> Readiness:
        return Readiness(ready=True, reasons=[])

    def status(self) -> Mapping[str, Any]:
        return {}


class Api:
    """One method per route."""

    def __init__(
        self, service: Service, probes: Probes, version: str, created: int, admin: Admin | None = None
    ) -> None:
        """Without `admin` there are no routes for orders to workers."""
        self.service, self.probes, self.admin = service, probes, admin
        self._version, self._created = version, created
        told = document(version)
        self._document, self._page = msgspec.json.encode(told), page(told)

    async def chat(self, request: Request) -> Response:
        self.service.admit()
        return await self.service.chat(await self._body(request, ChatRequest), _caller(request))

    async def completion(self, request: Request) -> Response:
        self.service.admit()
        return await self.service.completion(await self._body(request, CompletionRequest), _caller(request))

    async def tokenize(self, request: Request) -> Response:
        return reply(await self.service.tokenize(await self._body(request, TokenizeRequest)))

    async def detokenize(self, request: Request) -> Response:
        return reply(await self.service.detokenize(await self._body(request, DetokenizeRequest)))

    async def models(self, request: Request) -> Response:
        return reply(ModelList([self._card(name) for name in self.service.rules.names]))

    async def model(self, request: Request) -> Response:
        return reply(self._card(check_model(request.path_params["id"], self.service.rules)))

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.probes.alive() else 503)

    async def ready(self, request: Request) -> Response:
        state = await self.probes.ready()
        return reply(state, 200 if state.ready else 503)

    async def status(self, request: Request) -> Response:
        return reply(self.probes.status())

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), headers={"content-type": METRICS_TYPE})

    async def version(self, request: Request) -> Response:
        return reply(Version(self._version))

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type=JSON)

    async def docs(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html", headers={"content-security-policy": PAGE_POLICY})

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        """The checked body. Clients that name no content type are forgiven, those that name another are not."""
        named = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if named != JSON and not named.endswith("+json"):
            raise RequestError(
                f"the content type must be {JSON}",
                status=415,
                code="unsupported_media_type",
                param="content-type",
            )
        return parse(await request.body(), kind, self.service.rules.limits.max_depth)

    def _card(self, name: str) -> ModelCard:
        rules = self.service.rules
        return ModelCard(name, self._created, rules.names[0], rules.context_tokens)

    def routes(self) -> list[Route]:
        gets: dict[str, Endpoint] = {
            "/v1/models": self.models,
            "/v1/models/{id:path}": self.model,
            "/health": self.health,
            "/ping": self.health,
            "/ready": self.ready,
            "/status": self.status,
            "/metrics": self.metrics,
            "/version": self.version,
            "/openapi.json": self.openapi,
            "/docs": self.docs,
        }
        posts: dict[str, Endpoint] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completion,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        if self.admin is not None:
            posts["/admin/workers/{name}/drain"] = self.admin.drain
            posts["/admin/workers/{name}/turn"] = self.admin.turn
            if self.admin.replanning is not None:
                posts["/admin/replan"] = self.admin.replanning.meet
        return [
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        ]


def build(api: Api, keys: Keys, host: str, admin: Keys | None = None) -> ASGIApp:
    """The whole application. `host` is the address it will be bound to, `admin` the key for orders to workers."""
    routes = api.routes()
    # FastAPI's own schema is off: bodies are decoded and checked in one pass by the classes of `schema`, which
    # also make the OpenAPI document, so its 422 and its validation models never come into play.
    app = FastAPI(
        routes=[*routes],
        openapi_url=None,
        exception_handlers={RequestError: _refused, HTTPException: _unrouted, Exception: _failed},
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body
    limits = api.service.rules.limits
    layered: ASGIApp = BodyLimit(app, limits.max_body_bytes, limits.body_s)
    layered = Auth(layered, keys, host, admin)
    layered = CORSMiddleware(
        layered,
        allow_origins=["*"] if keys else [],  # without a key only pages of this machine may speak to it
        allow_origin_regex=None if keys else LOCAL_ORIGINS,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
    return Envelope(layered, api.service.metrics, frozenset(route.path for route in routes))


def _caller(request: Request) -> Caller:
    state = request.state
    return Caller(state.arrived_s, state.tenant, timeout_of(request.scope["headers"]))


def reply(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type=JSON)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"], request.method
    response = error_response(
        not_allowed(path, method) if error.status_code == 405 else not_found(path, method)
    )
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(internal_error(request.state.request_id))
