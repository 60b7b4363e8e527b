"""Every metric of the gateway, as `/metrics` shows it."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from diptych.keys.named_key import NamedKey
from diptych.messages import WorkerStats
from diptych.slo import Slo
from services.gateway.batches.batch_report import BatchCollector
from services.gateway.keys.key_metrics import KeyCollector
from services.gateway.keys.named_keys import NamedKeys
from services.gateway.metrics.deployment import DeploymentCollector
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.workers import LinkSpeed, WorkerSnapshot
from tests.unit.gateway.batches.idle_feeder import idle_feeder

Entry = tuple[str, frozenset[str]]  # type and labels


def exported() -> dict[str, Entry]:
    """Every metric, named as /metrics shows it, with its type and labels."""
    metrics = GatewayMetrics(Slo(ttft_s=1.0, tpot_s=0.1))
    stats = WorkerStats(preemptions={"park": 1}, step_parts={"run": 1.0}, buffer_slabs=8)
    books, link = (
        WorkerSnapshot("decode-0", "decode", stats, {"raw": (8, 4096)}),
        LinkSpeed("prefill-0", "decode-0", "shm", 1.0, 1.0),
    )
    metrics.watch_workers(lambda: [books], lambda: [link], "toy")
    metrics.registry.register(BatchCollector(idle_feeder()))
    metrics.registry.register(KeyCollector(NamedKeys([NamedKey("team", b"")])))
    metrics.registry.register(
        DeploymentCollector("1.0", "toy", lambda: "fp_1", lambda: {"prefill": 1, "decode": 1})
    )
    metrics.registry.gauge("diptych:certificate_expiry_seconds", "defined with a certificate alone")
    named = {
        own._name: frozenset(own._labelnames)
        for own in (*vars(metrics).values(), *vars(metrics.kv).values(), *vars(metrics.replan).values())
        if isinstance(own, Counter | Gauge | Histogram)
    }
    found = {}
    for family in metrics.registry.collect():
        seen = frozenset(label for sample in family.samples for label in sample.labels if label != "le")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (str(family.type), named.get(family.name, seen))
    return found
