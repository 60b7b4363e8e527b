"""Builds the HTTP application: its routes, and the middleware around them, from the outside to the inside:

    UnreadBodyMiddleware ─▶ RequestIdMiddleware (id, count, 500) ─▶ RequestPacingMiddleware
        ─▶ TraceMiddleware (if traced) ─▶ CORSMiddleware ─▶ CrossOriginMiddleware (without API keys only)
        ─▶ AuthMiddleware ─▶ RateMiddleware (with --keys) ─▶ RequestBodyMiddleware ─▶ routes

All middleware is plain ASGI, so nothing buffers a stream or hides a disconnect. A route reads its request's body
itself, after every check that can refuse the request without reading it.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from diptych.errors import RequestError
from services.gateway.api_routes import ApiRoutes
from services.gateway.generation.formats import KV_CLASS_HEADER
from services.gateway.generation.timings import SERVER_TIMING_HEADER
from services.gateway.http.access_keys import AccessKeys
from services.gateway.http.auth import AuthMiddleware
from services.gateway.http.cross_origin import LOCAL_ORIGINS, CrossOriginMiddleware
from services.gateway.http.error_response import (
    error_response,
    internal_failure,
    method_not_allowed_failure,
    unknown_route_failure,
)
from services.gateway.http.request_body import (
    BodyMemory,
    RequestBodyMiddleware,
    UnreadBodyMiddleware,
)
from services.gateway.http.request_id import RequestIdMiddleware
from services.gateway.http.request_pacing import RequestPacingMiddleware
from services.gateway.http.trace_requests import TraceMiddleware
from services.gateway.keys.key_rates import RATE_HEADERS
from services.gateway.keys.named_keys import NamedKeys
from services.gateway.keys.rated_backend import RateMiddleware
from services.gateway.page.web_page import render_page
from services.gateway.service import GENERATION_ROUTES
from services.gateway.tracing.tracer import RequestTracer


def build_app(
    api: ApiRoutes,
    keys: AccessKeys,
    host: str,
    tracer: RequestTracer | None = None,
    admit: Callable[[ASGIApp], ASGIApp] | None = None,
) -> ASGIApp:
    """The whole application with its middleware.

    `host` is the address that the server will be bound to. Without `tracer` nothing is traced.
    A front has `admit` in the place of `RateMiddleware`.
    """
    routes = api.make_routes()
    # FastAPI's own schema is off. The classes of `request_schema` decode and check bodies in one pass, and also make
    # the OpenAPI document. FastAPI's 422 responses and validation models are therefore never used.
    app = FastAPI(
        routes=[*routes],
        openapi_url=None,
        exception_handlers={
            RequestError: _request_error_response,
            HTTPException: _unknown_route_response,
            Exception: _internal_error_response,
        },
    )
    # A redirected POST would lose its body.
    app.router.redirect_slashes = False
    limits = api.service.rules.limits
    # If keys are required, pages of other sites cannot send requests, so a missing content type is harmless.
    api.lenient = bool(keys.api)
    api.page = render_page(bool(keys.keys_for_route("/status")), api.root_path)
    layered: ASGIApp = RequestBodyMiddleware(
        app, BodyMemory(limits.max_bodies_bytes), limits.max_body_bytes, limits.body_s
    )
    layered = AuthMiddleware(_with_admission(layered, api, keys, admit), keys, host)
    if not keys.api:
        layered = CrossOriginMiddleware(layered)
    layered = CORSMiddleware(
        layered,
        # Without a key only pages of this machine may send requests.
        allow_origins=["*"] if keys.api else [],
        allow_origin_regex=None if keys.api else LOCAL_ORIGINS,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[
            "x-request-id",
            "retry-after",
            KV_CLASS_HEADER,
            SERVER_TIMING_HEADER,
            "traceresponse",
            *(RATE_HEADERS if isinstance(keys.api, NamedKeys) else ()),
        ],
    )
    if tracer is not None:
        layered = TraceMiddleware(layered, tracer, GENERATION_ROUTES.keys())
    paths = frozenset(route.path for route in routes)
    layered = RequestPacingMiddleware(layered)
    enveloped = RequestIdMiddleware(layered, api.service.metrics, paths, api.service.errors)
    return UnreadBodyMiddleware(enveloped)


def _with_admission(
    app: ASGIApp, api: ApiRoutes, keys: AccessKeys, admit: Callable[[ASGIApp], ASGIApp] | None
) -> ASGIApp:
    """The application behind `admit`, or else behind the rates of keys with names."""
    if admit is not None:
        return admit(app)
    if isinstance(keys.api, NamedKeys):
        return RateMiddleware(app, keys.api, api.service.outcomes, GENERATION_ROUTES.keys())
    return app


async def _request_error_response(request: Request, error: Exception) -> Response:
    """The response for a `RequestError` that leaves a route."""
    assert isinstance(error, RequestError)
    return error_response(error.failure)


async def _unknown_route_response(request: Request, error: Exception) -> Response:
    """The response (404 or 405) for a path or method that no route handles."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"], request.method
    response = error_response(
        method_not_allowed_failure(path, method)
        if error.status_code == 405
        else unknown_route_failure(path, method)
    )
    response.headers.update(error.headers or {})
    return response


async def _internal_error_response(request: Request, error: Exception) -> Response:
    """The response (500) for an unexpected exception in a route."""
    return error_response(internal_failure(request.state.request_id))
