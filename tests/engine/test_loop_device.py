"""The engine over a pool on the emulated device: preempted KV goes to the host and back, a lost device blames none."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from diptych.errors import DeviceLost
from diptych.messages import Failed, Output
from diptych.request import SamplingParams
from engine.gpu.decoder import GpuDecoder
from engine.gpu.model_runner import GpuModelRunner, load_kernels
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.model.weights import WeightReader
from engine.sampling import grammar
from engine.sampling.sampler import Sampler
from engine.scheduling.new_token_ratio import NewTokenRatio
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.device.pool import DevicePool
from kvcache.prefix_tree import PrefixTree
from kvcache.tiers.host import HostTier
from tests.support.factories import make_folder, make_tokenizer
from tests.unit.engine.fakes import FixedRate

MODEL_LEN, TOKENS = 512, 90


class FailingRunner:
    """Runs steps of `runner`, and raises `error` instead if there is one."""

    def __init__(self, runner: GpuModelRunner) -> None:
        self.error: Exception | None = None
        self.calls, self._runner = 0, runner

    def run(self, works, done=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self._runner.run(works, done)


class DeviceEngine:
    """One engine over a pool on the emulated device, with room for `swap` slabs in the host tier."""

    def __init__(self, model: Checkpoint, num_slabs: int, swap: int = 0) -> None:
        device = torch.device("cpu")
        self.pool = DevicePool(model.layout(), num_slabs, device)
        self.pool.data.fill_(float("nan"))
        with WeightReader(model.weights) as weights:
            decoder = GpuDecoder(
                model.config, weights, MODEL_LEN, device, torch.float32, load_kernels(emulated=True)
            )
        runner = GpuModelRunner(decoder, self.pool.layout, self.pool.data, MODEL_LEN)
        self.runner, self.kv = FailingRunner(runner), KvAllocator(self.pool, PrefixTree())
        sampler = Sampler(runner.vocab_size, grammar.build_tokenizer(make_tokenizer(), [2]))
        scheduler = Scheduler(EngineLimits(num_slabs, MODEL_LEN, max_num_seqs=12, max_num_batched_tokens=96))
        self.host = HostTier((), swap * self.pool.slab_size, storages=[self.pool])
        self.engine = Engine(self.runner, scheduler, self.kv, sampler, self.host)
        self._ticks = itertools.count()
        for number in range(4):
            tokens = torch.randint(
                3, 259, (20 + 45 * number,), generator=torch.Generator().manual_seed(number)
            )
            sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0 if number % 2 else 1.0, seed=number)
            self.engine.add(Sequence(f"r{number}", 1, tokens.tolist(), sampling, math.inf), 0.0)

    def step(self) -> list[Output | Failed]:
        return [one.message for one in self.engine.step(lambda: float(next(self._ticks)))]

    def run(self) -> dict[str, list[int]]:
        answers: dict[str, list[int]] = {}
        while len(self.engine.scheduler):
            for message in self.step():
                assert isinstance(message, Output), message
                answers.setdefault(message.request, []).extend(message.tokens)
        return answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = make_folder(tmp_path_factory.mktemp("model"))
    return Checkpoint.resolve(str(folder))


@pytest.mark.parametrize("parks", [True, False], ids=["park", "recompute"])
def test_preempted_sequences_continue_with_their_own_kv(model: Checkpoint, parks: bool) -> None:
    expected = DeviceEngine(model, 40).run()
    small = DeviceEngine(model, 6, swap=40)
    # Admits whatever fits now.
    small.engine.scheduler.ratio = NewTokenRatio(0.0, 0.0, 0.0, 0.0)
    small.engine.copy_rate = FixedRate(1e15 if parks else 1e-15)
    assert small.run() == expected
    assert all(len(tokens) == TOKENS for tokens in expected.values())
    ways = small.engine.stats.preemptions
    assert ways.get("park" if parks else "recompute", 0) >= 2 and len(ways) == 1
    assert small.host.used_bytes == 0 and small.pool.used == small.kv.cached


def test_a_lost_device_blames_no_request(model: Checkpoint) -> None:
    for error in (
        torch.AcceleratorError("CUDA error: an illegal memory access"),
        RuntimeError("CUDA error: x"),
    ):
        engine = DeviceEngine(model, 40)
        engine.step()
        calls, engine.runner.error = engine.runner.calls, error
        with pytest.raises(DeviceLost, match="CUDA error"):
            engine.step()
        # Nothing was run again, and no sequence has failed.
        assert engine.runner.calls == calls + 1 and len(engine.engine.scheduler) == 4


def test_a_device_without_memory_is_not_lost(model: Checkpoint) -> None:
    engine = DeviceEngine(model, 40)
    engine.runner.error = torch.OutOfMemoryError("CUDA out of memory. CUDA error: x")
    failed = engine.step()
    assert failed and all(isinstance(one, Failed) and one.code == "out_of_memory" for one in failed)
