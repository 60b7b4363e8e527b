"""`diptych serve`, `diptych worker` and `diptych gateway`: their flags are the settings, and a guard stays outside.

Ray and the planner are imported after the guard has forked, so it stays small.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diptych.config.load import LoadedConfig, check_slo_target
from services.cli.serve.settings_flags import bind_settings
from services.host.child_environment import prepare_joined_environment, prepare_ray_environment
from services.host.device_settings import apply_device
from services.host.supervision.process_guard import run_guarded, run_guarded_with_folder


def _lazy_function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f"services.cli.serve.{module}"), name)
    return function


def _run_serve(loaded: LoadedConfig) -> int:
    settled, answer = _lazy_function("from_plan", "apply_plan")(loaded)
    settled = apply_device(settled)
    check_slo_target(settled)
    _lazy_function("offload_plan", "check_bulk_settings")(settled)
    _lazy_function("replan_checks", "check_replan_settings")(settled)
    _lazy_function("cluster.cluster_settings", "check_cluster_settings")(settled)

    def run(folder: Path) -> int:
        if settled.config.ray_address is None:
            prepare_ray_environment(os.environ)
        else:
            prepare_joined_environment(os.environ)
        return int(_lazy_function("run", "run_serve")(settled, answer, folder))

    return run_guarded_with_folder(run)


def _run_worker(loaded: LoadedConfig) -> int:
    return run_guarded(lambda: int(_lazy_function("standalone", "run_worker")(apply_device(loaded))))


def _run_gateway(loaded: LoadedConfig) -> int:
    return run_guarded(lambda: int(_lazy_function("standalone", "run_gateway")(loaded)))


serve = bind_settings("serve", _run_serve)
worker = bind_settings("worker", _run_worker, place="role")
gateway = bind_settings("gateway", _run_gateway)
