"""Puts the parts of files and batches together, for one gateway."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from diptych.specs import StorageShares
from services.gateway.batches.batch_report import BatchCollector
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.feeder import BatchFeeder
from services.gateway.batches.files.file_routes import FileRoutes
from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.line_window import LineWindowSink
from services.gateway.batches.routes.admin_routes import AdminBatchRoutes
from services.gateway.batches.routes.batch_routes import BatchRoutes
from services.gateway.batches.storage.tenant_shares import check_disk
from services.gateway.batches.store import BatchStore
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.recent_events import RecentErrors
from services.gateway.openai.schemas.batch_schema import MAX_WINDOW_S
from services.gateway.outcomes import RequestOutcomes
from services.gateway.preparation.file_checker import FileChecker
from services.gateway.service import GatewayService, RequestTimeouts


@dataclass(frozen=True, slots=True)
class BatchService:
    """Files and batches of a gateway that has a data directory."""

    store: BatchStore
    feeder: BatchFeeder
    files: FileRoutes
    batches: BatchRoutes
    admin: AdminBatchRoutes

    def close(self) -> None:
        """Finish what is being written. The feeder must have ended. Idempotent."""
        self.store.close()


@dataclass(frozen=True, slots=True)
class BatchesOff:
    """Why a gateway has no files and batches: `what` for clients, and `why` with the facts for its operator."""

    what: str = "the server was started without a data directory"
    why: str = ""

    def __str__(self) -> str:
        """Both in one line."""
        return f"{self.what}: {self.why}" if self.why else self.what


def open_batch_service(
    data_dir: str,
    max_file_bytes: int,
    service: GatewayService,
    num_workers: Callable[[], int] = lambda: 1,
    shares: StorageShares | None = None,
    tenants: Collection[str] | None = None,
) -> BatchService:
    """Open the data directory, and make what serves it. The lines of batches run through a copy of `service`.

    `num_workers` gives the number of decode workers. `shares` are what a tenant may keep. Batches of others than
    `tenants` (None: of nobody) are cancelled.

    Raises:
        StartError: the data directory cannot be used.
        ConfigError: a share is larger than its disk.
    """
    shares = shares or StorageShares()
    folder = DataDir(data_dir)
    try:
        check_disk(shares, folder.disk_bytes())
        store = BatchStore(folder, shares=shares, tenants=tenants)
    except BaseException:
        folder.close()
        raise
    # Lines are not requests of clients who wait: they have metrics of their own, nobody counts their outcomes, and
    # they end with their batch.
    lines = replace(
        service,
        metrics=GatewayMetrics(),
        outcomes=RequestOutcomes(),
        timeouts=RequestTimeouts(request_s=2.0 * MAX_WINDOW_S),
        open=set(),
        only_batches=False,
        errors=RecentErrors(),
    )
    limits = service.rules.limits

    def is_draining() -> bool:
        return service.draining

    feeder = BatchFeeder(
        store,
        LineRunner(lines, folder.uploads),
        FileChecker(service.preparers),
        service.rules.served_names[0],
        limits.max_body_bytes,
        num_workers,
        is_draining,
        service.metrics.slo.attainment,
    )
    if not service.only_batches:
        service.outcomes.add_sink(LineWindowSink(feeder.record_request))
    service.metrics.registry.register(BatchCollector(feeder))
    files = FileRoutes(store, max_file_bytes, limits.body_s, is_draining)
    batches = BatchRoutes(store, feeder, is_draining)
    return BatchService(store, feeder, files, batches, AdminBatchRoutes(store, feeder, tenants))
