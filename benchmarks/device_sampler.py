"""Whether sampling on a device chooses the tokens of today's sampler on the host, and what it costs beside it.

    python -m benchmarks.device_sampler [--json] [--short] [--device cpu] [--seed 0]

Without `--device` it takes a CUDA device, or the CPU if there is none. Rows are drawn from a grid: every parameter of
sampling, alone and with others (`PARAMS`), over logits that are ordinary, flat, steep, tied, extreme, forbidden in part
or invalid (`LOGITS`), and vocabularies of 2 to 128,256 tokens, in batches of mixed rows. One row in eight also asks for
something that goes through the host's sampler: a penalty, a bias, minimum tokens, log-probabilities.

    rows           how many rows were sampled by both (20,000; short: 2,000)
    different      of those, how many got another token, log-probability or error
    hosted         how many went to the host because of what they ask for
    undecided      how many others the device gave to the host: invalid logits, and decisions within rounding errors
    undecided_ordinary  of those, how many in batches (every second one) whose logits are valid and not extreme
    ratio_KIND     time of a step's sampling on the device / on the host, with one thread, for 64 rows of 128,256 logits
                   that are on the device (short: 8 rows). Medians. On a CPU it only shows what plain torch costs there
    ms_KIND        milliseconds of that on the device
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import benchmarks.script_path  # noqa: F401
from diptych.request import SamplingParams
from engine.gpu.sampler import DeviceSampler
from engine.protocols import SampledToken
from engine.sampling.sampler import Sampler, SamplerRow

# Values of each parameter. A row takes one of each.
PARAMS: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 1e-300, 1e-6, 0.3, 0.8, 1.0, 1.0, 1.9, 1e6),
    "top_k": (0, 0, 0, 1, 2, 7, 50, 1024, 1025, 100_000),
    "top_p": (1.0, 1.0, 0.999999, 0.95, 0.9, 0.5, 0.05, 1e-9),
    "min_p": (0.0, 0.0, 0.0, 1e-9, 0.02, 0.5, 1.0),
}
# Makes the host's sampler do the row.
MORE: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 0.7, "frequency_penalty": -0.4},
    {"repetition_penalty": 1.3},
    {"logit_bias": {1: 2.5, 0: -100.0}},
    {"min_tokens": 2000, "stop_token_ids": (1,)},
    {"logprobs": 3},
)
# Rows by vocabulary: fewer of the wide ones, which take the host milliseconds each.
ROWS = {2: 3200, 3: 2400, 50: 4400, 1024: 2400, 1025: 2400, 4099: 3000, 32_000: 1600, 128_256: 600}
BATCH = 40
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 1 << 40)
VALID = ("normal", "flat", "steep", "bfloat16", "halves", "forbidden", "alone")


def _make_logits(kind: str, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Float32 [vocab] of one of `LOGITS`."""
    normal = torch.randn(vocab, generator=generator)
    place = int(torch.randint(vocab, (1,), generator=generator))
    made = {
        "normal": lambda: normal * 3,
        "flat": lambda: normal * 0.01,
        "steep": lambda: normal * 20,
        # Ties of a few, and of many.
        "bfloat16": lambda: (normal * 3).bfloat16().float(),
        "halves": lambda: (normal * 3).round() / 2,
        "equal": lambda: torch.full((vocab,), 1.25),
        "zeros": lambda: torch.zeros(vocab) * normal.sign(),
        "huge": lambda: normal.sign() * torch.finfo(torch.float32).max,
        "extreme": lambda: normal * 1e30,
        "tiny": lambda: normal * 1e-40,
        "forbidden": lambda: torch.where(normal > 0.5, normal * 3, -math.inf).index_fill_(
            0, torch.tensor([place]), 0.5
        ),
        "alone": lambda: torch.full((vocab,), -math.inf).index_fill_(0, torch.tensor([place]), -3.0),
        "nothing": lambda: torch.full((vocab,), -math.inf),
        "nan": lambda: normal.index_fill_(0, torch.tensor([place]), math.nan),
        "negative_nan": lambda: normal.index_fill_(0, torch.tensor([place]), -math.nan),
        "infinite": lambda: normal.index_fill_(0, torch.tensor([place]), math.inf),
    }
    return made[kind]()


LOGITS = (
    *VALID * 3, "equal", "zeros", "huge", "extreme", "tiny", "nothing", "nan", "negative_nan", "infinite",
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """Counts of rows; `examples` are of rows that differ."""

    rows: int = 0
    different: int = 0
    hosted: int = 0
    undecided: int = 0
    undecided_ordinary: int = 0
    examples: list[str] = field(default_factory=list)


def make_row(rng: random.Random, vocab: int) -> SamplerRow:
    """A row of the grid."""
    chosen: dict[str, Any] = {name: rng.choice(values) for name, values in PARAMS.items()}
    if rng.random() < 1 / 8:
        chosen |= rng.choice(MORE)
    seed = rng.choice(SEEDS) if rng.random() < 0.2 else rng.randrange(-(2**63), 2**63)
    asked = SamplingParams(max_tokens=1, seed=seed, **chosen)
    row = SamplerRow([0], [1, 1], asked, vocab, None)
    row.index = rng.choice((0, 1, 2, rng.randrange(1 << 20)))
    return row


def compare(rows_by_vocab: dict[int, int], device: torch.device, seed: int) -> Tally:
    """Sample all rows with both samplers."""
    tally, rng = Tally(), random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for vocab, count in rows_by_vocab.items():
        host = Sampler(vocab)
        sampler = DeviceSampler(host, device)
        for begin in range(0, count, BATCH):
            size = min(BATCH, count - begin)
            kinds = rng.choices(VALID if begin // BATCH % 2 else LOGITS, k=size)
            logits = torch.stack([_make_logits(kind, vocab, generator) for kind in kinds])
            compare_batch(tally, host, sampler, logits, [make_row(rng, vocab) for _ in kinds], kinds)
    return tally


def compare_batch(
    tally: Tally,
    host: Sampler,
    sampler: DeviceSampler,
    logits: torch.Tensor,
    rows: list[SamplerRow],
    kinds: list[str],
) -> None:
    """Sample a batch with both, and count what differs."""
    with warnings.catch_warnings():
        # NumPy's, about rows that are not finite.
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = host.sample(list(torch.split(logits, 1)), rows)
        before = sampler.undecided
        picks = sampler.sample(list(torch.split(logits.to(sampler.device), 1)), rows)
    undecided = sampler.undecided - before
    tally.undecided += undecided
    tally.undecided_ordinary += undecided if set(kinds) <= set(VALID) else 0
    tally.rows += len(rows)
    tally.hosted += sum(row.edited or row.sampling.logprobs is not None for row in rows)
    for kind, row, right, pick in zip(kinds, rows, expected, picks, strict=True):
        if _describe(right) != _describe(pick):
            tally.different += 1
            tally.examples.append(f"{kind} of {logits.shape[1]}, {row.sampling}: {right!r}, {pick!r}")


def _describe(pick: SampledToken | Exception) -> object:
    """Equal for equal results: two exceptions never are."""
    return (type(pick), str(pick)) if isinstance(pick, Exception) else pick


SPEED_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "top_k_top_p": {"top_k": 50, "top_p": 0.95},
}


def measure_speed(device: torch.device, rows: int, vocab: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step's sampling by kind, of both samplers."""
    host = Sampler(vocab)
    sampler = DeviceSampler(host, device)
    # Probabilities that fall with the rank to the power of 1.5: 95 % of them are in a few hundred tokens.
    falling = -1.5 * torch.arange(1, vocab + 1).log()
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(vocab, generator=generator) for _ in range(rows)]
    logits = torch.stack([falling[order] for order in orders]).to(device)
    parts = list(torch.split(logits, 1))
    found = {}
    for kind, more in SPEED_KINDS.items():
        asked = [SamplingParams(max_tokens=1, seed=seed, **more) for seed in range(rows)]
        opened = [SamplerRow([0], [], one, vocab, None) for one in asked]
        found[kind] = _measure_both(
            lambda opened=opened: sampler.sample(parts, opened),  # type: ignore[misc]
            lambda opened=opened: host.sample(parts, opened),  # type: ignore[misc]
            rounds,
        )
    return found


def _measure_both(
    on_device: Callable[[], object], on_host: Callable[[], object], rounds: int
) -> dict[str, float]:
    """Median milliseconds of both, measured in turn after one call each. Both return only when tokens are known."""
    times: dict[str, list[float]] = {"device": [], "host": []}
    for _ in range(rounds + 1):
        for name, call in (("device", on_device), ("host", on_host)):
            began_s = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - began_s) * 1e3)
    return {name: median(taken[1:]) for name, taken in times.items()}


def measure(device: torch.device, short: bool, seed: int) -> dict[str, object]:
    """All figures."""
    shares = {vocab: count // (10 if short else 1) for vocab, count in ROWS.items()}
    tally = compare(shares, device, seed)
    figures: dict[str, object] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "rows": tally.rows,
        "different": tally.different,
        "hosted": tally.hosted,
        "undecided": tally.undecided,
        "undecided_ordinary": tally.undecided_ordinary,
        "examples": tally.examples[:5],
    }
    speed = measure_speed(device, 8 if short else 64, 128_256, 3 if short else 5)
    for kind, taken in speed.items():
        figures[f"ratio_{kind}"] = round(taken["device"] / taken["host"], 4)
        figures[f"ms_{kind}"] = round(taken["device"], 3)
    return figures


def main() -> None:
    """Print the figures; exit with 1 if a row differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--short", action="store_true", help="a tenth of the rows")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--seed", type=int, default=0, help="of rows and logits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    figures = measure(device, arguments.short, arguments.seed)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<24} {value}")
    raise SystemExit(1 if figures["different"] else 0)


if __name__ == "__main__":
    main()
