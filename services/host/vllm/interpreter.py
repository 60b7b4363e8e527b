"""Runs Diptych's packages under vLLM's own interpreter, beside the packages that vLLM needs.

The pins of vLLM and of Diptych exclude each other, so nothing of Diptych's environment may be found there: the import
path has links to Diptych's packages and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from diptych.specs import VLLM, WorkerSpec
from services.host.child_environment import child_environment
from services.host.vllm.links import link_packages

VLLM_MODULE = "services.worker.vllm_process"
# The module that runs workers of Diptych's own engine; tests run others in its place.
OWN_MODULE = "services.worker"
# vLLM runs in the worker's process, sends nothing home, and downloads nothing: the model is here.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
# How much vLLM logs, unless the user has set it: as much as Diptych does.
LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
# What the user may set otherwise. Several workers share a machine, so none binds its threads to cores by itself.
VLLM_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_SGL_KERNEL": "0"}
# The first would override an argument that Diptych gives; the others name another environment.
REMOVED_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE", "PYTHONHOME", "VIRTUAL_ENV")


def worker_command(spec: WorkerSpec, module: str) -> list[str]:
    """The command of a worker's process. With vLLM it runs under vLLM's interpreter, unless `module` is a test's."""
    if spec.engine == VLLM and module == OWN_MODULE:
        return [spec.vllm_python, "-m", VLLM_MODULE]
    return [sys.executable, "-m", module]


def worker_environment(spec: WorkerSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker's process.

    Raises:
        StartError: the folder with links to Diptych's packages cannot be made.
    """
    if spec.engine != VLLM:
        return child_environment(spec.threads, environ)
    return {LEVEL_VARIABLE: spec.log_level.upper()} | vllm_environment(spec.threads, environ)


def vllm_environment(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process under vLLM's interpreter, whose import path has Diptych's packages only.

    Raises:
        StartError: the folder with links to them cannot be made.
    """
    kept = {name: value for name, value in environ.items() if name not in REMOVED_VARIABLES}
    path = {"PYTHONPATH": str(link_packages(environ))}
    return VLLM_DEFAULTS | child_environment(threads, kept) | VLLM_ENVIRONMENT | path
