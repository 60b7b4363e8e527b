"""Several KV classes in a worker of two ranks, in real processes, against one rank that has them all."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.errors import DiptychError
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.ranks.tensor_parallel import RankPlacement
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import KvClassChoice, resolve_kv_classes
from engine.step_work import StepWork
from kvcache.codecs.calibration import FILE_NAME
from kvcache.layout import KvLayout
from kvcache.pool import KvPool
from kvtransfer.resharding import ShardedPool, plan_spans
from kvtransfer.shared_memory import SharedMemory
from tests.engine.cpu.spread_model import CLOSE, FAR
from tests.system.factored_calibration import write_factored
from tests.system.transformers_oracle import TINY, read_text
from worker.ranks import RankClass, RankProcesses, RankSpec, load_leader

SLABS, CONTEXT, LENGTH, PREFILLED, PIECE = 16, 512, 448, 384, 96
RAW_ERROR = 1e-4
CODECS = "raw:0.3,tq4:0.3,nuq4-1%.g64"

Scores = list[torch.Tensor]


@dataclass
class ClassWorker:
    """A runner with a pool for each class, and the memory of all its ranks."""

    runner: CpuModelRunner
    pool: ShardedPool


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[KvClassChoice, ...], Path]:
    """Two ranks cut the embedded model's own groups, so its calibration is used for groups of half the heads.

    Factors of `tq4` are others for each layer and head.
    """
    model, file = Checkpoint.resolve(str(TINY)), tmp_path_factory.mktemp("calibration") / FILE_NAME
    write_factored(file, "tq4", group=64)
    return resolve_kv_classes(model, CODECS, str(file)), file


@cache
def source_text() -> list[int]:
    return read_text()[:LENGTH]


def layouts_of(classes: tuple[KvClassChoice, ...]) -> list[tuple[KvLayout, int]]:
    model = Checkpoint.resolve(str(TINY))
    return [(model.layout(codec=one.codec), SLABS) for one in classes]


@pytest.fixture(scope="module")
def lone(classes: tuple[tuple[KvClassChoice, ...], Path]) -> ClassWorker:
    """One rank, in this process."""
    model, sized = Checkpoint.resolve(str(TINY)), layouts_of(classes[0])
    shards = model.split(1, 1)
    spans, (size,) = plan_spans(sized, shards)
    memory = memoryview(bytearray(size))
    pool = ShardedPool(sized[0][0], [(shards[0], memory)], sized)
    pools = [
        KvPool(layout, count, memory[at : at + count * layout.chunk_bytes], span.first)
        for (layout, count), span in zip(sized, spans, strict=True)
        for at in span.offsets
    ]
    others = list(zip(pools[1:], [one.calibration for one in classes[0][1:]], strict=True))
    runner = CpuModelRunner.load(model, pools[0], CONTEXT, classes[0][0].calibration, others=others)
    return ClassWorker(runner, pool)


@pytest.fixture(scope="module")
def pair(classes: tuple[tuple[KvClassChoice, ...], Path]) -> Iterator[ClassWorker]:
    """Two ranks, each with half of the heads of every class."""
    chosen, file = classes
    model, sized = Checkpoint.resolve(str(TINY)), layouts_of(chosen)
    shards = model.split(2, 1)
    _, sizes = plan_spans(sized, shards)
    memories = [SharedMemory(size) for size in sizes]
    lost: queue.SimpleQueue[DiptychError] = queue.SimpleQueue()
    ranks = RankProcesses("test", lost.put)
    spec = RankSpec(
        worker="test",
        placement=RankPlacement(0, 2, 1),
        shard=shards[0],
        config=model.config,
        weights={name: str(path) for name, path in model.weights.items()},
        dtype="float32",
        max_model_len=CONTEXT,
        classes=tuple(
            RankClass(
                SLABS, one.codec, None if one.calibration is None else (str(file), one.calibration.model)
            )
            for one in chosen
        ),
    )
    try:
        steps = list[tuple[int, int]]()
        runner = load_leader(spec, shards, memories, ranks, lambda *step: steps.append(step))
        sections = model.config.layers + 2
        assert steps == [(done, sections + 1) for done in range(1, sections + 1)]
        parts = [(shard, memory.view) for shard, memory in zip(shards, memories, strict=True)]
        yield ClassWorker(runner, ShardedPool(sized[0][0], parts, sized))
        assert lost.empty()
    finally:
        ranks.close()
        for memory in memories:
            memory.close()


def steps(worker: ClassWorker, arenas: list[int]) -> list[Scores]:
    """Log-probabilities of a text by arena: prefilled in pieces, then decoded, the rows of all arenas in each step."""
    text = source_text()
    slabs = [
        list(range(worker.pool.arenas[number].span.first, 1 << 20))[: LENGTH // 64 + 1] for number in arenas
    ]
    ends = [*range(PIECE, PREFILLED + 1, PIECE), *range(PREFILLED + 1, LENGTH + 1)]
    found: list[Scores] = [[] for _ in arenas]
    for start, end in zip([0, *ends], ends, strict=False):
        works = [StepWork(text[start:end], start, own, "all", text[0]) for own in slabs]
        for scores, logits in zip(found, worker.runner.run(works), strict=True):
            scores.append(torch.log_softmax(logits, dim=-1))
    return found


@pytest.fixture(scope="module")
def answered(lone: ClassWorker, pair: ClassWorker) -> tuple[list[Scores], list[Scores]]:
    """What one rank and two compute for rows of all classes side by side."""
    everything = list(range(len(lone.pool.arenas)))
    return steps(lone, everything), steps(pair, everything)


def test_two_ranks_agree_with_one_in_every_class(answered: tuple[list[Scores], list[Scores]]) -> None:
    text = torch.tensor(source_text())
    for number, (one, two) in enumerate(zip(*answered, strict=True)):
        wanted, found = torch.cat(one)[:-1], torch.cat(two)[:-1]
        rows = torch.arange(LENGTH - 1)
        errors = (wanted[rows, text[1:]] - found[rows, text[1:]]).abs()
        same = (wanted.argmax(-1) == found.argmax(-1)).float().mean()
        if number == 0:
            assert errors.max() <= RAW_ERROR and same == 1
        else:
            assert errors.max() <= FAR and errors.mean() <= CLOSE and same >= 0.97


def test_codes_of_two_ranks_are_those_of_one(
    lone: ClassWorker, pair: ClassWorker, answered: tuple[list[Scores], list[Scores]]
) -> None:
    """Pages lie in the memory of the rank that has their heads, in one order; few bytes are a step apart."""
    for mine, theirs in zip(lone.pool.arenas[1:], pair.pool.arenas[1:], strict=True):
        slab = mine.span.first + 1
        one, two = (
            np.concatenate(
                [
                    np.frombuffer(pool.memories[page.target], np.uint8)[at : at + page.num_bytes]
                    for page in arena.pages
                    for at in [arena.offset_of(slab, page.target) + page.own]
                ]
            )
            for pool, arena in ((lone.pool, mine), (pair.pool, theirs))
        )
        assert len(one) == mine.layout.chunk_bytes and one.any()
        assert np.mean(one == two) > 0.98


@pytest.mark.parametrize("number", [0, 1, 2], ids=["raw", "tq4", "nuq4-1%.g64"])
def test_rows_of_a_class_are_the_same_beside_other_classes(
    number: int, pair: ClassWorker, answered: tuple[list[Scores], list[Scores]]
) -> None:
    """To the last bit, on two ranks as on one."""
    (alone,) = steps(pair, [number])
    assert torch.equal(torch.cat(alone), torch.cat(answered[1][number]))
