"""The ranks of one worker: child processes that run what rank 0, the worker's own process, tells them.

    rank 0   link to the gateway, engine, its part of the model ──step──▶ ranks 1 ...: a part of the model, nothing else
                                                                ◀─done──
    standard input of a rank   a socket to rank 0: `Orders` (JSON), then steps (`engine.parallel.encode`); the way back
                               carries what became of loading, and of every step

All pools are memory that rank 0 made and has mapped, so KV comes and goes through rank 0 alone. A rank never outlives
rank 0: the kernel kills it. When one dies, or does not answer, the worker ends at once, and its supervisor starts it
again: a model that lacks a part can do nothing. `python -m worker.ranks` is such a rank.
"""

from __future__ import annotations

import sys

from worker.start import EXPECTED, FATAL, core_of, pin, settle

if __name__ == "__main__":
    settle()

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
from typing import NoReturn

import msgspec
import torch

from diptych.errors import DiptychError, StartError
from engine.model.decoder import Decoder
from engine.model.shape import Shape
from engine.model.weights import Weights
from engine.parallel import STALL_S, Group, Place, decode
from engine.runner import Runner
from kvcache.layout import KVLayout, Shard
from kvcache.pool import Pool
from kvtransfer.memory import PAGE, SharedMemory

GRACE_S = 5.0  # how long a rank may take to end when its work is over
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # else gloo listens where the host's name leads
AGAIN = "the worker is started again by its supervisor"

log = logging.getLogger(__name__)


class Orders(msgspec.Struct, frozen=True):
    """All that one rank is told; what rank 0 found out about the model it need not find again."""

    worker: str
    place: Place
    shard: Shard
    shape: Shape
    weights: dict[str, str]  # tensor name -> file
    dtype: str
    max_model_len: int
    num_slabs: int
    memory: tuple[int, int] = (-1, 0)  # an inherited descriptor of a `SharedMemory`, and its bytes
    meeting: str = ""  # a file in a private folder, where the ranks find each other
    core: int | None = None  # that of rank 0
    threads: int = 1
    stall_s: float = STALL_S  # longest wait for another rank within a step
    log_level: str = "warning"


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says: all is well, or what went wrong."""

    kind: str = ""  # "" | "start" (of a `DiptychError`) | the type of an exception in a step
    what: str = ""
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    line: Connection


class Ranks:
    """Ranks 1 and up of the worker `name`. `fatal` is told, once, why the worker has to end; it should not return."""

    def __init__(
        self, name: str, fatal: Callable[[DiptychError], object], module: str = "worker.ranks"
    ) -> None:
        self.name = name
        self._fatal, self._module = fatal, module
        self._stall_s = STALL_S
        self._ranks: list[_Rank] = []
        self._group: Group | None = None
        self._lock, self._over = threading.Lock(), threading.Event()
        self._closing = False
        self._lost: DiptychError | None = None

    @property
    def pids(self) -> list[int]:
        """Of the processes, from rank 1 on."""
        return [rank.process.pid for rank in self._ranks]

    def start(self, orders: Sequence[Orders], memories: Sequence[SharedMemory]) -> None:
        """Start a process for each of `orders`, with its pool, which begins to load. They end with this thread."""
        self._folder = tempfile.mkdtemp(prefix="diptych-ranks-")  # nobody else can enter it
        for order, memory in zip(orders, memories, strict=True):
            self._stall_s = order.stall_s
            ours, theirs = socket.socketpair()
            # A step may be longer than what the socket takes at once: writing it waits for the rank, too.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(order.stall_s))
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module],
                    stdin=theirs.fileno(),
                    pass_fds=[memory.fd],
                    env=dict(os.environ) | LOOPBACK,
                )
            rank = _Rank(order.place.rank, process, Connection(ours.detach()))
            self._ranks.append(rank)
            told = msgspec.structs.replace(
                order, memory=(memory.fd, memory.num_bytes), meeting=str(Path(self._folder) / "meeting")
            )
            rank.line.send_bytes(msgspec.json.encode(told))

    def meet(self, group: Group) -> None:
        """Wait until all have loaded, connect, and watch over them from now on.

        Raises:
            StartError: one of them could not load.
        """
        for rank in self._ranks:
            try:
                reply = msgspec.msgpack.decode(rank.line.recv_bytes(), type=Reply)
            except EOFError:
                why = _ended(rank.process.wait())
                raise StartError(f"rank {rank.number} of {self.name} ended while loading", why) from None
            if reply.kind:
                raise StartError(reply.what, reply.why, reply.fix)
        for rank in self._ranks:
            name = f"watch rank {rank.number}"
            threading.Thread(target=self._watch, args=(rank,), name=name, daemon=True).start()
        os.environ.update(LOOPBACK)
        self._group = group
        group.join(Path(self._folder) / "meeting")
        shutil.rmtree(self._folder)

    def tell(self, step: bytes) -> None:
        """Let all of them run their part of a step."""
        for rank in self._ranks:
            try:
                rank.line.send_bytes(step)
            except OSError as error:
                self.lose(f"rank {rank.number} does not listen", error)

    def hear(self) -> Exception | None:
        """Wait until all of them are through with a step; what went wrong on one of them."""
        wrong: Exception | None = None
        for rank in self._ranks:
            try:
                if not rank.line.poll(self._stall_s):
                    self.lose(f"rank {rank.number} does not answer", TimeoutError(f"{self._stall_s:.0f} s"))
                reply = msgspec.msgpack.decode(rank.line.recv_bytes(), type=Reply)
            except (EOFError, OSError) as error:
                self.lose(f"rank {rank.number} has gone", error)
            if reply.kind:
                kind = MemoryError if reply.kind == "MemoryError" else RuntimeError
                wrong = kind(f"rank {rank.number}: {reply.kind}: {reply.what}")
        return wrong

    def lose(self, what: str, error: Exception) -> NoReturn:
        """The ranks are out of step: the worker has to end."""
        # It may be the death of one that the others stumble over; then that is what is told.
        if not self._over.wait(1.0):
            self._tell(f"{what} ({self.name})", " ".join(f"{type(error).__name__}: {error}".split())[:300])
        raise self._lost or error

    def close(self) -> None:
        """End them all. Idempotent."""
        self._closing = True
        for rank in self._ranks:
            rank.line.close()
        for rank in self._ranks:
            try:
                rank.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        if self._ranks:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks.clear()
        if self._group is not None:
            self._group.leave()
            self._group = None

    def _watch(self, rank: _Rank) -> None:
        rank.process.wait()
        if not self._closing:
            self._end(rank)

    def _end(self, rank: _Rank) -> None:
        self._tell(f"rank {rank.number} of {self.name} has ended", _ended(rank.process.returncode))

    def _tell(self, what: str, why: str) -> None:
        with self._lock:
            if self._lost is None:
                self._lost = DiptychError(what, why, AGAIN)
                self._fatal(self._lost)
                self._over.set()


def _timeval(seconds: float) -> bytes:
    """A `struct timeval`; never zero, which would mean no limit."""
    return struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))


def _ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def lead(orders: Orders, shards: Sequence[Shard], memories: Sequence[SharedMemory], ranks: Ranks) -> Runner:
    """The runner of a model that is spread over ranks. `orders` are rank 0's; `shards` and `memories` are by rank.

    Raises:
        ModelError: the checkpoint cannot be read.
        StartError: another rank could not load its part.
    """
    others = [
        msgspec.structs.replace(orders, place=replace(orders.place, rank=rank), shard=shard)
        for rank, shard in enumerate(shards)
    ]
    ranks.start(others[1:], memories[1:])
    group = _group(orders, lambda error: ranks.lose("an exchange failed", error))
    runner = _load(orders, group, memories[0].view, ranks)
    ranks.meet(group)
    return runner


def serve(orders: Orders, line: Connection) -> None:
    """The life of a rank: load, meet the others, run steps until rank 0 hangs up."""
    torch.set_num_threads(orders.threads)
    group = _group(orders, _broken)
    descriptor, num_bytes = orders.memory
    runner = _load(orders, group, memoryview(mmap.mmap(descriptor, PAGE + num_bytes))[PAGE:])
    line.send_bytes(msgspec.msgpack.encode(Reply()))
    group.join(Path(orders.meeting))
    pin(core_of(orders.core, orders.place.rank))
    while True:
        try:
            step = line.recv_bytes()
        except EOFError:
            group.leave()
            return
        line.send_bytes(msgspec.msgpack.encode(_run(runner, step)))


def _group(orders: Orders, broken: Callable[[Exception], NoReturn]) -> Group:
    return Group(orders.place, orders.shape, orders.shard, broken, orders.stall_s)


def _run(runner: Runner, step: bytes) -> Reply:
    works = decode(step)
    try:
        runner.part(works)
    except Exception as error:
        return Reply(type(error).__name__, str(error)[:500])
    return Reply()


def _load(orders: Orders, wire: Group, memory: memoryview, crew: Ranks | None = None) -> Runner:
    shape, shard = orders.shape, orders.shard
    layout = KVLayout(shape.layers, shape.kv_heads, shape.head_dim, orders.dtype).part(shard)
    files = {name: Path(file) for name, file in orders.weights.items()}
    with torch.no_grad(), Weights(files) as weights:
        decoder = Decoder(shape, weights, orders.max_model_len, place=orders.place, shard=shard, wire=wire)
    return Runner(decoder, Pool(layout, orders.num_slabs, memory), orders.max_model_len, crew)


def _broken(error: Exception) -> NoReturn:
    log.error("the ranks are out of step: %s", " ".join(str(error).split())[:300])
    os._exit(FATAL)


def main() -> int:
    """One rank, commanded over standard input; returns the exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 drains, then hangs up
    line = Connection(os.dup(0))
    orders = msgspec.json.decode(line.recv_bytes(), type=Orders)
    name = f"{orders.worker} rank {orders.place.rank}"
    logging.basicConfig(level=orders.log_level.upper(), format=f"%(levelname)s {name} %(message)s")
    try:
        serve(orders, line)
    except DiptychError as error:
        line.send_bytes(msgspec.msgpack.encode(Reply("start", error.what, error.why, error.fix)))
        return EXPECTED
    except Exception as error:
        _broken(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
