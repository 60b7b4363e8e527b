"""For tests of segments: sequences whose kept rows are cut into segments and a bag when their prompt ends."""

from __future__ import annotations

from dataclasses import replace

from diptych.eviction_spec import KeepSpec
from engine.cpu.model_runner import CpuModelRunner
from engine.model.calibration_file import load_surrogate
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.protocols import EvictionOrder
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.kept_segments import KeptSegment, count_segment_slabs
from kvcache.eviction.zap import KeepSurrogate
from kvcache.pool import KvPool
from tests.engine.cpu.eviction.evicted_runs import CONTEXT, FOLDER, SETUP, EvictedRun


def read_weights() -> KeepSurrogate:
    """The embedded model's weights for the rule `zap`."""
    found = load_surrogate(Checkpoint.resolve(str(FOLDER)))
    assert found is not None
    return found


WEIGHTS = read_weights()
CALIBRATED = replace(SETUP, surrogate=WEIGHTS)
SPEC = KeepSpec(0.6, 64, WEIGHTS.rule)


def make_cutting(codec: str = "raw", num_slabs: int = 60) -> tuple[CpuModelRunner, KvPool]:
    """The embedded model over a pool in a codec, that evicts by `zap`. Unused memory is no valid code."""
    files = Checkpoint.resolve(str(FOLDER))
    codec_id, calibration = resolve_kv_codec(files, codec)
    pool = KvPool(files.layout(codec=codec_id), num_slabs)
    for slab in range(num_slabs):
        pool.slab_bytes(slab)[:] = bytes([0xFF]) * pool.layout.chunk_bytes
    return CpuModelRunner.load(files, pool, CONTEXT, calibration, eviction=CALIBRATED), pool


class SegmentedRun(EvictedRun):
    """A run that asks for segments; `segments` are those that it got."""

    segments: tuple[KeptSegment, ...] = ()

    @property
    def lead(self) -> int:
        """Slabs before the ring."""
        return self.spec.boundary_chunks + count_segment_slabs(self.segments)

    @property
    def segment_slabs(self) -> list[int]:
        """Slabs of segments."""
        return self.slabs[self.spec.boundary_chunks : self.lead]

    def next_work(self, count: int, logits: str = "all") -> StepWork:
        """The work of the next `count` tokens."""
        work = super().next_work(count, logits)
        more = self.lead - self.spec.boundary_chunks if self.evicted else 0
        return replace(work, kept=KeptWork(self.key, self.prompt, self.spec, self.evicted, more))

    def evict(self) -> None:
        """Plan, give back slabs, take those of segments and the bag, apply."""
        order = EvictionOrder(
            self.key, self.tokens[: self.computed], self.prompt, self.spec, list(self.slabs), cuts=True
        )
        report = self.runner.plan_eviction(order)
        first = not self.evicted
        self.segments = report.segments if first else self.segments
        stay = self.spec.boundary_chunks if first else self.lead + 1
        self._give_back(self.slabs[stay:])
        more = count_segment_slabs(self.segments) + 1 if first else 0
        self.slabs = self.slabs[:stay] + self.pool.take_slabs(report.bag_slabs + more, self.key)
        self.evicted = True
        bag = self.slabs[self.lead + 1 :]
        self.runner.apply_eviction(self.key, [*(self.segment_slabs if first else []), *bag])
        self.reports.append(report)

    def _give_back(self, slabs: list[int]) -> None:
        for slab in slabs:
            self.pool.slab_bytes(slab)[:] = bytes([0xFF]) * self.pool.layout.chunk_bytes
        self.pool.give_back(slabs, self.key)
