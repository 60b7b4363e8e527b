"""The other ranks of one worker: child processes that compute their shard of the model in every step of rank 0.

    rank 0   link to the gateway, engine, its part of the model ─order──▶ ranks 1 ...: a part of the model, nothing else
                                                                ◀─done──
    standard input of a rank   a socket to rank 0: `RankSpec` (JSON), then orders: steps and evictions
                               (`engine.cpu.ranks.orders`); each is answered by a `RankReply`, as is loading the weights

Rank 0 is the worker's own process. It creates and maps the pools of all ranks, so KV is transferred through rank 0
alone. The kernel kills a rank when rank 0 dies. When a rank dies or does not answer, the worker ends at once and its
supervisor starts it again: a model that lacks a shard cannot compute. `python -m worker.ranks` is the program of such a
rank.
"""

from __future__ import annotations

import sys

from diptych.process import EXIT_EXPECTED, EXIT_FATAL, configure_process, core_of_rank, pin_to_core
from engine.torch_import import import_torch

if __name__ == "__main__":
    configure_process()
    import_torch()

import logging
import mmap
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import numpy as np
import torch
from msgspec import Meta

from diptych.errors import DiptychError, StartError
from diptych.logs.log_format import configure_logging
from engine.batching.sink_slots import DEFAULT_SLOTS
from engine.cpu.decoder import CpuDecoder
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.ranks.orders import RunStep, decode_order
from engine.cpu.ranks.tensor_parallel import EXCHANGE_TIMEOUT_S, RankGroup, RankPlacement, RankReplies
from engine.cpu.weights.decoder_weights import OnPacked, SectionReader, ignore_progress, read_weights
from engine.cpu.weights.prepared_folder import PreparedFolder
from engine.model.architecture import ModelConfig
from engine.model.weights import WeightReader
from engine.protocols import EvictionReport
from kvcache.codecs.calibration import CalibratedModel, Calibration, read_calibration
from kvcache.eviction.policies import KeepRule
from kvcache.eviction.zap import pack_surrogate, parse_surrogate
from kvcache.layout import KvLayout, Shard
from kvcache.pool import KvPool
from kvtransfer.resharding import plan_spans
from kvtransfer.shared_memory import PAGE_BYTES, SharedMemory

# Seconds that a rank may take to end after rank 0 has closed the connection.
END_GRACE_S = 5.0
# Keeps gloo on the loopback interface; by default it listens on the address of the host name.
LOOPBACK_ENV = {"GLOO_SOCKET_IFNAME": "lo"}
RESTART_HINT = "the worker is started again by its supervisor"

# Exceptions of other ranks that are raised as the same type in rank 0; all others are a RuntimeError.
REPLIED_ERRORS: dict[str, type[Exception]] = {"MemoryError": MemoryError, "ValueError": ValueError}

log = logging.getLogger(__name__)


class RankClass(msgspec.Struct, frozen=True, array_like=True):
    """A KV class of a worker, as its ranks get it."""

    num_slabs: int
    # The canonical id of the codec; empty: it has none.
    codec: str = ""
    # The file of the codec's calibration, and the model that it must be of; None for codecs without one.
    calibration: tuple[str, CalibratedModel] | None = None


class RankEviction(msgspec.Struct, frozen=True):
    """An `EvictionSetup`, as ranks get it: bytes of tokens' kinds, and of the surrogate's file, with its model."""

    kinds: bytes
    rule: KeepRule
    surrogate: tuple[bytes, CalibratedModel] | None = None

    @classmethod
    def of(cls, setup: EvictionSetup) -> RankEviction:
        """The setup in this form."""
        return cls(setup.kinds.tobytes(), setup.rule, pack_surrogate(setup.surrogate))

    def to_setup(self) -> EvictionSetup:
        """The setup that the runner takes."""
        weights = self.surrogate and parse_surrogate(*self.surrogate)
        return EvictionSetup(np.frombuffer(self.kinds, np.uint8), self.rule, weights)


class RankSpec(msgspec.Struct, frozen=True):
    """Everything that a rank needs to know. Rank 0 has inspected the model, so the other ranks need not."""

    worker: str
    placement: RankPlacement
    shard: Shard
    config: ModelConfig
    # The file of each tensor, by tensor name.
    weights: dict[str, str]
    dtype: str
    max_model_len: int
    # The KV classes, the default one first. Their pools follow each other in the memory of each rank.
    classes: Annotated[tuple[RankClass, ...], Meta(min_length=1)]
    # How many first tokens' exact KV the ranks keep, if any class has a codec.
    sink_slots: int = DEFAULT_SLOTS
    # None: nothing is evicted.
    eviction: RankEviction | None = None
    # The folder of prepared files, and the identity of the weights; None: they are packed into memory of the rank.
    prepared: tuple[str, str] | None = None
    # An inherited file descriptor of a `SharedMemory`, and its size in bytes.
    memory: tuple[int, int] = (-1, 0)
    # A file in a private folder, through which the ranks find each other; and the core of rank 0, if it is pinned.
    meeting: str = ""
    core: int | None = None
    threads: int = 1
    # Seconds to wait for another rank within a step.
    stall_s: float = EXCHANGE_TIMEOUT_S
    log_level: str = "warning"
    log_format: str = "text"


class RankReply(msgspec.Struct, frozen=True, array_like=True):
    """The answer of a rank after loading or to an order: success, or the error."""

    # "" means success; "start" a `DiptychError` while loading; anything else is the type of an exception later.
    kind: str = ""
    what: str = ""
    why: str = ""
    fix: str = ""
    # The reports that the order asks for: one, or none.
    reports: tuple[EvictionReport, ...] = ()


@dataclass(frozen=True, slots=True)
class _RankProcess:
    number: int
    process: subprocess.Popen[bytes]
    line: Connection


class RankProcesses:
    """Ranks 1 and up of the worker `name`. `fatal` is called once, when the worker must end; it should not return."""

    def __init__(
        self, name: str, fatal: Callable[[DiptychError], object], module: str = "worker.ranks"
    ) -> None:
        self.name = name
        self._fatal, self._module = fatal, module
        self._stall_s = EXCHANGE_TIMEOUT_S
        self._ranks: list[_RankProcess] = []
        self._group: RankGroup | None = None
        self._lock, self._over = threading.Lock(), threading.Event()
        self._closing = False
        self._lost: DiptychError | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids, from rank 1 on."""
        return [rank.process.pid for rank in self._ranks]

    def start_ranks(self, spec: Sequence[RankSpec], memories: Sequence[SharedMemory]) -> None:
        """Start a process for each of `spec`, with its pool; it begins to load.

        The processes end with this thread.
        """
        # The folder is private: no other user can enter it.
        self._folder = tempfile.mkdtemp(prefix="diptych-ranks-")
        for order, memory in zip(spec, memories, strict=True):
            self._stall_s = order.stall_s
            ours, theirs = socket.socketpair()
            # A step may be longer than the socket's buffer. Sending it then waits for the rank, so sending has a time
            # limit, too.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _pack_timeval(order.stall_s))
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module],
                    stdin=theirs.fileno(),
                    pass_fds=[memory.fd],
                    env=dict(os.environ) | LOOPBACK_ENV,
                )
            rank = _RankProcess(order.placement.rank, process, Connection(ours.detach()))
            self._ranks.append(rank)
            rank_spec = msgspec.structs.replace(
                order, memory=(memory.fd, memory.num_bytes), meeting=str(Path(self._folder) / "meeting")
            )
            rank.line.send_bytes(msgspec.json.encode(rank_spec))

    def join_ranks(self, group: RankGroup) -> None:
        """Wait until all ranks have loaded, connect them, and watch their processes from now on.

        Raises:
            StartError: a rank could not load.
        """
        for rank in self._ranks:
            try:
                reply = msgspec.msgpack.decode(rank.line.recv_bytes(), type=RankReply)
            except EOFError:
                why = _describe_exit(rank.process.wait())
                raise StartError(f"rank {rank.number} of {self.name} ended while loading", why) from None
            if reply.kind:
                raise StartError(reply.what, reply.why, reply.fix)
        for rank in self._ranks:
            name = f"watch rank {rank.number}"
            threading.Thread(target=self._watch_rank, args=(rank,), name=name, daemon=True).start()
        os.environ.update(LOOPBACK_ENV)
        self._group = group
        group.join(Path(self._folder) / "meeting")
        shutil.rmtree(self._folder)

    def send_order(self, order: bytes) -> None:
        """Send an order to all ranks, which begin with it."""
        for rank in self._ranks:
            try:
                rank.line.send_bytes(order)
            except OSError as error:
                self.fail_worker(f"rank {rank.number} does not listen", error)

    def wait_for_replies(self) -> RankReplies:
        """Wait until all ranks have answered an order; says the error of one of them, if any failed."""
        wrong, reports = None, list[EvictionReport]()
        for rank in self._ranks:
            try:
                if not rank.line.poll(self._stall_s):
                    self.fail_worker(
                        f"rank {rank.number} does not answer", TimeoutError(f"{self._stall_s:.0f} s")
                    )
                reply = msgspec.msgpack.decode(rank.line.recv_bytes(), type=RankReply)
            except (EOFError, OSError) as error:
                self.fail_worker(f"rank {rank.number} has gone", error)
            if reply.kind:
                kind = REPLIED_ERRORS.get(reply.kind, RuntimeError)
                wrong = kind(f"rank {rank.number}: {reply.kind}: {reply.what}")
            reports += reply.reports
        return RankReplies(wrong, reports)

    def fail_worker(self, what: str, error: Exception) -> NoReturn:
        """End the worker, because the ranks are out of step."""
        # The cause may be the death of another rank. The thread that watches that rank reports it within a second, so
        # wait for the report.
        if not self._over.wait(1.0):
            self._report_fatal(
                f"{what} ({self.name})", " ".join(f"{type(error).__name__}: {error}".split())[:300]
            )
        raise self._lost or error

    def close(self) -> None:
        """End all ranks. Idempotent."""
        self._closing = True
        for rank in self._ranks:
            rank.line.close()
        for rank in self._ranks:
            try:
                rank.process.wait(END_GRACE_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        if self._ranks:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks.clear()
        if self._group is not None:
            self._group.leave()
            self._group = None

    def _watch_rank(self, rank: _RankProcess) -> None:
        """A thread: wait for the end of a rank's process, which is fatal unless the worker is closing."""
        rank.process.wait()
        if not self._closing:
            self._on_rank_ended(rank)

    def _on_rank_ended(self, rank: _RankProcess) -> None:
        self._report_fatal(
            f"rank {rank.number} of {self.name} has ended", _describe_exit(rank.process.returncode)
        )

    def _report_fatal(self, what: str, why: str) -> None:
        """Keep the first reason for which the worker must end, and call `fatal` with it."""
        with self._lock:
            if self._lost is None:
                self._lost = DiptychError(what, why, RESTART_HINT)
                self._fatal(self._lost)
                self._over.set()


def _pack_timeval(seconds: float) -> bytes:
    """`seconds` as a `struct timeval`; never zero, which would mean no limit."""
    return struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))


def _describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def load_leader(
    spec: RankSpec,
    shards: Sequence[Shard],
    memories: Sequence[SharedMemory],
    ranks: RankProcesses,
    packed: OnPacked = ignore_progress,
) -> CpuModelRunner:
    """Start the other ranks and load rank 0's shard. `spec` is for rank 0; `shards` and `memories` are by rank.

    `packed` is called while rank 0 packs its weights, as the others do at the same time.

    Raises:
        ModelError: the checkpoint cannot be read.
        StartError: another rank could not load its shard.
    """
    others = [
        msgspec.structs.replace(spec, placement=replace(spec.placement, rank=rank), shard=shard)
        for rank, shard in enumerate(shards)
    ]
    ranks.start_ranks(others[1:], memories[1:])
    group = _make_group(spec, lambda error: ranks.fail_worker("an exchange failed", error))
    runner = _load_runner(spec, group, memories[0].view, ranks, packed)
    ranks.join_ranks(group)
    return runner


def serve_rank(spec: RankSpec, line: Connection) -> None:
    """Run one rank: load its shard, connect to the other ranks, and carry out orders until rank 0 hangs up."""
    torch.set_num_threads(spec.threads)
    group = _make_group(spec, _exit_broken)
    descriptor, num_bytes = spec.memory
    runner = _load_runner(spec, group, memoryview(mmap.mmap(descriptor, PAGE_BYTES + num_bytes))[PAGE_BYTES:])
    line.send_bytes(msgspec.msgpack.encode(RankReply()))
    group.join(Path(spec.meeting))
    pin_to_core(core_of_rank(spec.core, spec.placement.rank))
    while True:
        try:
            order = line.recv_bytes()
        except EOFError:
            group.leave()
            return
        line.send_bytes(msgspec.msgpack.encode(_perform_order(runner, order)))


def _make_group(spec: RankSpec, broken: Callable[[Exception], NoReturn]) -> RankGroup:
    return RankGroup(spec.placement, spec.config, spec.shard, broken, spec.stall_s)


def _perform_order(runner: CpuModelRunner, data: bytes) -> RankReply:
    """Carry out this rank's part of an encoded order; an exception becomes the reply."""
    order = decode_order(data)
    try:
        if isinstance(order, RunStep):
            runner.part(order.works, order.sinks)
            return RankReply()
        return RankReply(reports=tuple(runner.rank_evictor.evict_part(order)))
    except Exception as error:
        return RankReply(type(error).__name__, str(error)[:500])


def _load_runner(
    spec: RankSpec,
    group: RankGroup,
    memory: memoryview,
    followers: RankProcesses | None = None,
    packed: OnPacked = ignore_progress,
) -> CpuModelRunner:
    """Load the shard of one rank, and bind it to its pools in `memory`."""
    config, shard = spec.config, spec.shard
    (pool, calibration), *others = _open_pools(spec, memory)
    files = {name: Path(file) for name, file in spec.weights.items()}
    with torch.no_grad(), WeightReader(files) as weights:
        reader = SectionReader(config, weights, spec.placement, shard, packed=packed)
        if spec.prepared is None:
            found = read_weights(reader)
        else:
            folder, identity = spec.prepared
            found = PreparedFolder(Path(folder), identity).load_weights(reader)
    decoder = CpuDecoder(
        config, found, spec.max_model_len, placement=spec.placement, shard=shard, communicator=group
    )
    return CpuModelRunner(
        decoder,
        pool,
        spec.max_model_len,
        followers,
        calibration=calibration,
        shard=shard,
        sink_slots=spec.sink_slots,
        others=others,
        eviction=None if spec.eviction is None else spec.eviction.to_setup(),
    )


def _open_pools(spec: RankSpec, memory: memoryview) -> list[tuple[KvPool, Calibration | None]]:
    """This rank's pool of each KV class in `memory`, one after the other, with the calibration of its codec."""
    config = spec.config
    layouts = [
        KvLayout(config.layers, config.kv_heads, config.head_dim, spec.dtype, one.codec)
        for one in spec.classes
    ]
    sizes = [one.num_slabs for one in spec.classes]
    spans, _ = plan_spans(list(zip(layouts, sizes, strict=True)), [spec.shard])
    pools: list[tuple[KvPool, Calibration | None]] = []
    for layout, span, one in zip(layouts, spans, spec.classes, strict=True):
        part, (start,) = layout.shard_layout(spec.shard), span.offsets
        view = memory[start : start + span.num_slabs * part.chunk_bytes]
        calibration = None
        if one.calibration is not None:
            file, model = one.calibration
            calibration = read_calibration(Path(file), model)
        pools.append((KvPool(part, span.num_slabs, view, span.first), calibration))
    return pools


def _exit_broken(error: Exception) -> NoReturn:
    """End this rank's process, because an exchange failed."""
    log.error("the ranks are out of step: %s", " ".join(str(error).split())[:300])
    os._exit(EXIT_FATAL)


def main() -> int:
    """The program of one rank, commanded by rank 0 over standard input; returns the exit status."""
    # SIGTERM is ignored, since rank 0 drains first and then closes the connection, which ends this rank.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = Connection(os.dup(0))
    spec = msgspec.json.decode(line.recv_bytes(), type=RankSpec)
    name = f"{spec.worker} rank {spec.placement.rank}"
    configure_logging(spec.log_level, spec.log_format, name)
    try:
        serve_rank(spec, line)
    except DiptychError as error:
        line.send_bytes(msgspec.msgpack.encode(RankReply("start", error.what, error.why, error.fix)))
        return EXIT_EXPECTED
    except Exception as error:
        _exit_broken(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
