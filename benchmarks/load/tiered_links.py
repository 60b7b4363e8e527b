"""Deployments with tiers on hosts of their own (`benchmarks.load.shaped_link`), for `benchmarks.kv_tiers`.

One has no tiers, one has host memory below its pools, and one has the same, read at 1 MB/s. KV goes over links of 200
Mbit/s.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.load.deployment import ReachedDeployment
from benchmarks.load.shaped_link import ShapedDeployment
from benchmarks.load.slow_tier import TIER_BYTES_PER_S
from tests.support.network_namespaces import running_bridge

MBIT_PER_S = 200.0
MODULES = {"none": "services.worker", "host": "services.worker", "slow": "benchmarks.load.slow_tier"}


@contextmanager
def tiered_links(pool_bytes: int, host_bytes: int) -> Iterator[dict[str, ReachedDeployment]]:
    """The deployments by name, running and ready; at the end nothing of them is left."""
    with running_bridge() as net, tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        reached = {}
        for number, (name, module) in enumerate(MODULES.items()):
            own = Path(folder) / name
            own.mkdir()
            fields: dict[str, Any] = {"kv_bytes": pool_bytes, "kv_bytes_asked": True}
            fields |= {} if name == "none" else {"kv_host_bytes": host_bytes}
            deployment = ShapedDeployment(net, own, "raw", number, fields, module)
            running.callback(deployment.stop)
            deployment.start()
            deployment.shape_link(MBIT_PER_S)
            reached[name] = ReachedDeployment(deployment.port)
        yield reached


def summarize_links(seconds: Mapping[str, list[tuple[float, float]]]) -> dict[str, float]:
    """The figures, of seconds to the first and to the second token in each round, by deployment."""

    def ratio(name: str, place: int) -> float:
        rounds = zip(seconds[name], seconds["none"], strict=True)
        return round(median(one[place] / none[place] for one, none in rounds), 3)

    return {"pull": ratio("host", 1), "slow_ttft": ratio("slow", 0)}


def check_slow(deployment: ReachedDeployment) -> None:
    """Raises AssertionError if the slow tier was never read, or faster than it may be."""
    tiers = [one["stats"]["tiers"]["host"] for one in deployment.get("/status")["workers"]]
    rates = [one["read_bytes_per_s"] for one in tiers]
    assert min(rates) <= TIER_BYTES_PER_S, f"no tier was held to {TIER_BYTES_PER_S:.0f} bytes/s: {rates}"
