"""A worker process with a toy for a model: `python -m tests.faults.toy_worker`, a `WorkerSpec` on standard input.

Real: channel, shell, roles, engine loop, scheduler, holdings, prefix tree, shared memory, transports, leases, digests.
Toy: runner and sampler (`tests.faults.toy_model`), and the doors at which requests are held
(`tests.faults.phase_gates`). `DIPTYCH_TOY` has the `ToySettings` as JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from diptych.process import SupervisorPipe, configure_and_report, run_supervised

if __name__ == "__main__":
    configure_and_report()

import msgspec

from decode_worker.kv_fetcher import KvArrival, KvFetcher
from diptych.channel.link import ChannelLink
from diptych.specs import WorkerSpec
from engine.bulk.budget import BulkTime
from engine.bulk.engine import BulkEngine
from engine.loop import Engine
from engine.scheduling.prefill_adder import KvStock
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.prefix_tree import PrefixTree
from kvcache.slab_ledger import SlabLedger
from kvtransfer.cooperative import CoopTask
from kvtransfer.resharding import unsharded_pool
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.transports.links import MeasuredRoute, TransportLinks
from prefill_worker.worker import PrefillWorker
from services.worker import role_lifecycle
from tests.faults.phase_gates import PhaseGates
from tests.faults.toy_model import (
    CONTEXT,
    ToyPool,
    ToyRunner,
    ToySampler,
    grammar_tokenizer,
    toy_layout,
)
from worker.loop import WorkerLoop

LOOK_S = 0.01  # between two looks at a door, beside decoding
FAR_US = 1e6  # latency that a slow link owns up to: more than a hand-off seems to cost right after faults
# At most so much for the layers of a unit of bulk work.
UNIT_S = 0.002
HINT_EVERY = 4  # tokens of an answer after which "decoding" begins


class ToySettings(msgspec.Struct, frozen=True):
    """What a toy is given beside its specification. A token read costs `token_s`, a step `step_s` on top.

    With `gb_per_s` it says that its links are no faster, so that the gateway finds it worth while to pull ahead.
    """

    control: str | None = None
    step_s: float = 0.001
    token_s: float = 0.0
    gb_per_s: float | None = None
    codec: str = ""


class HeldScheduler(Scheduler):
    """Plans as if the sequences that are held at a door were not there."""

    def __init__(self, limits: EngineLimits, doors: PhaseGates) -> None:
        super().__init__(limits)
        self._doors = doors

    def admits(self, seq: Sequence, stock: KvStock, moving: Iterable[Sequence] = ()) -> bool:
        if self._doors.shut(seq.prompt, seq.epoch, "offered"):
            return False
        return super().admits(seq, stock, moving)

    def schedule(self, stock: KvStock) -> StepPlan:
        with self._without_held():
            return super().schedule(stock)

    def ready(self, stock: KvStock) -> bool:
        with self._without_held():
            return super().ready(stock)

    @contextmanager
    def _without_held(self) -> Any:
        whole = self.running, self.adopted, self.prompts
        held = {seq.key for seq in self.sequences() if self._held(seq)}
        if not held:
            yield
            return
        self.running, self.adopted = (
            {key: seq for key, seq in part.items() if key not in held} for part in whole[:2]
        )
        self.prompts = self.prompts.without(held)
        try:
            yield
        finally:
            self.running, self.adopted, self.prompts = whole

    def _held(self, seq: Sequence) -> bool:
        doors, key = self._doors, seq.key
        if key in self.waiting:
            return seq.hold_kv and doors.shut(seq.prompt, seq.epoch, "queued")
        if key in self.adopted:
            return doors.shut(seq.prompt, seq.epoch, "pulled")
        if not seq.decoding:
            if not seq.computed:
                return False
            return doors.shut(seq.prompt, seq.epoch, "reading") or (
                seq.stage and doors.shut(seq.prompt, seq.epoch, "staged")
            )
        written = len(seq.output)
        if written == seq.sampling.max_tokens - 1 and doors.shut(seq.prompt, seq.epoch, "last"):
            return True
        return written >= HINT_EVERY and doors.shut(seq.prompt, seq.epoch, "decoding")


def build_toy(spec: WorkerSpec, doors: PhaseGates, settings: ToySettings) -> role_lifecycle.WorkerParts:
    """Everything that `services.worker` makes of a model, made of the toy."""
    layout = toy_layout(settings.codec)
    num_slabs = max(1, spec.kv_bytes // layout.chunk_bytes)
    memory = SharedMemory(num_slabs * layout.chunk_bytes)
    limits = EngineLimits(
        num_slabs=num_slabs,
        max_model_len=min(spec.max_model_len or CONTEXT, CONTEXT),
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        chunked_prefill=spec.chunked_prefill,
    )
    holdings = KvAllocator(SlabLedger(num_slabs), PrefixTree() if spec.prefix_caching else None)
    pool = ToyPool(memory.view, layout)
    runner = ToyRunner(pool, settings.step_s, settings.token_s)
    sampler = ToySampler(grammar_tokenizer())
    engine = Engine(runner, HeldScheduler(limits, doors), holdings, sampler)
    tpot_s = None if spec.bulk_tpot_ms is None else spec.bulk_tpot_ms / 1000
    # Units are short whatever steps are. They sleep, so it is no sign of a busy machine that they have no core.
    units = ToyRunner(pool, min(settings.step_s, UNIT_S))
    bulk = BulkEngine(units, limits, holdings, sampler, BulkTime(spec.bulk_slice_ms / 1000, tpot_s))
    return role_lifecycle.WorkerParts(
        engine=engine,
        kv=holdings,
        pool=unsharded_pool(layout, memory.view),
        memories=[memory],
        fingerprint=f"toy-{spec.dtype}",
        identity={"model": "toy", "dtype": spec.dtype},
        max_model_len=limits.max_model_len,
        close=lambda: None,
        bulk=bulk,
    )


def install_gates(doors: PhaseGates, settings: ToySettings) -> None:
    """Doors where no object of ours stands in the way: before an offer, in a pull, after each round of the loop."""
    let_go, take_note = PrefillWorker.take_over, WorkerLoop._update_stats

    def held_offer(self: PrefillWorker, seq: Sequence, now_s: float) -> None:
        doors.wait(seq.prompt, seq.epoch, "read", lambda: False)
        let_go(self, seq, now_s)

    def update_toy_stats(self: WorkerLoop) -> None:
        take_note(self)
        stats = self.latest_stats.stats
        used = (stats.slabs_used, stats.leases, stats.staging_bytes, stats.running, stats.waiting)
        doors.rest(not any(used))

    class HeldCourier(KvFetcher):
        """Hand-offs that wait at their door, with room reserved and nothing copied yet."""

        def fetch(self, arrival: KvArrival) -> CoopTask[None]:
            seq = arrival.seq
            while doors.shut(seq.prompt, seq.epoch, "pulling") and not arrival.stopped:
                yield LOOK_S
            yield from super().fetch(arrival)

    class SlowLinks(TransportLinks):
        """Links that say they are no faster than the settings want."""

        def link_task(
            self, worker: str, incarnation: str, endpoints: Mapping[str, bytes]
        ) -> CoopTask[MeasuredRoute]:
            yield from super().link_task(worker, incarnation, endpoints)
            route = self.route_to(worker)
            assert route is not None, "it was linked just now"
            return route

        def route_to(self, worker: str) -> MeasuredRoute | None:
            route = super().route_to(worker)
            if route is None or settings.gb_per_s is None:
                return route
            slow = min(settings.gb_per_s, route.gb_per_s)
            return replace(route, gb_per_s=slow, latency_us=max(FAR_US, route.latency_us))

    class WokenLink(ChannelLink):
        """Its worker looks again when somebody was let go."""

        def __init__(self, *rest: Any, **more: Any) -> None:
            super().__init__(*rest, **more)
            doors.wake = self.wake_poll

    PrefillWorker.take_over, WorkerLoop._update_stats = held_offer, update_toy_stats  # type: ignore[method-assign]
    vars(role_lifecycle).update(TransportLinks=SlowLinks, ChannelLink=WokenLink, KvFetcher=HeldCourier)


def main(spec: WorkerSpec, voice: SupervisorPipe) -> int | None:
    """Build a toy worker and run it until it is drained."""
    settings = msgspec.json.decode(os.environ.get("DIPTYCH_TOY", "{}"), type=ToySettings)
    doors = PhaseGates(settings.control, spec.worker)
    built = build_toy(spec, doors, settings)
    install_gates(doors, settings)
    return role_lifecycle.run_worker(spec, voice, built)


if __name__ == "__main__":
    sys.exit(run_supervised(main))
