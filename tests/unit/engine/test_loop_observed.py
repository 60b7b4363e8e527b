"""Who follows held sequences: what is announced is what is in memory, and what is hashed is what is offered.

The whole of the loop's machine runs (preemption in both ways, sharing, aborts, failures), and after every layer of
every step the board is held against the memory: an entry that still has the mark of a hint, any hint ever, and says
that layers are done, must have that chunk's KV in its slab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import KeepSpec
from engine.eviction.decision_points import DecisionPoints
from engine.outputs import SequenceOutput
from engine.protocols import OnLayersDone
from engine.sequence import Sequence
from engine.step_work import StepWork
from kvtransfer.layer_progress import COMPLETE_MARK, LayerProgress
from prefill_worker.announcer import KvAnnouncer
from prefill_worker.chunk_hashes import ChunkHashes
from tests.unit.engine.conservation import Conservation
from tests.unit.engine.fakes import LAYERS, EngineBench, EvictingFakeRunner, sampling, sequence
from tests.unit.engine.loop_outputs import RecordingObserver, finish

SEEN: Counter[str] = Counter()


@dataclass(frozen=True)
class AnnouncedChunk:
    """One chunk of a hint, with the tokens that its sequence had by then."""

    key: str
    place: int
    slab: int
    mark: int
    tokens: tuple[int, ...]


class WatchedRunner(EvictingFakeRunner):
    """Lets the memory be looked at before a step, and after each layer of one."""

    look: Callable[[], None]

    def run(self, batch: list[StepWork], done: OnLayersDone | None = None) -> list[list[list[int]]]:
        self.look()

        def watched(layers: int) -> None:
            assert done is not None
            done(layers)
            self.look()

        return super().run(batch, watched if done is not None else None)


class BoardReader:
    """A bench's first engine, followed; and the board, as one sees it who reads it from outside."""

    def __init__(self, bench: EngineBench) -> None:
        self.bench, self.memory = bench, memoryview(bytearray(8 * bench.pool.num_slabs))
        self.announced: list[AnnouncedChunk] = []
        self.payloads = ChunkHashes(bench.holdings, self.content)
        board = LayerProgress(bench.pool.num_slabs, self.memory)
        self.stager = KvAnnouncer(bench.holdings, self.payloads, LAYERS, board, self.hear)
        bench.engine.kv_observer = self.stager
        watched = WatchedRunner(bench.pool.num_slabs)
        watched.kv, watched.look = bench.runner.kv, self.check
        bench.runner = bench.engine.runner = watched
        bench.engine.decisions = DecisionPoints(watched, bench.engine.table)
        self.step, bench.engine.step = bench.engine.step, self.observed_step  # type: ignore[method-assign]

    def observed_step(self, clock: Callable[[], float]) -> list[SequenceOutput]:
        """As a worker's loop has it: what is to be hashed is hashed between steps."""
        self.stager.hash_full()
        emitted = self.step(clock)
        self.check()
        return emitted

    def content(self, slab: int) -> bytes:
        return bytes(self.bench.runner.kv.slab_bytes(slab))

    def hear(self, seq: Sequence, start: int, slabs: list[int], mark: int) -> None:
        tokens = tuple(seq.prompt + seq.output)
        for place, slab in enumerate(slabs, start):
            self.announced.append(AnnouncedChunk(seq.key, place, slab, mark, tokens))
            if mark == COMPLETE_MARK:
                self.check_content(self.announced[-1])
            SEEN["complete" if mark == COMPLETE_MARK else "coming"] += 1

    def check(self) -> None:
        """No entry says of a chunk that it is there when something else is."""
        entries = self.memory.cast("Q")
        for chunk in self.announced:
            mark, layers = entries[chunk.slab] >> 16, entries[chunk.slab] & 0xFFFF
            if chunk.mark != COMPLETE_MARK and mark == chunk.mark and layers:
                self.check_content(chunk)
                SEEN["readable"] += 1
            elif chunk.mark not in (COMPLETE_MARK, mark):
                SEEN["over"] += 1

    def check_content(self, chunk: AnnouncedChunk) -> None:
        first = chunk.place * CHUNK_TOKENS
        for row in range(min(CHUNK_TOKENS, len(chunk.tokens) - first)):
            assert self.bench.runner.kv[chunk.slab, row] == list(chunk.tokens[: first + row + 1]), chunk

    def offer(self, seq: Sequence) -> None:
        """It leaves with its slabs: what it offers is hashed as it is, and its whole chunks were announced.

        If it evicted, these are the chunks below its boundary. Its bag is offered too, without an announcement, and the
        slab of its newest tokens is not.
        """
        ring, whole = seq.keep.boundary_chunks, len(seq.slabs)
        offered = list(seq.slabs)
        if seq.keep.evicts:
            whole = ring
            del offered[ring]
            SEEN["bag"] += len(offered) - whole
        assert self.stager.finish_sequence(seq, offered) == [self.content(slab) for slab in offered]
        last = {chunk.place: chunk for chunk in self.announced if chunk.key == seq.key}
        assert sorted(last) == list(range(whole))
        for place, chunk in last.items():
            SEEN["offered" if chunk.slab == seq.slabs[place] else "replaced"] += 1


class ObservedMachine(Conservation):
    """The machine, with its first engine followed."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = BoardReader(self.first)

    def _taken(self, seq: Sequence) -> None:
        self.reader.offer(seq)


KINDS = ("complete", "coming", "readable", "over", "offered", "bag")


def test_no_mark_is_false_and_no_hash_is_old_whatever_happens() -> None:
    """And all of it happens: chunks found complete, computed ones, ones that were replaced, marks that are over."""
    slow = [HealthCheck.too_slow]  # how fast this machine is, is not the question
    bounds = settings(max_examples=40, stateful_step_count=40, suppress_health_check=slow)
    run_state_machine_as_test(ObservedMachine, settings=bounds)
    for _ in range(20):  # the examples hang on the order of sets, and may lack one kind
        if all(SEEN[kind] for kind in KINDS):
            break
        run_state_machine_as_test(
            ObservedMachine, settings=settings(bounds, derandomize=False, database=None)
        )
    assert all(SEEN[kind] for kind in KINDS), SEEN


@pytest.mark.parametrize("boundary", [0, 64])
def test_of_a_sequence_that_evicts_only_chunks_below_its_boundary_are_announced(boundary: int) -> None:
    """An example that the machine found, and the same with a boundary. The other chunks are given back."""
    bench = EngineBench(6)
    reader = BoardReader(bench)
    keep = KeepSpec(0.5, boundary)
    seq = sequence("evicts", 190, sampling(100), hold_kv=True, stage=True, keep=keep)
    bench.engine.add(seq, bench.now_s)
    held = [one.held for _ in range(5) for one in bench.engine.step(bench.clock) if one.held is not None]
    assert held == [seq] and seq.bag_slabs
    reader.offer(seq)
    assert {chunk.place for chunk in reader.announced} == set(range(boundary // CHUNK_TOKENS))


def test_a_drop_is_announced_while_the_sequence_still_has_its_slabs() -> None:
    """What is being copied out of them must end before they are somebody else's."""
    bench, held = EngineBench(num_slabs=6, max_num_batched_tokens=100), dict[str, int]()

    class HoldingObserver(RecordingObserver):
        def on_sequence_dropped(self, key: str) -> None:
            held.setdefault(key, bench.holdings.num_held(key))

    bench.engine.kv_observer = HoldingObserver()
    bench.engine.add(sequence("aborted", 200, hold_kv=True), 0.0)
    bench.engine.step(bench.clock)
    bench.engine.abort("aborted", 1)
    bench.runner.poison = {99}
    bench.engine.add(sequence("fails", [1, 99]), 0.0)
    bench.engine.add(sequence("ends", 60, sampling(1), hold_kv=True), 0.0)
    for name in ("first", "preempted"):
        bench.engine.add(sequence(name, 150, sampling(90)), 0.0)
    finish(bench)
    assert held.keys() == {"aborted#1", "fails#1", "ends#1", "first#1", "preempted#1"}
    assert min(held.values()) > 0, held
