"""Runs one worker process: what is built once serves as a prefill or a decode worker, one role after the other.

    Built (weights, pool, engine) ──▶ role ──drained, SwitchRole──▶ other role ──drained, Drain or SIGTERM──▶ end

Towards the gateway each role is a life of its own: a new session, a new incarnation, a new `Hello`. Pool, prefix tree
and engine are kept, so a change of role reloads nothing. This module does not import torch: what computes is passed in
as `WorkerParts`.
"""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from decode_worker.kv_fetcher import KvFetcher
from decode_worker.worker import DecodeWorker
from diptych.channel.keys import WorkerKeys, load_transfer_key, load_worker_keys
from diptych.channel.link import ChannelLink
from diptych.errors import find_device_loss
from diptych.messages import Hello
from diptych.process import EXIT_RETIRED, SupervisorPipe, exit_fatally, exit_lost, pin_to_core
from diptych.specs import WorkerSpec
from engine.bulk.engine import BulkEngine
from engine.loop import Engine
from engine.protocols import WorkerEngine
from engine.sequence import EngineLimits
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.layout import KvLayout
from kvtransfer.bag_repacking import BagRepacker
from kvtransfer.layer_progress import ENTRY_BYTES, LayerProgress
from kvtransfer.leases import LeaseLedger
from kvtransfer.resharding import ShardedPool
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.transports.links import KvLinks, OfferedTransports, TransportLinks
from prefill_worker.worker import PrefillWorker, TicketIssuer
from services.worker.prefill_priority import at_usual_slice, set_slice_ms
from services.worker.traits import list_traits
from worker.loop import GatewayLink, LatestStats, SlabBooks, WorkerLoop, WorkerRole
from worker.prefault import PoolPrefault
from worker.watchdog import LIMIT_S, STUCK_S, EngineWatchdog

if TYPE_CHECKING:
    # Only workers on a device load them.
    from kvcache.device.copies import SlabCopies
    from kvtransfer.transfer_buffer import TransferBuffer
    from prefill_worker.buffered_offers import BufferedOffers

log = logging.getLogger(__name__)


def _tune_nothing(role: str) -> None:
    """The default for `WorkerParts.tune_for`: nothing depends on the role."""


def _start_nothing() -> None:
    """The default for `WorkerParts.start_later`: the start has left nothing."""


class EngineRoles(Protocol):
    """Makes the roles of a worker whose engine is not Diptych's. Each comes with the function that closes it."""

    @property
    def num_slabs(self) -> int:
        """How many slabs the engine has for KV, for `Hello`."""

    @property
    def books(self) -> SlabBooks:
        """The accounts of all KV that a role or the engine may hold."""

    @property
    def traits(self) -> tuple[str, ...]:
        """What the worker can continue exactly, for `Hello`."""

    def make_prefill(
        self, link: GatewayLink, hello: Hello, sources: OfferedTransports
    ) -> tuple[WorkerRole, Callable[[], None]]:
        """The prefill role, whose KV is offered over `sources`."""

    def make_decode(self, link: GatewayLink) -> tuple[WorkerRole, Callable[[], None]]:
        """The decode role. What it starts has begun when this returns."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts that are built once per process and used by all its roles.

    `engine` and `kv` are Diptych's own, unless there are `roles`: then `kv` is None, and the pool is the memory through
    which KV is handed over.
    """

    engine: WorkerEngine
    kv: KvAllocator | KvArenas | None
    # The whole KV pool, over all `memories`.
    pool: ShardedPool
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
    # The KV classes in which the engine can evict, and the rules by which it can.
    keep_classes: Sequence[str] = ()
    keep_rules: tuple[str, ...] = ()
    # Called when the worker serves: begins with what the start did not need. May be called several times.
    start_later: Callable[[], None] = _start_nothing
    # Does bulk work while the worker decodes, beside `engine`.
    bulk: BulkEngine | None = None
    # If the pool of `kv` is on a device: host memory `pool`, through which KV is handed over, and copies between both.
    buffer: TransferBuffer | None = None
    copies: SlabCopies | None = None
    # The roles of another engine; None: those of Diptych's own.
    roles: EngineRoles | None = None
    # Of such an engine: prompt tokens that may wait at the worker (`Hello.block_tokens`).
    waiting_tokens: int = 0
    # Seconds after which a round of the loop is reported as stuck, and ends the process (`worker.watchdog`).
    stuck_s: float = STUCK_S
    limit_s: float = LIMIT_S

    @property
    def layout(self) -> KvLayout:
        """The layout of KV in the worker's pools, over all ranks; of the default KV class, if there are several."""
        return self.pool.layout

    @property
    def books(self) -> SlabBooks:
        """The accounts of all slabs that a role may hold."""
        if self.roles is not None:
            return self.roles.books
        if self.buffer is None:
            return self.own_kv
        # Only a worker on a device has a buffer.
        from kvtransfer.transfer_buffer import BufferedBooks

        return BufferedBooks(self.own_kv, self.buffer)

    @property
    def own_engine(self) -> Engine:
        """The engine of a worker without `roles`."""
        assert isinstance(self.engine, Engine)
        return self.engine

    @property
    def own_kv(self) -> KvAllocator | KvArenas:
        """The KV pool of a worker without `roles`."""
        assert self.kv is not None
        return self.kv

    @property
    def class_slabs(self) -> dict[str, int]:
        """How many slabs each KV class has, the default class first."""
        classes = [arena.layout.kv_class for arena in self.pool.arenas]
        if self.roles is not None:
            return dict.fromkeys(classes, self.roles.num_slabs)
        return {kv_class: self.own_kv.arena_of(kv_class).num_slabs for kv_class in classes}


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


def run_worker(spec: WorkerSpec, supervisor: SupervisorPipe, parts: WorkerParts) -> int:
    """Serve in `spec.role`, then in the role that the gateway orders, until drained. Returns the exit status.

    Closes `parts` and its memory at the end. The calling thread is pinned to `spec.core`.

    Raises:
        ConfigError: a key file is missing or not private, a transport is unknown, or the core cannot be used.
        TransferError: no transport can offer this worker's KV.
        RuntimeError: a role ended with memory still held; only a new process is safe then.
    """
    end_request = _EndRequest()
    with ExitStack() as owned:
        for memory in parts.memories:
            owned.enter_context(closing(memory))
        owned.callback(parts.close)
        shown = owned.enter_context(closing(SharedMemory(parts.pool.num_slabs * ENTRY_BYTES)))
        # All roles of the process share it, so that a mark in it never has two meanings.
        progress = LayerProgress(parts.pool.num_slabs, shown.view)
        key, keys = load_transfer_key(spec.keys_dir), load_worker_keys(spec.keys_dir)
        signal.signal(signal.SIGTERM, lambda *_: end_request.request_end())
        watchdog = EngineWatchdog(
            partial(exit_fatally, supervisor), spec.worker, stuck_s=parts.stuck_s, limit_s=parts.limit_s
        )
        prefault = PoolPrefault(parts.memories, busy=lambda: _is_computing(parts.engine))
        owned.callback(prefault.stop)
        role, cores = spec.role, os.sched_getaffinity(0)
        while role and not end_request.ending:
            # Undoes the pinning of the last role, so that threads which the next role starts may use all cores.
            os.sched_setaffinity(0, cores)
            set_slice_ms(0.0)
            parts.tune_for(role)
            loop = _serve_role(
                _RoleLife(spec, role, key, keys, parts, watchdog, progress, shown, prefault),
                end_request,
                supervisor,
            )
            role, spec = loop.next_role, msgspec.structs.replace(spec, ended="")
            if role and not end_request.ending:
                supervisor.report_role(role)
    return 0 if end_request.ending else EXIT_RETIRED


def _is_computing(engine: WorkerEngine) -> bool:
    """Whether any sequence is in progress. May be called from any thread."""
    if isinstance(engine, Engine):
        return bool(engine.scheduler.running or engine.scheduler.adopted)
    return engine.has_work


@dataclass(frozen=True, slots=True)
class _RoleLife:
    """All that is needed to serve in one role."""

    spec: WorkerSpec
    role: str
    key: bytes
    keys: WorkerKeys
    parts: WorkerParts
    watchdog: EngineWatchdog
    progress: LayerProgress
    # The memory that holds the layer progress.
    memory: SharedMemory
    prefault: PoolPrefault

    @property
    def shows_progress(self) -> bool:
        """Whether decode workers see the layers of KV that is being computed; in a transfer buffer KV is complete."""
        return self.spec.pipelined and self.parts.buffer is None


def _serve_role(life: _RoleLife, end_request: _EndRequest, supervisor: SupervisorPipe) -> WorkerLoop:
    """Connect to the gateway in one role, and serve until the role is drained."""
    spec, parts, latest = life.spec, life.parts, LatestStats(life.watchdog)
    with ExitStack() as owned:
        sources = None
        if life.role == "prefill":
            shards = list(zip(parts.pool.shards, parts.memories, strict=True))
            sources = OfferedTransports(
                spec.transports,
                shards,
                spec.worker,
                life.memory if life.shows_progress else None,
                parts.pool.spans,
            )
            owned.callback(sources.close)
        hello = make_hello(life, sources.endpoints() if sources is not None else {})
        link = ChannelLink(spec.gateway, life.keys, hello, latest.read_stats)
        role, close = (
            _make_prefill_role(life, link, hello, sources) if sources else _make_decode_role(life, link)
        )
        root = parts.fingerprint if spec.prefix_caching else ""
        loop = WorkerLoop(
            link,
            parts.engine,
            role,
            parts.books,
            latest,
            fingerprint=root,
            codecs={arena.layout.kv_class: arena.layout.codec for arena in parts.pool.arenas},
            drain_s=spec.drain_s,
            bulk=parts.bulk if life.role == "decode" else None,
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
        if hello.prefill_slice_ms:
            # Only now, since threads inherit it.
            set_slice_ms(hello.prefill_slice_ms)
            log.info("threads that wake interrupt prompts: their time slice is %g ms", hello.prefill_slice_ms)
        try:
            loop.run_until_drained()
        except BaseException as error:
            if (lost := find_device_loss(error)) is not None:
                exit_lost(supervisor, lost)
            raise
        finally:
            close()
        if loop.next_role:
            loop.check_settled()
        return loop


def _on_welcomed(life: _RoleLife, supervisor: SupervisorPipe) -> None:
    """The gateway has accepted this worker. What would have delayed the start begins now."""
    supervisor.report_progress("ready")
    life.prefault.start()
    life.parts.start_later()


def make_hello(life: _RoleLife, endpoints: dict[str, bytes]) -> Hello:
    """The `Hello` by which the gateway learns of this role; its `incarnation` is unique."""
    parts = life.parts
    return Hello(
        worker=life.spec.worker,
        role=life.role,
        incarnation=uuid.uuid4().hex,
        fingerprint=parts.fingerprint,
        identity=parts.identity,
        host=life.spec.host,
        pid=os.getpid(),
        num_slabs=parts.own_kv.num_slabs if parts.roles is None else parts.roles.num_slabs,
        chunk_bytes=parts.layout.chunk_bytes,
        max_model_len=parts.max_model_len,
        endpoints=endpoints,
        ended=life.spec.ended,
        kv_classes={
            arena.layout.kv_class: (parts.class_slabs[arena.layout.kv_class], arena.layout.chunk_bytes)
            for arena in parts.pool.arenas
        },
        raw_chunk_bytes=replace(parts.layout, codec="").chunk_bytes,
        kv_losses=dict(parts.kv_losses),
        kv_auto=parts.kv_auto,
        keep_classes=list(parts.keep_classes),
        keep_rules=parts.keep_rules,
        log_file=life.spec.log_file,
        block_tokens=_count_block_tokens(parts),
        traits=list_traits(parts.engine, parts.keep_classes) if parts.roles is None else parts.roles.traits,
        prefill_slice_ms=_find_slice_ms(life),
        # vLLM's workers do not pool for us.
        pools=parts.roles is None and bool(getattr(getattr(parts.engine, "runner", None), "can_pool", False)),
    )


def _find_slice_ms(life: _RoleLife) -> float:
    """The time slice that the thread of this role will have, if it is to have one and the kernel gives it."""
    slice_ms = life.spec.prefill_slice_ms
    if not slice_ms or life.role != "prefill" or life.parts.roles is not None:
        return 0.0
    given = set_slice_ms(slice_ms)
    set_slice_ms(0.0)
    if not given:
        log.info(
            "prompts do not yield: the kernel gives threads no time slices of their own (Linux 6.12 does)"
        )
    return slice_ms if given else 0.0


def _count_block_tokens(parts: WorkerParts) -> int:
    """The prompt tokens that may wait at the worker; 0 on the CPU, where the gateway decides it."""
    if parts.roles is not None:
        return parts.waiting_tokens
    return 0 if parts.buffer is None else count_waiting_tokens(parts.own_engine.scheduler.limits)


def count_waiting_tokens(limits: EngineLimits) -> int:
    """The prompt tokens that may wait at a worker on a device, whose steps are large: the running step and the next."""
    step = limits.saturation_tokens or limits.max_num_batched_tokens
    return 2 * min(step, limits.max_num_batched_tokens)


def _make_prefill_role(
    life: _RoleLife, link: ChannelLink, hello: Hello, sources: OfferedTransports
) -> tuple[WorkerRole, Callable[[], None]]:
    """The prefill role, and the function that closes it."""
    spec, parts = life.spec, life.parts
    if parts.roles is not None:
        return parts.roles.make_prefill(link, hello, sources)
    issuer = TicketIssuer(
        life.key, hello.worker, hello.incarnation, hello.fingerprint, spec.digest, spec.tp, spec.pp
    )
    ledger, progress = LeaseLedger(spec.lease_s), life.progress if life.shows_progress else None
    role = PrefillWorker(
        link,
        parts.own_engine,
        parts.own_kv,
        parts.pool,
        ledger,
        issuer,
        progress,
        at_usual_slice(sources.open_transport),
        _make_offers(life, link),
    )
    return role, role.close


def _make_offers(life: _RoleLife, link: ChannelLink) -> BufferedOffers | None:
    """What moves KV from a device to the transfer buffer; None of a worker on the CPU."""
    parts = life.parts
    if parts.buffer is None or parts.copies is None:
        return None
    # Only a worker on a device has a buffer.
    from prefill_worker.buffered_offers import BufferedOffers

    assert isinstance(parts.kv, KvAllocator)
    return BufferedOffers(parts.kv, parts.buffer, parts.copies, life.spec.digest, link.wake_poll)


def _make_decode_role(life: _RoleLife, link: ChannelLink) -> tuple[WorkerRole, Callable[[], None]]:
    """The decode role, and the function that closes it."""
    parts = life.parts
    if parts.roles is not None:
        return parts.roles.make_decode(link)
    fetcher = KvFetcher(_make_links(life), link.send, link.wake_poll)
    role = DecodeWorker(
        link,
        parts.own_engine,
        parts.own_kv,
        parts.pool.layout_of,
        fetcher,
        life.key,
        parts.fingerprint,
        BagRepacker(parts.pool) if parts.buffer is None else None,
        parts.buffer,
    )
    fetcher.open()
    return role, fetcher.close


def _make_links(life: _RoleLife) -> KvLinks:
    """The links to prefill workers, through the transfer buffer if there is one."""
    spec, parts = life.spec, life.parts
    links = TransportLinks(spec.transports, parts.pool, spec.digest)
    if parts.buffer is None or parts.copies is None:
        return links
    # Only a worker on a device has a buffer.
    from kvtransfer.buffered_links import BufferedLinks

    return BufferedLinks(links, parts.buffer, parts.copies)
