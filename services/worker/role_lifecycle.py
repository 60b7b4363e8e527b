"""Runs one worker process: what is built once serves as a prefill or a decode worker, one role after the other.

    Built (weights, pool, engine) ──▶ role ──drained, SwitchRole──▶ other role ──drained, Drain or SIGTERM──▶ end

Towards the gateway each role is a life of its own: a new session, a new incarnation, a new `Hello`. Pool, prefix tree
and engine are kept, so a change of role reloads nothing. This module does not import torch: what computes is passed in
as `WorkerParts`.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from decode_worker.kv_fetcher import KvFetcher
from decode_worker.worker import DecodeWorker
from diptych.channel.keys import WorkerKeys, load_transfer_key, load_worker_keys
from diptych.channel.link import ChannelLink
from diptych.messages import Hello
from diptych.process import EXIT_RETIRED, SupervisorPipe, exit_fatally, pin_to_core
from diptych.specs import WorkerSpec
from engine.bulk.engine import BulkEngine
from engine.loop import Engine
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.layout import KvLayout
from kvtransfer.bag_repacking import BagRepacker
from kvtransfer.layer_progress import ENTRY_BYTES, LayerProgress
from kvtransfer.leases import LeaseLedger
from kvtransfer.resharding import ShardedPool
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.transports.links import OfferedTransports, TransportLinks
from prefill_worker.worker import PrefillWorker, TicketIssuer
from worker.loop import LatestStats, WorkerLoop, WorkerRole
from worker.prefault import PoolPrefault
from worker.watchdog import EngineWatchdog


def _tune_nothing(role: str) -> None:
    """The default for `WorkerParts.tune_for`: nothing depends on the role."""


def _start_nothing() -> None:
    """The default for `WorkerParts.start_later`: the start has left nothing."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts that are built once per process and used by all its roles."""

    engine: Engine
    holdings: KvAllocator | KvArenas
    # The whole KV pool, over all `memories`.
    parts: ShardedPool
    # The pool's memory of each rank.
    memories: Sequence[SharedMemory]
    fingerprint: str
    identity: dict[str, str]
    max_model_len: int
    # Closes the engine. `run_worker` closes the memory afterwards.
    close: Callable[[], None]
    # Called with each role before the role begins.
    tune_for: Callable[[str], None] = _tune_nothing
    # The recorded loss of each KV class, and whether the gateway chooses the class (`Hello`).
    kv_losses: Mapping[str, float] = field(default_factory=dict)
    kv_auto: bool = False
    # The KV classes in which the engine can evict.
    keep_classes: Sequence[str] = ()
    # Called when the worker serves: begins with what the start did not need. May be called several times.
    start_later: Callable[[], None] = _start_nothing
    # Does bulk work while the worker decodes, beside `engine`.
    bulk: BulkEngine | None = None

    @property
    def layout(self) -> KvLayout:
        """The layout of KV in the worker's pools, over all ranks; of the default KV class, if there are several."""
        return self.parts.layout


@dataclass(slots=True)
class _EndRequest:
    """Whether the process was asked to end. Signal handlers write it, so it is plain data."""

    loop: WorkerLoop | None = None
    ending: bool = False

    def request_end(self) -> None:
        """The handler of SIGTERM: drain the current role, and begin no other."""
        self.ending = True
        if self.loop is not None:
            self.loop.start_drain()


def run_worker(spec: WorkerSpec, supervisor: SupervisorPipe, built: WorkerParts) -> int:
    """Serve in `spec.role`, then in the role that the gateway orders, until drained. Returns the exit status.

    Closes `built` and its memory at the end. The calling thread is pinned to `spec.core`.

    Raises:
        ConfigError: a key file is missing or not private, a transport is unknown, or the core cannot be used.
        TransferError: no transport can offer this worker's KV.
        RuntimeError: a role ended with memory still held; only a new process is safe then.
    """
    end_request = _EndRequest()
    with ExitStack() as owned:
        for memory in built.memories:
            owned.enter_context(closing(memory))
        owned.callback(built.close)
        shown = owned.enter_context(closing(SharedMemory(built.parts.num_slabs * ENTRY_BYTES)))
        # All roles of the process share it, so that a mark in it never has two meanings.
        progress = LayerProgress(built.parts.num_slabs, shown.view)
        key, keys = load_transfer_key(spec.keys_dir), load_worker_keys(spec.keys_dir)
        signal.signal(signal.SIGTERM, lambda *_: end_request.request_end())
        watchdog = EngineWatchdog(partial(exit_fatally, supervisor), spec.worker)
        populating = PoolPrefault(built.memories, busy=lambda: _is_computing(built.engine))
        owned.callback(populating.stop)
        role, cores = spec.role, os.sched_getaffinity(0)
        while role and not end_request.ending:
            # Undoes the pinning of the last role, so that threads which the next role starts may use all cores.
            os.sched_setaffinity(0, cores)
            built.tune_for(role)
            loop = _serve_role(
                _RoleLife(spec, role, key, keys, built, watchdog, progress, shown, populating),
                end_request,
                supervisor,
            )
            role, spec = loop.next_role, msgspec.structs.replace(spec, ended="")
            if role and not end_request.ending:
                supervisor.report_role(role)
    return 0 if end_request.ending else EXIT_RETIRED


def _is_computing(engine: Engine) -> bool:
    """Whether any sequence is in progress. May be called from any thread."""
    return bool(engine.scheduler.running or engine.scheduler.adopted)


@dataclass(frozen=True, slots=True)
class _RoleLife:
    """All that is needed to serve in one role."""

    spec: WorkerSpec
    role: str
    key: bytes
    keys: WorkerKeys
    built: WorkerParts
    watchdog: EngineWatchdog
    progress: LayerProgress
    # The memory that holds the layer progress.
    shown: SharedMemory
    populating: PoolPrefault


def _serve_role(life: _RoleLife, end_request: _EndRequest, supervisor: SupervisorPipe) -> WorkerLoop:
    """Connect to the gateway in one role, and serve until the role is drained."""
    spec, built, latest = life.spec, life.built, LatestStats(life.watchdog)
    with ExitStack() as owned:
        sources = None
        if life.role == "prefill":
            parts = list(zip(built.parts.shards, built.memories, strict=True))
            sources = OfferedTransports(
                spec.transports,
                parts,
                spec.worker,
                life.shown if spec.pipelined else None,
                built.parts.spans,
            )
            owned.callback(sources.close)
        hello = make_hello(life, sources.endpoints() if sources is not None else {})
        link = ChannelLink(spec.gateway, life.keys, hello, latest.read_stats)
        role, close = (
            _make_prefill_role(life, link, hello, sources) if sources else _make_decode_role(life, link)
        )
        root = built.fingerprint if spec.prefix_caching else ""
        loop = WorkerLoop(
            link,
            built.engine,
            role,
            built.holdings,
            latest,
            fingerprint=root,
            codecs={arena.layout.kv_class: arena.layout.codec for arena in built.parts.arenas},
            drain_s=spec.drain_s,
            bulk=built.bulk if life.role == "decode" else None,
        )
        end_request.loop = loop
        if end_request.ending:
            # SIGTERM came before there was a loop to drain.
            loop.start_drain()
        supervisor.report_progress("link", 0)
        loop.welcomed = partial(_on_welcomed, life, supervisor)
        link.open()
        owned.callback(link.close)
        pin_to_core(spec.core)
        try:
            loop.run_until_drained()
        finally:
            close()
        if loop.next_role:
            loop.check_settled()
        return loop


def _on_welcomed(life: _RoleLife, supervisor: SupervisorPipe) -> None:
    """The gateway has accepted this worker. What would have delayed the start begins now."""
    supervisor.report_progress("ready")
    life.populating.start()
    life.built.start_later()


def make_hello(life: _RoleLife, endpoints: dict[str, bytes]) -> Hello:
    """The `Hello` by which the gateway learns of this role; its `incarnation` is unique."""
    built = life.built
    return Hello(
        worker=life.spec.worker,
        role=life.role,
        incarnation=uuid.uuid4().hex,
        fingerprint=built.fingerprint,
        identity=built.identity,
        host=life.spec.host,
        pid=os.getpid(),
        num_slabs=built.parts.num_slabs,
        chunk_bytes=built.layout.chunk_bytes,
        max_model_len=built.max_model_len,
        endpoints=endpoints,
        ended=life.spec.ended,
        kv_classes={
            arena.layout.kv_class: (arena.span.num_slabs, arena.layout.chunk_bytes)
            for arena in built.parts.arenas
        },
        raw_chunk_bytes=replace(built.layout, codec="").chunk_bytes,
        kv_losses=dict(built.kv_losses),
        kv_auto=built.kv_auto,
        keep_classes=list(built.keep_classes),
        log_file=life.spec.log_file,
    )


def _make_prefill_role(
    life: _RoleLife, link: ChannelLink, hello: Hello, sources: OfferedTransports
) -> tuple[WorkerRole, Callable[[], None]]:
    """The prefill role, and the function that closes it."""
    spec, built = life.spec, life.built
    issuer = TicketIssuer(
        life.key, hello.worker, hello.incarnation, hello.fingerprint, spec.digest, spec.tp, spec.pp
    )
    ledger, progress = LeaseLedger(spec.lease_s), life.progress if spec.pipelined else None
    role = PrefillWorker(
        link, built.engine, built.holdings, built.parts, ledger, issuer, progress, sources.open_transport
    )
    return role, role.close


def _make_decode_role(life: _RoleLife, link: ChannelLink) -> tuple[WorkerRole, Callable[[], None]]:
    """The decode role, and the function that closes it."""
    spec, built = life.spec, life.built
    fetcher = KvFetcher(TransportLinks(spec.transports, built.parts, spec.digest), link.send, link.wake_poll)
    role = DecodeWorker(
        link,
        built.engine,
        built.holdings,
        built.parts.layout_of,
        fetcher,
        life.key,
        built.fingerprint,
        BagRepacker(built.parts),
    )
    fetcher.open()
    return role, fetcher.close
