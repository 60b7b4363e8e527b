"""What operators see of files and batches: metrics, and a part of `/status`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.batches.feeder import BatchFeeder
from services.gateway.batches.open_batch import OpenBatch
from services.gateway.openai.schemas.batch_schema import ALL_STATUSES

# Open batches that `/status` lists, oldest first.
MAX_LISTED = 20


class BatchCollector(Collector):
    """A Prometheus collector of the figures that the feeder and its store keep."""

    def __init__(self, feeder: BatchFeeder) -> None:
        self._feeder = feeder

    def describe(self) -> Iterable[Metric]:
        """No metrics in advance: they are collected from live figures."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Lines, batches, tokens and bytes."""
        feeder = self._feeder
        lines = GaugeMetricFamily(
            "diptych:batch_lines", "Lines of open batches: waiting, running", labels=["state"]
        )
        lines.add_metric(["waiting"], feeder.num_waiting)
        lines.add_metric(["running"], feeder.num_running)
        ended = CounterMetricFamily(
            "diptych:batch_lines_ended",
            "Ended lines: completed (output file), failed (error file)",
            labels=["outcome"],
        )
        for outcome, count in feeder.ended.items():
            ended.add_metric([outcome], count)
        tokens = CounterMetricFamily(
            "diptych:batch_tokens", "Tokens of answered lines: prompt, completion", labels=["kind"]
        )
        for kind, count in feeder.tokens.items():
            tokens.add_metric([kind], count)
        batches = GaugeMetricFamily("diptych:batches", "Batches by status", labels=["status"])
        for status in ALL_STATUSES:
            batches.add_metric([status], feeder.store.by_status.get(status, 0))
        held = GaugeMetricFamily("diptych:batch_data_bytes", "Bytes of files and results under --data-dir")
        held.add_metric([], feeder.store.held_bytes)
        share = GaugeMetricFamily(
            "diptych:batch_line_share",
            "Share of all lines that may be in flight, as requests meet their SLOs",
        )
        share.add_metric([], feeder.window.share)
        recalled = CounterMetricFamily(
            "diptych:batch_lines_recalled",
            "Lines taken back from workers, since requests missed their SLOs",
        )
        recalled.add_metric([], feeder.recalled)
        yield from (lines, ended, tokens, batches, held, share, recalled)


def report_batches(feeder: BatchFeeder | None, off: str = "", named: bool = True) -> dict[str, Any]:
    """The part of `/status` about batches. Without a data directory `enabled` is false, and `off` says why.

    Without `named` no single batch is in it, since one tenant would see the batches of others.
    """
    if feeder is None:
        return {"enabled": False, "off": off}
    store = feeder.store
    return {
        "enabled": True,
        "data_dir": str(store.data_dir.path),
        "held_bytes": store.held_bytes,
        # Why no lines are started; empty if they are.
        "stopped": store.trouble,
        # What requests that miss their SLOs leave of the lines that may be in flight; 1: nothing is held back.
        "line_share": round(feeder.window.share, 3),
        "lines": {"waiting": feeder.num_waiting, "running": feeder.num_running, **feeder.ended},
        "by_status": {status: store.by_status.get(status, 0) for status in ALL_STATUSES},
        "open": [
            _describe_batch(batch) for batch in islice(feeder.open.values(), MAX_LISTED if named else 0)
        ],
    }


def _describe_batch(batch: OpenBatch) -> dict[str, Any]:
    """An open batch, without anything that its tenant wrote."""
    record = batch.record
    return {
        "id": record.id,
        "status": record.status,
        "endpoint": record.endpoint,
        "expires_at": record.expires_at,
        "lines": {
            "total": record.total,
            "running": len(batch.in_flight),
            "completed": record.completed,
            "failed": record.failed,
        },
    }
