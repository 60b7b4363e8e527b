"""How long a first user waits: from `diptych serve` to the first token, and what small commands cost.

    python -m benchmarks.startup [--json] [--rounds 3] [--against CHECKOUT] [--cold] [--timeline] [-- SERVE OPTIONS]

A round starts `diptych serve` (embedded model, one prefill and one decode worker, unless options say otherwise), waits
for the box that it prints when it is ready, sends one streamed request, and stops the deployment. `CHECKOUT` is another
version with its own `.venv`: both are measured in turn, in alternating order. One start of each goes before and does
not count, so that compiled kernels and byte code are there. With `--cold` every round begins with an empty kernel cache
and `python -m worker.precompile`, with which an install ends; then come the first start, whose figures count, and
a second one.

    startup_s        from the start of the process to the first token
    ready_s          to the box
    cpu_s            CPU seconds of all its processes up to the first token
    help_cpu_s       CPU seconds of `diptych --help`
    status_cpu_s     CPU seconds of `diptych status`, of the deployment that runs
    precompile_s     with `--cold`: what `python -m worker.precompile` took
    fresh_over_warm  with `--cold`: startup_s of the first start over that of the second one
    phases           when each line of the command came (s)
    startup_ratio    startup_s over that of `--against`; `cpu_ratio`, `help_ratio` and `status_ratio` likewise

Medians over the rounds. Seconds are this machine's; ratios are what is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

import psutil

HERE = Path(__file__).resolve().parents[1]
START_S, STOP_S = 300.0, 60.0
HELP_RUNS = 5  # of `--help` in each round
RATIOS = {
    "startup_ratio": "startup_s",
    "cpu_ratio": "cpu_s",
    "help_ratio": "help_cpu_s",
    "status_ratio": "status_cpu_s",
}
BODY = {"model": "tiny", "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
PHASE = re.compile(r"([a-z][a-z-]*)\s+\d+\.\d s\b")  # a phase that is done, with the seconds that it took


@dataclass(frozen=True, slots=True)
class Round:
    """One start of one version."""

    figures: dict[str, float]  # by the names at the top of this file
    phases: dict[str, float]  # name -> seconds from the start of the process to its line
    timeline: list[str]  # processes by the moment when each began


class Lines:
    """What a process prints, with the seconds since its start."""

    def __init__(self, process: subprocess.Popen[str], began_s: float) -> None:
        self.found: list[tuple[float, str]] = []
        self.ready = threading.Event()  # the box has come, or the output has ended
        self._process, self._began_s = process, began_s
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.found.append((time.monotonic() - self._began_s, line.rstrip()))
            if line.startswith("curl "):
                self.ready.set()
        self.ready.set()

    def phases(self) -> dict[str, float]:
        """Seconds to the line of each phase."""
        matches = ((at_s, PHASE.match(line)) for at_s, line in list(self.found))
        return {match[1]: round(at_s, 2) for at_s, match in matches if match}


def command(checkout: Path, *arguments: str) -> list[str]:
    """`diptych` of a checkout, by the interpreter of its own environment."""
    return [str(checkout / ".venv" / "bin" / "diptych"), *arguments]


def environ(**more: str) -> dict[str, str]:
    """Ours, without settings of Diptych; byte code is kept, as for everybody who does not forbid it."""
    dropped = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DIPTYCH_") and name not in dropped
    }
    return kept | {"COLUMNS": "200", "NO_COLOR": "1"} | more


def cpu_of(arguments: Sequence[str], checkout: Path) -> float:
    """CPU seconds of a command, its children included."""
    child = subprocess.Popen(
        arguments, cwd=checkout, env=environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, _, used = os.wait4(child.pid, 0)
    child.returncode = 0  # it has been waited for
    return used.ru_utime + used.ru_stime


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def tree_cpu_s(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds of processes, and of those children of theirs that have ended."""
    total = 0.0
    for one in processes:
        with contextlib.suppress(psutil.Error):
            total += sum(one.cpu_times()[:4])  # user and system, then the same of ended children
    return total


def moments(processes: Sequence[psutil.Process], began_s: float) -> list[str]:
    """Each process with the second at which it began, and the CPU seconds that it has had."""
    found = []
    for one in processes:
        with contextlib.suppress(psutil.Error):
            words = " ".join(one.cmdline())[:90]
            found.append((one.create_time() - began_s, tree_cpu_s([one]), words))
    return [f"{at_s:6.2f} s  {cpu_s:6.2f} CPU s  {words}" for at_s, cpu_s, words in sorted(found)]


def first_token(port: int) -> None:
    """Send one streamed request, and return at its first token.

    Raises:
        RuntimeError: the answer was an error, or had no token.
    """
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=60.0)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"the gateway answered {answer.status}: {answer.read()[:300]!r}")
        for line in answer:
            content = line.removeprefix(b"data: ").strip()
            if content and content != b"[DONE]":
                choices = json.loads(content).get("choices") or [{}]
                if choices[0].get("delta", {}).get("content"):
                    return
    raise RuntimeError("the answer ended without a token")


@contextlib.contextmanager
def running(checkout: Path, options: Sequence[str], env: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """`diptych serve`, and its port; stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began_s, wall_s = time.monotonic(), time.time()
    process = subprocess.Popen(
        command(checkout, "serve", "--port", str(port), *options),
        cwd=checkout, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process, port, began_s, wall_s
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure_cold(checkout: Path, options: Sequence[str]) -> Round:
    """The first start of a version on the kernels of an install, with figures of the install and of a second start.

    Raises as `measure`, and CalledProcessError if the kernels cannot be compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = environ(NUMBA_CACHE_DIR=folder)
        began_s = time.monotonic()
        python = str(checkout / ".venv" / "bin" / "python")
        subprocess.run([python, "-m", "worker.precompile"], cwd=checkout, env=env, check=True)
        precompile_s = time.monotonic() - began_s
        fresh, warm = (measure(checkout, options, env) for _ in range(2))
    ratio = fresh.figures["startup_s"] / warm.figures["startup_s"]
    return replace(fresh, figures=fresh.figures | {"precompile_s": precompile_s, "fresh_over_warm": ratio})


def measure(checkout: Path, options: Sequence[str], env: Mapping[str, str]) -> Round:
    """One start of a version.

    Raises:
        RuntimeError: it did not come up, or did not answer.
    """
    helps = [cpu_of(command(checkout, "--help"), checkout) for _ in range(HELP_RUNS)]
    with contextlib.ExitStack() as stack:
        process, port, began_s, wall_s = stack.enter_context(running(checkout, options, env))
        lines = Lines(process, began_s)
        if not lines.ready.wait(START_S) or process.poll() is not None:
            raise RuntimeError("it did not come up:\n" + "\n".join(line for _, line in lines.found))
        ready_s = time.monotonic() - began_s
        first_token(port)
        startup_s = time.monotonic() - began_s
        processes = tree(process.pid)
        figures = {
            "startup_s": startup_s,
            "ready_s": ready_s,
            "cpu_s": tree_cpu_s(processes),
            "help_cpu_s": median(helps),
            "status_cpu_s": cpu_of(
                command(checkout, "status", "--url", f"http://127.0.0.1:{port}"), checkout
            ),
        }
        return Round(figures, lines.phases(), moments(processes, wall_s))


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians of the figures, and of the moments of the phases."""
    names = [name for name in rounds[0].phases if all(name in one.phases for one in rounds)]
    return {
        **{name: round(median(one.figures[name] for one in rounds), 3) for name in rounds[0].figures},
        "phases": {name: median(one.phases[name] for one in rounds) for name in names},
        "all_startup_s": [round(one.figures["startup_s"], 2) for one in rounds],
    }


def compare(versions: Mapping[str, Path], options: Sequence[str], rounds: int, cold: bool) -> dict[str, Any]:
    """Measure versions in turn; the first one's figures, and ratios to the second if there is one."""
    seen: dict[str, list[Round]] = {name: [] for name in versions}
    order = list(versions)
    for number in range(0 if cold else -1, rounds):
        for name in order:
            one = (
                measure_cold(versions[name], options) if cold else measure(versions[name], options, environ())
            )
            if number >= 0:
                seen[name].append(one)
                shown = ", ".join(f"{figure} {value:.2f}" for figure, value in one.figures.items())
                print(f"round {number + 1}, {name}: {shown}", file=sys.stderr, flush=True)
        order.reverse()
    figures = {name: summary(found) for name, found in seen.items()}
    result: dict[str, Any] = {"rounds": rounds, "cold": cold, **figures}
    if "before" in figures:
        now, before = figures["now"], figures["before"]
        ratios = {ratio: float(now[figure]) / float(before[figure]) for ratio, figure in RATIOS.items()}
        result |= {ratio: round(value, 3) for ratio, value in ratios.items()}
    if cold:
        result["fresh_over_warm"] = figures["now"]["fresh_over_warm"]
    result["timeline"] = {name: found[-1].timeline for name, found in seen.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="From `diptych serve` to the first token.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout, with its own .venv")
    parser.add_argument("--cold", action="store_true", help="the first start after an install, each time")
    parser.add_argument("--timeline", action="store_true", help="when each process of the last round began")
    parser.add_argument("options", nargs="*", help="of `diptych serve`, after --")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # stops what runs
    versions = {"now": HERE}
    if given.against is not None:
        versions["before"] = given.against.resolve()
    result = compare(versions, given.options, max(1, given.rounds), given.cold)
    timelines = result.pop("timeline")
    if given.timeline:
        for name, lines in timelines.items():
            print(name, *lines, sep="\n", file=sys.stderr)
    if given.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
