"""The routes of the gateway, and what each of them does with a request. `app.py` puts the middleware around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych.chunks import RAW_CLASS
from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.batches.batch_service import BatchesOff, BatchService
from services.gateway.batches.routes.admin_routes import admin_batch_handlers
from services.gateway.generation.streaming import GenerationResponse
from services.gateway.http.error_response import JSON_TYPE, error_response
from services.gateway.http.request_body import RequestBody
from services.gateway.openai.openapi import docs_page, openapi_document
from services.gateway.openai.request_limits import MAX_BATCH_BYTES
from services.gateway.openai.schemas.response_schema import ModelCard, ModelList, Readiness, Version
from services.gateway.openai.tenancy import Caller, parse_timeout_header, parse_timings_header
from services.gateway.openai.validate import check_model_name
from services.gateway.ops.admin import AdminRoutes
from services.gateway.ops.status_body import StatusBody, accepted_age_s
from services.gateway.page.web_page import WebPage, render_page
from services.gateway.service import GENERATION_ROUTES, GatewayService

PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BATCHES_OFF = BatchesOff()

Endpoint = Callable[[Request], Awaitable[Response]]


class HealthProbes(Protocol):
    """The gateway's reports about its own health."""

    def is_alive(self) -> bool:
        """Whether the gateway's event loop still makes progress."""

    async def check_readiness(self, known: bool = True) -> Readiness:
        """Whether requests can be served, and why not.

        Worker names are in the reasons only if the client is `known`.
        """

    def status_report(self) -> Mapping[str, Any]:
        """The body of `/status`, ready to be written as JSON."""


class ApiRoutes:
    """The handlers of all routes, one method per route. Errors leave them as `RequestError`; see `build_app`."""

    def __init__(
        self,
        service: GatewayService,
        probes: HealthProbes,
        version: str,
        created: int,
        admin: AdminRoutes | None = None,
        batches: BatchService | BatchesOff = BATCHES_OFF,
        root_path: str = "",
    ) -> None:
        """`created` is the models' creation time in Unix seconds. Without `admin` there are no `/admin` routes.
        If `batches` are off, the routes of files and batches say why, and how to turn them on.

        With `lenient`, a body without a content type is taken for JSON. `page` is the document at `/`. A proxy
        strips `root_path` from the paths of requests.
        """
        self.lenient = False
        self.page: WebPage = render_page(needs_key=False, root_path=root_path)
        self.service, self.probes, self.admin, self.batches = service, probes, admin, batches
        self._status = StatusBody(probes.status_report)
        self._version, self._created = version, created
        self.root_path = root_path
        document = openapi_document(version) | ({"servers": [{"url": root_path}]} if root_path else {})
        self._document, self._docs = msgspec.json.encode(document), docs_page(document)

    async def create_generation(self, request: Request) -> Response:
        """`POST` to one of `GENERATION_ROUTES`; the generation starts when the response is sent.

        Raises RequestError if the request is refused.
        """
        service = self.service
        with service.outcomes.count_refusals():
            service.check_admission(request.state.tenant)
            async with self._body(request) as body:
                caller = _caller_of(request)
                generation, output_format = await service.create_generation(
                    request.scope["path"], body, caller
                )
        return GenerationResponse(
            generation,
            output_format,
            service.open,
            stall_s=service.timeouts.stall_s,
            ping_s=service.timeouts.ping_s,
            timings=caller.timings,
        )

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`. Raises RequestError if the request is refused."""
        return await self._make_reply("tokenize", request)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`. Raises RequestError if the request is refused."""
        return await self._make_reply("detokenize", request)

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`. Raises RequestError if the request is refused."""
        return await self._make_reply("count_tokens", request)

    async def _make_reply(self, route: str, request: Request) -> Response:
        """The response to a request that a preparer answers. Raises RequestError if the request is refused."""
        self.service.check_admission(request.state.tenant)
        async with self._body(request) as body:
            reply = await self.service.make_reply(route, body, _caller_of(request))
        return Response(reply, media_type=JSON_TYPE)

    async def create_batch(self, request: Request) -> Response:
        """`POST /v1/batches`. Raises RequestError if the batch is refused."""
        assert isinstance(self.batches, BatchService)
        async with self._body(request).limit_bytes(MAX_BATCH_BYTES) as body:
            asked = await self.service.check_batch(body, _caller_of(request))
        return await self.batches.batches.create_batch(request, asked)

    async def refuse_batches(self, request: Request) -> Response:
        """The answer of all routes of files and batches where they are off."""
        assert isinstance(self.batches, BatchesOff)
        problem = f"files and batches are off: {self.batches.what}; --data-dir DIR turns them on"
        return error_response(RequestFailure(FailureReason.BATCHES_NOT_ENABLED, problem))

    async def list_models(self, request: Request) -> Response:
        """`GET /v1/models`: one entry per served name."""
        return json_response(ModelList([self._model_card(name) for name in self.service.rules.served_names]))

    async def get_model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`. Raises RequestError (404) for a name that is not served."""
        return json_response(
            self._model_card(check_model_name(request.path_params["id"], self.service.rules))
        )

    async def show_page(self, request: Request) -> Response:
        """`GET /`: the operators' page, which holds no data; 304 for a client that has it already."""
        page = self.page
        if page.is_known(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=page.headers)
        return Response(page.body, headers=page.headers)

    async def health(self, request: Request) -> Response:
        """`GET /health` and `GET /ping`: 200 while the gateway is alive, else 503. Workers do not matter here."""
        return Response(status_code=200 if self.probes.is_alive() else 503)

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: 200 if requests can be served, else 503, with the reasons."""
        state = await self.probes.check_readiness(request.state.known)
        return json_response(state, 200 if state.ready else 503)

    async def status(self, request: Request) -> Response:
        """`GET /status`: workers, links and queues, for operators. It may be as old as the client accepts."""
        body, age_s = self._status.read(accepted_age_s(request.headers.get("cache-control", "")))
        return Response(body, headers={"age": str(int(age_s))}, media_type=JSON_TYPE)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`: all metrics in Prometheus' text format."""
        return Response(await self.service.render_metrics(), headers={"content-type": METRICS_TYPE})

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return json_response(Version(self._version))

    async def show_openapi(self, request: Request) -> Response:
        """`GET /openapi.json`: the description of this API."""
        return Response(self._document, media_type=JSON_TYPE)

    async def show_docs(self, request: Request) -> Response:
        """`GET /docs`: the same description as an HTML page."""
        return Response(self._docs, media_type="text/html", headers={"content-security-policy": PAGE_POLICY})

    def _body(self, request: Request) -> RequestBody:
        """The request's body. Entering it reads the bytes, which count as held memory until it is left.

        Raises:
            RequestError: 415 if the content type is not JSON, or if it is missing and no API key protects the server.
        """
        named = request.headers.get("content-type", JSON_TYPE if self.lenient else "")
        kind = named.partition(";")[0].strip().lower()
        if kind != JSON_TYPE and not kind.endswith("+json"):
            problem = f"the content type must be {JSON_TYPE}"
            raise RequestError(RequestFailure(FailureReason.UNSUPPORTED_MEDIA_TYPE, problem, "content-type"))
        body: RequestBody = request.state.body
        return body

    def _model_card(self, name: str) -> ModelCard:
        """The entry of a served name in `/v1/models`."""
        rules, classes = self.service.rules, self.service.kv_classes().served
        card = ModelCard(name, self._created, rules.served_names[0], self.service.context_tokens)
        return card if classes in ([], [RAW_CLASS]) else structs.replace(card, kv_classes=classes)

    def make_routes(self) -> list[Route]:
        """All routes with their handlers. The `/admin` routes exist only if there is an admin key."""
        gets: dict[str, Endpoint] = {
            "/": self.show_page,
            "/v1/models": self.list_models,
            "/v1/models/{id:path}": self.get_model,
            "/health": self.health,
            "/ping": self.health,
            "/ready": self.ready,
            "/status": self.status,
            "/metrics": self.metrics,
            "/version": self.version,
            "/openapi.json": self.show_openapi,
            "/docs": self.show_docs,
        }
        posts: dict[str, Endpoint] = {
            **dict.fromkeys(GENERATION_ROUTES, self.create_generation),
            "/v1/messages/count_tokens": self.count_tokens,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        if self.admin is not None:
            posts["/admin/workers/{name}/drain"] = self.admin.drain
            posts["/admin/workers/{name}/turn"] = self.admin.switch_role
            if self.admin.replan_route is not None:
                posts["/admin/replan"] = self.admin.replan_route.exchange_report
        return [
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *self._batch_routes(),
        ]

    def _batch_routes(self) -> list[Route]:
        """The routes of files and batches."""
        found, refuse_batches = self.batches, self.refuse_batches
        files, batches = (None, None) if isinstance(found, BatchesOff) else (found.files, found.batches)
        handlers: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/files", files.upload_file if files else refuse_batches),
            ("GET", "/v1/files", files.list_files if files else refuse_batches),
            ("GET", "/v1/files/{id}", files.get_file if files else refuse_batches),
            ("DELETE", "/v1/files/{id}", files.delete_file if files else refuse_batches),
            ("GET", "/v1/files/{id}/content", files.get_content if files else refuse_batches),
            ("POST", "/v1/batches", self.create_batch if batches else refuse_batches),
            ("GET", "/v1/batches", batches.list_batches if batches else refuse_batches),
            ("GET", "/v1/batches/{id}", batches.get_batch if batches else refuse_batches),
            ("POST", "/v1/batches/{id}/cancel", batches.cancel_batch if batches else refuse_batches),
        ]
        if self.admin is not None:
            admin = None if isinstance(found, BatchesOff) else found.admin
            handlers += admin_batch_handlers(admin, refuse_batches)
        return [Route(path, endpoint, methods=[method]) for method, path, endpoint in handlers]


def _caller_of(request: Request) -> Caller:
    """The facts about the client that the service needs: arrival, tenant, timeout, best priority, and request id."""
    state, headers = request.state, request.scope["headers"]
    return Caller(
        state.arrived_s,
        state.tenant,
        parse_timeout_header(headers),
        state.best_priority,
        getattr(state, "request_id", ""),
        parse_timings_header(headers),
        getattr(state, "client_id", ""),
    )


def json_response(body: Any, status: int = 200) -> Response:
    """A response with `body` as JSON. `body` is a struct or anything else that msgspec can encode."""
    return Response(msgspec.json.encode(body), status, media_type=JSON_TYPE)
