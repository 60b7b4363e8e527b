"""Measures the memory that a deployment's workers hold on this machine, so that the next one gets the same share.

Workers and their ranks are found by a variable of their environment.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from diptych.errors import ConfigError
from kvcache.tiers.tier_checks import HOST_BASE, TierRequest, deployment_id, reusable_bytes

# The variable with which the workers of a deployment are started.
WORKER_OF = "DIPTYCH_WORKER_OF"
# Memory that cannot be reclaimed; that which several processes map counts once. Older kernels do not tell the second.
_HELD_FIELDS = (("Pss_Anon:", "Pss_Shmem:"), ("Anonymous:",))


def held_memory(deployment: str, proc: Path = Path("/proc")) -> int:
    """Bytes that this user's processes with `WORKER_OF` = `deployment` hold. Files that they only read do not count."""
    total = 0
    for folder in proc.glob("[0-9]*") if deployment else ():
        if is_worker(folder, deployment):
            # The errors mean that it has ended.
            with suppress(OSError, ValueError):
                total += _held_by(folder)
    return total


def is_worker(folder: Path, deployment: str) -> bool:
    """Whether the process of this folder in /proc is this user's and was started with `WORKER_OF` = `deployment`."""
    if not deployment:
        return False
    try:
        return f"{WORKER_OF}={deployment}".encode() in (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        # It has ended, or belongs to another user.
        return False


def tier_request(
    host_bytes: int | None, disk_bytes: int | None, disk_folder: Path | None, keys_dir: Path | None
) -> TierRequest | None:
    """The tiers that settings ask for, with the deployment's name if its key is in `keys_dir`; None: no tier."""
    request = TierRequest.of(host_bytes, disk_bytes, disk_folder)
    if request is None or keys_dir is None:
        return request
    # Imported only here, since few who ask for a model's size need ZeroMQ.
    from diptych.channel.keys import load_transfer_key

    # A key that is missing is told where it is needed.
    with suppress(ConfigError):
        request = msgspec.structs.replace(request, deployment=deployment_id(load_transfer_key(keys_dir)))
    return request


def reused_memory(tiers: TierRequest | None, deployment: str, proc: Path = Path("/proc")) -> int:
    """Bytes of host memory that tiers have already, or free before they take any (`reusable_bytes`)."""
    if tiers is None:
        return 0
    return reusable_bytes(
        tiers.deployment, lambda process: is_worker(proc / str(process), deployment), HOST_BASE
    )


def _held_by(folder: Path) -> int:
    """Bytes that the process of this folder in /proc holds."""
    found = dict[str, int]()
    for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
        name, amount, *_ = line.split()
        found[name] = int(amount) << 10
    fields = next((names for names in _HELD_FIELDS if names[0] in found), ())
    return sum(found.get(name, 0) for name in fields)
