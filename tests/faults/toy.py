"""A worker process with a toy for a model: `python -m tests.faults.toy`, a `WorkerSpec` on standard input.

Real: channel, shell, roles, engine loop, scheduler, holdings, prefix tree, shared memory, transports, leases, digests.
Toy: runner and sampler (`tests.faults.toy_model`), and the doors at which requests are held (`tests.faults.gates`).
`DIPTYCH_TOY` has the `Settings` as JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from worker.start import Voice, prepare, supervised

if __name__ == "__main__":
    prepare()

import msgspec

from decode_worker.courier import Arrival, Courier
from diptych.channel import Link
from diptych.config import WorkerSpec
from engine.desk import Stock
from engine.loop import Engine
from engine.scheduler import Limits, Plan, Scheduler, Sequence
from kvcache.holdings import Holdings
from kvcache.prefix_tree import PrefixTree
from kvcache.slabs import Slabs
from kvtransfer.links import Links, Route
from kvtransfer.memory import SharedMemory
from kvtransfer.parts import whole
from kvtransfer.turns import Turns
from prefill_worker.worker import Prefiller
from services.worker import compose
from tests.faults.gates import Doors
from tests.faults.toy_model import CONTEXT, LAYOUT, Memory, ToyRunner, ToySampler, guide
from worker.shell import Shell

LOOK_S = 0.01  # between two looks at a door, beside decoding
FAR_US = 1e6  # latency that a slow link owns up to: more than a hand-off seems to cost right after faults
SOME = 4  # tokens of an answer after which "decoding" begins


class Settings(msgspec.Struct, frozen=True):
    """What a toy is told beside its specification. A token read costs `token_s`, a step `step_s` on top.

    With `gb_per_s` it says that its links are no faster, so that the gateway finds it worth while to pull ahead.
    """

    control: str | None = None
    step_s: float = 0.001
    token_s: float = 0.0
    gb_per_s: float | None = None


class HeldScheduler(Scheduler):
    """Plans as if the sequences that are held at a door were not there."""

    def __init__(self, limits: Limits, doors: Doors) -> None:
        super().__init__(limits)
        self._doors = doors

    def admits(self, seq: Sequence, stock: Stock, moving: Iterable[Sequence] = ()) -> bool:
        if self._doors.shut(seq.prompt, seq.epoch, "offered"):
            return False
        return super().admits(seq, stock, moving)

    def schedule(self, stock: Stock) -> Plan:
        with self._without_held():
            return super().schedule(stock)

    def ready(self, stock: Stock) -> bool:
        with self._without_held():
            return super().ready(stock)

    @contextmanager
    def _without_held(self) -> Any:
        whole = self.running, self.waiting, self.adopted, self._lines
        held = {seq.key for seq in self.sequences() if self._held(seq)}
        if not held:
            yield
            return
        self.running, self.waiting, self.adopted = (
            {key: seq for key, seq in part.items() if key not in held} for part in whole[:3]
        )
        lines = {
            line: {key: seq for key, seq in seqs.items() if key not in held}
            for line, seqs in whole[3].items()
        }
        self._lines = {line: seqs for line, seqs in lines.items() if seqs}
        try:
            yield
        finally:
            self.running, self.waiting, self.adopted, self._lines = whole

    def _held(self, seq: Sequence) -> bool:
        doors, key = self._doors, seq.key
        if key in self.waiting:
            return seq.hold and doors.shut(seq.prompt, seq.epoch, "queued")
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
        return written >= SOME and doors.shut(seq.prompt, seq.epoch, "decoding")


def build(spec: WorkerSpec, doors: Doors, settings: Settings) -> compose.Built:
    """Everything that `services.worker` makes of a model, made of the toy."""
    num_slabs = max(1, spec.kv_bytes // LAYOUT.chunk_bytes)
    memory = SharedMemory(num_slabs * LAYOUT.chunk_bytes)
    limits = Limits(
        num_slabs=num_slabs,
        max_model_len=min(spec.max_model_len or CONTEXT, CONTEXT),
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        chunked_prefill=spec.chunked_prefill,
    )
    holdings = Holdings(Slabs(num_slabs), PrefixTree() if spec.prefix_caching else None)
    runner = ToyRunner(Memory(memory.view), settings.step_s, settings.token_s)
    engine = Engine(runner, HeldScheduler(limits, doors), holdings, ToySampler(guide()))
    return compose.Built(
        engine=engine,
        holdings=holdings,
        parts=whole(LAYOUT, memory.view),
        memories=[memory],
        fingerprint=f"toy-{spec.dtype}",
        identity={"model": "toy", "dtype": spec.dtype},
        max_model_len=limits.max_model_len,
        close=lambda: None,
    )


def hang_doors(doors: Doors, settings: Settings) -> None:
    """Doors where no object of ours stands in the way: before an offer, in a pull, after each turn of the loop."""
    let_go, take_note = Prefiller.let_go, Shell._write_books

    def held_offer(self: Prefiller, seq: Sequence, now_s: float) -> None:
        doors.wait(seq.prompt, seq.epoch, "read", lambda: False)
        let_go(self, seq, now_s)

    def told_books(self: Shell) -> None:
        take_note(self)
        stats = self.books.stats
        used = (stats.slabs_used, stats.leases, stats.staging_bytes, stats.running, stats.waiting)
        doors.rest(not any(used))

    class HeldCourier(Courier):
        """Hand-offs that wait at their door, with room reserved and nothing copied yet."""

        def haul(self, arrival: Arrival) -> Turns[None]:
            seq = arrival.seq
            while doors.shut(seq.prompt, seq.epoch, "pulling") and not arrival.stop.is_set():
                yield LOOK_S
            yield from super().haul(arrival)

    class SlowLinks(Links):
        """Links that say they are no faster than the settings want."""

        def linking(self, worker: str, incarnation: str, endpoints: Mapping[str, bytes]) -> Turns[Route]:
            yield from super().linking(worker, incarnation, endpoints)
            route = self.route(worker)
            assert route is not None, "it was linked just now"
            return route

        def route(self, worker: str) -> Route | None:
            route = super().route(worker)
            if route is None or settings.gb_per_s is None:
                return route
            slow = min(settings.gb_per_s, route.gb_per_s)
            return replace(route, gb_per_s=slow, latency_us=max(FAR_US, route.latency_us))

    class WokenLink(Link):
        """Its worker looks again when somebody was let go."""

        def __init__(self, *rest: Any, **more: Any) -> None:
            super().__init__(*rest, **more)
            doors.wake = self.wake

    Prefiller.let_go, Shell._write_books = held_offer, told_books  # type: ignore[method-assign]
    vars(compose).update(Links=SlowLinks, Link=WokenLink, Courier=HeldCourier)


def main(spec: WorkerSpec, voice: Voice) -> int | None:
    """Build a toy worker and run it until it is drained."""
    settings = msgspec.json.decode(os.environ.get("DIPTYCH_TOY", "{}"), type=Settings)
    doors = Doors(settings.control, spec.worker)
    built = build(spec, doors, settings)
    hang_doors(doors, settings)
    return compose.run(spec, voice, built)


if __name__ == "__main__":
    sys.exit(supervised(main))
