"""Part `same`: whether deployments on a device give the tokens of a CPU worker.

How near two tokens must be for rounding to decide is known for plain pages. Of coded pages it is measured: a number
that lies between two codes may get either, which moves those of later layers. So a second CPU worker gets weights that
differ from those of the first by one rounding, and its log-probabilities show what rounding moves.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu_parts.check_part import PartContext
from benchmarks.load.answer_checks import (
    NEAR,
    AskedRequest,
    ask_all,
    ask_reference,
    compare_answers,
    largest_difference,
    make_requests,
)
from benchmarks.load.channel_deployment import DEVICE_BOOKS, ChannelAnswer, ChannelDeployment
from services.host.model_probe import EMBEDDED_MODEL, resolve_embedded

PAIR, TWO_PAIRS = ("--prefill", "1", "--decode", "1"), ("--prefill", "2", "--decode", "2")
CPU_WORKER = ("--colocated", "1", "--device", "cpu")
CODEC = ("--kv-cache-codec", "tq4")
REST_S = 3.0
# The most by which a rounded weight differs, relative to it: as two neighbouring float32 numbers do.
ROUNDING = 1.2e-7
COUNTS = ("answers", "identical", "explained", "unexplained", "failed")


def on_device(context: PartContext) -> tuple[str, ...]:
    """The flags of a deployment on the device, in float32."""
    return ("--device", context.device, "--dtype", "float32")


def measure_same(context: PartContext) -> None:
    """Greedy answers and others of every kind, of plain and of coded pages, beside those of one CPU worker."""
    share = context.share
    groups = (
        ("", (PAIR, TWO_PAIRS), (), make_requests(int(400 * share), int(200 * share))),
        ("coded_", (PAIR,), CODEC, make_requests(int(100 * share), int(50 * share), seed=1)),
    )
    held, examples = dict[str, object](), list[str]()
    for prefix, pools, codec, asked in groups:
        counts = dict.fromkeys(COUNTS, 0)
        with ChannelDeployment(*CPU_WORKER, *codec) as deployment:
            reference = ask_reference(deployment, asked)
        near = NEAR["float32"]
        if codec:
            # Both log-probabilities may move.
            near = max(near, 2 * measure_rounding(context, codec, asked, reference))
            context.record({f"{prefix}near": near})
        for pool in pools:
            with ChannelDeployment(*pool, *on_device(context), *codec) as deployment:
                found = compare_answers(reference, ask_all(deployment, asked), near)
                held |= deployment.wait_rest(REST_S, DEVICE_BOOKS)
            for name in COUNTS:
                counts[name] += getattr(found, name)
            examples += [" ".join((*pool, *codec, text)) for text in found.examples]
            context.record({f"{prefix}{name}": count for name, count in counts.items()})
            context.record({"same_held": len(held), "held_by": held, "same_examples": examples})


def measure_rounding(
    context: PartContext,
    codec: Sequence[str],
    asked: Sequence[AskedRequest],
    reference: Sequence[ChannelAnswer],
) -> float:
    """The most by which a log-probability of a CPU worker differs from `reference` when its weights are rounded."""
    folder = context.folder / "rounded"
    round_weights(Path(resolve_embedded(EMBEDDED_MODEL)), folder)
    with ChannelDeployment(*CPU_WORKER, *codec, "--model", str(folder)) as deployment:
        return largest_difference(reference, ask_reference(deployment, asked))


def round_weights(source: Path, target: Path) -> None:
    """Copy the model in folder `source` to `target`, in float32, with weights moved by at most `ROUNDING`."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        noise = torch.rand(tensor.shape, generator=generator) * 2 - 1
        weights[name] = tensor.float() * (1 + ROUNDING * noise)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
