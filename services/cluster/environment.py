"""What is in the environment of Ray and of the processes it starts. Does not import Ray."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

ROOT = Path(__file__).parents[
    2
]  # where the packages lie; children find them there whatever their working folder
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the only way to make every Ray process listen on 127.0.0.1 alone
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leave CUDA_VISIBLE_DEVICES as it is
    # A head that died stops scaling, not serving: else every process of Ray, this one too, ends 60 s later.
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(365 * 86400),
    "RAY_worker_niceness": "0",  # else actors, and workers under them, run at nice 15: any other program starves them
    "RAY_memory_monitor_refresh_ms": "0",  # else workers are killed when other programs use the memory
}
SECRETS = ("DIPTYCH_API_KEY", "DIPTYCH_ADMIN_KEY")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def prepare_ray(environ: MutableMapping[str, str]) -> None:
    """Set a new token and quiet ways for a Ray head of our own; settings of another cluster are dropped.

    Ray reads the environment when it is imported, so this comes before.
    """
    assert "ray" not in sys.modules, "too late: Ray has read the environment"
    for name in [name for name in environ if name.startswith("RAY_")]:
        del environ[name]
    environ.update(QUIET, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    environ["PYTHONPATH"] = _paths(environ)


def child_environ(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker or gateway: packages found, threads set, and none of our secrets."""
    kept = {k: v for k, v in environ.items() if not k.startswith("RAY_") and k not in SECRETS}
    # Set before the child's interpreter starts, since torch and numba read them when they are imported.
    return kept | dict.fromkeys(THREADS, str(threads)) | {"PYTHONPATH": _paths(kept), "PYTHONUNBUFFERED": "1"}


def loopback_only(environ: Mapping[str, str]) -> dict[str, str]:
    """For workers that all run on this machine: UCX, which NIXL uses, would listen on every network it finds."""
    return {"UCX_NET_DEVICES": "lo"} | dict(environ)


def _paths(environ: Mapping[str, str]) -> str:
    return os.pathsep.join(
        dict.fromkeys([str(ROOT), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))])
    )
