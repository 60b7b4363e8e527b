"""Every metric of the gateway, as `/metrics` shows it.

`python -m tests.unit.gateway.exported_metrics` writes the tables of docs/metrics.md. Which metrics a table has, and in
what order, is by hand; type, labels and meaning are those of the registry.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Counter, Gauge, Histogram

from diptych.keys.named_key import NamedKey
from diptych.messages import WorkerStats
from diptych.slo import Slo
from diptych.stats.tiers import TierStats
from services.gateway.batches.batch_report import BatchCollector
from services.gateway.keys.key_metrics import KeyCollector
from services.gateway.keys.named_keys import NamedKeys
from services.gateway.metrics.deployment import DeploymentCollector
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.workers import LinkSpeed, WorkerSnapshot
from services.gateway.preparation.ignored_fields import IgnoredFields
from services.gateway.tls.certificate_watch import EXPIRY
from tests.unit.gateway.batches.idle_feeder import idle_feeder

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
BLOCK = re.compile(r"(?<=<!-- table: metrics -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
NAME = re.compile(r"^\| `([\w:]+)` \|", re.MULTILINE)
HEAD = "| name | type | labels | meaning |\n|---|---|---|---|\n"


class Entry(NamedTuple):
    """A metric: its type, its labels in the order of their definition, and its help."""

    type: str
    labels: tuple[str, ...]
    help: str


def exported() -> dict[str, Entry]:
    """Every metric by its name in /metrics."""
    metrics = GatewayMetrics(Slo(ttft_s=1.0, tpot_s=0.1))
    tiers = {"host": TierStats()}
    stats = WorkerStats(
        preemptions={"park": 1},
        segment_slabs={"found": 1},
        step_parts={"run": 1.0},
        buffer_slabs=8,
        tiers=tiers,
    )
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
    metrics.registry.gauge(*EXPIRY)
    ignored_fields = IgnoredFields(metrics.registry)
    named = {
        own._name: tuple(own._labelnames)
        for own in (
            *vars(metrics).values(),
            *vars(metrics.kv).values(),
            *vars(metrics.pooled).values(),
            *vars(metrics.replan).values(),
            *vars(metrics.slos).values(),
            *vars(ignored_fields).values(),
        )
        if isinstance(own, Counter | Gauge | Histogram)
    }
    found = {}
    for family in metrics.registry.collect():
        seen = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = Entry(str(family.type), named.get(family.name, tuple(seen)), family.documentation)
    return found


def documented(page: str) -> list[str]:
    """The metrics in the tables of a page."""
    return [name for table in BLOCK.findall(page) for name in NAME.findall(table)]


def render_tables(page: str) -> str:
    """The text of `page` with each table's rows written again; raises KeyError for one that is no metric."""
    entries = exported()

    def row(name: str) -> str:
        entry = entries[name]
        labels = ",".join(f"`{label}`" for label in entry.labels)
        return f"| `{name}` | {entry.type} | {labels} | {entry.help} |\n"

    return BLOCK.sub(lambda table: HEAD + "".join(map(row, NAME.findall(table[1]))), page)


if __name__ == "__main__":
    PAGE.write_text(render_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
