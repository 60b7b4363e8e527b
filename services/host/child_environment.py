"""Prepares the environment variables of Ray and of the child processes. Does not import Ray."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# The folder that holds the packages. Children import from it, whatever their working directory is.
PACKAGES_ROOT = Path(__file__).parents[2]
# For how many seconds Ray's processes live on after the loss of its head.
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # This is the only way to make all processes of Ray listen on 127.0.0.1 alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # CUDA_VISIBLE_DEVICES stays as it is.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # By default all processes of Ray, and this one, end 60 s after Ray's head has died. With this time of a year the
    # deployment serves on without a head; only the number of its workers can no longer change.
    RECONNECT_VARIABLE: str(365 * 86400),
    # By default actors and their workers run at nice 15, below all other programs.
    "RAY_worker_niceness": "0",
    # By default Ray kills workers when other programs use the memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # Size in bytes at which Ray's log files are rotated.
    "RAY_ROTATION_MAX_BYTES": str(16 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
}
SECRET_VARIABLES = ("DIPTYCH_API_KEY", "DIPTYCH_ADMIN_KEY", "DIPTYCH_METRICS_KEY")
# CUDA numbers GPUs by speed by default; NVML, `nvidia-smi` and Ray number them by their place on the PCI bus.
GPU_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def prepare_ray_environment(environ: MutableMapping[str, str]) -> None:
    """Set the environment for a new Ray head: a new token, and no telemetry. Settings of other clusters are removed.

    The secrets of this deployment have been read already and are removed too: Ray's daemons would keep them in their
    environment. Must be called before Ray is imported, since Ray reads the environment then.
    """
    assert "ray" not in sys.modules, "too late: Ray has read the environment"
    for name in [name for name in environ if name.startswith("RAY_") or name in SECRET_VARIABLES]:
        del environ[name]
    environ.update(QUIET_RAY, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    environ.update(import_path_environment(environ))


def prepare_joined_environment(environ: MutableMapping[str, str]) -> None:
    """Set the environment for joining a Ray cluster that others started; what it says of that cluster is kept.

    Ray's token is used wherever it lies (`RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH` or `~/.ray/auth_token`), even if
    `RAY_AUTH_MODE` is not set: Ray itself would ignore it for an address that is given. The secrets of this deployment
    have been read already and are removed. Must be called before Ray is imported.
    """
    assert "ray" not in sys.modules, "too late: Ray has read the environment"
    for name in SECRET_VARIABLES:
        environ.pop(name, None)
    has_token = "RAY_AUTH_TOKEN" in environ or "RAY_AUTH_TOKEN_PATH" in environ
    if "RAY_AUTH_MODE" not in environ and (has_token or (Path.home() / ".ray" / "auth_token").is_file()):
        environ["RAY_AUTH_MODE"] = "token"
    for name in ("RAY_USAGE_STATS_ENABLED", RECONNECT_VARIABLE):
        environ.setdefault(name, QUIET_RAY[name])
    # Otherwise a call that comes after the cluster was left would start a Ray of its own.
    environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    environ.update(import_path_environment(environ))


def child_environment(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker or gateway: import path, threads and the order of GPUs are set; secrets and Ray's
    settings are removed.
    """
    kept = {k: v for k, v in environ.items() if not k.startswith("RAY_") and k not in SECRET_VARIABLES}
    # torch and numba read the number of threads when they are imported, so it is set in the environment.
    return (
        kept
        | dict.fromkeys(THREAD_VARIABLES, str(threads))
        | import_path_environment(kept)
        | GPU_ORDER
        | {"PYTHONUNBUFFERED": "1"}
    )


def import_path_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a Python process and its children import nothing from the working directory.

    `python -m` would search the working directory first, so a folder `services/` or `models/` there would be imported
    in place of Diptych's. Relative entries of `PYTHONPATH` are made absolute; entries for the working directory are
    dropped.
    """
    given = map(os.path.normpath, filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)))
    paths = [str(PACKAGES_ROOT), *(os.path.abspath(path) for path in given if path != os.curdir)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1"}


def ucx_on_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment for workers that all run on this machine: UCX (used by NIXL) listens on the loopback interface only.

    Without it UCX would listen on every network. A value that is set already is kept.
    """
    return {"UCX_NET_DEVICES": "lo"} | dict(environ)
