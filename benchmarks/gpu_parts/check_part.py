"""One part of `benchmarks.gpu_check` or `benchmarks.device_pools`: a process of its own, with a limit, that writes down
each figure at once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.errors import DiptychError

# How long a killed part may take to vanish. One that hangs in the driver never does.
KILL_S = 3.0
MAX_ERROR_CHARS = 600
# Names the interpreter with vLLM, as in the tests.
PYTHON_VARIABLE = "TEST_VLLM_PYTHON"


@dataclass(frozen=True, slots=True)
class PartContext:
    """What a part is given: the kind of device ("cuda", "emulated", "cpu"), its folder, and where figures go.

    `share` is the part of all requests that a short form makes.
    """

    device: str
    folder: Path
    file: Path
    share: float = 1.0

    @property
    def is_toy(self) -> bool:
        """Whether there is no GPU, so that only the part's own logic is tested, with small shapes."""
        return self.device != "cuda"

    def record(self, figures: Mapping[str, Any]) -> None:
        """Add figures to the file, which is replaced as a whole: a part that is killed loses none of them."""
        before = json.loads(self.file.read_text()) if self.file.exists() else {}
        aside = self.file.with_suffix(".new")
        aside.write_text(json.dumps(before | dict(figures)), encoding="utf-8")
        aside.replace(self.file)


@dataclass(frozen=True, slots=True)
class CheckPart:
    """A part: the function "module:function" that measures it, within `limit_s`; aims as in `results_tables`."""

    name: str
    function: str
    limit_s: float
    aims: Mapping[str, str] = field(default_factory=dict)

    def measure(self, context: PartContext) -> None:
        """Run it in this process. Raises whatever goes wrong."""
        module, name = self.function.split(":")
        call: Callable[[PartContext], None] = getattr(importlib.import_module(module), name)
        call(context)


@dataclass(frozen=True, slots=True)
class PartResult:
    """What became of a part: "done", "failed", "timeout" or "left out" (no time was left)."""

    state: str
    seconds: float
    figures: dict[str, Any]
    error: str = ""

    def report(self) -> dict[str, Any]:
        """All but the figures, for the JSON."""
        found: dict[str, Any] = {"state": self.state, "seconds": round(self.seconds, 1)}
        return found | ({"error": self.error} if self.error else {})


def run_part(part: CheckPart, folder: Path, limit_s: float, command: Sequence[str]) -> PartResult:
    """Run `command`, which measures the part, in a process group of its own, for at most `limit_s` seconds.

    Nothing that it does can stop the caller: after the limit its whole group is killed, and what it has recorded until
    then counts. What it prints goes to `folder`/NAME.log.
    """
    file, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    file.unlink(missing_ok=True)
    began_s = time.monotonic()
    with log.open("w", encoding="utf-8") as printed:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_group(process)
    seconds = time.monotonic() - began_s
    figures, error = _read_figures(file), ""
    if status is None:
        error = f"it was stopped after {limit_s:.0f} s; see {log}"
    elif status:
        error = figures.pop("error", "") or f"it ended with status {status}; see {log}"
    state = "timeout" if status is None else "failed" if status else "done"
    return PartResult(state, seconds, figures, error)


def part_command(part: CheckPart, device: str, folder: Path) -> list[str]:
    """What measures a part in another process (`measure_here`)."""
    module = "benchmarks.gpu_check"
    return [sys.executable, "-m", module, "--part", part.name, "--device", device, "--out", str(folder)]


def measure_here(part: CheckPart, device: str, folder: Path, share: float = 1.0) -> int:
    """Measure a part in this process; returns its exit status. An error is recorded in words."""
    context = PartContext(device, folder, folder / f"{part.name}.json", share)
    try:
        part.measure(context)
    except BaseException as error:
        traceback.print_exc()
        words = [error.what, error.why] if isinstance(error, DiptychError) else [str(error)]
        context.record({"error": f"{type(error).__name__}: {'; '.join(words)}"[:MAX_ERROR_CHARS]})
        return 1
    return 0


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a part, and do not wait long for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)


def _read_figures(file: Path) -> dict[str, Any]:
    """What a part has recorded; nothing if it recorded nothing."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
