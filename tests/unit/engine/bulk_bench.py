"""Bulk work beside online requests, in an engine whose steps take what a cost model says."""

from __future__ import annotations

from collections.abc import Callable

from diptych.messages import Output
from diptych.request import BULK_PRIORITY, Tenancy
from engine.bulk.budget import BulkTime
from engine.bulk.engine import BulkEngine
from engine.sequence import Sequence
from engine.step_work import StepWork
from tests.unit.engine.fakes import EngineBench, sampling, sequence

BASE_S, ROW_S, TOKEN_S = 0.001, 0.0005, 0.0002
SLICE_S = 0.02
BULK = Tenancy("batch", "", BULK_PRIORITY)


class BulkBench(EngineBench):
    """An engine, and that of bulk work beside it, on a runner whose steps take as long as their rows and tokens say."""

    def __init__(self, tpot_s: float | None = None, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.batches: list[tuple[str, list[str]]] = []
        run: Callable[..., object] = self.runner.run
        self.runner.run = self._timed(run)  # type: ignore[method-assign,assignment]
        self.bulk = BulkEngine(
            self.runner, self.scheduler.limits, self.holdings, self.sampler, BulkTime(SLICE_S, tpot_s)
        )
        self.unit_s: list[float] = []
        # How many times longer steps take than on a core of their own.
        self.stretch = 1.0
        self.out: dict[str, list[int]] = {}

    def _timed(self, run: Callable[..., object]) -> Callable[..., object]:
        def timed(batch: list[StepWork], done: object = None) -> object:
            rows = sum(len(work.tokens) == 1 and work.start > 0 for work in batch)
            tokens = sum(len(work.tokens) for work in batch) - rows
            self.now_s += self.stretch * (BASE_S + ROW_S * rows + TOKEN_S * tokens)
            return run(batch, done)

        return timed

    def clock(self) -> float:
        return self.now_s

    def online_step(self) -> None:
        begun_s = self.now_s
        for one in self.engine.step(self.clock):
            self._take(one.message)
        self.bulk.record_online(begun_s, self.now_s)

    def unit(self) -> bool:
        """A unit of bulk work; False if there was no time for it."""
        before, begun_s = self.bulk.units, self.now_s
        for one in self.bulk.run_unit(self.engine, self.clock):
            self._take(one.message)
        if self.bulk.units > before:
            self.unit_s.append(self.now_s - begun_s)
        return self.bulk.units > before

    def _take(self, message: object) -> None:
        assert isinstance(message, Output), message
        self.out.setdefault(message.request, []).extend(message.tokens)

    def add_bulk(self, name: str, prompt: int, max_tokens: int = 8) -> Sequence:
        seq = sequence(name, prompt, sampling(max_tokens), tenancy=BULK)
        self.bulk.add(seq, self.now_s)
        return seq

    def settle(self) -> None:
        """Run the online engine while it has work, else bulk work, until all is done."""
        while len(self.scheduler) or len(self.bulk.scheduler):
            if self.engine.has_work:
                self.online_step()
            if not self.unit():
                assert self.engine.has_work or not len(self.bulk.scheduler)
