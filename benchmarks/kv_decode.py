"""What coded KV costs on the CPU: attention over pages of each codec beside raw pages, and the coding itself.

    python -m benchmarks.kv_decode [--json] [--rounds 9] [--codecs nuq4-1% int8 ...]

One thread, the embedded model. The pools of raw pages and of each codec hold the same tokens. Ratios are of medians of
the thread's CPU seconds over rounds, each round measuring all contestants in turn. For each codec:

    ratio            decode attention of all layers, 16 sequences of 2,048 tokens in shuffled slabs: coded / raw
    shared_ratio     the same, where the sequences share all chunks but the last
    encode_share     writing coded rows / the whole prefill of 1,024 tokens with coded pages
    prefill_ratio    the whole prefill: coded / raw

Decode attention is measured again for 8 KV heads of 128 with four queries each (`benchmarks.kv_wide`): `wide_ratio` and
`wide_shared_ratio`.

`--json` prints those of nuq4-1% as `nuq4_ratio`, `nuq4_shared_ratio`, `encode_share` and `prefill_ratio`, and all with
the medians in milliseconds under `codecs`. `--codecs all` takes every codec.

What eviction per head costs is measured too (`benchmarks.kv_ragged` says how), and printed under `eviction`, unless
`--no-eviction` is given.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import benchmarks.script_path  # noqa: F401
from benchmarks.engine import EMBEDDED
from benchmarks.kv_ragged import measure_eviction, thread_seconds
from benchmarks.kv_wide import WideSide, make_wide_side
from engine.batching.batch import ForwardBatch, pack_batch
from engine.cpu.attention import PagedAttention
from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.step_work import StepWork
from kvcache.codecs.codec_id import CODE_BITS
from kvcache.layout import KvLayout
from kvcache.pool import KvPool

MAIN_CODEC = "nuq4-1%"
SEQUENCES, TOKENS, PROMPT, VOCAB = 16, 2048, 1024, 300
# Two pools with equal tokens differ by what coding costs: far more than rounding, far less than unrelated numbers.
MOST_APART = 0.8


@dataclass(frozen=True, slots=True)
class Contestant:
    """A model with a pool whose every sequence has the same random tokens, in slabs of its own."""

    runner: CpuModelRunner
    layout: KvLayout
    alone: ForwardBatch
    shared: ForwardBatch
    qkv: torch.Tensor  # [sequences, (heads + 2 * kv_heads) * head_dim]
    out: torch.Tensor  # [sequences, heads * head_dim]

    def decode(self, batch: ForwardBatch) -> None:
        """Attention of all layers."""
        for layer in range(self.layout.layers):
            self.runner._attentions[0].attention.decode(layer, self.qkv, batch, 0, self.out)

    def prefill(self) -> None:
        """A prompt through the whole model, into slabs that the decodes do not read."""
        chunks = self.layout.num_chunks(PROMPT)
        slabs = list(range(self.runner._pools[0].num_slabs - chunks, self.runner._pools[0].num_slabs))
        self.runner.run([StepWork(prompt_ids(PROMPT), 0, slabs, "last")])


class TimedWrites:
    """Pages that count the CPU seconds of their writes."""

    def __init__(self, pages: PagedAttention) -> None:
        self._pages, self.seconds = pages, 0.0
        self.decode, self.prefill = pages.decode, pages.prefill

    def write(self, *arguments: Any) -> None:
        """As `PagedAttention.write`."""
        self.seconds += thread_seconds(lambda: self._pages.write(*arguments))


def prompt_ids(count: int) -> list[int]:
    """Random tokens, always the same."""
    ids: list[int] = np.random.default_rng(0).integers(3, VOCAB, count).tolist()
    return ids


def make_contestant(codec: str) -> Contestant:
    """The embedded model with a pool of one codec."""
    files = Checkpoint.resolve(str(EMBEDDED))
    canonical, calibration = resolve_kv_codec(files, codec)
    layout = files.layout(codec=canonical)
    chunks = layout.num_chunks(TOKENS)
    pool = KvPool(layout, SEQUENCES * chunks + layout.num_chunks(PROMPT))
    runner = CpuModelRunner.load(files, pool, TOKENS, calibration)
    rng = np.random.default_rng(1)
    slabs = rng.permutation(SEQUENCES * chunks).reshape(SEQUENCES, chunks)
    first = slabs[0].tolist()
    runner.run([StepWork(prompt_ids(TOKENS), 0, first, "none")])
    for row in slabs[1:]:
        pool.data[row] = pool.data[first]
    works = [StepWork([0], TOKENS - 1, row.tolist(), "none", 0) for row in slabs]
    shared = [StepWork([0], TOKENS - 1, [*first[:-1], int(row[-1])], "none", 0) for row in slabs]
    heads = files.config.heads
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(SEQUENCES, (heads + 2 * layout.kv_heads) * layout.head_dim, generator=generator)
    out = torch.empty(SEQUENCES, heads * layout.head_dim)
    return Contestant(runner, layout, pack_batch(works), pack_batch(shared), qkv, out)


def measure(rounds: int, codecs: list[str]) -> dict[str, dict[str, float]]:
    """Figures by codec; the results of each pool are compared with those of raw pages first."""
    sides = {name: make_contestant(name) for name in ("raw", *codecs)}
    writes: dict[str, TimedWrites] = {}
    for name in codecs:
        (attention,) = sides[name].runner._attentions
        writes[name] = TimedWrites(attention.attention)
        sides[name].runner._attentions = [replace(attention, attention=writes[name])]
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, side in sides.items():
        calls[name, "alone"] = lambda side=side: side.decode(side.alone)  # type: ignore[misc]
        calls[name, "shared"] = lambda side=side: side.decode(side.shared)  # type: ignore[misc]
        calls[name, "prefill"] = side.prefill
    for call in calls.values():
        call()
    for kind in ("alone", "shared"):
        for name, side in sides.items():
            calls[name, kind]()
            _check_outputs(name, sides["raw"], side)
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    shares: dict[str, list[float]] = {name: [] for name in codecs}
    for _ in range(rounds):
        for (name, kind), call in calls.items():
            before = writes[name].seconds if name in writes else 0.0
            taken[name, kind].append(thread_seconds(call))
            if name in writes and kind == "prefill":
                shares[name].append((writes[name].seconds - before) / taken[name, kind][-1])
    middle = {key: median(times) for key, times in taken.items()}
    return {"raw": _milliseconds(middle, "raw")} | {
        name: {
            "ratio": round(middle[name, "alone"] / middle["raw", "alone"], 3),
            "shared_ratio": round(middle[name, "shared"] / middle["raw", "shared"], 3),
            "encode_share": round(median(shares[name]), 3),
            "prefill_ratio": round(middle[name, "prefill"] / middle["raw", "prefill"], 3),
        }
        | _milliseconds(middle, name)
        for name in codecs
    }


def measure_wide(rounds: int, codecs: list[str]) -> dict[str, dict[str, float]]:
    """`wide_ratio` and `wide_shared_ratio` by codec, each pool beside raw pages in turn."""
    raw, found = make_wide_side("", SEQUENCES, TOKENS), dict[str, dict[str, float]]()
    for name in codecs:
        pair = (raw, make_wide_side(name, SEQUENCES, TOKENS))
        found[name] = {}
        for kind, batches in (("", [one.alone for one in pair]), ("shared_", [one.shared for one in pair])):
            times: list[list[float]] = [[], []]
            for side, batch in zip(pair, batches, strict=True):
                side.decode(batch)
            _check_outputs(name, *pair)
            for _ in range(rounds):
                for side, batch, taken in zip(pair, batches, times, strict=True):
                    taken.append(thread_seconds(lambda side=side, batch=batch: side.decode(batch)))  # type: ignore[misc]
            first, second = map(median, times)
            found[name] |= {
                f"wide_{kind}ratio": round(second / first, 3),
                f"wide_{kind}raw_ms": round(1e3 * first, 2),
                f"wide_{kind}ms": round(1e3 * second, 2),
            }
    return found


def _check_outputs(name: str, raw: Contestant | WideSide, coded: Contestant | WideSide) -> None:
    apart = float((raw.out - coded.out).norm() / raw.out.norm())
    assert apart < MOST_APART, f"attention over {name} is {apart:.2f} away from that over raw pages"


def _milliseconds(middle: dict[tuple[str, str], float], name: str) -> dict[str, float]:
    """The medians of one contestant."""
    return {f"{kind}_ms": round(1e3 * middle[name, kind], 2) for kind in ("alone", "shared", "prefill")}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--codecs", nargs="+", default=[MAIN_CODEC], help="names, or `all`")
    parser.add_argument("--no-eviction", action="store_true", help="do not measure eviction")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in CODE_BITS if name != "raw"] if options.codecs == ["all"] else options.codecs
    found, wide = measure(options.rounds, names), measure_wide(options.rounds, names)
    found |= {name: found[name] | wide[name] for name in names}
    eviction = {} if options.no_eviction else measure_eviction(options.rounds)
    if options.json:
        print(json.dumps(flatten_figures(found) | {"eviction": eviction}))
        return
    columns = (
        "ratio",
        "shared_ratio",
        "encode_share",
        "prefill_ratio",
        "wide_ratio",
        "wide_shared_ratio",
        "alone_ms",
        "shared_ms",
        "prefill_ms",
    )
    print("codec", *columns, sep="\t")
    for name, figures in found.items():
        print(name, *(figures.get(column, "") for column in columns), sep="\t")
    for name, figure in eviction.items():
        print("eviction", name, figure, sep="\t")


def flatten_figures(found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """What `--json` prints: the figures of `nuq4-1%` at the top, those of all codecs below."""
    top = {}
    if MAIN_CODEC in found:
        main = found[MAIN_CODEC]
        top = {f"nuq4_{name}": main[name] for name in ("ratio", "shared_ratio")}
        top |= {name: main[name] for name in ("encode_share", "prefill_ratio")}
    return {**top, "codecs": found, "sequences": SEQUENCES, "tokens": TOKENS, "prompt": PROMPT}


if __name__ == "__main__":
    main()
