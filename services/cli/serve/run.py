"""`diptych serve`: runs a deployment on this machine or in a Ray cluster, and turns errors into an exit status."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from pathlib import Path
from typing import IO

from rich.console import Console

from diptych.config.load import LoadedConfig
from diptych.config.options import Config
from diptych.errors import ConfigError, DiptychError
from diptych.logs.log_files import open_log
from kvcache.tiers.store_folder import check_unused
from planner.placement.plan_file import PlanFile
from services.cli.serve.launch import ServeRun
from services.cli.serve.progress import StartProgress
from services.host.exit_codes import FAILED, USAGE


def run_serve(loaded: LoadedConfig, plan: PlanFile | None, folder: Path) -> int:
    """Start the deployment of these settings and serve until stopped. Returns the exit status.

    `folder` holds keys, sockets and logs. `plan` is what the settings come from, if there is one.
    """
    config = loaded.config
    logs = config.log_dir.absolute() if config.log_dir else folder / "logs"
    view = StartProgress(Console(file=sys.stdout), sum(config.pools))
    try:
        # Workers in a cluster may be those of the last start, which are adopted, and each looks at its own disk.
        if config.kv_disk_folder is not None and config.ray_address is None:
            check_unused(config.kv_disk_folder)
        # Ray writes its processes' messages to standard output. They belong into the logs.
        with _open_ray_log(logs) as ray_log, contextlib.redirect_stdout(ray_log):
            return asyncio.run(_choose_run(config)(loaded, plan, folder, logs, view).run_until_stopped())
    except DiptychError as error:
        view.print_error(error)
        return USAGE if isinstance(error, ConfigError) else FAILED
    finally:
        view.close()


def _choose_run(config: Config) -> type[ServeRun]:
    """The class that runs these settings: on this machine, or in a Ray cluster."""
    if config.ray_address is None:
        return ServeRun
    from services.cli.serve.cluster.cluster_launch import ClusterRun

    return ClusterRun


def _open_ray_log(logs: Path) -> IO[str]:
    """Open Ray's log in the folder for logs, which is made if necessary.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        return io.TextIOWrapper(open_log(logs / "ray.log"), encoding="utf-8")
    except OSError as error:
        why = f"{error.filename or logs}: {error.strerror}"
        raise ConfigError(
            "logs cannot be written", why, "give --log-dir a folder that can be written to"
        ) from None
