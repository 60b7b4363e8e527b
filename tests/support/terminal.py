"""`diptych serve` as a person runs it: a process in a terminal of its own, read line by line, stopped with Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from services.host.supervision.process_guard import tied_command

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 400.0  # far beyond what anything takes, compiling all kernels included

# The command line with `tests.system.stub_child` in place of the workers and the gateway: all of the
# start-up, no model.
STUBBED = """
import functools, sys
import services.cli.main as main
import services.cli.serve.specs as specs
specs.DeploymentSpec = functools.partial(specs.DeploymentSpec, worker_module="tests.system.stub_child",
    gateway_module="tests.system.stub_child")
import services.host.model_probe as model_probe
async def resolve_model(config, num_workers):
    return model_probe.ProbedModel("/" + config.model, "a stub", True, 64, 1 << 20, 6)
model_probe.resolve_model = resolve_model
main.main()
"""


def clean_environ(**more: str) -> dict[str, str]:
    """The environment without settings of ours, wide enough that no line is cut."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DIPTYCH_")}
    return kept | {"COLUMNS": "200", "NO_COLOR": "1"} | more


def traps(folder: Path, names: Iterable[str]) -> Path:
    """Packages of these names in `folder`. The file that is returned comes to exist when one of them is imported."""
    marker = folder / "imported"
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"open({str(marker)!r}, 'a').write(__name__)\n")
    return marker


def run(*arguments: str, says: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run `diptych` to its end, with `says` on its standard input."""
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    environ = clean_environ(**env)
    return subprocess.run(
        tied_command(command),
        cwd=ROOT,
        env=environ,
        input=says,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


class Terminal:
    """One running `diptych` command. A context manager: at its end nothing of it is left, however the test went."""

    def __init__(
        self,
        *arguments: str,
        stubbed: bool = False,
        cwd: Path = ROOT,
        program: Sequence[str] = (),
        **env: str,
    ) -> None:
        code = ["-c", STUBBED] if stubbed else ["-m", "services.cli.main"]
        # `-P`: as the installed command, which does not look for modules in the working directory.
        command = [*(program or (sys.executable, "-P", *code)), *arguments]
        self.process = subprocess.Popen(
            tied_command(command), cwd=cwd, env=clean_environ(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._grown = threading.Condition()
        self._ended = False
        self._seen: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.remember()
        if self.process.poll() is None:  # a test that failed half-way: first the way that cleans up
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.process.kill()
        for one in self._seen.values():
            if one.is_running():
                one.kill()
        self.process.wait()
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grown:
                self.lines.append(line.rstrip("\n"))
                self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    def expect(self, wanted: Callable[[str], bool] | str) -> str:
        """The first line that is wanted, waiting for it if need be."""
        found = wanted if callable(wanted) else lambda line: wanted in line
        with self._grown:
            self._grown.wait_for(lambda: self._ended or any(map(found, self.lines)), PATIENCE_S)
            matching = [line for line in self.lines if found(line)]
        assert matching, f"never said {wanted!r}:\n" + "\n".join(self.lines)
        return matching[0]

    def remember(self) -> list[psutil.Process]:
        """All descendants there are now, and were at earlier calls."""
        try:
            everyone = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            everyone = []
        self._seen |= {one.pid: one for one in everyone}
        return list(self._seen.values())

    def find(self, words: str) -> list[psutil.Process]:
        """Living descendants whose command line contains `words`."""
        return [one for one in self.remember() if one.is_running() and words in " ".join(_command(one))]

    def gateway(self) -> psutil.Process:
        """The gateway's process; those that it forks have its command line."""
        found = self.find("-m services.gateway")
        pids = {one.pid for one in found}
        (gateway,) = [one for one in found if one.ppid() not in pids]
        return gateway

    def interrupt(self) -> int:
        """Press Ctrl-C, which reaches the whole session as in a terminal, and wait; returns the exit status."""
        self.remember()
        os.killpg(self.process.pid, signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def left(self) -> list[str]:
        """Command lines of descendants that live on."""
        _, alive = psutil.wait_procs(self.remember(), timeout=60)
        return [" ".join(_command(one)) for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
