"""One worker process, both roles: what was built once serves as a prefill or a decode worker, one role after the other.

    Built (weights, pool, engine) ──▶ role ──drained, Turn──▶ other role ──drained, Drain or SIGTERM──▶ end

Every role is a life of its own towards the gateway: a new session, a new incarnation, a new `Hello`. Pool, prefix tree
and engine stay as they are, so a change of pool reloads nothing. No torch here: what computes comes in with `Built`.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import msgspec

from decode_worker.courier import Courier
from decode_worker.worker import Decoder
from diptych.channel import Link
from diptych.config import WorkerSpec
from diptych.keys import WorkerKeys, load_transfer_key, load_worker_keys
from diptych.messages import Hello
from engine.loop import Engine
from kvcache.holdings import Holdings
from kvcache.layout import KVLayout
from kvtransfer.board import ENTRY_BYTES, Board
from kvtransfer.leases import LeaseLedger
from kvtransfer.links import Links, open_sources
from kvtransfer.memory import SharedMemory
from kvtransfer.parts import Parts
from prefill_worker.worker import Issuer, Prefiller
from worker.pulse import Pulse
from worker.shell import Books, Role, Shell
from worker.start import RETIRED, Voice, give_up, pin


def _any_role(role: str) -> None:
    """What was built suits both roles as it is."""


@dataclass(frozen=True, slots=True)
class Built:
    """What is made once in the life of a process, whatever its roles."""

    engine: Engine
    holdings: Holdings
    parts: Parts  # the whole pool, over `memories`
    memories: Sequence[SharedMemory]  # of the pool, by rank
    fingerprint: str
    identity: dict[str, str]
    max_model_len: int
    close: Callable[[], None]  # ends what computes; the memory is closed after it, by `run`
    suit: Callable[[str], None] = _any_role  # called before each role begins

    @property
    def layout(self) -> KVLayout:
        return self.parts.layout


@dataclass(slots=True)
class _Will:
    """What the process was told to become. Signal handlers write it, so it is plain data."""

    shell: Shell | None = None
    ending: bool = False

    def end(self) -> None:
        """SIGTERM: drain whatever role there is, and begin no other."""
        self.ending = True
        if self.shell is not None:
            self.shell.drain()


def run(spec: WorkerSpec, voice: Voice, built: Built) -> int:
    """Serve in `spec.role`, then in the role that the gateway asks for, until drained. Returns the exit status.

    Closes `built` and its memory. The calling thread is pinned to `spec.core`.

    Raises:
        ConfigError: a key file is missing or not private, a transport is unknown, or the core cannot be used.
        TransferError: no transport can offer this worker's KV.
        RuntimeError: a role that ended left something held: a new process is better.
    """
    will = _Will()
    with ExitStack() as owned:
        for memory in built.memories:
            owned.enter_context(closing(memory))
        owned.callback(built.close)
        shown = owned.enter_context(closing(SharedMemory(built.parts.num_slabs * ENTRY_BYTES)))
        board = Board(built.parts.num_slabs, shown.view)  # one for all lives: a mark never means two things
        key, keys = load_transfer_key(spec.keys_dir), load_worker_keys(spec.keys_dir)
        signal.signal(signal.SIGTERM, lambda *_: will.end())
        pulse = Pulse(partial(give_up, voice), spec.worker)
        role = spec.role
        while role and not will.ending:
            built.suit(role)
            shell = _live(_Life(spec, role, key, keys, built, pulse, board, shown), will, voice)
            role, spec = shell.turned, msgspec.structs.replace(spec, ended="")
            if role and not will.ending:
                voice.become(role)
    return 0 if will.ending else RETIRED


@dataclass(frozen=True, slots=True)
class _Life:
    """All that one life of the worker is made from."""

    spec: WorkerSpec
    role: str
    key: bytes
    keys: WorkerKeys
    built: Built
    pulse: Pulse
    board: Board
    shown: SharedMemory  # what the board is written to


def _live(life: _Life, will: _Will, voice: Voice) -> Shell:
    """One role, from its first word to its last."""
    spec, built, books = life.spec, life.built, Books(life.pulse)
    with ExitStack() as owned:
        sources = {}
        if life.role == "prefill":
            parts = list(zip(built.parts.shards, built.memories, strict=True))
            sources = open_sources(
                spec.transports, parts, spec.worker, life.shown if spec.pipelined else None
            )
            for source in sources.values():
                owned.callback(source.close)
        hello = introduce(life, {name: source.endpoint() for name, source in sources.items()})
        link = Link(spec.gateway, life.keys, hello, books.read)
        role, close = _prefiller(life, link, hello) if sources else _decoder(life, link)
        root = built.fingerprint if spec.prefix_caching else ""
        shell = Shell(link, built.engine, role, built.holdings, books, fingerprint=root, drain_s=spec.drain_s)
        will.shell = shell
        if will.ending:  # asked for while nobody was there to be told
            shell.drain()
        voice.tell("link", 0)
        shell.welcomed = lambda: voice.tell("ready")
        link.open()
        owned.callback(link.close)
        pin(spec.core)
        try:
            shell.run()
        finally:
            close()
        if shell.turned:
            shell.settle()
        return shell


def introduce(life: _Life, endpoints: dict[str, bytes]) -> Hello:
    """What the gateway is told about this life of the worker; no other has had its `incarnation`."""
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
    )


def _prefiller(life: _Life, link: Link, hello: Hello) -> tuple[Role, Callable[[], None]]:
    spec, built = life.spec, life.built
    issuer = Issuer(life.key, hello.worker, hello.incarnation, hello.fingerprint, spec.digest)
    ledger, board = LeaseLedger(spec.lease_s), life.board if spec.pipelined else None
    role = Prefiller(link, built.engine, built.holdings, built.parts, ledger, issuer, board)
    return role, role.close


def _decoder(life: _Life, link: Link) -> tuple[Role, Callable[[], None]]:
    spec, built = life.spec, life.built
    courier = Courier(Links(spec.transports, built.parts, spec.digest), link.send, link.wake)
    role = Decoder(link, built.engine, built.holdings, built.layout, courier, life.key, built.fingerprint)
    courier.open()
    return role, courier.close
