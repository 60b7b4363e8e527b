"""Both roles over the embedded model with heads that drop tokens: a handed-over answer is that of one worker alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from decode_worker.worker import DecodeWorker
from diptych.eviction_spec import KEEP_ALL, KeepSpec, decision_tokens
from diptych.messages import Admit, Generate, Offer, Output, Prefill, Pulled, Release, Step, ToWorker
from engine.loop import Engine
from engine.sampling import grammar
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, num_chunks
from kvcache.allocator import KvAllocator
from kvcache.prefix_tree import PrefixTree
from kvtransfer.leases import LeaseLedger
from kvtransfer.resharding import unsharded_pool
from prefill_worker.worker import PrefillWorker, TicketIssuer
from tests.engine.cpu.eviction.evicted_runs import make_runner, source_tokens
from tests.engine.workers.worker_bench import KEY, FakeLine, FakeLinks, StillCourier, sampling
from tests.support.factories import make_tokenizer
from worker.loop import LatestStats, WorkerLoop, WorkerRole

PROMPT = source_tokens(330)
KEEP = KeepSpec(0.3, 64)
TOKENS = 140
NUM_SLABS = 30


class ModelWorker:
    """A worker's loop over the embedded model, and what it said."""

    def __init__(self) -> None:
        self.line = FakeLine()
        self.runner, self.pool = make_runner(NUM_SLABS)
        self.holdings = KvAllocator(self.pool, PrefixTree())
        limits = EngineLimits(NUM_SLABS, 1000, max_num_seqs=8, max_num_batched_tokens=128)
        sampler = Sampler(self.runner.vocab_size, grammar.build_tokenizer(make_tokenizer(), [2]))
        self.engine = Engine(self.runner, Scheduler(limits), self.holdings, sampler)

    def open(self, role: WorkerRole) -> None:
        self.shell = WorkerLoop(
            self.line, self.engine, role, self.holdings, LatestStats(), fingerprint="model", clock=lambda: 1.0
        )

    def tell(self, order: ToWorker) -> None:
        self.line.inbox.append(order)
        self.shell.run_once()
        while self.engine.has_work:
            self.shell.run_once()

    def tokens(self, request: str) -> list[int]:
        steps = [message for message in self.line.said if isinstance(message, Step)]
        outputs: list[Output] = [output for step in steps for output in step.outputs]
        return [token for output in outputs if output.request == request for token in output.tokens]


class ModelBench:
    """A prefill and a decode worker over the embedded model."""

    def __init__(self) -> None:
        self.prefill, self.decode = ModelWorker(), ModelWorker()
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

    def hand_over(self, name: str, delivered: list[int], keep: KeepSpec) -> tuple[list[int], int]:
        """The answer behind `delivered`, and the bytes that were moved for it."""
        self.prefill.tell(Prefill(name, 0, PROMPT, delivered, sampling(TOKENS), 60.0, keep=keep))
        [offer] = [one for one in self.prefill.line.said if isinstance(one, Offer) and one.request == name]
        first = self.prefill.tokens(name)
        what = delivered + first, sampling(TOKENS), offer.ticket
        self.decode.tell(Admit(name, 0, PROMPT, *what, 60.0, keep=keep))
        self.courier.land()
        self.decode.tell(Release("nobody", 0))
        self.prefill.tell(Release(name, 0))
        pulled = [one for one in self.decode.line.said if isinstance(one, Pulled) and one.request == name]
        return first + self.decode.tokens(name), pulled[0].num_bytes


@pytest.fixture(scope="module")
def bench() -> Iterator[ModelBench]:
    """Left as it was found: nothing is held, the prompt's whole chunks are cached."""
    bench = ModelBench()
    yield bench
    for half in (bench.prefill, bench.decode):
        half.holdings.check_books()
        assert half.holdings.used == 0


def test_a_handed_over_answer_is_that_of_one_worker_alone(bench: ModelBench) -> None:
    """From its first token, and from any other at which it moves; and less is moved than without eviction."""
    bench.decode.tell(Generate("alone", 0, PROMPT, [], sampling(TOKENS), 60.0, keep=KEEP))
    alone = bench.decode.tokens("alone")
    assert len(alone) == TOKENS
    whole, _ = bench.hand_over("whole", [], KEEP_ALL)
    assert whole != alone, "what is dropped matters"
    for count in (0, 1, 70, 128):
        rest, num_bytes = bench.hand_over(f"moved-{count}", alone[:count], KEEP)
        assert alone[:count] + rest == alone
        # The chunk below the boundary is cached here.
        behind = decision_tokens(len(PROMPT), len(PROMPT) + count) - KEEP.boundary
        assert num_bytes <= (num_chunks(behind) - 1) * bench.decode.pool.layout.chunk_bytes
