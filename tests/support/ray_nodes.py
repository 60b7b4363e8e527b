"""A Ray cluster whose nodes are network namespaces of this machine: each has an address and processes of its own.

    with running_cluster(folder, cpus=(0, 4, 4)) as cluster:      # the first node is Ray's head
        serving = cluster.popen(0, [...])                         # a program on the head's node
        cluster.nodes[2].kill(); cluster.nodes[1].house.cut()

A node is one process tree in a PID namespace: `kill` ends all of it at once, as a power cut would, and shared memory of
one node is not found from another. The head keeps its tables on disk (RocksDB), so it can be started again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support import network_namespaces, waiting
from tests.support.network_namespaces import NamespaceBridge, NamespaceHost
from tests.support.ray_tls import tls_environ

HEAD_PORT = 6400
PATIENCE_S = 120.0
MAX_ADDRESSES = 20
OBJECT_STORE_BYTES = str(80 << 20)
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
# The first process of a node outlives Ray's, so that only one of these can be killed.
KEEP = 'until "$@"; do sleep 1; done; exec sleep infinity'


@dataclass
class RayNode:
    """One node, in `house`; `process` is the program that all of its processes end with."""

    house: NamespaceHost
    folder: Path
    options: list[str]
    environ: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start Ray here; returns at once."""
        isolated = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--uts", "--ipc"]
        with (self.folder / "node.log").open("wb") as log:
            self.process = subprocess.Popen(
                self.house.command([*isolated, "bash", "-c", KEEP, "node", *RAY, *self.options]), stdout=log,
                stderr=log, cwd=self.folder, env=self.environ, start_new_session=True,
            )  # fmt: skip

    def output(self) -> str:
        """What the node's program has said."""
        return (self.folder / "node.log").read_text(errors="replace")

    def is_started(self) -> bool:
        """Whether Ray says that it runs here."""
        return "Ray runtime started" in self.output()

    @property
    def init_pid(self) -> int:
        """The first process of the node's PID namespace, as seen from outside."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def kill(self) -> None:
        """End all processes of the node at once."""
        if self.process is not None:
            with contextlib.suppress(IndexError, OSError):
                os.kill(self.init_pid, 9)
            self.process.kill()
            self.process.wait()

    def find_process(self, name: str) -> psutil.Process | None:
        """The living process of the node with this program name, for example "raylet"."""
        if self.process is None or self.process.poll() is not None:
            return None
        for one in psutil.Process(self.init_pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if one.name() == name and one.status() != psutil.STATUS_ZOMBIE:
                    return one
        return None

    def command(self, words: Sequence[str]) -> list[str]:
        """A command that runs among the node's processes."""
        return self.house.command(["nsenter", "-t", str(self.init_pid), "-p", "-m", "--", *words])


@dataclass
class RayCluster:
    """The nodes, and what a program needs to join them."""

    net: NamespaceBridge
    folder: Path
    environ: dict[str, str]
    nodes: list[RayNode] = field(default_factory=list)
    # Head processes that were started again.
    heads: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """HOST:PORT of Ray's head."""
        return f"{self.nodes[0].house.address}:{HEAD_PORT}"

    def add_node(self, cpus: int, *options: str, environ: Mapping[str, str] | None = None) -> RayNode:
        """Start one more node; the first one is the head."""
        house, number = self.net.house(), len(self.nodes)
        folder = self.folder / f"n{number}"
        folder.mkdir()
        place = ["--node-ip-address", house.address, "--num-cpus", str(cpus), "--temp-dir", str(folder)]
        place += ["--object-store-memory", OBJECT_STORE_BYTES]
        role = ["--address", f"{self.nodes[0].house.address}:{HEAD_PORT}"] if self.nodes else [
            "--head", "--port", str(HEAD_PORT), "--include-dashboard", "false"
        ]  # fmt: skip
        node = RayNode(house, folder, [*role, *place, *options], self.environ | dict(environ or {}))
        self.nodes.append(node)
        node.start()
        return node

    def kill_head(self) -> list[str]:
        """Kill Ray's head process (`gcs_server`); returns its command line, for `restart_head`."""
        head = self.nodes[0].find_process("gcs_server")
        assert head is not None
        command: list[str] = head.cmdline()
        head.kill()
        return command

    def restart_head(self, command: Sequence[str]) -> None:
        """Start Ray's head process again, with its tables."""
        with (self.folder / "head.log").open("ab") as log:
            head = subprocess.Popen(
                self.nodes[0].command(command),
                stdout=log,
                stderr=log,
                env=self.environ,
                start_new_session=True,
            )
        self.heads.append(head)

    def wait_started(self) -> None:
        """Wait until every node says that it runs."""
        for node in self.nodes:
            waiting.wait_for(node.is_started, PATIENCE_S, explain=node.output)

    def close(self) -> None:
        """End all nodes."""
        for node in reversed(self.nodes):
            node.kill()
        for head in self.heads:
            head.kill()
            head.wait()


def cluster_environ(folder: Path, health_timeout_s: float) -> dict[str, str]:
    """The environment of nodes and drivers: a token, nothing of this machine's settings, no limit to a head's loss."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "DIPTYCH_", "UCX_"))}
    return kept | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "31536000",
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(folder / "gcs"),
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
        # A lost node is noticed after a few of these, not after half a minute.
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": str(round(health_timeout_s * 1e3)),
        "RAY_health_check_failure_threshold": "3",
        # Otherwise UCX sees one machine, and tries memory that the other PID namespace does not show.
        "UCX_TLS": "tcp,self",
        "XDG_STATE_HOME": str(folder / "state"),
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }


@contextmanager
def running_cluster(
    folder: Path, cpus: Sequence[int], with_tls: bool = True, health_timeout_s: float = 10.0
) -> Iterator[RayCluster]:
    """A cluster with a node for each number of CPUs, the head first; at the end nothing of it is left. It has a token.

    A node counts as lost after three checks, a second apart, that have each had no answer for `health_timeout_s`.

    `folder` must have a short path, since Ray's sockets lie in it.
    """
    (folder / "gcs").mkdir(parents=True)
    with network_namespaces.running_bridge() as net:
        addresses = [f"{net.subnet}.{number}" for number in range(1, MAX_ADDRESSES)]
        tls = tls_environ(folder, addresses) if with_tls else {}
        cluster = RayCluster(net, folder, cluster_environ(folder, health_timeout_s) | tls)
        try:
            cluster.add_node(cpus[0])
            cluster.wait_started()
            for count in cpus[1:]:
                cluster.add_node(count)
            cluster.wait_started()
            yield cluster
        finally:
            cluster.close()
