"""Part `same`: whether deployments on a device give the tokens of a CPU worker."""

from __future__ import annotations

from benchmarks.gpu_parts.check_part import PartContext
from benchmarks.load.answer_checks import (
    CODED_NEAR,
    NEAR,
    ask_all,
    ask_reference,
    compare_answers,
    make_requests,
)
from benchmarks.load.channel_deployment import DEVICE_BOOKS, ChannelDeployment

PAIR, TWO_PAIRS = ("--prefill", "1", "--decode", "1"), ("--prefill", "2", "--decode", "2")
CPU_WORKER = ("--colocated", "1", "--device", "cpu")
CODEC = ("--kv-cache-codec", "tq4")
REST_S = 3.0
COUNTS = ("answers", "identical", "explained", "unexplained", "failed")


def on_device(context: PartContext) -> tuple[str, ...]:
    """The flags of a deployment on the device, in float32."""
    return ("--device", context.device, "--dtype", "float32")


def measure_same(context: PartContext) -> None:
    """Greedy answers and others of every kind, of plain and of coded pages, beside those of one CPU worker."""
    share = context.share
    groups = (
        ("", (PAIR, TWO_PAIRS), (), NEAR["float32"], make_requests(int(400 * share), int(200 * share))),
        ("coded_", (PAIR,), CODEC, CODED_NEAR, make_requests(int(100 * share), int(50 * share), seed=1)),
    )
    held, examples = dict[str, object](), list[str]()
    for prefix, pools, codec, near, asked in groups:
        counts = dict.fromkeys(COUNTS, 0)
        with ChannelDeployment(*CPU_WORKER, *codec) as deployment:
            reference = ask_reference(deployment, asked)
        for pool in pools:
            with ChannelDeployment(*pool, *on_device(context), *codec) as deployment:
                found = compare_answers(reference, ask_all(deployment, asked), near)
                held |= deployment.wait_rest(REST_S, DEVICE_BOOKS)
            for name in COUNTS:
                counts[name] += getattr(found, name)
            examples += [" ".join((*pool, *codec, text)) for text in found.examples]
            context.record({f"{prefix}{name}": count for name, count in counts.items()})
            context.record({"same_held": len(held), "held_by": held, "same_examples": examples})
