"""Opens the tiers below a worker's pool, as its specification says."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from diptych.errors import ConfigError
from diptych.specs import WorkerSpec
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.tiers.chunk_store import ChunkStore
from kvcache.tiers.store_folder import remove_leftovers
from kvcache.tiers.tier_checks import HOST_BASE, HOST_PREFIX, check_chunk_fits, deployment_id
from kvtransfer.resharding import ShardedPool
from worker.tiers.worker_tiers import WorkerTiers


def build_tiers(
    spec: WorkerSpec, transfer_key: bytes, pool: ShardedPool, kv: KvAllocator | KvArenas
) -> WorkerTiers | None:
    """The tiers of a worker, opened; None without `--kv-host-bytes`. All workers of a deployment on a host share them.

    Raises:
        ConfigError: a folder cannot be used, is another deployment's, or a chunk does not fit into a tier.
    """
    if not spec.kv_host_bytes:
        return None
    largest = max(arena.layout.chunk_bytes for arena in pool.arenas)
    name = deployment_id(transfer_key)
    check_chunk_fits("--kv-host-bytes", spec.kv_host_bytes, largest)
    folder = HOST_BASE / f"{HOST_PREFIX}{name}"
    # A worker that died alone finds what it had stored.
    remove_leftovers(HOST_BASE, HOST_PREFIX, keep=folder.name)
    host = _open_store(folder, spec.kv_host_bytes, name, removes=True)
    disk = None
    if spec.kv_disk_bytes:
        try:
            check_chunk_fits("--kv-disk-bytes", spec.kv_disk_bytes, largest)
            disk = _open_store(Path(spec.kv_disk_folder), spec.kv_disk_bytes, name, removes=False)
        except BaseException:
            host.close()
            raise
    tiers = WorkerTiers(pool, kv, host, disk)
    tiers.open()
    return tiers


def _open_store(folder: Path, capacity_bytes: int, deployment: str, removes: bool) -> ChunkStore:
    """One tier's store. Raises ConfigError."""
    try:
        return ChunkStore(folder, capacity_bytes, deployment, removes)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"KV cannot be stored in {folder}",
            f"{type(error).__name__}: {error}",
            "let this user write there, see that no other program uses it, or name another folder",
        ) from None
