"""Prompts that are pooled, through the loop over real runners, against transformers: any batch, chunks and company."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diptych.messages import Failed, Output
from diptych.request import Pooling, SamplingParams
from engine.cpu.model_runner import CpuModelRunner
from engine.gpu.decoder import GpuDecoder
from engine.gpu.model_runner import GpuModelRunner, load_kernels
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.model.weights import WeightReader
from engine.sampling import grammar
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree, root_key
from kvcache.tiers.host import HostTier
from tests.support.factories import FAMILIES, make_oracle, make_tokenizer, save_model

MODEL_LEN, HIDDEN = 512, 48
LENGTHS = (1, 2, 63, 64, 65, 130, 300)
POOLINGS = {
    "last": Pooling("last", normalize=True),
    "cut": Pooling("last", normalize=True, dimensions=16),
    "mean": Pooling("mean"),
    "cls": Pooling("cls", normalize=True),
    "score": Pooling("score", tokens=(7, 9)),
    "one": Pooling("score", tokens=(9,)),
}
Floats = NDArray[np.float32]


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest) -> Any:
    return make_oracle(request.param)


@pytest.fixture(scope="module")
def model(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.resolve(str(save_model(tmp_path_factory.mktemp("model"), oracle)))


def random_prompt(length: int) -> list[int]:
    tokens = torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(length))
    return [int(token) for token in tokens]


def reference(oracle: Any, prompt: list[int], pooling: Pooling) -> Floats:
    with torch.no_grad():
        ids = torch.tensor([prompt])
        hidden, logits = oracle.model(ids).last_hidden_state[0], oracle(ids).logits[0, -1]
    if pooling.kind == "score":
        chosen = logits[list(pooling.tokens)]
        return torch.sigmoid(chosen[-1] - (chosen[0] if len(chosen) > 1 else 0.0)).numpy()[None]
    vector = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[pooling.kind]
    vector = vector[: pooling.dimensions or None]
    return (torch.nn.functional.normalize(vector, dim=0) if pooling.normalize else vector).numpy()


class PoolingEngine:
    """An engine with a pool of `num_slabs`, of the CPU or of the emulated device."""

    def __init__(self, model: Checkpoint, num_slabs: int = 40, device: bool = False, **limits: Any) -> None:
        pool = KvPool(model.layout(), num_slabs)
        self.kv = KvAllocator(pool, PrefixTree())
        settings = {"max_num_seqs": 12, "max_num_batched_tokens": 96} | limits
        runner: Any = CpuModelRunner.load(model, pool, MODEL_LEN)
        if device:
            with WeightReader(model.weights) as weights:
                place, kernels = torch.device("cpu"), load_kernels(emulated=True)
                decoder = GpuDecoder(model.config, weights, MODEL_LEN, place, torch.float32, kernels)
            runner = GpuModelRunner(decoder, pool.layout, pool.data, MODEL_LEN)
        sampler = Sampler(runner.vocab_size, grammar.build_tokenizer(make_tokenizer(), [2]))
        scheduler = Scheduler(EngineLimits(num_slabs, MODEL_LEN, **settings))
        self.engine = Engine(runner, scheduler, self.kv, sampler, HostTier([pool], 0))
        self._ticks = itertools.count()

    def add(self, name: str, prompt: list[int], pooling: Pooling | None = None) -> None:
        sampling = SamplingParams(0 if pooling else 8, 0, temperature=0.0, pooling=pooling)
        seq = Sequence(name, 1, prompt, sampling, math.inf, root=root_key("model", ""))
        self.engine.add(seq, 0.0)

    def run(self) -> dict[str, Output]:
        """The last output of each sequence."""
        last: dict[str, Output] = {}
        while len(self.engine.scheduler):
            for one in self.engine.step(lambda: float(next(self._ticks))):
                assert isinstance(one.message, Output) and one.held is None, one.message
                last[one.message.request] = one.message
        assert self.kv.used == 0
        return last


def vector_of(output: Output) -> Floats:
    assert output.tokens == [] and output.finish == "stop"
    return np.frombuffer(output.pooled, "<f4")


@pytest.mark.parametrize("device", [False, True], ids=["cpu", "emulated"])
@pytest.mark.parametrize("budget", [16, 96, 512])
def test_any_batch_and_chunks_give_what_transformers_gives(
    model: Checkpoint, oracle: Any, budget: int, device: bool
) -> None:
    made = PoolingEngine(model, device=device, max_num_batched_tokens=budget)
    for length, (name, pooling) in itertools.product(LENGTHS, POOLINGS.items()):
        made.add(f"{name}-{length}", random_prompt(length), pooling)
    made.add("chat", random_prompt(200))
    found = made.run()
    assert len(found.pop("chat").pooled) == 0
    for length, (name, pooling) in itertools.product(LENGTHS, POOLINGS.items()):
        vector = vector_of(found[f"{name}-{length}"])
        wanted = reference(oracle, random_prompt(length), pooling)
        assert vector.shape == wanted.shape
        assert abs(vector - wanted).max() <= 1e-5, (name, length)


def test_prefixes_are_shared_only_where_the_last_token_is_all(model: Checkpoint, oracle: Any) -> None:
    made, prompt = PoolingEngine(model), random_prompt(300)
    made.add("first", prompt)
    made.run()
    for name in ("last", "score", "mean", "cls"):
        made.add(name, prompt, POOLINGS[name])
    found = made.run()
    assert [found[name].cached_tokens for name in ("last", "score", "mean", "cls")] == [256, 256, 0, 0]
    for name in ("last", "score", "mean", "cls"):
        assert abs(vector_of(found[name]) - reference(oracle, prompt, POOLINGS[name])).max() <= 1e-5


def test_one_that_loses_its_memory_is_computed_again(model: Checkpoint, oracle: Any) -> None:
    """A mean over chunks begins anew, and counts no chunk twice."""
    made = PoolingEngine(model, max_num_batched_tokens=64)
    made.add("mean", random_prompt(300), POOLINGS["mean"])
    made.engine.step(lambda: 1.0)
    made.engine.step(lambda: 2.0)
    made.engine._preempt_sequence("mean#1", lambda: 3.0)
    vector = vector_of(made.run()["mean"])
    assert abs(vector - reference(oracle, random_prompt(300), POOLINGS["mean"])).max() <= 1e-5


def test_what_is_not_finite_fails_alone(model: Checkpoint) -> None:
    made = PoolingEngine(model)
    made.engine.sampler.pool = broken_pool  # type: ignore[method-assign]
    made.add("bad", random_prompt(10), POOLINGS["last"])
    made.add("good", random_prompt(11))
    messages = [one.message for _ in range(9) for one in made.engine.step(lambda: 1.0)]
    failed = [one for one in messages if isinstance(one, Failed)]
    assert [(one.request, one.code) for one in failed] == [("bad", "internal_error")]
    assert sum(len(one.tokens) for one in messages if isinstance(one, Output)) == 8
    assert made.kv.used == 0


def broken_pool(row: torch.Tensor, pooling: Pooling, num_tokens: int) -> bytes:
    return Sampler.pool(None, torch.full_like(row, math.nan), pooling, num_tokens)  # type: ignore[arg-type]


def test_a_checkpoint_without_its_output_matrix_is_read(tmp_path: Path) -> None:
    """Qwen3's embedding checkpoints name tensors as the model without its head does."""
    oracle = make_oracle("qwen3", tie_word_embeddings=True)
    whole = save_model(tmp_path / "whole", oracle)
    bare = save_model(tmp_path / "bare", oracle.model)
    config = (whole / "config.json").read_text(encoding="utf-8")
    (bare / "config.json").write_text(config, encoding="utf-8")
    assert "layers.0.mlp.down_proj.weight" in (bare / "model.safetensors").read_bytes()[:9000].decode(
        "latin-1"
    )
    vectors = []
    for folder in (whole, bare):
        made = PoolingEngine(Checkpoint.resolve(str(folder)))
        made.add("one", random_prompt(70), POOLINGS["last"])
        vectors.append(made.run()["one"].pooled)
    assert vectors[0] == vectors[1]
