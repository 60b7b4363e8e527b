"""The parts of a check that run whole workers: one prefill and one decode worker, driven over the channel."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import gpu_decode
from benchmarks.gpu_parts.check_part import PartContext
from benchmarks.load.answer_checks import Comparison, ask_all, ask_reference, compare_answers, make_requests
from benchmarks.load.channel_deployment import DEVICE_BOOKS, ChannelAnswer, ChannelDeployment, wait_answers
from diptych.request import SamplingParams
from engine.model.architecture import ModelConfig
from tests.support.gpu_pages import LLAMA_8B, Place

EMBEDDED = Path(__file__).parents[2] / "models" / "tiny"
REST_S = 3.0
LLAMA_1B = replace(LLAMA_8B, layers=16, hidden=2048, head_dim=64, mlp=8192, tied=True, windows=(0,) * 16)
TOY = replace(
    LLAMA_1B, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=128, vocab=4096, windows=(0,) * 2
)
STREAMS, PROMPT_TOKENS, NEW_TOKENS, LONG_PROMPT = (1, 16, 64), 100, 160, 3000
# Kills wait until so many answers have begun.
BEGUN_SHARE = 0.2


def measure_pair(context: PartContext) -> None:
    """Tokens of a pair in float32 beside those of one CPU worker; also while both of its workers are killed once."""
    greedy, others, again = (12, 15, 20) if context.is_toy else (200, 100, 60)
    asked = make_requests(greedy, others)
    with ChannelDeployment("--colocated", "1", "--device", "cpu") as deployment:
        reference = ask_reference(deployment, asked)
    pair = ("--prefill", "1", "--decode", "1", "--device", context.device, "--dtype", "float32")
    began_s = time.monotonic()
    with ChannelDeployment(*pair) as deployment:
        context.record({"pair_start_s": round(time.monotonic() - began_s, 2)})
        _record_comparison(context, "", compare_answers(reference, ask_all(deployment, asked)))
        context.record({"kv_at_rest": len(deployment.wait_rest(REST_S, DEVICE_BOOKS))})
        found = [_ask_and_kill(deployment, asked[:again], worker) for worker in deployment.workers]
        answers = [answer for some in found for answer in some]
        again_right = reference[:again] * len(found)
        _record_comparison(context, "killed_", compare_answers(again_right, answers))
        held = deployment.wait_rest(REST_S, DEVICE_BOOKS)
        hit = sum(answer.request.epoch > 0 for answer in answers)
        context.record({"killed_kv_at_rest": len(held), "held": held, "killed_hit": hit})


def _ask_and_kill(deployment: ChannelDeployment, asked: Sequence[Any], worker: str) -> list[ChannelAnswer]:
    """Ask for all, and kill the worker as soon as some answers have begun; then wait for all answers."""
    deployment.wait_ready()
    answers = [deployment.submit(one.prompt, one.sampling) for one in asked]
    deadline_s = time.monotonic() + REST_S
    while (
        sum(bool(one.tokens) for one in answers) < BEGUN_SHARE * len(answers)
        and time.monotonic() < deadline_s
    ):
        time.sleep(0.002)
    deployment.kill(worker)
    wait_answers(answers, within_s=40.0)
    return answers


def _record_comparison(context: PartContext, name: str, found: Comparison) -> None:
    context.record(
        {
            f"{name}answers": found.answers,
            f"{name}explained": found.explained,
            f"{name}unexplained": found.unexplained,
            f"{name}failed": found.failed,
        }
    )
    if found.examples:
        context.record({f"{name}examples": found.examples})


def measure_load(context: PartContext) -> None:
    """Tokens per second of a pair with 1, 16 and 64 streams, over those of the runner alone; and beside a prompt."""
    shape = TOY if context.is_toy else LLAMA_1B
    dtype, device = ("float32", "cpu") if context.is_toy else ("bfloat16", "cuda")
    place = Place(torch.device(device), dtype, rounds=3 if context.is_toy else 9, layers=shape.layers)
    length = PROMPT_TOKENS + NEW_TOKENS
    bare = {}
    with torch.no_grad():
        model = gpu_decode.Model(shape, place, max(STREAMS), length)
        for streams in STREAMS[: 1 if context.is_toy else None]:
            bare[streams] = streams / model.run_seconds(streams, length - NEW_TOKENS // 2)
            context.record({f"bare_tokens_per_s_{streams}": round(bare[streams], 1)})
    del model
    gpu_decode.release()
    with tempfile.TemporaryDirectory(prefix="diptych-check-") as name:
        folder = write_checkpoint(Path(name), shape, place)
        flags = ("--model", str(folder), "--device", context.device, "--dtype", dtype)
        with ChannelDeployment("--prefill", "1", "--decode", "1", *flags) as deployment:
            ratios = []
            for streams, bare_rate in bare.items():
                rate = measure_rate(deployment, streams, shape.vocab)
                ratios.append(rate / bare_rate)
                context.record(
                    {f"tokens_per_s_{streams}": round(rate, 1), "host_ratio": round(min(ratios), 3)}
                )
            alone, beside = measure_gaps(deployment, shape.vocab, 300 if context.is_toy else LONG_PROMPT)
            context.record({"gap_ms": round(alone * 1e3, 2), "interference": round(beside / alone, 2)})


def _start_streams(deployment: ChannelDeployment, count: int, vocab: int, seed: int) -> list[ChannelAnswer]:
    """Greedy streams with different prompts, which do not end before their last token."""
    generator = torch.Generator().manual_seed(seed)
    asked = SamplingParams(NEW_TOKENS, 0, temperature=0.0)
    return [
        deployment.submit(torch.randint(vocab, (PROMPT_TOKENS,), generator=generator).tolist(), asked)
        for _ in range(count)
    ]


def measure_rate(deployment: ChannelDeployment, count: int, vocab: int) -> float:
    """Tokens per second of `count` streams together, from when all have begun to when the first one ends.

    Raises:
        RuntimeError: a stream failed.
    """
    # The first time, kernels are compiled.
    for seed in (0, 1):
        answers = _start_streams(deployment, count, vocab, seed)
        wait_answers(answers)
        failures = [answer.failure for answer in answers if answer.failure or not answer.finish]
        if failures:
            raise RuntimeError(f"{len(failures)} of {count} streams failed: {failures[0]}")
    begin_s = max(answer.times_s[1] for answer in answers)
    end_s = min(answer.times_s[-1] for answer in answers)
    if end_s <= begin_s:
        # They hardly overlap: the whole time counts.
        begin_s, end_s = min(one.times_s[0] for one in answers), max(one.times_s[-1] for one in answers)
    tokens = sum(begin_s < at_s <= end_s for answer in answers for at_s in answer.times_s)
    return tokens / (end_s - begin_s)


def measure_gaps(deployment: ChannelDeployment, vocab: int, long_prompt: int) -> tuple[float, float]:
    """The median gap between a stream's tokens alone, and its longest one while a long prompt is prefilled: seconds."""
    longest = []
    for round_number in range(3):
        answers = _start_streams(deployment, 4, vocab, 10 + round_number)
        while not all(len(answer.tokens) > 20 or answer.ended.is_set() for answer in answers):
            time.sleep(0.002)
        begun_s = time.monotonic()
        prompt = torch.randint(vocab, (long_prompt,), generator=torch.Generator().manual_seed(round_number))
        beside = deployment.submit(prompt.tolist(), SamplingParams(1, 0, temperature=0.0))
        wait_answers([*answers, beside])
        end_s = beside.times_s[0] if beside.times_s else begun_s
        gaps = [
            later - earlier
            for answer in answers
            for earlier, later in zip(answer.times_s, answer.times_s[1:], strict=False)
            if later > begun_s and earlier < end_s
        ]
        longest.append(max(gaps, default=0.0))
        alone = [
            later - earlier
            for answer in answers
            for earlier, later in zip(answer.times_s[1:20], answer.times_s[2:20], strict=False)
        ]
    return median(alone), median(longest)


def write_checkpoint(folder: Path, config: ModelConfig, place: Place) -> Path:
    """A Llama of this shape with random weights; the tokenizer is the embedded model's. Returns `folder`."""
    kind: torch.dtype = getattr(torch, place.dtype)
    heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, config.hidden),
        "model.norm.weight": (config.hidden,),
    }
    for layer in range(config.layers):
        for name, shape in {
            "input_layernorm": (config.hidden,),
            "post_attention_layernorm": (config.hidden,),
            "self_attn.q_proj": (heads, config.hidden),
            "self_attn.k_proj": (kv, config.hidden),
            "self_attn.v_proj": (kv, config.hidden),
            "self_attn.o_proj": (config.hidden, heads),
            "mlp.gate_proj": (config.mlp, config.hidden),
            "mlp.up_proj": (config.mlp, config.hidden),
            "mlp.down_proj": (config.hidden, config.mlp),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    tensors = {
        name: torch.ones(shape, dtype=kind)
        if len(shape) == 1
        else torch.randn(shape, device=place.device, dtype=kind).mul_(0.02).cpu()
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": 4096,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": place.dtype,
    }
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    for file in EMBEDDED.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
