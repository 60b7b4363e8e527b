"""`python -m services.worker.vllm_process`: a worker whose engine is vLLM, under vLLM's own interpreter.

Its packages are those that vLLM needs, so what Diptych's own engine imports beyond them is not imported here.
"""

from __future__ import annotations

import sys

from diptych.process import SupervisorPipe, configure_and_report, run_supervised

if __name__ == "__main__":
    configure_and_report()

from diptych.specs import WorkerSpec
from services.worker.role_lifecycle import run_worker
from services.worker.vllm_parts import build_vllm_worker


def main(spec: WorkerSpec, supervisor: SupervisorPipe) -> int:
    """Build a worker and run it until it is drained; returns the exit status."""
    return run_worker(spec, supervisor, build_vllm_worker(spec, supervisor))


if __name__ == "__main__":
    sys.exit(run_supervised(main))
