"""Docker's daemon in a network namespace and a mount namespace of its own, which its firewall and mounts stay in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.containers.debian import ROOT, Downloads, Unavailable

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
BASE_IMAGE = "python:3.11-slim-bookworm"
START_S, STOP_S = 60.0, 60.0
# Images that stand in for those of compose's monitoring profile: name, program, folder that it writes. Debian's
# Alertmanager writes below /var/lib where the image of its makers writes its working folder.
STAND_INS = (
    ("prom/prometheus:v2.55.1", "prometheus", "/prometheus"),
    ("prom/alertmanager:v0.27.0", "prometheus-alertmanager", "/var/lib/prometheus/alertmanager"),
)
# Debian's Alertmanager does not hold its templates: it reads them from here, and ends without them.
TEMPLATES = "usr/share/prometheus/alertmanager"
STAND_IN = """FROM {base}
COPY {program} /bin/program
COPY templates /{templates}
RUN install -d -o 65534 -g 65534 {folder}
USER 65534
WORKDIR {folder}
ENTRYPOINT ["/bin/program"]
"""


def enter_namespaces() -> None:
    """Give this process, and all that it starts from now on, a network and mounts of its own. Raises Unavailable."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWNET):
        raise Unavailable(f"no namespaces can be made: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


class Engine:
    """The daemon, and the commands of its client."""

    def __init__(self, folder: Path, downloads: Downloads) -> None:
        self.folder, self.downloads, self.base = folder, downloads, BASE_IMAGE
        self.packages = folder / "packages"
        downloads.unpack(self.packages)
        programs = f"{self.packages}/usr/sbin:{self.packages}/usr/bin"
        (folder / "client" / "cli-plugins").mkdir(parents=True)
        for plugin in (self.packages / "usr/libexec/docker/cli-plugins").iterdir():
            shutil.copy2(plugin, folder / "client" / "cli-plugins")
        self.environ = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}", "DOCKER_HOST": f"unix://{folder}/socket",
            "DOCKER_CONFIG": f"{folder}/client", "BUILDKIT_PROGRESS": "plain",
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the daemon, and wait for it. Raises Unavailable: it does not start here."""
        words = ["--data-root", "data", "--exec-root", "run", "--pidfile", "pid", "--bridge", "none"]
        words = [f"{self.folder}/{word}" if word in ("data", "run", "pid") else word for word in words]
        with (self.folder / "daemon.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["dockerd", "-H", self.environ["DOCKER_HOST"], *words],
                env=self.environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end_s = time.monotonic() + START_S
        while not self.succeeds("docker", "info"):
            if self._process.poll() is not None or time.monotonic() > end_s:
                lines = (self.folder / "daemon.log").read_text(errors="replace").splitlines()
                raise Unavailable(f"dockerd does not start here: {lines[-1] if lines else 'it says nothing'}")
            time.sleep(0.5)

    def stop(self) -> None:
        """Stop the daemon, and remove all mounts that it has left in this namespace."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in reversed([one for one in mounts if one.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", "-l", mount], check=False)

    def succeeds(self, *words: str) -> bool:
        return subprocess.run(words, env=self.environ, capture_output=True).returncode == 0

    def run(self, *words: str, timeout_s: float = 1800.0, stdin: str = "", **names: str) -> str:
        """Standard output of a command in the checkout; `names` go into its environment.

        Raises:
            AssertionError: it fails; with the last lines that it printed.
        """
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=self.environ | names,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            input=stdin,
        )
        last = " / ".join((done.stdout + done.stderr).strip().splitlines()[-4:])
        assert done.returncode == 0, f"`{' '.join(words[:4])}` ended with {done.returncode}: {last}"
        return done.stdout

    def import_base(self) -> None:
        """Make the base image."""
        path = "ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.run("docker", "import", "--change", path, str(self.downloads.base), BASE_IMAGE)

    def build_stand_ins(self) -> None:
        """Make images of Debian's Prometheus and Alertmanager under the names that compose has."""
        for image, program, folder in STAND_INS:
            place = self.folder / program
            place.mkdir()
            shutil.copy2(self.packages / "usr/bin" / program, place)
            shutil.copytree(self.packages / TEMPLATES, place / "templates")
            text = STAND_IN.format(base=BASE_IMAGE, program=program, templates=TEMPLATES, folder=folder)
            (place / "Dockerfile").write_text(text)
            self.run("docker", "build", "--network", "none", "-t", image, str(place))

    def versions(self) -> Mapping[str, str]:
        """Versions of the engine's parts, as they say them."""

        def last_of(*words: str) -> str:
            return self.run(*words).strip().splitlines()[0]

        return {
            "engine": last_of("docker", "version", "--format", "{{.Server.Version}}"),
            "compose": last_of("docker", "compose", "version", "--short"),
            "buildx": last_of("docker", "buildx", "version").split()[1],
            "runc": last_of("runc", "--version").split()[-1],
            "cgroups": last_of("docker", "info", "--format", "v{{.CgroupVersion}}"),
        }


@contextmanager
def running_engine(folder: Path, downloads: Downloads) -> Iterator[Engine]:
    """The daemon, with its data in `folder`; at the end it has ended."""
    engine = Engine(folder, downloads)
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()
