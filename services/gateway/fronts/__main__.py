"""`python -m services.gateway.fronts NAME DESCRIPTOR LINK HTTP`: one front, which the relay's process starts.

It reads a `GatewaySpec` from standard input, as the relay's process did, and reports its progress on standard output.
It accepts clients from the listening socket with this descriptor, and ends when the relay's process does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from functools import partial

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.errors import DiptychError, StartError
from diptych.logs.log_format import configure_logging
from diptych.process import EXIT_EXPECTED, EXIT_FATAL, SupervisorPipe, die_with_parent, exit_fatally
from diptych.specs import GatewaySpec
from services.gateway.access_files import open_access_files
from services.gateway.api_routes import ApiRoutes
from services.gateway.app import build_app
from services.gateway.fronts.forwarding import Forwarder, refuse_lost
from services.gateway.fronts.merged_metrics import count_samples
from services.gateway.fronts.relay_admission import RelayAdmission
from services.gateway.fronts.relay_client import RELAY_LOST, RelayClient, RelayedErrors
from services.gateway.fronts.wire import Counts
from services.gateway.http.request_body import UnreadBodyMiddleware
from services.gateway.http.request_id import RequestIdMiddleware
from services.gateway.metrics.loop_lag import observe_loop_lag
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.schemas.response_schema import Readiness
from services.gateway.openai.validate import RequestRules
from services.gateway.ops.loop_watchdog import watch_event_loop
from services.gateway.outcomes import RequestOutcomes
from services.gateway.preparation.preparer_pool import PreparerPool
from services.gateway.process_parts import (
    SWITCH_S,
    access_keys,
    close_writers,
    diptych_version,
    freeze_objects,
    make_exporter,
    make_request_rules,
    serve_with_tasks,
)
from services.gateway.server import GatewayServer
from services.gateway.service import GENERATION_ROUTES, GatewayService, RequestTimeouts
from services.gateway.spec_reader import SpecReader
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from services.gateway.tracing.tracer import RequestTracer

TICK_S = 0.1
# Seconds that a front has left when the relay's process is gone.
LAST_S = 2.0
OWN_PATHS = frozenset({*GENERATION_ROUTES, "/tokenize", "/detokenize", "/v1/messages/count_tokens"})


def main() -> int:
    """Run until a signal arrives, or the relay's process ends. Returns the exit status."""
    pipe = SupervisorPipe(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    try:
        # Its streams end with an error, and not with a reset.
        die_with_parent(signal.SIGTERM)
        reader = SpecReader(sys.stdin.buffer)
        spec = reader.read_without_keys()
        name, descriptor, link_address, http_address = sys.argv[1:]
        configure_logging(spec.log_level, spec.log_format, name)
        with socket.socket(fileno=int(descriptor)) as bound:
            pipe.report_progress("load", 0)
            tokens = GatewayTokenizer.load(spec.model, spec.revision, spec.chat_template)
            tokens.warm_up()
            rules = make_request_rules(spec, tokens)
            preparers = PreparerPool(rules)
            front = Front(name, reader.read_with_keys(), rules, preparers, pipe)
            uvloop.run(front.serve(bound, f"\0{link_address}", f"\0{http_address}"))
    except DiptychError as error:
        pipe.report_error(error)
        return EXIT_EXPECTED
    except BaseException as error:
        logging.getLogger(__name__).critical("a front of the gateway failed", exc_info=True)
        why = f"{type(error).__name__}: {error}"[:300]
        pipe.report_error(DiptychError("a front of the gateway failed", why, "see its log"))
        return EXIT_FATAL
    return 0


class Front:
    """One front: takes HTTP, prepares bodies, and writes text; the relay's process does the rest."""

    def __init__(
        self,
        name: str,
        spec: GatewaySpec,
        rules: RequestRules,
        preparers: PreparerPool,
        pipe: SupervisorPipe,
    ) -> None:
        self._spec, self._rules, self._preparers, self._pipe = spec, rules, preparers, pipe
        self._metrics = GatewayMetrics(spec.slo)
        self._client = RelayClient(name, self._on_relay_lost, self._count)
        self._service = self._make_service()
        self._server: GatewayServer | None = None
        self._ticks = 0

    async def serve(self, bound: socket.socket, link_address: str, http_address: str) -> None:
        """Serve on `bound` until a signal arrives, or the relay's process is gone.

        Raises:
            StartError: the relay's process cannot be reached.
        """
        spec, metrics = self._spec, self._metrics
        try:
            await self._client.connect(link_address)
        except OSError as error:
            raise StartError("a front cannot reach the relay's process", str(error)) from None
        files, exporter = open_access_files(spec, metrics.registry), make_exporter(spec, metrics)
        keys = access_keys(spec, files.named_keys)
        api = ApiRoutes(
            self._service,
            FrontProbes(self._client),
            diptych_version(),
            int(time.time()),
            root_path=spec.root_path,
        )
        tracer = RequestTracer(exporter, spec.trace_sample) if exporter is not None else None
        admit = partial(
            RelayAdmission,
            client=self._client,
            outcomes=self._service.outcomes,
            paths=GENERATION_ROUTES.keys(),
        )
        own = build_app(api, keys, spec.host, tracer, admit)
        paths = frozenset(route.path for route in api.make_routes())
        refusal = RequestIdMiddleware(refuse_lost, metrics, paths, self._service.errors)
        app = FrontApp(own, UnreadBodyMiddleware(Forwarder(http_address, refusal)))
        serving = partial(self._pipe.report_progress, "ready")
        self._server = server = GatewayServer(
            app, self._service, spec.drain_s, serving, spec.max_connections, keys, files.certificates
        )
        self._preparers.open()
        sys.setswitchinterval(SWITCH_S)
        freeze_objects()
        try:
            with watch_event_loop(lambda: self._ticks, partial(exit_fatally, self._pipe)):
                await serve_with_tasks(
                    server,
                    bound,
                    self._tick_forever(),
                    self._preparers.wait_for_failure(),
                    observe_loop_lag(metrics),
                    *files.watch_files(),
                )
        finally:
            self._service.close()
            await self._client.leave()
            close_writers(None, exporter)

    def _make_service(self) -> GatewayService:
        spec, client = self._spec, self._client
        return GatewayService(
            self._rules,
            client,
            self._metrics,
            self._preparers,
            lambda: client.state.fingerprint,
            RequestTimeouts(request_s=spec.request_timeout_s, stall_s=spec.reader_stall_s),
            errors=RelayedErrors(client),
            longest=lambda: client.state.longest,
            kv_classes=lambda: client.state.classes,
            only_batches=spec.bulk_only,
            workers_pool=lambda: client.state.can_pool,
            only_pools=spec.only_pools,
            outcomes=RequestOutcomes(spec.slo, [client]),
        )

    def _count(self, number: int) -> Counts:
        return Counts(number, len(self._service.open), count_samples(self._metrics.registry))

    async def _tick_forever(self) -> None:
        """Notice that the relay's process says nothing any more. Time in which this one was stopped does not count."""
        num_silent = 0
        while True:
            self._ticks += 1
            before_s = self._client.latest_s
            await asyncio.sleep(TICK_S)
            num_silent = num_silent + 1 if self._client.latest_s == before_s else 0
            if num_silent * TICK_S > self._spec.silence_s:
                self._client.close()

    def _on_relay_lost(self) -> None:
        """Let all clients see an error, and end: the relay's process that is started again has fronts of its own."""
        for generation in list(self._service.open):
            generation.fail_request(RELAY_LOST)
        if self._server is not None:
            self._server.should_exit = True
        asyncio.get_running_loop().call_later(LAST_S, os._exit, EXIT_EXPECTED)


class FrontApp:
    """Answers the requests that are a front's own, and forwards the others."""

    def __init__(self, own: ASGIApp, forwarder: ASGIApp) -> None:
        self._own, self._forwarder = own, forwarder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_own = scope["type"] != "http" or (scope["method"] == "POST" and scope["path"] in OWN_PATHS)
        await (self._own if is_own else self._forwarder)(scope, receive, send)


class FrontProbes:
    """What a front knows of its own health. The relay's process answers who asks for that of the gateway."""

    def __init__(self, client: RelayClient) -> None:
        self._client = client

    def is_alive(self) -> bool:
        """Whether the relay's process is there."""
        return not self._client.is_lost

    async def check_readiness(self, known: bool = True) -> Readiness:
        """Whether requests can be handed to the relay's process."""
        return Readiness(ready=self.is_alive(), reasons=[] if self.is_alive() else [RELAY_LOST.message])

    def status_report(self) -> dict[str, str]:
        """The name of the front."""
        return {"gateway": self._client.name}


if __name__ == "__main__":
    sys.exit(main())
