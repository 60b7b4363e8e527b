"""How close decoding on a GPU comes to the speed of its memory, and what reading shared chunks once saves.

    python -m benchmarks.gpu_decode [--json] [--rounds 15] [--profile FILE] [--sweep]

Needs a CUDA device. Everything has the shape of Llama-3.1-8B (random weights, bfloat16), batch 32, times are medians.
The bandwidth is that of a device-to-device copy of 2 GiB, read and write both counted.

    attention_ratio   KV bytes per second of the flat decode kernel, 32 sequences of 4,096 tokens / the bandwidth
    tpp_4096          time of the flat kernel where every sequence has its own copy of a 4,096-token prefix / time of
                      the two-phase kernel over one copy of it; 128 tokens of each sequence are its own
    tpp_4096_pages    the same against the flat kernel reading the same physical pages, which the cache helps
    coded_CODEC       time of the flat decode kernel over raw bfloat16 pages / over pages of the codec, 32 sequences of
                      4,096 tokens; above 1 the codec is faster
    step_ratio        a full decode step at 1,024 tokens each / (bytes of weights and KV it must read / the bandwidth)
    run_ratio         the same with packing and everything else between two steps; logits stay on the device

`--profile` saves what the planner needs: seconds of decode steps by batch and context, of prefills by tokens.
`--sweep` tries other launch settings for the attention kernel and prints each one's ratio.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

import benchmarks.script_path  # noqa: F401
from diptych.chunks import CHUNK_TOKENS
from engine.batching.batch import pack_batch
from engine.gpu.launch import LaunchTuning
from engine.gpu.model_runner import GpuModelRunner
from engine.model.architecture import ModelConfig
from engine.step_work import StepWork
from kvcache.layout import KvLayout
from tests.support.gpu_pages import LLAMA_8B, Place, Random, open_pages

OWN = 128  # tokens of a sequence that it shares with none
# Codecs that are compared with raw pages.
CODECS = ("nuq4-1%", "nuq4", "int4", "tq4")


class Attention:
    """The decode kernel over random KV: `batch` sequences of `tokens`, of which `shared` chunks are the same.

    copies: the shared chunks lie there once for each sequence, and nothing is shared.
    """

    def __init__(
        self,
        shape: ModelConfig,
        place: Place,
        batch: int,
        tokens: int,
        shared: int,
        copies: bool,
        tuning: LaunchTuning,
        codec: str = "",
    ) -> None:
        self.layout = KvLayout(place.layers, shape.kv_heads, shape.head_dim, place.dtype)
        self.place, self.tokens, self.batch = place, tokens, batch
        chunks = self.layout.num_chunks(tokens)
        own = chunks if copies else chunks - shared
        numbers = torch.randperm(batch * own + shared).tolist()
        prefix = [] if copies else [numbers.pop() for _ in range(shared)]
        slabs = [prefix + [numbers.pop() for _ in range(own)] for _ in range(batch)]
        kind: torch.dtype = getattr(torch, place.dtype)
        self.pages = open_pages(shape, place, codec, batch * own + shared, tuning)
        self.step = self.pages.load(pack_batch([StepWork([0], tokens - 1, row, "none") for row in slabs]))
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = torch.randn(batch, width, dtype=kind, device=place.device)
        self.out = torch.zeros(batch, shape.heads * shape.head_dim, dtype=kind, device=place.device)

    @property
    def kv_bytes(self) -> int:
        """KV that one pass over all layers reads when nothing is shared."""
        return self.batch * self.tokens * self.layout.bytes_per_token

    def layers(self) -> None:
        """One pass over all layers."""
        for layer in range(self.layout.layers):
            self.pages.decode(layer, self.qkv, self.step, 0, self.out)

    def seconds(self) -> float:
        """Of one pass; launches are replayed as a graph where there are graphs."""
        if self.place.device.type != "cuda":
            return self.place.seconds(self.layers)
        self.layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.layers()
        return self.place.seconds(graph.replay)


def attention_ratio(
    shape: ModelConfig,
    place: Place,
    bandwidth: float,
    batch: int = 32,
    tokens: int = 4096,
    tuning: LaunchTuning | None = None,
) -> float:
    """KV bytes per second of the flat kernel over the bandwidth."""
    bench = Attention(shape, place, batch, tokens, 0, True, tuning or LaunchTuning.of(place.device))
    return bench.kv_bytes / bench.seconds() / bandwidth


def coded_ratios(shape: ModelConfig, place: Place, batch: int = 32, tokens: int = 4096) -> dict[str, float]:
    """Time of the flat kernel over raw pages, over that over pages of each codec."""
    tuning = LaunchTuning.of(place.device)
    times = {}
    for codec in ("", *CODECS):
        times[codec] = Attention(shape, place, batch, tokens, 0, True, tuning, codec).seconds()
        release()
    return {f"coded_{codec}": times[""] / times[codec] for codec in CODECS}


def tpp_ratios(shape: ModelConfig, place: Place, batch: int = 32, prefix: int = 4096) -> tuple[float, float]:
    """Time of the flat kernel over that of the two-phase kernel: over copies of the prefix, over the same pages."""
    tuning = LaunchTuning.of(place.device)
    tokens, shared = prefix + OWN, prefix // CHUNK_TOKENS
    never = replace(tuning, saving_bytes=1 << 62)
    cases = ((tuning, False), (never, True), (never, False))
    times = []
    for chosen, copies in cases:
        times.append(Attention(shape, place, batch, tokens, shared, copies, chosen).seconds())
    return times[1] / times[0], times[2] / times[0]


class Model:
    """A whole model of random weights, decoding."""

    def __init__(self, shape: ModelConfig, place: Place, batch: int, context: int) -> None:
        layout = KvLayout(shape.layers, shape.kv_heads, shape.head_dim, place.dtype)
        self.place, self.chunks = place, layout.num_chunks(context + 1)
        self.bytes_per_token = layout.bytes_per_token
        slabs = batch * self.chunks
        self.runner = GpuModelRunner.load(shape, Random(), slabs, context + 1, str(place.device), place.dtype)

    def works(self, batch: int, context: int) -> list[StepWork]:
        """A decode step of `batch` sequences of `context` tokens."""
        rows = [range(n * self.chunks, (n + 1) * self.chunks) for n in range(batch)]
        return [StepWork([1], context - 1, list(row), "last") for row in rows]

    def step_bytes(self, batch: int, context: int) -> int:
        """Weights and KV that a step must read."""
        return self.runner.weight_bytes + batch * context * self.bytes_per_token

    def step_seconds(self, batch: int, context: int) -> float:
        """Of what the device does in a decode step."""
        return self.place.seconds(self.runner.replayer(self.works(batch, context)))

    def run_seconds(self, batch: int, context: int) -> float:
        """Of a step among others, each a token longer than the one before, from the call to the end of the step."""
        count = self.place.rounds + 2
        steps = iter([self.works(batch, context - count + n + 1) for n in range(count)])
        return self.place.seconds(lambda: self.runner.run(next(steps)))

    def prefill_seconds(self, tokens: int) -> float:
        """Of one prompt, from the call to its logits."""
        slabs = list(range(-(-tokens // CHUNK_TOKENS)))
        return self.place.seconds(lambda: self.runner.run([StepWork([1] * tokens, 0, slabs, "last")]))


def figures(
    shape: ModelConfig, place: Place, batch: int = 32, tokens: int = 4096, context: int = 1024
) -> dict[str, float]:
    """All ratios."""
    bandwidth = place.bandwidth()
    found = {"attention_ratio": attention_ratio(shape, place, bandwidth, batch, tokens)}
    found["tpp_4096"], found["tpp_4096_pages"] = tpp_ratios(shape, place, batch, tokens)
    release()
    found |= coded_ratios(shape, place, batch, tokens)
    model = Model(shape, place, batch, context)
    floor_s = model.step_bytes(batch, context) / bandwidth
    found["step_ratio"] = model.step_seconds(batch, context) / floor_s
    found["run_ratio"] = model.run_seconds(batch, context) / floor_s
    return found


def profile(
    shape: ModelConfig, place: Place, batches: list[int], contexts: list[int], prompts: list[int]
) -> dict[str, object]:
    """Seconds of steps by what they do, for the planner."""
    model = Model(shape, place, max(batches), max(*contexts, *prompts))
    decode = [
        {"batch": batch, "context": context, "seconds": model.run_seconds(batch, context)}
        for batch in batches
        for context in contexts
    ]
    prefill = [{"tokens": tokens, "seconds": model.prefill_seconds(tokens)} for tokens in prompts]
    device = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "interpreter"
    return {"device": device, "dtype": place.dtype, "tp": 1, "pp": 1, "decode": decode, "prefill": prefill}


def sweep(shape: ModelConfig, place: Place) -> dict[str, float]:
    """The ratio of the attention kernel under each of a grid of settings."""
    bandwidth, plain = place.bandwidth(), LaunchTuning.of(place.device)
    settings = [
        replace(plain, programs=plain.programs * more // 8, warps=warps, stages=stages)
        for more in (2, 4, 8, 16)
        for warps in (2, 4, 8)
        for stages in (2, 3, 4)
    ]
    return {
        f"programs {t.programs} warps {t.warps} stages {t.stages}": attention_ratio(
            shape, place, bandwidth, tuning=t
        )
        for t in settings
    }


def release() -> None:
    """Give the memory of what is no longer held back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """Print the figures; exit with 2 where there is no CUDA device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rounds", type=int, default=15, help="measurements per figure")
    parser.add_argument("--profile", type=Path, help="save a profile for the planner to this file")
    parser.add_argument("--sweep", action="store_true", help="try launch settings of the attention kernel")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: there is no CUDA device here", file=sys.stderr)
        raise SystemExit(2)
    place = Place(torch.device("cuda"), rounds=arguments.rounds)
    with torch.no_grad():
        found = sweep(LLAMA_8B, place) if arguments.sweep else figures(LLAMA_8B, place)
        release()
        if arguments.profile:
            saved = profile(LLAMA_8B, place, [1, 8, 32, 64], [256, 1024, 4096], [128, 512, 2048, 4096])
            arguments.profile.write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps({name: round(value, 3) for name, value in found.items()}))
        return
    for name, value in found.items():
        print(f"{name:<40} {value:.3f}")


if __name__ == "__main__":
    main()
