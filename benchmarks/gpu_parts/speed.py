"""The parts of a check that measure sampling and decoding in one process, in the shape of Llama-3.1-8B."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from benchmarks import device_sampler, gpu_decode
from benchmarks.gpu_parts.check_part import PartContext
from engine.model.architecture import ModelConfig
from planner.costs.profile_file import load_profile
from tests.support.gpu_pages import LLAMA_8B, Place

# What a model of `planner.costs.model` has that shape.
PROFILED_MODEL = "Llama-3.1-8B"


def _choose_shape(context: PartContext) -> ModelConfig:
    """The shape that is measured; a toy without a GPU."""
    if not context.is_toy:
        return LLAMA_8B
    return replace(
        LLAMA_8B,
        layers=1,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=32,
        vocab=50,
        windows=(0,),
    )


def _choose_place(context: PartContext, rounds: int) -> Place:
    if not context.is_toy:
        return Place(torch.device("cuda"), rounds=rounds)
    return Place(torch.device("cpu"), "float32", rounds=1, copy_bytes=1 << 12, layers=1)


def measure_sampling(context: PartContext) -> None:
    """Whether the device samples the host's tokens, and how long that takes beside a decode step."""
    place, toy = _choose_place(context, 7), context.is_toy
    rows_by_vocab = {vocab: count // (400 if toy else 10) for vocab, count in device_sampler.ROWS.items()}
    tally = device_sampler.compare(rows_by_vocab, place.device, 0)
    context.record(
        {
            "sampler_rows": tally.rows,
            "sampler_different": tally.different,
            "sampler_undecided": tally.undecided_ordinary,
        }
    )
    rows, vocab = (2, 3000) if toy else (64, 128_256)
    taken = device_sampler.measure_speed(place.device, rows, vocab, 1 if toy else 5)
    context.record({f"sampler_ms_{kind}": round(one["device"], 3) for kind, one in taken.items()})
    batch, tokens = (2, 70) if toy else (64, 1024)
    with torch.no_grad():
        step_s = gpu_decode.Model(_choose_shape(context), place, batch, tokens).run_seconds(batch, tokens)
    slowest_ms = max(one["device"] for one in taken.values())
    context.record({"step_ms": round(step_s * 1e3, 3), "sampler_ratio": round(slowest_ms / step_s / 1e3, 4)})


def measure_decoding(context: PartContext) -> None:
    """The ratios of `benchmarks.gpu_decode`, one after the other."""
    place, shape = _choose_place(context, 7), _choose_shape(context)
    batch, tokens = (2, 64) if context.is_toy else (32, 4096)
    with torch.no_grad():
        bandwidth = place.bandwidth()
        context.record({"copy_tb_per_s": round(bandwidth / 1e12, 3)})
        found = gpu_decode.attention_ratio(shape, place, bandwidth, batch, tokens)
        context.record({"attention_ratio": round(found, 3)})
        flat, same = gpu_decode.tpp_ratios(shape, place, batch, tokens)
        context.record({"tpp_4096": round(flat, 3), "tpp_4096_pages": round(same, 3)})
        gpu_decode.release()
        context_tokens = 70 if context.is_toy else 1024
        model = gpu_decode.Model(shape, place, batch, context_tokens)
        floor_s = model.step_bytes(batch, context_tokens) / bandwidth
        context.record({"step_ratio": round(model.step_seconds(batch, context_tokens) / floor_s, 3)})
        context.record({"run_ratio": round(model.run_seconds(batch, context_tokens) / floor_s, 3)})


def measure_profile(context: PartContext) -> None:
    """A profile of steps in `steps.json`, and whether the planner reads it."""
    place, file = _choose_place(context, 5), context.folder / "steps.json"
    # The planner fits a line to four prompts at least.
    grid = ([1, 2], [70, 90], [65, 70, 75, 80])
    if not context.is_toy:
        grid = ([1, 16, 64], [256, 2048], [128, 512, 2048, 4096])
    with torch.no_grad():
        saved = gpu_decode.profile(_choose_shape(context), place, *grid)
    if context.is_toy:
        # No model of the planner has this shape, and no device this name.
        saved["device"] = "H200"
    file.write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
    read = load_profile(file, PROFILED_MODEL)
    context.record({"profile": str(file), "profile_splits": len(read.costs)})
