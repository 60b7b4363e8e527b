"""`python -m services.gateway`: the gateway process, which `diptych serve` starts.

It reads a `GatewaySpec` from standard input and reports its progress on standard output (see `diptych.process`). It
exits with 0 after SIGTERM, with 3 after an expected error and with 1 after a bug; it reports either error first.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import uvloop
from starlette.types import ASGIApp

from diptych.channel.hub import ChannelHub
from diptych.channel.keys import load_server_keys
from diptych.errors import DiptychError, StartError
from diptych.logs.log_format import configure_logging
from diptych.messages import Hello
from diptych.process import EXIT_EXPECTED, EXIT_FATAL, SupervisorPipe, die_with_parent, exit_fatally
from diptych.specs import GatewaySpec
from engine.model.checkpoint import tokenizer_identity
from router.requests.admission import Admission
from router.requests.relay import Relay
from router.routing.prefix_index import PrefixIndex
from router.workers.fleet import Fleet
from services.gateway.access_files import AccessFiles, open_access_files
from services.gateway.api_routes import ApiRoutes
from services.gateway.app import build_app
from services.gateway.batches.batch_service import BatchesOff, BatchService, open_batch_service
from services.gateway.batches.feeder import LINES_PER_WORKER
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.http.access_keys import AccessKeys
from services.gateway.keys.key_metrics import KeyCollector
from services.gateway.keys.named_keys import NamedKeys
from services.gateway.keys.rated_backend import RatedBackend
from services.gateway.metrics.deployment import DeploymentCollector
from services.gateway.metrics.loop_lag import observe_loop_lag
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.request_log import RequestLog, RequestLogFile
from services.gateway.metrics.traffic_feed import TrafficFeed
from services.gateway.openai.tenancy import tenants_of_keys
from services.gateway.openai.validate import RequestRules
from services.gateway.ops.admin import AdminRoutes
from services.gateway.ops.loop_watchdog import watch_event_loop
from services.gateway.ops.readiness import CanaryProber
from services.gateway.ops.replan_endpoint import ReplanRoute
from services.gateway.outcomes import RequestOutcomes
from services.gateway.preparation.preparer_pool import PreparerPool
from services.gateway.process_parts import (
    SWITCH_S,
    access_keys,
    admission_limits,
    close_writers,
    diptych_version,
    freeze_objects,
    make_exporter,
    make_request_rules,
    serve_with_tasks,
)
from services.gateway.server import GatewayServer, open_listener
from services.gateway.service import GatewayService, RequestTimeouts
from services.gateway.spec_reader import SpecReader
from services.gateway.status import LiveHealthProbes
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from services.gateway.tracing.tracer import RequestTracer

if TYPE_CHECKING:
    from services.gateway.tracing.otlp_exporter import OtlpExporter

log = logging.getLogger(__name__)

CANARY_PROMPT_LENGTH = 4
# Lines in flight for each sequence of a block, so that its places are always taken.
BLOCK_LINES = 2


def main() -> int:
    """Run until a signal arrives. Returns the exit status; an expected error is reported without a traceback."""
    supervisor = SupervisorPipe(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    # What libraries print must not reach the supervisor, so it goes to standard error.
    os.dup2(2, 1)
    try:
        die_with_parent()
        reader = SpecReader(sys.stdin.buffer)
        spec = reader.read_without_keys()
        configure_logging(spec.log_level, spec.log_format, "gateway")
        with open_listener(spec.host, spec.port) as bound:
            supervisor.report_progress("load", 0)
            tokens = GatewayTokenizer.load(spec.model, spec.revision, spec.chat_template)
            tokens.warm_up()
            supervisor.report_progress("load", 1)
            rules = make_request_rules(spec, tokens)
            # The pool forks this process, so it is made before API keys are read.
            preparers = PreparerPool(rules)
            uvloop.run(serve_gateway(reader.read_with_keys(), rules, preparers, bound, supervisor))
    except DiptychError as error:
        supervisor.report_error(error)
        return EXIT_EXPECTED
    except BaseException as error:
        logging.getLogger(__name__).critical("the gateway failed", exc_info=True)
        supervisor.report_error(
            DiptychError("the gateway failed", f"{type(error).__name__}: {error}"[:300], "see its log")
        )
        return EXIT_FATAL
    return 0


async def serve_gateway(
    spec: GatewaySpec,
    rules: RequestRules,
    preparers: PreparerPool,
    bound: socket.socket,
    supervisor: SupervisorPipe,
) -> None:
    """Create all parts of the gateway, connect them, and serve until a signal ends the server."""
    metrics, relay = (
        GatewayMetrics(spec.slo),
        build_relay(spec, tokenizer_identity(spec.model, spec.revision)),
    )
    log_file = RequestLogFile(spec.request_log) if spec.request_log else None
    request_log = RequestLog(log_file) if log_file else None
    hub = make_hub(spec)
    exporter = make_exporter(spec, metrics)
    backend = RelayBackend(relay, hub, metrics, request_log=request_log)
    files = open_access_files(spec, metrics.registry)
    named = files.named_keys
    service = make_service(spec, rules, backend, preparers, named)
    model = spec.served_names[0]
    metrics.watch_workers(backend.worker_stats, backend.link_speeds, model, spec.prefix_caching)
    prober = make_prober(spec, rules, backend)
    wanted = prober.wanted_workers
    metrics.registry.register(DeploymentCollector(diptych_version(), model, service.fingerprint, wanted))
    opened = open_batches(spec, service, relay, named)
    batches = opened if isinstance(opened, BatchService) else None
    keys = access_keys(spec, named)
    app = build_http_app(spec, keys, service, backend, prober, metrics, exporter, opened, files)
    server, bound, chores = open_server(spec, app, service, keys, files, bound, supervisor)
    hub.open()
    preparers.open()
    sys.setswitchinterval(SWITCH_S)
    freeze_objects()
    try:
        with watch_event_loop(lambda: backend.ticks, partial(exit_fatally, supervisor)):
            await serve_with_tasks(
                server,
                bound,
                backend.run_tasks(),
                prober.run_forever(),
                preparers.wait_for_failure(),
                observe_loop_lag(metrics),
                *([batches.feeder.run_forever()] if batches is not None else []),
                *files.watch_files(),
                *chores,
            )
    finally:
        service.close()
        hub.close()
        if batches is not None:
            batches.close()
        close_writers(log_file, exporter)


def open_server(
    spec: GatewaySpec,
    app: ASGIApp,
    service: GatewayService,
    keys: AccessKeys,
    files: AccessFiles,
    bound: socket.socket,
    supervisor: SupervisorPipe,
) -> tuple[GatewayServer, socket.socket, list[Coroutine[Any, Any, None]]]:
    """The server, the socket that it listens on, and what runs beside it. `bound` listens for clients.

    Raises:
        StartError: others shall take HTTP for this process, and this system has no Unix sockets.
    """
    if spec.gateways == 1:
        serving = partial(supervisor.report_progress, "ready")
        certificates = files.certificates
        server = GatewayServer(app, service, spec.drain_s, serving, spec.max_connections, keys, certificates)
        return server, bound, []
    # Imported only here, since a gateway that takes HTTP itself needs none of it.
    from services.gateway.fronts.front_group import FrontGroup

    fronts = FrontGroup(spec, service, files.key_watch, bound, supervisor)
    return fronts.make_server(app, keys), fronts.listener, fronts.chores()


def make_prober(spec: GatewaySpec, rules: RequestRules, backend: RelayBackend) -> CanaryProber:
    """What sends canaries through the workers."""
    return CanaryProber(
        backend,
        backend.metrics,
        [rules.tokenizer.start_id] * CANARY_PROMPT_LENGTH,
        (spec.num_prefill, spec.num_decode),
        only_batches=spec.bulk_only,
    )


def open_batches(
    spec: GatewaySpec, service: GatewayService, relay: Relay, named: NamedKeys | None = None
) -> BatchService | BatchesOff:
    """Files and batches, or why they are off. Raises StartError if the data directory that is needed cannot be used."""
    if spec.data_dir is None:
        return BatchesOff()
    role = "prefill" if spec.only_pools else "decode"
    try:
        return open_batch_service(
            spec.data_dir,
            spec.max_file_bytes,
            service,
            lambda: sum(count_line_shares(member.hello) for member in relay.fleet.workers_of(role)),
            spec.shares,
            tenants_of_keys(spec.api_keys) if named is None else named.tenants,
        )
    except StartError as error:
        if not spec.data_dir_optional:
            raise
        off = BatchesOff(error.what, error.why)
        log.warning("files and batches are off: %s", off)
        return off


def count_line_shares(hello: Hello) -> int:
    """For how many workers a worker counts in the number of lines in flight: a block is larger than a batch."""
    return max(1, -(-BLOCK_LINES * hello.block_sequences // LINES_PER_WORKER))


def make_service(
    spec: GatewaySpec,
    rules: RequestRules,
    backend: RelayBackend,
    preparers: PreparerPool,
    named: NamedKeys | None = None,
) -> GatewayService:
    """The service behind the routes, with the time limits of `spec`, and the rates of `named` keys."""
    relay, metrics = backend.relay, backend.metrics
    return GatewayService(
        rules,
        backend if named is None else RatedBackend(backend, named),
        metrics,
        preparers,
        lambda: system_fingerprint(relay),
        RequestTimeouts(request_s=spec.request_timeout_s, stall_s=spec.reader_stall_s),
        longest=lambda: relay.capabilities.max_model_len,
        kv_classes=lambda: relay.capabilities.served_classes,
        only_batches=spec.bulk_only,
        workers_pool=lambda: relay.capabilities.can_pool,
        only_pools=spec.only_pools,
        outcomes=RequestOutcomes(metrics.slo, [metrics, metrics.history]),
    )


def make_hub(spec: GatewaySpec) -> ChannelHub:
    """The gateway's end of the channel to its workers, under a name of its own; not opened yet."""
    return ChannelHub(
        spec.channel,
        load_server_keys(spec.keys_dir),
        f"gateway-{secrets.token_hex(4)}",
        beat_s=spec.beat_s,
        lease_s=spec.lease_s,
        silence_s=spec.silence_s,
    )


def build_http_app(
    spec: GatewaySpec,
    keys: AccessKeys,
    service: GatewayService,
    backend: RelayBackend,
    prober: CanaryProber,
    metrics: GatewayMetrics,
    exporter: OtlpExporter | None,
    batches: BatchService | BatchesOff,
    files: AccessFiles,
) -> ASGIApp:
    """The HTTP application: the API, and the admin and replanning routes if `spec` asks for them."""
    replanning = None
    if spec.replan:
        service.outcomes.add_sink(traffic := TrafficFeed())
        replanning = ReplanRoute(traffic, prober, metrics)
    if files.named_keys is not None and shows_names(spec):
        metrics.registry.register(KeyCollector(files.named_keys))
    admin = AdminRoutes(backend, replanning) if spec.admin_key else None
    feeder, off = (None, str(batches)) if isinstance(batches, BatchesOff) else (batches.feeder, "")
    probes = LiveHealthProbes(
        service,
        backend,
        prober,
        replanning,
        spec.plan_note,
        feeder,
        spec.bulk_plan,
        off,
        shows_names(spec),
        files,
    )
    api = ApiRoutes(service, probes, diptych_version(), int(time.time()), admin, batches, spec.root_path)
    tracer = RequestTracer(exporter, spec.trace_sample) if exporter is not None else None
    return build_app(api, keys, spec.host, tracer)


def shows_names(spec: GatewaySpec) -> bool:
    """Whether `/status` and `/metrics` name keys and single batches.

    With several API keys, and none for operators, every tenant reads them.
    """
    return bool(spec.status_keys) or (len(spec.api_keys) <= 1 and spec.keys_file is None)


def build_relay(spec: GatewaySpec, tokenizer: str) -> Relay:
    """The relay for this deployment. `tokenizer` is the identity that workers must have to serve with it."""
    return Relay(
        Fleet(spec.silence_s, tokenizer=tokenizer, kv_keep=spec.kv_keep),
        admission=Admission(admission_limits(spec)),
        split=spec.num_prefill > 0,
        only_pools=spec.only_pools,
        lease_s=spec.lease_s,
        index=PrefixIndex() if spec.prefix_caching else None,
        pipelined=spec.pipelined,
        recovery_s=spec.recovery_s,
        local_prefill=spec.local_prefill,
        tpot_s=spec.slo.limits_s()["tpot"],
        kv_budget_pct=spec.kv_quality_budget,
        overdraft=spec.decode_overdraft == "auto",
    )


def system_fingerprint(relay: Relay) -> str | None:
    """The part of `system_fingerprint` that all workers share: the model's fingerprint, and the kind of its weights if
    they are not as in the checkpoint, for example `fp_0123456789ab.weights-int4`. None without workers.
    """
    members = relay.fleet.workers_of("decode") or relay.fleet.workers_of("prefill")
    if not members:
        return None
    hello = members[0].hello
    kind = hello.identity.get("weight_kind")
    return f"fp_{hello.fingerprint[:12]}" + (f".weights-{kind}" if kind else "")


if __name__ == "__main__":
    sys.exit(main())
