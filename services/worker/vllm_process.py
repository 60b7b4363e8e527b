"""`python -m services.worker.vllm_process`: a worker whose engine is vLLM, under vLLM's own interpreter.

Its packages are those that vLLM needs, so what Diptych's own engine imports beyond them is not imported here. vLLM is
opened before numba is imported: it asks every attribute of every module for a `__dict__`, and llvmlite's library
answers with a function.
"""

from __future__ import annotations

import sys

from diptych.process import SupervisorPipe, configure_and_report, run_supervised

if __name__ == "__main__":
    configure_and_report()

from diptych.errors import ConfigError
from diptych.specs import WorkerSpec
from vllm_worker import preflight
from vllm_worker.port import EnginePort
from vllm_worker.setup.engine_args import EngineOptions


def main(spec: WorkerSpec, supervisor: SupervisorPipe) -> int:
    """Build a worker and run it until it is drained; returns the exit status."""
    port = open_port(spec)
    supervisor.report_progress("load")
    supervisor.report_progress("warm", 0)
    # Imported only here, since they import numba.
    from services.worker.role_lifecycle import run_worker
    from services.worker.vllm_parts import build_parts

    try:
        parts = build_parts(spec, port)
    except BaseException:
        port.close()
        raise
    supervisor.report_progress("warm")
    return run_worker(spec, supervisor, parts)


def open_port(spec: WorkerSpec) -> EnginePort:
    """Load the model into vLLM, in this process.

    Raises:
        ConfigError: this vLLM is not supported, or its arguments contradict ours.
        ModelError: vLLM refuses the model, or it does not fit.
    """
    try:
        preflight.check_interpreter()
        preflight.check_version()
    except preflight.Refusal as refusal:
        raise ConfigError(**refusal.parts) from None
    # Imported only here: the checks say what is wrong, if this fails.
    from vllm_worker.setup.vllm_config import open_vllm

    return open_vllm(engine_options(spec))


def engine_options(spec: WorkerSpec) -> EngineOptions:
    """What a worker with this specification asks of vLLM.

    On the CPU the KV has the planned size; on a GPU vLLM takes this worker's share of the memory, unless a size is set.
    vLLM counts the KV of each rank.
    """
    on_gpu = spec.device == "cuda"
    return EngineOptions(
        model=spec.model,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        kv_bytes=spec.kv_bytes // spec.tp if spec.kv_bytes_asked or not on_gpu else None,
        gpu_memory_utilization=spec.gpu_memory_utilization / spec.gpu_workers if on_gpu else None,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        tp=spec.tp,
        prefix_caching=spec.prefix_caching,
        chunked_prefill=spec.chunked_prefill,
        vllm_args=spec.vllm_args,
    )


if __name__ == "__main__":
    sys.exit(run_supervised(main))
