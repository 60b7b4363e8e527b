"""Both roles of vLLM workers in one process, over toy ports: real buffers, tickets, digests and loops.

Time, pulls and the thread that offers stand still until a test moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from decode_worker.kv_fetcher import KvArrival
from diptych.messages import Abort, Admit, Failed, Offer, Output, Prefill, Pulled, Step, ToWorker, WorkerStats
from diptych.request import SamplingParams, Tenancy
from kvtransfer.cooperative import RUN_NOW, CoopTask
from kvtransfer.leases import LeaseLedger
from kvtransfer.transfer_buffer import TransferBuffer
from prefill_worker.worker import TicketIssuer
from tests.engine.workers.worker_bench import KEY, LEASE_S, FakeLine, FakeLinks, StillCourier
from tests.support.toy_port import VOCAB, ToyPort, answer_alone
from vllm_worker.buffer import open_buffer
from vllm_worker.decode_role import VllmDecodeRole
from vllm_worker.engine import VllmEngine
from vllm_worker.prefill_role import VllmPrefillRole
from vllm_worker.roles import VllmBooks
from worker.loop import LatestStats, WorkerLoop, WorkerRole

MAX_MODEL_LEN = 1000
TOKENS = 10
ANYBODY = Tenancy()


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return [5 + (7 * place + 13 * seed + length) % (VOCAB - 5) for place in range(length)]


def greedy(max_tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)


def alone(prompt: list[int], max_tokens: int = TOKENS) -> list[int]:
    return answer_alone(prompt, greedy(max_tokens), MAX_MODEL_LEN)


class StillTasks:
    """The thread of a prefill role, which runs when a test says so."""

    def __init__(self) -> None:
        self.tasks: list[CoopTask[None]] = []

    def open(self) -> None:
        """Nothing starts."""

    def close(self) -> None:
        self.creep()
        assert not self.tasks, "they would never end"

    def add_task(self, task: CoopTask[None]) -> None:
        self.tasks.append(task)

    def wake_tasks(self) -> None:
        """They run when a test says so."""

    def creep(self) -> None:
        """Let every task go as far as it can go now."""
        for task in list(self.tasks):
            while (pause_s := next(task, None)) == RUN_NOW:
                pass
            if pause_s is None:
                self.tasks.remove(task)


class BenchCourier(StillCourier):
    """A courier that can be closed: its pulls notice that they were stopped."""

    def close(self) -> None:
        self._closing.set()
        while self.under_way:
            self.land()


class SlabMemory:
    """The slabs of a buffer, as `FakeLinks` copies them."""

    def __init__(self, buffer: TransferBuffer) -> None:
        self.num_slabs, self._buffer = buffer.num_slabs, buffer

    def slab_bytes(self, slab: int) -> memoryview:
        size = self._buffer.layout.chunk_bytes
        return self._buffer.memory.view[slab * size : (slab + 1) * size]


class VllmHalf:
    """One worker: its loop, line, port and buffer."""

    def __init__(
        self, bench: VllmBench, port: ToyPort, num_slabs: int, make: Callable[[VllmHalf], WorkerRole]
    ) -> None:
        self.line, self.port, self.latest = FakeLine(), port, LatestStats()
        self.buffer = open_buffer(port.facts, num_slabs * port.facts.slab_bytes)
        port.attach_buffer(self.buffer)
        self.engine = VllmEngine(port, bench.clock)
        self.role: Any = make(self)
        self.books = VllmBooks(port, self.buffer)
        self.loop = WorkerLoop(
            self.line,
            self.engine,
            self.role,
            self.books,
            self.latest,
            fingerprint="model",
            clock=bench.clock,
        )

    def tell(self, *messages: ToWorker) -> None:
        """Messages arrive, and are taken in one round of the loop."""
        self.line.inbox.extend(messages)
        self.loop.run_once()

    def outputs(self, request: str, epoch: int = 0) -> list[Output]:
        steps = [message for message in self.line.said if isinstance(message, Step)]
        outputs = [output for step in steps for output in step.outputs]
        return [output for output in outputs if (output.request, output.epoch) == (request, epoch)]

    def tokens(self, request: str, epoch: int = 0) -> list[int]:
        return [token for output in self.outputs(request, epoch) for token in output.tokens]

    def failures(self, request: str) -> list[str]:
        said = [message for message in self.line.said if isinstance(message, Failed)]
        return [message.code for message in said if message.request == request]

    def offers(self, request: str, epoch: int = 0) -> list[Offer]:
        said = [message for message in self.line.said if isinstance(message, Offer)]
        return [message for message in said if (message.request, message.epoch) == (request, epoch)]

    def pulled(self, request: str) -> list[Pulled]:
        said = [message for message in self.line.said if isinstance(message, Pulled)]
        return [message for message in said if message.request == request]

    @property
    def stats(self) -> WorkerStats:
        return self.latest.stats


class VllmBench:
    """A prefill and a decode worker, and a clock that a test moves."""

    def __init__(
        self,
        prefill: ToyPort | None = None,
        decode: ToyPort | None = None,
        prefill_slabs: int = 40,
        decode_slabs: int = 40,
    ) -> None:
        self.now_s = 100.0
        self.tasks = StillTasks()
        toy = partial(ToyPort, max_model_len=MAX_MODEL_LEN, num_blocks=60)
        self.prefill = VllmHalf(self, prefill or toy(), prefill_slabs, self._make_prefill)
        self.decode = VllmHalf(self, decode or toy(), decode_slabs, self._make_decode)

    def clock(self) -> float:
        return self.now_s

    def _make_prefill(self, half: VllmHalf) -> VllmPrefillRole:
        issuer, ledger = TicketIssuer(KEY, "prefill-0", "life", "model", "xxh3"), LeaseLedger(LEASE_S)
        return VllmPrefillRole(
            half.line,
            half.engine,
            half.port.exchange,
            half.buffer,
            ledger,
            issuer,
            clock=self.clock,
            tasks=self.tasks,  # type: ignore[arg-type]
        )

    def _make_decode(self, half: VllmHalf) -> VllmDecodeRole:
        memories = SlabMemory(self.prefill.buffer), SlabMemory(half.buffer)
        self.links = FakeLinks(*memories, memoryview(bytearray()))  # type: ignore[arg-type]
        self.courier = BenchCourier(self.links, self.clock)
        return VllmDecodeRole(
            half.line, half.engine, half.buffer, self.courier, KEY, "model", clock=self.clock
        )

    # ---- a request on its way

    def work(self) -> None:
        """Let everything but pulls progress until nothing can."""
        for _ in range(60):
            self.tasks.creep()
            for half in (self.prefill, self.decode):
                half.loop.run_once()
            self.now_s += 0.06  # an engine that rests wakes up
            if not (self.prefill.port.has_work or self.decode.port.has_work or self.tasks.tasks):
                break

    def prefill_it(
        self, name: str, prompt: list[int], epoch: int = 0, defer: bool = False, origin: Tenancy = ANYBODY
    ) -> Offer:
        """Let the prefill worker compute a prompt; returns what it offers."""
        order = Prefill(name, epoch, prompt, [], greedy(), 60.0, origin, defer_first=defer)
        self.prefill.tell(order)
        self.work()
        return self.prefill.offers(name, epoch)[-1]

    def admit(
        self, name: str, prompt: list[int], ticket: bytes, epoch: int = 0, origin: Tenancy = ANYBODY
    ) -> None:
        """Order the decode worker to go on with what was offered."""
        first = self.prefill.tokens(name, epoch)
        self.decode.tell(Admit(name, epoch, prompt, first, greedy(), ticket, 60.0, origin))

    def answer(self, name: str, prompt: list[int], defer: bool = False) -> list[int]:
        """The whole way of one request; returns all its tokens."""
        self.admit(name, prompt, self.prefill_it(name, prompt, defer=defer).ticket)
        self.land_all()
        self.work()
        self.prefill.tell(Abort(name, 0))
        return self.prefill.tokens(name) + self.decode.tokens(name)

    def land_all(self) -> None:
        """Let all pulls end."""
        while self.courier.under_way:
            self.courier.land()
            self.decode.loop.run_once()

    @property
    def pulling(self) -> list[KvArrival]:
        """The pulls that have begun."""
        return self.courier.under_way

    def check_rest(self) -> None:
        """Everything is free, at both workers."""
        self.work()
        for half in (self.prefill, self.decode):
            half.loop.run_once()
            assert not half.loop.is_busy
            assert half.books.used == 0, half.books.owners()
            half.books.check_books()
            stats = half.stats
            used = (
                stats.slabs_used,
                stats.leases,
                stats.buffer_used,
                stats.buffer_leased,
                stats.copies_in_flight,
            )
            assert (*used, stats.waiting, stats.staging_bytes, stats.offers_waiting) == (0,) * 8
