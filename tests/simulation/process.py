"""Worker processes in virtual time: the real loop, roles, engine and books, on a toy model and a virtual channel.

    Post (a name, supervised) ── starts ──▶ Process (a pool and an engine, once) ── role after role ──▶ Life

A turn of the loop happens at one moment, and takes as long as the step in it; what it says leaves when it ends. The
connection of a process that was killed is closed, that of one that was stopped is not.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from decode_worker.worker import Decoder
from diptych.messages import Hello
from engine.loop import Engine
from engine.scheduler import Limits, Scheduler
from kvcache.holdings import Holdings
from kvcache.prefix_tree import PrefixTree
from kvcache.slabs import Slabs
from kvcache.tiers.host import HostTier
from kvtransfer.board import ENTRY_BYTES, Board
from kvtransfer.leases import LeaseLedger
from kvtransfer.parts import Parts, whole
from prefill_worker.worker import Issuer, Prefiller
from tests.simulation.agenda import Agenda, Entry
from tests.simulation.channel import LEASE_S, Line, Network
from tests.simulation.toy import FINGERPRINT, LAYOUT, Crash, Memory, ToyRunner, ToySampler
from tests.simulation.transport import Pipes, VirtualCourier
from worker.shell import Books, Role, Shell

KEY = bytes(range(32))
MODEL_LEN = 320
STEP_S, TOKEN_S, TURN_S = 0.004, 0.00005, 0.0001  # a step, each of its tokens, and a turn without any step
DRAIN_S = 3.0


class Surroundings(Protocol):
    """What a process needs of the world around it."""

    agenda: Agenda
    network: Network
    pipes: Pipes
    num_slabs: int
    writers: type[Decoder]
    readers: type[Prefiller]

    def ended(self, process: Process, how: str) -> None:
        """A process is over: "crashed", "killed", or "" if it had been told to end."""


class Process:
    """One process: what was built, and the life that it leads now."""

    def __init__(self, world: Surroundings, name: str, role: str, number: int, ended: str) -> None:
        self.world, self.name, self.number = world, name, number
        self.alive, self.stopped = True, False
        self.retires = False  # told to end, for good
        self._elapsed_s, self._awake, self._lives = 0.0, False, 0
        self._due: Entry | None = None
        self._turning, self._busy_s = False, 0.0
        self.memory = Memory(world.num_slabs)
        self.board_memory = memoryview(bytearray(world.num_slabs * ENTRY_BYTES))
        self.parts: Parts = whole(LAYOUT, self.memory.bytes)
        self.holdings = Holdings(Slabs(world.num_slabs), PrefixTree())
        limits = Limits(world.num_slabs, MODEL_LEN, max_num_seqs=6, max_num_batched_tokens=96, max_waiting=64)
        runner = ToyRunner(self.memory, self._spend)
        self.host = HostTier([self.memory], 4 * LAYOUT.chunk_bytes)
        self.engine = Engine(runner, Scheduler(limits), self.holdings, ToySampler(), self.host)
        self.begin(role, ended)

    # ---- lives

    def begin(self, role: str, ended: str = "") -> None:
        """A life in `role`, as `services.worker.compose` makes one."""
        self._lives += 1
        self.kind, self.incarnation = role, f"{self.name}/{self.number}.{self._lives}"
        self.line = Line(self.world.network, self.name, self.clock, self.stir)
        self.books = Books()
        self.courier: VirtualCourier | None = None
        endpoints = {"virtual": self.incarnation.encode()} if role == "prefill" else {}
        self.world.pipes.open(self.incarnation, self)
        self.role = self._prefiller() if role == "prefill" else self._decoder()
        self.shell = Shell(
            self.line,
            self.engine,
            self.role,
            self.holdings,
            self.books,
            fingerprint=FINGERPRINT,
            drain_s=DRAIN_S,
            clock=self.clock,
        )
        self.line.stats = self.books.read
        self.line.open(
            Hello(
                self.name,
                role,
                self.incarnation,
                FINGERPRINT,
                {},
                "host",
                self.number,
                self.world.num_slabs,
                LAYOUT.chunk_bytes,
                MODEL_LEN,
                endpoints,
                ended=ended,
            )
        )
        self.stir()

    def _prefiller(self) -> Role:
        issuer = Issuer(KEY, self.name, self.incarnation, FINGERPRINT, "xxh3")
        board = Board(self.world.num_slabs, self.board_memory)
        self.ledger = LeaseLedger(LEASE_S)
        return self.world.readers(
            self.line, self.engine, self.holdings, self.parts, self.ledger, issuer, board
        )

    def _decoder(self) -> Role:
        courier = VirtualCourier(self.world.pipes, self, self.line.send, self.line.wake)
        self.courier = courier
        return self.world.writers(self.line, self.engine, self.holdings, LAYOUT, courier, KEY, FINGERPRINT)

    # ---- turns

    def clock(self) -> float:
        return self.world.agenda.now_s + self._elapsed_s

    def _spend(self, tokens: int) -> None:
        """Half a step passes, with what others do meanwhile to the memory that is read and written."""
        self._elapsed_s += (STEP_S + TOKEN_S * tokens) / LAYOUT.layers
        self.world.pipes.advance(self.clock())

    def stir(self) -> None:
        """Something has come that the loop waits for."""
        self._awake = True
        if self.alive and not self.stopped and not self._turning:
            self._plan(max(self.world.agenda.now_s, self._busy_s))

    def _plan(self, at_s: float) -> None:
        if self._due is not None:
            if not self._due.cancelled and self._due.at_s <= at_s:
                return
            self._due.cancel()
        self._due = self.world.agenda.at(at_s, self._turn, f"{self.kind} turn")

    def _turn(self) -> None:
        self._due = None
        if not self.alive or self.stopped:
            return
        self._elapsed_s, self._awake, self._turning = TURN_S, False, True
        try:
            self.shell.turn()
            over = self.shell.over
            if over:
                self.shell.run()  # it is over: what is left is told as failed
        except Crash:
            return self.end("crashed")
        finally:
            self._turning = False
        self._busy_s = self.clock()
        patience_s = 0.0 if self._awake or self.line.waiting else self.shell.patience
        self._elapsed_s = 0.0
        if over:
            self.world.agenda.at(self._busy_s, self._over, "life ends")
        else:
            self._plan(self._busy_s + patience_s)

    def _over(self) -> None:
        """The role is drained: on to the next, or to the end."""
        if not self.alive:
            return
        if self.courier is not None:
            self.courier.close()
        self.line.close()
        self.world.pipes.close(self.incarnation)
        role = self.shell.turned
        if role:
            self.shell.settle()
            self.begin(role)
        else:
            self.end("")

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
            self.stir()

    def term(self) -> None:
        """SIGTERM."""
        self.retires = True
        self.shell.drain()
        self.stir()


class Post:
    """A name at which a process lives, started again whenever one ends."""

    def __init__(self, world: Surroundings, name: str, role: str) -> None:
        self.world, self.name, self.role, self.number = world, name, role, 0
        self.process: Process | None = None
        self.start("")

    def start(self, ended: str) -> None:
        self.number += 1
        self.process = Process(self.world, self.name, self.role, self.number, ended)

    def again(self, after_s: float, ended: str) -> None:
        """The supervisor starts another one, after a pause."""
        if self.process is not None:
            self.role = self.process.kind
        self.process = None
        self.world.agenda.after(after_s, partial(self.start, ended), "start")
