"""Plays faults that real workers guard against: KV that is held at rest, and KV that arrives corrupt.

A real gateway serves two workers without a model, over the real channel. One says that it holds a lease though no
request is open; the other counts a hand-off whose KV did not match its digest. (Real workers end themselves in the
first case.)
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import benchmarks.script_path  # noqa: F401
from diptych.messages import WorkerStats
from tests.support.fake_workers import Puppet
from tests.support.gateway_process import serving
from tests.support.prometheus_server import PrometheusServer, scraping

POLL_S = 0.5
# Each fault's alert, and how long the alert waits.
FAULTS = {"KV held at rest": ("DiptychKvHeldAtRest", 60.0), "corrupt KV": ("DiptychCorruptKv", 0.0)}


class BrokenWorker(Puppet):
    """A worker whose statistics are what a fault would make them."""

    leases = 0
    integrity_failures = 0

    def _stats(self) -> WorkerStats:
        return WorkerStats(
            slabs_total=64,
            leases=self.leases,
            slabs_used=self.leases,
            integrity_failures=self.integrity_failures,
        )


def alert_delays(evaluation_s: float, patience_s: float) -> dict[str, float | None]:
    """Seconds from each fault until its own alert fires; None if it does not within its wait, two evaluations and
    `patience_s`.
    """
    with tempfile.TemporaryDirectory(prefix="diptych-broken-") as name, serving(Path(name)) as gateway:
        address, keys = gateway.spec.channel, Path(gateway.spec.keys_dir)
        source, target = (BrokenWorker(role, 0, address, keys) for role in ("prefill", "decode"))
        try:
            with scraping(f"127.0.0.1:{gateway.spec.port}", evaluation=f"{evaluation_s:g}s") as server:
                _await_series(server, 'diptych:integrity_failures_total{worker="decode-0"}', patience_s)
                begun_s = time.monotonic()
                source.leases, target.integrity_failures = 1, 1
                return _await_alerts(server, begun_s, 2 * evaluation_s + patience_s)
        finally:
            source.kill()
            target.kill()


def _await_series(server: PrometheusServer, name: str, limit_s: float) -> None:
    """Wait until two samples are there, between which an increase is seen. Raises TimeoutError."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if (server.value(f"count_over_time({name}[1m])") or 0) >= 2:
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"{name} is not scraped")


def _await_alerts(server: PrometheusServer, begun_s: float, patience_s: float) -> dict[str, float | None]:
    """Seconds from `begun_s` until each fault's alert fires, None if that is not within its wait and `patience_s`."""
    found: dict[str, float | None] = {}
    while len(found) < len(FAULTS):
        firing, passed_s = server.firing(), time.monotonic() - begun_s
        for fault, (alert, wait_s) in FAULTS.items():
            if fault not in found and (alert in firing or passed_s > wait_s + patience_s):
                found[fault] = passed_s if alert in firing else None
        time.sleep(POLL_S)
    return found
