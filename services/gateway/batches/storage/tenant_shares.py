"""What one tenant may keep: pure, but for the text of refusals.

Everything counts that a tenant stores: contents, rows with what the tenant wrote in them, inodes, and for an open batch
at least as many bytes for its results as its input file has.
"""

from __future__ import annotations

import msgspec

from diptych.errors import ConfigError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.specs import StorageShares
from services.gateway.batches.storage.schema import FILE_BYTES

HOW_TO_FREE = "delete files, or wait until open batches have ended"
# Lines of batches may have results until their tenant keeps so many times what the disk has left.
LINE_FACTOR = 3


class TenantUse(msgspec.Struct, frozen=True):
    """What a tenant keeps: a row of `tenants`."""

    content: int = 0
    bytes: int = 0
    files: int = 0
    open_batches: int = 0
    lines: int = 0


def check_disk(shares: StorageShares, disk_bytes: int) -> None:
    """Check that the disk has as many bytes. Raises ConfigError if the share is larger than the whole disk."""
    if shares.max_bytes is not None and shares.max_bytes > disk_bytes:
        raise ConfigError(
            "--max-tenant-bytes is more than the disk under --data-dir has",
            f"it is {shares.max_bytes}, and the whole disk has {disk_bytes} bytes",
            "give fewer bytes, or leave it out: then a key may keep as much as the disk has left",
        )


def find_refusal(
    shares: StorageShares, use: TenantUse, num_bytes: int, num_files: int, free_bytes: int
) -> RequestFailure | None:
    """Why a tenant that keeps `use` may not keep so much more, while the disk has `free_bytes` left."""
    num_bytes += num_files * FILE_BYTES
    most, rule = shares.max_bytes, f"--max-tenant-bytes {shares.max_bytes}"
    if most is None:
        most, rule = (use.bytes + free_bytes) // 2, "as much as the disk has left"
    if use.bytes + num_bytes > most:
        problem = (
            f"your files and batches hold {use.bytes} bytes, and {num_bytes} more would be above the share of a "
            f"key, {most} ({rule}); {HOW_TO_FREE}"
        )
        return RequestFailure(FailureReason.TENANT_STORAGE_FULL, problem)
    if use.files + num_files > shares.max_files:
        problem = (
            f"you have {use.files} files, those of open batches included, and the share of a key is "
            f"{shares.max_files} (--max-tenant-files); {HOW_TO_FREE}"
        )
        return RequestFailure(FailureReason.TENANT_STORAGE_FULL, problem)
    return None


def find_line_refusal(shares: StorageShares, use: TenantUse, free_bytes: int) -> RequestFailure | None:
    """Why no other line of a tenant may have a result; None if it may.

    Without a share in bytes it is refused above `LINE_FACTOR` times what the disk has left: batches that were
    taken go on where new ones are refused. A disk without room is no tenant's fault: lines wait then.
    """
    most, rule = shares.max_bytes, f"--max-tenant-bytes {shares.max_bytes}"
    if most is None:
        most, rule = LINE_FACTOR * free_bytes, f"{LINE_FACTOR} times what the disk has left"
    if use.bytes <= most or not free_bytes:
        return None
    problem = (
        f"the line was not run: your files and batches hold {use.bytes} bytes, and the share of a key is {most} "
        f"({rule}); {HOW_TO_FREE}"
    )
    return RequestFailure(FailureReason.TENANT_STORAGE_FULL, problem)


def find_batch_refusal(shares: StorageShares, use: TenantUse) -> RequestFailure | None:
    """Why a tenant may not have another open batch; None if it may."""
    if use.open_batches < shares.max_batches:
        return None
    problem = (
        f"{use.open_batches} batches are open, and the share of a key is {shares.max_batches} "
        "(--max-tenant-batches); wait until one has ended, or cancel one"
    )
    return RequestFailure(FailureReason.TOO_MANY_BATCHES, problem)
