"""A decode worker whose ranks split KV otherwise than the source: it takes more slabs for a bag, or frees some."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decode_worker.worker import DecodeWorker
from diptych.errors import CorruptChunk
from diptych.messages import Abort, Release
from kvcache.layout import KvLayout
from kvtransfer.bag_repacking import BagRepacker
from kvtransfer.resharding import unsharded_pool
from kvtransfer.ticket import Ticket
from tests.engine.workers.kept_bench import KeptBench, kept_alone
from tests.engine.workers.kept_steps import (
    BAG,
    PROMPT,
    TOKENS,
    WHOLE,
    admit,
    failures,
    moving,
    prefill,
)
from tests.engine.workers.worker_bench import KEY, LAYOUT, BenchWorker, FakeLinks, StillCourier
from worker.loop import WorkerRole


class OtherRanks(BagRepacker):
    """Bags take `more` slabs here than at the source; `error` is raised instead of a repacking."""

    def __init__(self, bench: RepackingBench, more: int) -> None:
        super().__init__(unsharded_pool(LAYOUT, bench.decode.pool.memory))
        self._bench, self._more = bench, more
        self.error: Exception | None = None

    def needs(self, ticket: Ticket) -> int:
        return ticket.context.num_bag_slabs + self._more

    def repack(self, ticket: Ticket, slabs: Sequence[int]) -> None:
        if self.error is not None:
            raise self.error
        needed = self.needs(ticket)
        assert len(slabs) == max(needed, ticket.context.num_bag_slabs)
        self._bench.decoder.write_rest(list(slabs[:needed]))


class RepackingBench(KeptBench):
    """`repacker` brings bags into the form that the decode worker reads."""

    def __init__(self, more: int) -> None:
        self._more = more
        super().__init__()

    def _decoder(self, half: BenchWorker) -> WorkerRole:
        self.decode = half
        self.links = FakeLinks(self.prefill.pool, half.pool, self.board)
        self.courier = StillCourier(self.links, self.clock)
        self.repacker = OtherRanks(self, self._more)

        def layout_of(kv_class: str) -> KvLayout:
            return LAYOUT

        return DecodeWorker(
            half.line, half.engine, half.holdings, layout_of, self.courier, KEY, "model", self.repacker
        )


@pytest.mark.parametrize("more", [-1, 0, 2])
def test_room_is_taken_for_both_forms_and_what_is_left_over_is_freed(more: int) -> None:
    bench, answer = RepackingBench(more), kept_alone(PROMPT, TOKENS, WHOLE)
    admit(bench, "a", prefill(bench, "a", []), [])
    chunks = WHOLE.boundary_chunks
    assert BAG > 1 and bench.decode.holdings.used == chunks + max(BAG, BAG + more) + 1
    [arrival] = bench.courier.under_way
    assert arrival.num_bytes == (chunks + BAG) * LAYOUT.chunk_bytes, "what moves is what the source has"
    bench.courier.land()
    bench.decode.shell.run_once()
    [seq] = bench.decode.engine.scheduler.sequences()
    assert len(seq.bag_slabs) == BAG + more == seq.kept_slabs - 1
    bench.decode.holdings.check_books()
    assert bench.decode.holdings.used == chunks + BAG + more + 1
    bench.decode.work()
    bench.prefill.tell(Release("a", 0))
    assert bench.prefill.tokens("a") + bench.decode.tokens("a") == answer
    bench.check_rest()


@pytest.mark.parametrize(
    ("error", "code"),
    [(CorruptChunk("no map of kept rows"), "kv_corrupt"), (RuntimeError("a bug"), "internal_error")],
)
def test_a_bag_that_cannot_be_repacked_fails_the_attempt_and_frees_everything(
    error: Exception, code: str
) -> None:
    bench = RepackingBench(2)
    bench.repacker.error = error
    moving(bench)
    bench.courier.land()
    bench.decode.work()
    assert [one.code for one in failures(bench.decode, "a")] == [code]
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


def test_an_abort_while_it_is_on_its_way_frees_room_for_both_forms() -> None:
    bench = RepackingBench(2)
    moving(bench)
    bench.decode.tell(Abort("a", 0))
    bench.courier.land()
    bench.decode.work()
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()
