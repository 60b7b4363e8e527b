"""What is checked of the tiers of KV before a deployment starts. Nothing is changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from diptych.errors import ConfigError
from kvcache.tiers.chunk_store import min_store_bytes
from kvcache.tiers.store_folder import check_folder, is_used, using_processes

# Where host memory that processes share is named, and how the folders of deployments there begin.
HOST_BASE, HOST_PREFIX = Path("/dev/shm"), "diptych-kv-"
# File systems that another machine keeps: locks and failures there are others.
NETWORK_TYPES = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "9p", "glusterfs", "lustre", "afs", "beegfs", "gpfs",
    "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.ceph", "fuse.juicefs", "fuse.gcsfuse", "fuse.rclone",
})  # fmt: skip
MIB = 1 << 20


class TierRequest(msgspec.Struct, frozen=True):
    """The tiers that were asked for: their bounds in bytes, and the folder of the disk; 0: no disk.

    `deployment` is the name of the deployment (`deployment_id`), empty as long as it is not known.
    """

    host_bytes: int
    disk_bytes: int = 0
    disk_folder: str = ""
    deployment: str = ""

    @classmethod
    def of(
        cls, host_bytes: int | None, disk_bytes: int | None, disk_folder: Path | None
    ) -> TierRequest | None:
        """What settings ask for; None: no tier."""
        if not host_bytes:
            return None
        return cls(host_bytes, disk_bytes or 0, str(disk_folder.absolute()) if disk_folder else "")


def deployment_id(transfer_key: bytes) -> str:
    """A name of the deployment that has this key, which tells nothing of the key."""
    return hashlib.blake2b(transfer_key, digest_size=12, person=b"diptych tiers").hexdigest()


def reusable_bytes(deployment: str, is_worker: Callable[[int], bool], base: Path) -> int:
    """Bytes of host memory that a worker which starts now finds, or frees as it opens its tiers: in the folders of its
    deployment, and in those that nobody uses.

    A folder is the deployment's by its name, or if `is_worker` is true of the id of a process that uses it.
    """
    total = 0
    for folder in base.glob(f"{HOST_PREFIX}*"):
        # The errors mean that it is just going, or another user's.
        with contextlib.suppress(OSError, ValueError):
            own = bool(deployment) and folder.name == HOST_PREFIX + deployment
            if folder.lstat().st_uid == os.getuid() and (
                own or not is_used(folder) or any(is_worker(process) for process in using_processes(folder))
            ):
                total += _blocks_in(folder)
    return total


def _blocks_in(folder: Path) -> int:
    """Bytes that the files of a store take in memory."""
    found = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(root, name)).st_blocks * 512
    return found


def check_tiers(
    request: TierRequest,
    chunk_bytes: int,
    available_bytes: int,
    reused_bytes: int = 0,
    base: Path = HOST_BASE,
) -> None:
    """Check the tiers that were asked for. The largest chunk has `chunk_bytes`; `available_bytes` of memory are free,
    beside the `reused_bytes` that host memory below `base` has already (`reusable_bytes`).

    Raises:
        ConfigError: a tier is too small or too large, or its folder cannot be used.
    """
    check_chunk_fits("--kv-host-bytes", request.host_bytes, chunk_bytes)
    check_host_memory(request.host_bytes, available_bytes, reused_bytes, base)
    if request.disk_bytes:
        check_chunk_fits("--kv-disk-bytes", request.disk_bytes, chunk_bytes)
        check_disk(request.disk_bytes, Path(request.disk_folder))


def check_chunk_fits(flag: str, capacity_bytes: int, chunk_bytes: int) -> None:
    """Raises ConfigError if a tier has no room for a chunk."""
    need = min_store_bytes(chunk_bytes)
    if capacity_bytes < need:
        raise ConfigError(
            f"{flag} {capacity_bytes} has no room for one chunk of KV",
            f"64 tokens of this model take {chunk_bytes:,} bytes, and the index up to {MIB:,}",
            f"use {flag} {-(-need // MIB)}MiB or more, or leave it out",
        )


def check_host_memory(
    capacity_bytes: int, available_bytes: int, reused_bytes: int = 0, base: Path = HOST_BASE
) -> None:
    """Raises ConfigError if host memory for KV is larger than what is there: `available_bytes` that are free, and
    `reused_bytes` that it has already.
    """
    try:
        state = os.statvfs(base)
    except OSError as error:
        raise ConfigError(
            f"there is no shared memory at {base}",
            str(error),
            "mount a tmpfs there, or leave out --kv-host-bytes",
        ) from None
    room = state.f_bavail * state.f_frsize + reused_bytes
    if capacity_bytes > room:
        raise ConfigError(
            f"--kv-host-bytes {capacity_bytes} is larger than what is free in {base}",
            f"{room >> 20} MiB are free there (of containers: --shm-size)",
            f"use --kv-host-bytes {room >> 20}MiB or less, or make it larger",
        )
    available_bytes += reused_bytes
    if capacity_bytes > available_bytes:
        raise ConfigError(
            f"--kv-host-bytes {capacity_bytes} is larger than the memory that is free",
            f"{available_bytes >> 20} MiB are free, for this and all workers",
            f"use --kv-host-bytes {max(0, available_bytes) >> 21}MiB or less",
        )


def check_disk(capacity_bytes: int, folder: Path) -> None:
    """Raises ConfigError if KV cannot be stored on disk in `folder`, or not that much."""
    check_folder(folder)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    kind = filesystem_type(there)
    if kind in NETWORK_TYPES:
        raise ConfigError(
            f"the folder {folder} is on a network file system",
            f"{kind}: its locks and stalls are not those of a disk, and reading may take longer than computing",
            "name a folder on a disk of this machine",
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"nothing can be written to the folder {folder}",
            f"{there} is read-only, or belongs to somebody else",
            "name another folder, or let this user write there",
        )
    stored = sum(entry.stat().st_size for entry in _files(folder))
    room = shutil.disk_usage(there).free + stored
    if capacity_bytes > room:
        raise ConfigError(
            f"--kv-disk-bytes {capacity_bytes} is larger than what is free in {folder}",
            f"{room >> 20} MiB are free, what is stored there already included",
            f"use --kv-disk-bytes {room >> 20}MiB or less, or name another folder",
        )


def _files(folder: Path) -> list[os.DirEntry[str]]:
    """The files of chunks in a folder of a store."""
    chunks = folder / "chunks"
    return (
        [one for one in os.scandir(chunks) if one.is_file(follow_symlinks=False)] if chunks.is_dir() else []
    )


def filesystem_type(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that `path` is on, as the kernel calls it; empty if that is not known."""
    best, found, real = -1, "", os.path.realpath(path)
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # Of two at one place the later one is seen.
        if inside and len(point) >= best:
            best, found = len(point), right.split()[0]
    return found
