"""Runs under vLLM's interpreter: a worker as in the tests, which says on standard error when steps and forwards begin.

python -m benchmarks.vllm_parts.timed_steps FD NAME ROLE MODEL RANKS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A line has a mark, the time, and what goes with it.
MARK, STEP, LOAD, FORWARD = "timed:", "step", "load", "forward"


def say(what: str, at_s: float, seconds: float = 0.0) -> None:
    """Write a line, at once: it may be read while others are written."""
    sys.stderr.write(f"{MARK} {what} {at_s!r} {seconds!r}\n")
    sys.stderr.flush()


def say_steps(connector: type[Any]) -> None:
    """From now on vLLM says when a step begins that computes anything, how long its loads take, and when its forward
    begins.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def wrap(owner: type[Any], name: str, note: Callable[[float, Any], None]) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begun_s = time.perf_counter()
            result = function(*args, **options)
            note(begun_s, result)
            return result

        setattr(owner, name, timed)

    def note_step(begun_s: float, output: Any) -> None:
        if output.total_num_scheduled_tokens:
            say(STEP, begun_s)

    wrap(Scheduler, "schedule", note_step)
    wrap(connector, "start_load_kv", lambda begun_s, _: say(LOAD, begun_s, time.perf_counter() - begun_s))
    wrap(GPUModelRunner, "_model_forward", lambda begun_s, _: say(FORWARD, begun_s))


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step after a moment: seconds from that moment until its begin, its loads included, and its forward."""

    step_s: float
    forward_s: float


def read_first_step(log: Path, begun_s: float) -> FirstStep:
    """Read it in the log of a process. Raises ValueError if there is none."""
    whole = log.read_text(errors="replace").split("\n")[:-1]
    lines = [line.split()[1:] for line in whole if line.startswith(MARK)]
    events = [(what, float(at), float(seconds)) for what, at, seconds in lines if float(at) >= begun_s]
    step_s = min(at for what, at, _ in events if what == STEP)
    forward_s = min(at for what, at, _ in events if what == FORWARD and at > step_s)
    loads_s = sum(seconds for what, at, seconds in events if what == LOAD and step_s < at < forward_s)
    return FirstStep(step_s - begun_s + loads_s, forward_s - begun_s)


if __name__ == "__main__":
    from tests.support.vllm_worker_process import main
    from vllm_worker.setup.vllm_config import prepare_environment

    prepare_environment()
    from vllm_worker.connector import DiptychConnector

    say_steps(DiptychConnector)
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
