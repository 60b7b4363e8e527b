"""Runs docker-compose.yml as it stands, without Docker: each service in name spaces of its own, by the file's rules.

What is kept: command, environment, user, read-only root, tmpfs, volumes (fresh ones have the owner and mode of the
image's folder), the hosts' names, one network name space each, shared process name spaces, the memory limit, health
checks, and the order of starts. The image is this environment; its folders, variables and entry point are those of
deploy/Dockerfile. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.memory_groups import MemoryGroup, MemoryGroupError
from tests.support.network_namespaces import NamespaceBridge, NamespaceHost, running_bridge
from tests.system import container

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "deploy" / "Dockerfile").read_text()
USER = int(re.findall(r"^USER (\d+)$", RECIPE, re.MULTILINE)[0])
HOME = re.findall(r"^WORKDIR (\S+)$", RECIPE, re.MULTILINE)[-1]
# Names of processes that belong to no container: those that make it.
OUTSIDE = ("unshare", "nsenter", "ip", "mount")
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def image_environ() -> dict[str, str]:
    """The variables of the image's last stage."""
    (text,) = re.findall(r"^ENV (PATH=(?:.*\\\n)*.*)$", RECIPE, re.MULTILINE)
    pairs = dict(word.split("=", 1) for word in text.replace("\\\n", " ").split())
    return pairs | {"PATH": pairs["PATH"].replace("$PATH", "/usr/local/bin:/usr/bin:/bin")}


def image_folders() -> dict[str, int]:
    """Mode by folder of those that the image gives to its user."""
    found: dict[str, int] = {}
    for mode, names in re.findall(r"install -d -o \d+ -g \d+ -m (0\d+) (?:\\\n)?([^\n&]*)", RECIPE):
        found |= {name: int(mode, 8) for name in names.split() if name.startswith("/")}
    return found


def fill(value: Any, names: Mapping[str, str]) -> str:
    """A value of the file with `${NAME:-default}` replaced."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: names.get(match[1]) or match[2], str(value))


@dataclass
class Part:
    """A service that was started; `pid` is that of its first process, as seen from outside."""

    process: subprocess.Popen[bytes]
    house: NamespaceHost
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found: list[psutil.Process] = psutil.Process(self.pid).children(recursive=True)
            return found
        return []

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class ComposeRunner:
    """The services of the file, for one project in `folder`; `names` are the variables of the user's shell."""

    def __init__(self, net: NamespaceBridge, folder: Path, names: Mapping[str, str]) -> None:
        self.services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        self._net, self._folder, self._names = net, folder, names
        self.parts: dict[str, Part] = {}
        self.groups: dict[str, MemoryGroup] = {}
        # Why a service has no limit of memory though the file names one.
        self.unlimited: dict[str, str] = {}
        self.houses = {name: net.house() for name in ("gateway", "prefill", "decode", "keys", "processes")}
        hosts = [f"{house.address} {name}" for name, house in self.houses.items()]
        self._hosts = "\n".join(["127.0.0.1 localhost", *hosts, ""])

    def volume(self, name: str, inside: str) -> Path:
        """A named volume; a new one is a copy of the image's folder, or root's if the image has none."""
        place = self._folder / "volumes" / name
        if not place.exists():
            place.mkdir(parents=True)
            mode = image_folders().get(inside)
            os.chown(place, *((0, 0) if mode is None else (USER, USER)))
            place.chmod(0o755 if mode is None else mode)
        return place

    def start(self, name: str) -> Part:
        """Start a service; of `keys` the end is awaited."""
        service, house = self.services[name], self.houses[name]
        spec = self._spec(name, service)
        file = self._folder / f"{name}.json"
        file.write_text(json.dumps(spec))
        pid = service.get("pid", "")
        shared = self.inner_pid(pid.partition(":")[2]) if pid else None
        command = ["nsenter", f"--pid=/proc/{shared}/ns/pid", "--"] if shared else []
        command += ["unshare", "--mount", "--uts", "--ipc", "--propagation", "private"]
        command += [] if shared else ["--pid"]
        command += ["--fork", "--kill-child=SIGKILL", sys.executable, "-I", container.__file__, str(file)]
        log = self._folder / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                house.command(command), stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=self._limit(name, service),
            )  # fmt: skip
        self.parts[name] = Part(process, house, log)
        if service.get("restart") == "no":
            assert process.wait(120) == 0, log.read_text()
        return self.parts[name]

    def check(self, name: str) -> bool:
        """Run the service's health check inside it, as its user; whether it passed."""
        service, part = self.services[name], self.parts[name]
        _, *words = service["healthcheck"]["test"]
        environ = [f"{key}={value}" for key, value in self._environ(service).items()]
        command = [
            "nsenter",
            f"--target={self.inner_pid(name)}",
            "--mount",
            "--pid",
            "--net",
            "--root",
            "--wd",
        ]
        command += [f"--setuid={USER}", f"--setgid={USER}", "--", "/usr/bin/env", "-i", *environ, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert part.process.poll() is None, part.text()
        return done.returncode == 0

    def down(self) -> None:
        """Stop all as `docker compose down` does: SIGTERM to each first process, what shares a name space before it."""
        for name in ("decode", "prefill", "gateway", "processes"):
            if name in self.parts:
                self.stop(name)
        for group in self.groups.values():
            group.remove()

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM, grace_s: float = 60.0) -> None:
        """Send a signal to the service's first process and wait for its end; SIGKILL after `grace_s`."""
        part = self.parts.pop(name)
        if self.services[name].get("init"):
            # The engine's init ends at any signal; a command that is itself the first process ignores some.
            number = signal.SIGKILL
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self._inner_of(part), number)
        try:
            part.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(part.pid, signal.SIGKILL)
            part.process.wait()

    def inner_pid(self, name: str) -> int:
        """The first process inside a service's name spaces, by its number outside."""
        return self._inner_of(self.parts[name])

    def _inner_of(self, part: Part) -> int:
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            for one in part.family():
                with contextlib.suppress(psutil.Error):
                    words = one.cmdline()
                    if words and one.name() not in OUTSIDE and str(container.__file__) not in words:
                        return int(one.pid)
            time.sleep(0.02)
        raise AssertionError(part.text())

    def _environ(self, service: Mapping[str, Any]) -> dict[str, str]:
        given = {key: fill(value, self._names) for key, value in service["environment"].items()}
        return image_environ() | {"HOME": HOME} | given

    def _spec(self, name: str, service: Mapping[str, Any]) -> dict[str, Any]:
        root = self._folder / "roots" / name
        root.mkdir(parents=True, exist_ok=True)
        # This environment, at its own place and as the image's: the interpreter, the packages, the sources.
        code = {sys.base_prefix, sys.prefix, str(ROOT)}
        binds = {place: place for place in sorted(code)} | {
            "/opt/diptych": sys.prefix,
            HOME: str(self._home()),
        }
        writable = []
        for entry in service.get("volumes", ()):
            volume, inside, *flags = entry.split(":")
            binds[inside] = str(self.volume(volume, inside))
            writable += [] if "ro" in flags else [inside]
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        entry = service.get("entrypoint", ["diptych"])
        return {
            "root": str(root), "binds": binds, "writable": writable,
            "tmpfs": [one.split(":")[0] for one in service["tmpfs"]], "hostname": f"{name}-1", "hosts": self._hosts,
            "user": USER, "groups": [], "cwd": HOME, "environ": self._environ(service),
            "command": [*entry, *(fill(word, self._names) for word in service.get("command", ()))],
        }  # fmt: skip

    def _home(self) -> Path:
        """The home folder of the image, with the places that volumes are mounted on."""
        home = self._folder / "home"
        for folder in image_folders():
            if folder.startswith(f"{HOME}/"):
                (home / folder.removeprefix(f"{HOME}/")).mkdir(parents=True, exist_ok=True)
        return home

    def _limit(self, name: str, service: Mapping[str, Any]) -> Callable[[], None] | None:
        """What the child does first: it enters a memory group with the service's limit. Where there can be none,
        `unlimited` says why.
        """
        text = fill(service.get("mem_limit", ""), self._names)
        if not text:
            return None
        if name in self.groups:  # it is started again
            return self.groups[name].enter
        try:
            group = MemoryGroup(f"diptych-{os.getpid()}-{name}", int(text[:-1]) * UNITS[text[-1]])
        except MemoryGroupError as error:
            self.unlimited[name] = f"the service {name} runs without its limit of memory: {error}"
            return None
        self.groups[name] = group
        return group.enter


@contextlib.contextmanager
def project(folder: Path, **names: str) -> Iterator[ComposeRunner]:
    """A project of compose, brought down at the end."""
    with running_bridge() as net:
        runner = ComposeRunner(net, folder, names)
        try:
            yield runner
        finally:
            runner.down()
            shutil.rmtree(folder / "roots", ignore_errors=True)
