"""`python -m services.worker`: a process that reads prompts or writes answers, started by a supervisor."""

from __future__ import annotations

import sys

from worker.start import Voice, prepare, supervised

if __name__ == "__main__":
    prepare()

from diptych.config import WorkerSpec
from services.worker.compose import run
from services.worker.real import build


def main(spec: WorkerSpec, voice: Voice) -> int:
    """Build a worker and run it until it is drained; returns the exit status."""
    return run(spec, voice, build(spec, voice))


if __name__ == "__main__":
    sys.exit(supervised(main))
