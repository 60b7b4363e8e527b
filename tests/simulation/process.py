"""Worker processes in virtual time: the real loop, roles, engine and books, on a toy model and a virtual channel.

    Post (a name, supervised) ── starts ──▶ Process (a pool and an engine, once) ── role after role ──▶ Life

A round of the loop happens at one moment, and takes as long as the step in it; what it says leaves when it ends. The
connection of a process that was killed is closed, that of one that was stopped is not.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from decode_worker.worker import DecodeWorker
from diptych.chunks import RAW_CLASS
from diptych.eviction_spec import ADA, FASTGEN
from diptych.messages import Hello
from engine.bulk.budget import BulkTime
from engine.bulk.engine import BulkEngine
from engine.loop import Engine
from engine.protocols import StepRunner
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.class_shares import split_auto
from kvcache.layout import Shard
from kvcache.prefix_tree import PrefixTree
from kvcache.slab_ledger import SlabLedger
from kvcache.tiers.host import HostArenas, HostTier
from kvtransfer.layer_progress import ENTRY_BYTES, LayerProgress
from kvtransfer.leases import LeaseLedger
from kvtransfer.resharding import ShardedPool, plan_spans
from prefill_worker.worker import PrefillWorker, TicketIssuer
from tests.simulation.channel import LEASE_S, VirtualLink, VirtualNetwork
from tests.simulation.event_queue import ScheduledEvent, VirtualEventQueue
from tests.simulation.transport import VirtualKvFetcher, VirtualPipes
from tests.simulation.virtual_model import (
    FINGERPRINT,
    LAYERS,
    ProcessCrash,
    VirtualClassRunner,
    VirtualMemory,
    VirtualRunner,
    VirtualSampler,
    toy_layout,
)
from worker.loop import LatestStats, WorkerLoop, WorkerRole

KEY = bytes(range(32))
MODEL_LEN = 320
STEP_S, TOKEN_S, ROUND_S = 0.004, 0.00005, 0.0001  # a step, each of its tokens, and a round without any step
DRAIN_S = 3.0
BULK_SLICE_S = 0.01


class ProcessWorld(Protocol):
    """What a process needs of the world around it."""

    agenda: VirtualEventQueue
    network: VirtualNetwork
    pipes: VirtualPipes
    num_slabs: int
    # The KV class of each worker that has one, for its next process; the others are raw.
    kv_classes: dict[str, str]
    # What workers continue exactly, and say that they do.
    traits: tuple[str, ...]
    writers: type[DecodeWorker]
    readers: type[PrefillWorker]
    runners: type[VirtualRunner]
    # What its workers' processes are.
    processes: type[VirtualProcess]

    def ended(self, process: VirtualProcess, how: str) -> None:
        """A process is over: "crashed", "killed", or "" if it had been asked to end."""


class VirtualProcess:
    """One process: what was built, and the life that it leads now."""

    does_bulk = True

    def __init__(self, world: ProcessWorld, name: str, role: str, number: int, ended: str) -> None:
        self.world, self.name, self.number = world, name, number
        self.alive, self.stopped = True, False
        self.retires = False  # asked to end, for good
        self._elapsed_s, self._awake, self._lives = 0.0, False, 0
        self._due: ScheduledEvent | None = None
        self._round_planned, self._busy_s = False, 0.0
        self._build(world)
        self.begin(role, ended)

    def _build(self, world: ProcessWorld) -> None:
        """What is built once: memory, pools and the engine."""
        # Classes that are joined by commas share the worker's slabs evenly; a leading "auto" is none.
        self.kv_class = world.kv_classes.get(self.name, RAW_CLASS)
        self.chooses, named = split_auto(self.kv_class)
        classes = named.split(",")
        sized = [(toy_layout(one), world.num_slabs // len(classes)) for one in classes]
        shard = Shard((0, LAYERS), (0, 1))
        spans, (num_bytes,) = plan_spans(sized, [shard])
        whole = memoryview(bytearray(num_bytes))
        self.parts = ShardedPool(sized[0][0], [(shard, whole)], sized)
        self.memories = {
            span.kv_class: VirtualMemory(
                span.num_slabs,
                span.kv_class,
                span.first,
                whole[start : start + span.num_slabs * layout.chunk_bytes],
            )
            for span, (layout, _) in zip(spans, sized, strict=True)
            for start in span.offsets
        }
        self.num_slabs = self.parts.num_slabs
        self.board_memory = memoryview(bytearray(self.num_slabs * ENTRY_BYTES))
        slabs = {name: memory.num_slabs for name, memory in self.memories.items()}
        limits = EngineLimits(
            self.num_slabs, MODEL_LEN, max_num_seqs=6, max_num_batched_tokens=96, max_waiting=64,
            arena_slabs=slabs if len(slabs) > 1 else {},
        )  # fmt: skip
        books = {
            name: KvAllocator(SlabLedger(memory.num_slabs, memory.first), PrefixTree())
            for name, memory in self.memories.items()
        }
        self.tiers = {
            name: HostTier([memory], 4 * memory.layout.chunk_bytes, memory.first)
            for name, memory in self.memories.items()
        }
        self.holdings: KvAllocator | KvArenas
        if len(classes) > 1:
            self.holdings = KvArenas(books)
            host: HostTier | HostArenas = HostArenas(self.tiers)
            runner: StepRunner = VirtualClassRunner(list(self.memories.values()), self._spend, world.runners)
        else:
            self.holdings, host = books[classes[0]], self.tiers[classes[0]]
            runner = world.runners(self.memories[classes[0]], self._spend)
        sampler = VirtualSampler(world.traits)
        self.engine = Engine(runner, Scheduler(limits), self.holdings, sampler, host)
        self.bulk = BulkEngine(runner, limits, self.holdings, sampler, BulkTime(BULK_SLICE_S))

    @property
    def keep_classes(self) -> list[str]:
        """The classes in which it can evict."""
        return [RAW_CLASS] if getattr(self.engine.runner, "can_evict", False) else []

    def sequences(self) -> list[Sequence]:
        """All sequences that it works for."""
        return [*self.engine.scheduler.sequences(), *self.bulk.scheduler.sequences()]

    def count_held(self) -> dict[str, int]:
        """What else is held; all 0 at rest."""
        return {
            "bulk": len(self.bulk.scheduler),
            "lent": self.holdings.lent,
            "parked": sum(tier.used_bytes for tier in self.tiers.values()),
        }

    def memory_at(self, slab: int) -> VirtualMemory | None:
        """The pool that has a slab."""
        return next((memory for memory in self.memories.values() if slab in memory), None)

    # ---- lives

    def begin(self, role: str, ended: str = "") -> None:
        """A life in `role`, as `services.worker.role_lifecycle` makes one."""
        self._lives += 1
        self.kind, self.incarnation = role, f"{self.name}/{self.number}.{self._lives}"
        self.line = VirtualLink(self.world.network, self.name, self.clock, self.wake_process)
        self.books = LatestStats()
        self.courier: VirtualKvFetcher | None = None
        endpoints = {"virtual": self.incarnation.encode()} if role == "prefill" else {}
        self.world.pipes.open(self.incarnation, self)
        self.role = self._prefiller() if role == "prefill" else self._decoder()
        self.shell = WorkerLoop(
            self.line,
            self.engine,
            self.role,
            self.holdings,
            self.books,
            fingerprint=FINGERPRINT,
            codecs={name: memory.layout.codec for name, memory in self.memories.items()},
            drain_s=DRAIN_S,
            clock=self.clock,
            bulk=self.bulk if role == "decode" and self.does_bulk else None,
        )
        self.line.stats = self.books.read_stats
        self.line.open(
            Hello(
                self.name,
                role,
                self.incarnation,
                FINGERPRINT,
                {},
                "host",
                self.number,
                self.num_slabs,
                self.parts.layout.chunk_bytes,
                MODEL_LEN,
                endpoints,
                ended=ended,
                kv_classes={
                    name: (memory.num_slabs, memory.layout.chunk_bytes)
                    for name, memory in self.memories.items()
                },
                kv_losses={name: 0.5 for name, memory in self.memories.items() if memory.layout.codec},
                kv_auto=self.chooses,
                keep_classes=self.keep_classes,
                keep_rules=(ADA, FASTGEN),
                traits=self.world.traits,
                pools=True,
            )
        )
        self.wake_process()

    def _prefiller(self) -> WorkerRole:
        issuer = TicketIssuer(KEY, self.name, self.incarnation, FINGERPRINT, "xxh3")
        board = LayerProgress(self.num_slabs, self.board_memory)
        self.ledger = LeaseLedger(LEASE_S)
        return self.world.readers(
            self.line, self.engine, self.holdings, self.parts, self.ledger, issuer, board
        )

    def _decoder(self) -> WorkerRole:
        courier = VirtualKvFetcher(self.world.pipes, self, self.line.send, self.line.wake_poll)
        self.courier = courier
        return self.world.writers(
            self.line, self.engine, self.holdings, self.parts.layout_of, courier, KEY, FINGERPRINT
        )

    # ---- rounds

    def clock(self) -> float:
        return self.world.agenda.now_s + self._elapsed_s

    def _spend(self, tokens: int) -> None:
        """Half a step passes, with what others do meanwhile to the memory that is read and written."""
        self._elapsed_s += (STEP_S + TOKEN_S * tokens) / LAYERS
        self.world.pipes.advance(self.clock())

    def wake_process(self) -> None:
        """Something has come that the loop waits for."""
        self._awake = True
        if self.alive and not self.stopped and not self._round_planned:
            self._plan_round(max(self.world.agenda.now_s, self._busy_s))

    def _plan_round(self, at_s: float) -> None:
        if self._due is not None:
            if not self._due.cancelled and self._due.at_s <= at_s:
                return
            self._due.cancel()
        self._due = self.world.agenda.schedule_at(at_s, self._run_round, f"{self.kind} round")

    def _run_round(self) -> None:
        self._due = None
        if not self.alive or self.stopped:
            return
        self._elapsed_s, self._awake, self._round_planned = ROUND_S, False, True
        try:
            self.shell.run_once()
            over = self.shell.is_over
            if over:
                self.shell.run_until_drained()  # it is over: what is left is reported as failed
        except ProcessCrash:
            return self.end("crashed")
        finally:
            self._round_planned = False
        self._busy_s = self.clock()
        patience_s = 0.0 if self._awake or self.line.waiting else self.shell.max_wait_s
        self._elapsed_s = 0.0
        if over:
            self.world.agenda.schedule_at(self._busy_s, self._over, "life ends")
        else:
            self._plan_round(self._busy_s + patience_s)

    def _over(self) -> None:
        """The role is drained: on to the next, or to the end."""
        if not self.alive:
            return
        self._close_role()
        self.line.close()
        self.world.pipes.close(self.incarnation)
        role = self.shell.next_role
        if role:
            self.shell.check_settled()
            self.begin(role)
        else:
            self.end("")

    def _close_role(self) -> None:
        """What the role has started ends."""
        if self.courier is not None:
            self.courier.close()

    # ---- signals

    def end(self, how: str) -> None:
        """It is gone; its memory is not, for those who have mapped it."""
        if not self.alive:
            return
        self.alive = False
        if self.courier is not None:
            self.courier.end()
        if self._due is not None:
            self._due.cancel()
        self.line.close()
        self.world.pipes.close(self.incarnation)
        self.world.ended(self, how)

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.stopped:
            self.stopped = True
            self.line.freeze()

    def cont(self, silence_first: bool) -> None:
        """SIGCONT."""
        if self.alive and self.stopped:
            self.stopped = False
            self.line.thaw(silence_first)
            self.wake_process()

    def term(self) -> None:
        """SIGTERM."""
        self.retires = True
        self.shell.start_drain()
        self.wake_process()


class VirtualSupervisor:
    """A name at which a process lives, started again whenever one ends."""

    def __init__(self, world: ProcessWorld, name: str, role: str) -> None:
        self.world, self.name, self.role, self.number = world, name, role, 0
        self.process: VirtualProcess | None = None
        self.start("")

    def start(self, ended: str) -> None:
        self.number += 1
        self.process = self.world.processes(self.world, self.name, self.role, self.number, ended)

    def again(self, after_s: float, ended: str) -> None:
        """The supervisor starts another one, after a pause."""
        if self.process is not None:
            self.role = self.process.kind
        self.process = None
        self.world.agenda.schedule_after(after_s, partial(self.start, ended), "start")
