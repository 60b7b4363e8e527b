"""What the trial takes from Debian and from pip's index: an engine, a base image, wheels, and monitoring.

Everything lies in one folder and is taken once; only debootstrap, iptables and runc are installed on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Docker of Debian 12 is too old for the image's recipe.
ENGINE_SUITE, BASE_SUITE = "trixie", "bookworm"
ENGINE = ("docker.io", "docker-cli", "docker-compose", "docker-buildx", "containerd", "tini")
MONITORING = ("prometheus", "prometheus-alertmanager")
TOOLS = {"debootstrap": "debootstrap", "iptables": "iptables", "runc": "runc"}
BASE_PACKAGES = "python3-venv,python-is-python3,ca-certificates"


class Unavailable(Exception):
    """Why there can be no trial on this machine."""


def why_unavailable() -> str:
    """Why this machine cannot have the trial, as far as that can be seen at once; empty if it can."""
    if os.geteuid() != 0:
        return "the trial starts a container engine, which needs root"
    if not SOURCES.exists() or not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        return f"the engine and the base image are made of Debian's packages, and there is no {SOURCES}"
    if sys.version_info[:2] != (3, 11):
        return "the image has Python 3.11, and wheels are taken for the Python that runs this"
    return ""


def find_mirror() -> str:
    """The first address in the machine's own list of package sources."""
    found = re.search(r"^URIs: *(\S+)", SOURCES.read_text(), re.MULTILINE)
    if found is None:
        raise Unavailable(f"{SOURCES} names no address")
    return found[1]


@dataclass(frozen=True, slots=True)
class Downloads:
    """The folder with what was taken; each part is taken only if it is not there."""

    folder: Path

    @property
    def wheels(self) -> Path:
        return self.folder / "wheels"

    @property
    def base(self) -> Path:
        """The base image's files."""
        return self.folder / "base.tar"

    def take_all(self) -> None:
        """Take everything. Raises Unavailable: no network, or a package is not to be had."""
        self.folder.mkdir(parents=True, exist_ok=True)
        missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
        if missing:
            print(f"installing {', '.join(missing)}", flush=True)
            run_or_skip(["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing])
        if not (self.folder / "debs").exists():
            self._take_packages()
        if not self.base.exists():
            self._take_base()
        if not self.wheels.exists():
            self._take_wheels()

    def _take_packages(self) -> None:
        """Packages of two suites, with lists of their own: those of this machine stay as they are."""
        print("taking Debian's packages of the engine", flush=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            place = Path(name)
            for part in ("lists/partial", "archives/partial", "debs"):
                (place / part).mkdir(parents=True)
            signed = f"deb [signed-by={KEYRING}] {find_mirror()}"
            suites = (ENGINE_SUITE, BASE_SUITE)
            (place / "sources").write_text("".join(f"{signed} {suite} main\n" for suite in suites))
            options = {
                "Dir::Etc::sourcelist": place / "sources", "Dir::Etc::sourceparts": "/dev/null", "Dir::Cache": place,
                "Dir::State::lists": place / "lists", "Acquire::Languages": "none", "APT::Sandbox::User": "root",
            }  # fmt: skip
            apt = [
                "apt-get",
                "-q",
                *(word for key, value in options.items() for word in ("-o", f"{key}={value}")),
            ]
            wanted = [f"{package}/{ENGINE_SUITE}" for package in ENGINE]
            wanted += [f"{package}/{BASE_SUITE}" for package in MONITORING]
            run_or_skip([*apt, "update"])
            run_or_skip([*apt, "download", *wanted], place / "debs")
            (place / "debs").rename(self.folder / "debs")

    def _take_base(self) -> None:
        """A Debian with its own Python, which stands in for `python:3.11-slim-bookworm`."""
        print("making a base image with debootstrap", flush=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            made = [
                "--variant=minbase",
                f"--include={BASE_PACKAGES}",
                BASE_SUITE,
                f"{name}/root",
                find_mirror(),
            ]
            run_or_skip(["debootstrap", *made])
            run_or_skip(["tar", "-C", f"{name}/root", "-cf", f"{name}/base.tar", "."])
            Path(name, "base.tar").rename(self.base)

    def _take_wheels(self) -> None:
        """The command of docs/deploying.md, "The image"."""
        print("taking wheels", flush=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            words = ["-m", "pip", "download", "-q", "-d", f"{name}/wheels", "-c", "constraints.txt", ".[all]"]
            run_or_skip([sys.executable, *words, "hatchling>=1.27"], ROOT)
            Path(name, "wheels").rename(self.wheels)

    def unpack(self, target: Path) -> None:
        """Unpack all packages in `target`."""
        for package in sorted((self.folder / "debs").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, target], check=True)


def run_or_skip(words: list[str], folder: Path = ROOT) -> None:
    """Run a command that needs the network. Raises Unavailable with the last line that it printed."""
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        words, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines() or ["it says nothing"]
        raise Unavailable(f"{Path(words[0]).name} failed: {lines[-1]}")
