"""A prefill and a decode worker over the embedded model, for tests of what moves between them."""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.worker import DecodeWorker
from diptych.eviction_spec import KeepSpec
from diptych.messages import Admit, Offer, Output, Prefill, Pulled, Release, Step, ToWorker, WorkerStats
from diptych.request import Tenancy
from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine
from engine.sampling import grammar
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree
from kvcache.tiers.host import HostTier
from kvtransfer.leases import LeaseLedger
from kvtransfer.resharding import unsharded_pool
from prefill_worker.worker import PrefillWorker, TicketIssuer
from tests.engine.workers.worker_bench import KEY, FakeLine, FakeLinks, StillCourier, sampling
from tests.support.factories import make_tokenizer
from worker.loop import LatestStats, WorkerLoop, WorkerRole

TOKENS = 140
# Makes a runner and its pool.
MakeRunner = Callable[[], tuple[CpuModelRunner, KvPool]]


class ModelWorker:
    """A worker's loop over the embedded model, and what it said."""

    def __init__(self, make: MakeRunner, swap: int = 0) -> None:
        """`swap`: how many slabs may be parked."""
        self.line = FakeLine()
        self.runner, self.pool = make()
        num_slabs = self.pool.num_slabs
        self.holdings = KvAllocator(self.pool, PrefixTree())
        limits = EngineLimits(num_slabs, 1000, max_num_seqs=16, max_num_batched_tokens=128)
        sampler = Sampler(self.runner.vocab_size, grammar.build_tokenizer(make_tokenizer(), [2]))
        host = HostTier([self.pool], swap * self.pool.layout.chunk_bytes)
        self.engine = Engine(self.runner, Scheduler(limits), self.holdings, sampler, host)

    def open(self, role: WorkerRole) -> None:
        self.shell = WorkerLoop(
            self.line, self.engine, role, self.holdings, LatestStats(), fingerprint="model", clock=lambda: 1.0
        )

    def tell(self, order: ToWorker) -> None:
        """Give it an order, and let it work until it waits."""
        self.line.inbox.append(order)
        self.shell.run_once()
        while self.engine.has_work:
            self.shell.run_once()

    @property
    def stats(self) -> WorkerStats:
        """What it tells of itself."""
        return self.shell.role.complete_stats(self.engine.stats)

    def tokens(self, request: str) -> list[int]:
        """All tokens of a request."""
        steps = [message for message in self.line.said if isinstance(message, Step)]
        outputs: list[Output] = [output for step in steps for output in step.outputs]
        return [token for output in outputs if output.request == request for token in output.tokens]


class ModelBench:
    """A prefill and a decode worker over the embedded model."""

    def __init__(self, make: MakeRunner, swap: int = 0) -> None:
        self.prefill, self.decode = ModelWorker(make), ModelWorker(make, swap)
        pool = self.prefill.pool
        issuer = TicketIssuer(KEY, "prefill-0", "life", "model", "xxh3")
        half = self.prefill
        half.open(
            PrefillWorker(
                half.line,
                half.engine,
                half.holdings,
                unsharded_pool(pool.layout, pool.memory),
                LeaseLedger(10.0),
                issuer,
            )
        )
        links = FakeLinks(pool, self.decode.pool, memoryview(b""))
        self.courier = StillCourier(links, lambda: 1.0)
        half = self.decode
        half.open(
            DecodeWorker(
                half.line,
                half.engine,
                half.holdings,
                lambda kv_class: pool.layout,
                self.courier,
                KEY,
                "model",
            )
        )

    def offer(
        self, name: str, prompt: list[int], delivered: list[int], keep: KeepSpec, cuts_kept: bool = False
    ) -> tuple[Offer, list[int]]:
        """Prefill a prompt and what was delivered: the offer, and all tokens so far."""
        order = Prefill(
            name, 0, prompt, delivered, sampling(TOKENS), 60.0, Tenancy(), keep=keep, cuts_kept=cuts_kept
        )
        self.prefill.tell(order)
        [offer] = [one for one in self.prefill.line.said if isinstance(one, Offer) and one.request == name]
        return offer, delivered + self.prefill.tokens(name)

    def hand_over(
        self, name: str, prompt: list[int], delivered: list[int], keep: KeepSpec, cuts_kept: bool = False
    ) -> tuple[list[int], int]:
        """The answer behind `delivered`, and the bytes that were moved for it."""
        offer, output = self.offer(name, prompt, delivered, keep, cuts_kept)
        self.decode.tell(Admit(name, 0, prompt, output, sampling(TOKENS), offer.ticket, 60.0, keep=keep))
        self.courier.land()
        self.decode.tell(Release("nobody", 0))
        self.prefill.tell(Release(name, 0))
        return self.prefill.tokens(name) + self.decode.tokens(name), self.moved_bytes(name)

    def moved_bytes(self, name: str) -> int:
        """The bytes that were moved for a request."""
        [pulled] = [one for one in self.decode.line.said if isinstance(one, Pulled) and one.request == name]
        return pulled.num_bytes

    def check_rest(self) -> None:
        """Nothing is held."""
        for half in (self.prefill, self.decode):
            half.holdings.check_books()
            assert half.holdings.used == 0
