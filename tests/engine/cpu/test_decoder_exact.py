"""Logits are the same to the last bit whatever shares the step: decode in batches of 1 to 33, prefill in company."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.batching.batch import MIN_ROWS
from engine.cpu.linear import PackedLinear
from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.step_work import StepWork
from kvcache.pool import KvPool
from tests.support.factories import make_folder

SEQUENCES = 33

# Widths that are no multiple of a vector, so that every kernel has a tail.
ODD = {
    "hidden_size": 104,
    "intermediate_size": 202,
    "num_attention_heads": 4,
    "head_dim": 26,
    "vocab_size": 301,
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def ready(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CpuModelRunner, list[StepWork]]:
    """A runner with 33 sequences of ragged lengths prefilled, and the next decode work of each."""
    path = make_folder(tmp_path_factory.mktemp("exact"), request.param, **ODD)
    files = Checkpoint.resolve(str(path))
    pool = KvPool(files.layout(), 4 * SEQUENCES + 40)
    runner = CpuModelRunner.load(files, pool, files.config.context)
    rng = random.Random(5)
    works = []
    for index in range(SEQUENCES):
        length = rng.choice([1, 2, 63, 64, 65, 127, 128, 129, rng.randrange(1, 200)])
        slabs = pool.take_slabs(4, f"s{index}")
        runner.run([StepWork([rng.randrange(300) for _ in range(length)], 0, slabs, "none")])
        works.append(StepWork([rng.randrange(300)], length, slabs, "last"))
    return runner, works


def test_decode_rows_do_not_depend_on_the_batch(ready: tuple[CpuModelRunner, list[StepWork]]) -> None:
    runner, works = ready
    alone = [runner.run([work])[0] for work in works]
    rng = random.Random(6)
    for size in range(1, SEQUENCES + 1):
        for _ in range(3):
            chosen = rng.sample(range(SEQUENCES), size)
            for index, logits in zip(chosen, runner.run([works[index] for index in chosen]), strict=True):
                assert torch.equal(logits, alone[index]), f"batch of {size}"


def test_prefill_does_not_depend_on_companions(ready: tuple[CpuModelRunner, list[StepWork]]) -> None:
    runner, works = ready
    rng = random.Random(7)
    pool = runner._pools[0]
    for length, start in [(2, 0), (3, 0), (64, 0), (129, 0), (50, 64), (7, 130)]:
        slabs, other = pool.take_slabs(4, "p"), pool.take_slabs(4, "q")
        tokens = [rng.randrange(300) for _ in range(start + length)]
        if start:
            runner.run([StepWork(tokens[:start], 0, slabs, "none")])
        work = StepWork(tokens[start:], start, slabs, "all")
        (alone,) = runner.run([work])
        kept = pool.data[slabs].clone()
        noise = StepWork([rng.randrange(300) for _ in range(rng.randrange(2, 150))], 0, other, "none")
        for batch in ([*works[:5], work, noise], [noise, work], [work, *works], [work, works[0]]):
            together = runner.run(batch)[batch.index(work)]
            assert torch.equal(together, alone)
            assert torch.equal(pool.data[slabs], kept)
        pool.give_back(slabs, "p")
        pool.give_back(other, "q")


@pytest.mark.parametrize(("inputs", "outputs"), [(256, 1024), (896, 1152), (64, 211), (2048, 256), (101, 77)])
def test_products_do_not_depend_on_the_number_of_rows(inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    linear = PackedLinear.pack(torch.randn(outputs, inputs), torch.randn(outputs))
    x = torch.randn(700, inputs)
    with torch.no_grad():
        whole = linear(x)
        for rows in [*range(MIN_ROWS, 40), 63, 64, 65, 100, 128, 129, 300, 512, 700]:
            assert torch.equal(linear(x[:rows]), whole[:rows]), rows
            assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows


def test_short_products_are_refused() -> None:
    with pytest.raises(AssertionError):
        PackedLinear.pack(torch.randn(8, 8))(torch.randn(MIN_ROWS - 1, 8))


def test_greedy_tokens_do_not_depend_on_chunking(tmp_path: Path) -> None:
    files = Checkpoint.resolve(str(make_folder(tmp_path, "llama")))
    pool = KvPool(files.layout(), 8)
    runner = CpuModelRunner.load(files, pool, files.config.context)
    prompt = [random.Random(8).randrange(300) for _ in range(150)]
    answers = set()
    for chunk in (1, 7, 64, 100, 150):
        slabs = pool.take_slabs(4, "c")
        for start in range(0, len(prompt), chunk):
            (logits,) = runner.run([StepWork(prompt[start : start + chunk], start, slabs, "last")])
        output = [int(logits.argmax())]
        while len(output) < 30:
            (logits,) = runner.run([StepWork(output[-1:], len(prompt) + len(output) - 1, slabs, "last")])
            output.append(int(logits.argmax()))
        pool.give_back(slabs, "c")
        answers.add(tuple(output))
    assert len(answers) == 1
