"""`python -m services.gateway`: the gateway process. Started by `diptych serve`; see `worker.start` for the manners.

Reads a `GatewaySpec` from standard input, tells its progress on standard output, ends with 0 after SIGTERM and with 3
after an error that it has told.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import secrets
import socket
import sys
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import msgspec
import uvloop

from diptych.channel import Hub
from diptych.config import GatewaySpec
from diptych.errors import ConfigError, DiptychError
from diptych.keys import load_server_keys
from diptych.metrics import Metrics, Objectives
from router.admission import Admission
from router.admission import Limits as Openings
from router.prefix_index import PrefixIndex
from router.relay import Relay
from services.gateway.admin import Admin
from services.gateway.app import Api, build
from services.gateway.auth import Keys
from services.gateway.backend import RelayBackend
from services.gateway.grammars import Grammars
from services.gateway.limits import MAX_SEQUENCES, Limits
from services.gateway.ready import Prober
from services.gateway.replan import Replanning
from services.gateway.request_log import LogFile, RequestLog
from services.gateway.server import Server, listen
from services.gateway.service import Patience, Service
from services.gateway.status import LiveProbes
from services.gateway.tokens import Tokens
from services.gateway.traffic import Traffic
from services.gateway.validate import Rules
from worker.start import EXPECTED, FATAL, Voice, die_with_parent

CANARY_PROMPT_TOKENS = 4


def main() -> int:
    """Run until a signal; returns the exit status, shows no traceback of an expected error."""
    voice = Voice(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # whatever libraries print is not for the supervisor
    try:
        die_with_parent()
        spec = read_spec(sys.stdin.buffer.readline())
        logging.basicConfig(
            level=spec.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        with listen(spec.host, spec.port) as bound:
            voice.tell("load", 0)
            tokens = Tokens.load(spec.model, spec.revision, spec.chat_template)
            tokens.warm()
            voice.tell("load", 1)
            uvloop.run(serve(spec, tokens, bound, voice))
    except DiptychError as error:
        voice.fail(error)
        return EXPECTED
    except BaseException as error:
        logging.getLogger(__name__).critical("the gateway failed", exc_info=True)
        voice.fail(
            DiptychError("the gateway failed", f"{type(error).__name__}: {error}"[:300], "see its log")
        )
        return FATAL
    return 0


def read_spec(line: bytes) -> GatewaySpec:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(line, type=GatewaySpec)
    except msgspec.MsgspecError as error:
        why = str(error)
        raise ConfigError(
            "the gateway's specification cannot be read", why, "start it with `diptych serve`"
        ) from None


async def serve(spec: GatewaySpec, tokens: Tokens, bound: socket.socket, voice: Voice) -> None:
    """Wire everything together and serve until told to stop."""
    metrics, relay = Metrics(objectives(spec)), relay_of(spec)
    log_file = LogFile(spec.request_log) if spec.request_log else None
    hub = Hub(
        spec.channel,
        load_server_keys(spec.keys_dir),
        f"gateway-{secrets.token_hex(4)}",
        beat_s=spec.beat_s,
        lease_s=spec.lease_s,
    )
    backend = RelayBackend(relay, hub, metrics, request_log=RequestLog(log_file) if log_file else None)
    limits = Limits(
        max_body_bytes=spec.max_body_bytes,
        # Who asks for more than will ever be taken in at once is told that (400), not to come back later.
        max_sequences=min(MAX_SEQUENCES, spec.max_open_requests),
    )
    context_tokens = min(spec.max_model_len or tokens.context_tokens, tokens.context_tokens)
    service = Service(
        Rules(tokens, spec.served_names, context_tokens, limits),
        backend,
        metrics,
        Grammars(tokens),
        lambda: fingerprint(relay),
        Patience(request_s=spec.request_timeout_s, stall_s=spec.reader_stall_s),
    )
    metrics.watch(backend.books, backend.links, spec.served_names[0])
    prober = Prober(
        backend, metrics, [tokens.start_id] * CANARY_PROMPT_TOKENS, (spec.num_prefill, spec.num_decode)
    )
    replanning = None
    if spec.replan:
        metrics.listener = traffic = Traffic()
        replanning = Replanning(traffic, prober, metrics)
    admin, admin_keys = (
        (Admin(backend, replanning), Keys([spec.admin_key])) if spec.admin_key else (None, None)
    )
    api = Api(service, LiveProbes(service, backend, prober), version(), int(time.time()), admin)
    app = build(api, Keys(spec.api_keys), spec.host, admin_keys)
    server = Server(app, service, spec.drain_s, lambda: voice.tell("ready"))
    hub.open()
    try:
        async with asyncio.TaskGroup() as tasks:
            chores = [tasks.create_task(backend.run()), tasks.create_task(prober.run())]
            await server.serve(sockets=[bound])
            for chore in chores:
                chore.cancel()
    finally:
        service.close()
        hub.close()
        if log_file is not None:
            log_file.close()


def relay_of(spec: GatewaySpec) -> Relay:
    openings = Openings(max_requests=spec.max_open_requests, max_wait_s=spec.max_queue_wait_s)
    return Relay(
        admission=Admission(openings),
        split=spec.num_prefill > 0,
        lease_s=spec.lease_s,
        index=PrefixIndex() if spec.prefix_caching else None,
        pipelined=spec.pipelined,
        recovery_s=spec.recovery_s,
        local_prefill=spec.local_prefill,
        tpot_s=spec.slo_tpot_ms / 1e3 if spec.slo_tpot_ms else None,
    )


def objectives(spec: GatewaySpec) -> Objectives:
    ttft_ms, tpot_ms = spec.slo_ttft_ms, spec.slo_tpot_ms
    return Objectives(
        ttft_s=None if ttft_ms is None else ttft_ms / 1000, tpot_s=None if tpot_ms is None else tpot_ms / 1000
    )


def fingerprint(relay: Relay) -> str | None:
    """What OpenAI calls `system_fingerprint`: from the fingerprint that all workers share."""
    members = relay.fleet.role("decode")
    return f"fp_{members[0].hello.fingerprint[:12]}" if members else None


def version() -> str:
    try:
        return importlib.metadata.version("diptych")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0.1.0"


if __name__ == "__main__":
    sys.exit(main())
