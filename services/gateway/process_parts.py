"""What the processes of a gateway are made of: the gateway itself, and the fronts of `--gateways`."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.errors import DiptychError
from diptych.specs import GatewaySpec
from engine.model.checkpoint import DESCRIPTION_FILES, locate_folder
from router.requests.admission import AdmissionLimits as Openings
from services.gateway.http.access_keys import AccessKeys, BearerKeys
from services.gateway.keys.named_keys import NamedKeys
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.request_log import RequestLogFile
from services.gateway.openai.request_limits import MAX_INPUTS, MAX_SEQUENCES, RequestLimits
from services.gateway.openai.sampling_defaults import SamplingDefaults
from services.gateway.openai.validate import RequestRules
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.pooling.load_pooler import load_pooler
from services.gateway.server import GatewayServer
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from services.gateway.tracing.tracer import TRACE_OUTCOMES

if TYPE_CHECKING:
    from services.gateway.tracing.otlp_exporter import OtlpExporter

# Seconds after which a thread that computes must let the event loop's thread run. Python's 5 ms would be paid with each
# send, while the channel's thread has messages to decode.
SWITCH_S = 0.0005

log = logging.getLogger(__name__)


def make_request_rules(spec: GatewaySpec, tokenizer: GatewayTokenizer) -> RequestRules:
    """The rules that every request of this deployment is checked against."""
    limits = RequestLimits(
        max_body_bytes=spec.max_body_bytes,
        # If a request has more sequences than admission can ever take at once, it is refused for good (400). If it
        # has more than fit at the moment, it is refused for now (429).
        max_sequences=min(MAX_SEQUENCES, admission_limits(spec).max_group),
        max_inputs=min(MAX_INPUTS, admission_limits(spec).max_group),
    )
    context_tokens = min(spec.max_model_len or tokenizer.context_tokens, tokenizer.context_tokens)
    defaults, pooler = load_sampling_defaults(spec), load_pooler(spec, tokenizer)
    return RequestRules(
        tokenizer,
        spec.served_names,
        context_tokens,
        limits,
        defaults,
        spec.kv_keep,
        spec.prefix_caching,
        ModelMarkup.load(tokenizer, spec.tool_call_parser, spec.reasoning_parser),
        spec.unknown_fields == "ignore",
        pooler,
    )


def load_sampling_defaults(spec: GatewaySpec) -> SamplingDefaults:
    """The values of sampling fields that requests do not set, as `--generation-config` says. Logs them once.

    Raises:
        ModelError: the file is missing, cannot be read, or holds an invalid value.
    """
    if spec.generation_config == "none":
        return SamplingDefaults()
    if spec.generation_config == "model":
        defaults = SamplingDefaults.load(locate_folder(spec.model, spec.revision, DESCRIPTION_FILES))
    else:
        defaults = SamplingDefaults.load(Path(spec.generation_config), required=True)
    if defaults != SamplingDefaults():
        log.warning("sampling defaults, where a request sets none (--generation-config): %s", defaults)
    return defaults


def freeze_objects() -> None:
    """All objects that exist by now stay for good: they no longer cost each full garbage collection about 60 ms."""
    gc.collect()
    gc.freeze()


def close_writers(log_file: RequestLogFile | None, exporter: OtlpExporter | None) -> None:
    """Write and send what waits: the last lines of the request log, and the last traces."""
    if log_file is not None:
        log_file.close()
    if exporter is not None:
        exporter.close()


def make_exporter(spec: GatewaySpec, metrics: GatewayMetrics) -> OtlpExporter | None:
    """What sends traces to the collector; None if nothing is traced. Raises ConfigError if a package is missing."""
    if spec.otlp_traces_endpoint is None:
        return None

    # From 0 on: what a series begins with is no increase to Prometheus.
    for outcome in TRACE_OUTCOMES:
        metrics.traces.labels(outcome)

    def count_traces(outcome: str, num_traces: int) -> None:
        metrics.traces.labels(outcome).inc(num_traces)

    # Imported only here, since it imports httpx, which takes a fifth of the gateway's imports.
    from services.gateway.tracing.otlp_exporter import OtlpExporter

    return OtlpExporter(spec.otlp_traces_endpoint, diptych_version(), os.environ, count_traces)


def access_keys(spec: GatewaySpec, named: NamedKeys | None = None) -> AccessKeys:
    """All keys that `spec` gives. `named` are its API keys if some of them have names."""
    return AccessKeys(
        BearerKeys(spec.api_keys) if named is None else named,
        BearerKeys([spec.admin_key] if spec.admin_key else []),
        {"/metrics": BearerKeys(spec.metrics_keys), "/status": BearerKeys(spec.status_keys)},
        BearerKeys(spec.priority_keys),
    )


async def serve_with_tasks(
    server: GatewayServer, bound: socket.socket, *chores: Coroutine[Any, Any, None]
) -> None:
    """Serve on `bound` until a signal arrives. `chores` run meanwhile; if one of them fails, everything ends.

    Raises:
        DiptychError: one of them has failed with it.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(chore) for chore in chores]
            await server.serve(sockets=[bound])
            for task in running:
                task.cancel()
    except ExceptionGroup as failures:
        if isinstance(failures.exceptions[0], DiptychError):
            raise failures.exceptions[0] from None
        raise


def admission_limits(spec: GatewaySpec) -> Openings:
    """How many requests and tokens the gateway admits. With several API keys, tenants share these limits."""
    return Openings(
        max_requests=spec.max_open_requests,
        max_queued_tokens=spec.max_queued_tokens,
        max_wait_s=spec.max_queue_wait_s,
        shared=len(spec.api_keys) > 1 or spec.keys_file is not None,
    )


def diptych_version() -> str:
    """The version of the installed package; a fixed one in a checkout that is not installed."""
    try:
        return importlib.metadata.version("diptych")
    except importlib.metadata.PackageNotFoundError:
        # The package is not installed: it runs from a checkout.
        return "0.1.0"
