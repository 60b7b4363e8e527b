"""The decoder against transformers on random small models of every supported architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.step_work import StepWork
from kvcache.pool import KvPool
from tests.support.factories import make_oracle, save_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 50}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-bias": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
}
TOKENS = 200
Load = Callable[[str], tuple[Any, CpuModelRunner, KvPool]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """By name of `MODELS`: the oracle, and our runner on the weights it saved. Each is made once."""
    made: dict[str, tuple[Any, CpuModelRunner, KvPool]] = {}

    def build(name: str) -> tuple[Any, CpuModelRunner, KvPool]:
        if name not in made:
            family, changes = MODELS[name]
            oracle = make_oracle(family, **changes)
            made[name] = (oracle, *open_runner(save_model(tmp_path_factory.mktemp(name), oracle)))
        return made[name]

    return build


def open_runner(path: Path, num_slabs: int = 12) -> tuple[CpuModelRunner, KvPool]:
    files = Checkpoint.resolve(str(path))
    pool = KvPool(files.layout(), num_slabs)
    pool.data.fill_(float("nan"))  # whatever is read before it was written shows
    return CpuModelRunner.load(files, pool, files.config.context), pool


def logits_of(oracle: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = oracle(torch.tensor([tokens])).logits[0]
    return found


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers(name: str, load: Load) -> None:
    oracle, runner, pool = load(name)
    tokens = random_tokens(TOKENS)
    expected = logits_of(oracle, tokens)
    slabs = pool.take_slabs(4, name)
    (whole,) = runner.run([StepWork(tokens, 0, slabs, "all")])
    pool.data.fill_(float("nan"))
    cuts = [0, 1, 63, 64, 129, 130, TOKENS]
    chunks = [
        runner.run([StepWork(tokens[a:b], a, slabs, "all")])[0]
        for a, b in zip(cuts[:-1], cuts[1:], strict=True)
    ]
    pool.data.fill_(float("nan"))
    runner.run([StepWork(tokens[:10], 0, slabs, "none")])
    steps = [runner.run([StepWork([tokens[n]], n, slabs, "last")])[0] for n in range(10, TOKENS)]
    pool.give_back(slabs, name)
    assert expected.abs().max() > 2  # the models are not so tame that anything would pass
    assert (whole - expected).abs().max() <= 1e-4
    assert (torch.cat(chunks) - expected).abs().max() <= 1e-4
    assert (torch.cat(steps) - expected[10:]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_generate(name: str, load: Load) -> None:
    oracle, runner, pool = load(name)
    for prompt_tokens in (1, 63, 64, 100):
        prompt = random_tokens(prompt_tokens, seed=prompt_tokens)
        with torch.no_grad():
            ids = torch.tensor([prompt])
            generated = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                min_new_tokens=24,
                do_sample=False,
            )
        expected = generated[0, prompt_tokens:].tolist()
        slabs = pool.take_slabs(2, name)
        output: list[int] = []
        while len(output) < len(expected):
            start = prompt_tokens + len(output) - 1 if output else 0
            (logits,) = runner.run([StepWork(output[-1:] or prompt, start, slabs, "last")])
            logits[:, 2] = float("-inf")  # min_new_tokens keeps generate from ending early in the same way
            output.append(int(logits.argmax()))
        pool.give_back(slabs, name)
        assert output == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_half_precision_and_sharded_checkpoints(dtype: torch.dtype, shard: str, tmp_path: Path) -> None:
    save_model(tmp_path, make_oracle("qwen2"), dtype, shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    runner, _ = open_runner(tmp_path)
    oracle: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = random_tokens(70)
    (found,) = runner.run([StepWork(tokens, 0, [0, 1], "all")])
    assert (found - logits_of(oracle, tokens)).abs().max() <= 1e-4
