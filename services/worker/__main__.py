"""`python -m services.worker`: a prefill, decode or bulk worker process, started by a supervisor."""

from __future__ import annotations

import sys

from diptych.process import SupervisorPipe, configure_and_report, run_supervised
from engine.torch_import import import_torch

if __name__ == "__main__":
    configure_and_report()
    import_torch()

from diptych.specs import WorkerSpec
from services.worker.model_worker import build_worker
from services.worker.offload_worker import run_offload_worker
from services.worker.role_lifecycle import run_worker


def main(spec: WorkerSpec, supervisor: SupervisorPipe) -> int:
    """Build a worker and run it until it is drained; returns the exit status."""
    if spec.bulk_only:
        return run_offload_worker(spec, supervisor)
    return run_worker(spec, supervisor, build_worker(spec, supervisor))


if __name__ == "__main__":
    sys.exit(run_supervised(main))
