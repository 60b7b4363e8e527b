"""`diptych serve --ray-address`: a deployment on three Ray nodes, which are network namespaces of this machine.

All tests share the cluster: its head has no CPUs, two nodes have four each. Where the machine has no namespaces they
are skipped, and say why.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import network_namespaces
from tests.faults.ray_nodes import RayCluster, running_cluster
from tests.system.cluster_driver import Driver, ask, run_serve

pytestmark = pytest.mark.timeout(900)
TOKENS = 24
PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    if why := network_namespaces.why_unavailable():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="dpt", dir="/tmp"))
    try:
        with running_cluster(folder, cpus=(0, 4, 4)) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refused(cluster: RayCluster, *arguments: str, address: str = "", **environ: str) -> str:
    """What `diptych serve` says on the head's node when it refuses, in six lines at most."""
    ended = run_serve(cluster, address or cluster.address, *arguments, **environ)
    assert ended.returncode in (1, 2), ended.stdout + ended.stderr
    lines = ended.stderr.strip().splitlines()
    assert 1 < len(lines) <= 6 and "Traceback" not in ended.stderr, ended.stderr
    return ended.stderr


def test_what_cannot_be_joined_is_refused(cluster: RayCluster) -> None:
    head = cluster.nodes[0].house.address
    assert "no Ray head answers" in refused(cluster, address=f"{head}:6401")
    assert "refuses this token" in refused(cluster, RAY_AUTH_TOKEN="f" * 32)
    assert "needs a token" in refused(cluster, RAY_AUTH_TOKEN="")
    assert "is not the address" in refused(cluster, address="ray://somewhere")
    assert "refuses this token" in refused(cluster, RAY_AUTH_MODE="disabled")


def test_what_cannot_be_placed_is_refused_with_what_each_node_has(cluster: RayCluster) -> None:
    said = refused(cluster, "--decode-tp", "8")
    assert "no room for decode-0" in said and "asked: CPU 8 for decode-0" in said
    for node in cluster.nodes:
        assert node.house.address in said
    assert "fast 1 for prefill-0" in refused(cluster, "--prefill-resources", "fast=1").replace("CPU 1, ", "")


def test_a_node_without_the_model_or_with_another_version_is_named(
    cluster: RayCluster, tmp_path: Path
) -> None:
    away = cluster.nodes[2]
    hidden = cluster.folder / "model"
    shutil.copytree(Path(__file__).parents[2] / "models" / "tiny", hidden)
    # Node 2 sees another folder in its place.
    subprocess.run(away.command(["mount", "-t", "tmpfs", "none", str(hidden)]), check=True)
    said = refused(cluster, str(hidden))
    assert f"the node {away.house.address} cannot serve the model {hidden}" in said
    strange = tmp_path / "diptych-9.9.9.dist-info"
    strange.mkdir()
    (strange / "METADATA").write_text("Metadata-Version: 2.1\nName: diptych\nVersion: 9.9.9\n")
    other = cluster.add_node(1, environ={"PYTHONPATH": str(tmp_path)})
    try:
        cluster.wait_started()
        said = refused(cluster)
        assert f"{other.house.address}: diptych 9.9.9, here" in said
    finally:
        cluster.nodes.remove(other)
        other.kill()


def pools_by_node(status: dict[str, Any]) -> dict[str, list[str]]:
    """The names of the workers of each node, by its address."""
    found: dict[str, list[str]] = {}
    for worker in status["workers"]:
        found.setdefault(worker["host"], []).append(worker["worker"])
    return {address: sorted(names) for address, names in found.items()}


def transports(status: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(link["source"], link["target"]): link["transport"] for link in status["links"]}


def test_a_deployment_on_two_nodes_outlives_its_driver(cluster: RayCluster) -> None:
    """Each node has a worker of each pool; the next driver adopts them all; no worker has the gateway's secret."""
    first, second = (node.house.address for node in cluster.nodes[1:3])
    with Driver(cluster, "--prefill", "2", "--decode", "2") as driver:
        status = driver.status()
        assert pools_by_node(status) == {
            first: ["decode-0", "prefill-0"],
            second: ["decode-1", "prefill-1"],
        }
        moved = transports(status)
        assert moved["prefill-0", "decode-0"] == moved["prefill-1", "decode-1"] == "shm"
        assert moved["prefill-0", "decode-1"] == moved["prefill-1", "decode-0"] == "nixl"
        for worker in status["workers"]:
            log = Path(worker["log_file"])
            assert log.name == f"diptych-diptych-{worker['worker']}.log" and log.parent.name == "logs"
            assert log.exists()
        for folder in Path(tempfile.gettempdir()).glob("diptych-keys-*"):
            assert not (folder / "server.secret").exists() and (folder / "worker.secret").exists()
        before = ask(driver, PROMPT, TOKENS)
        assert "a deployment named diptych runs in this Ray cluster" in refused(cluster)
        processes = {worker["worker"]: (worker["host"], worker["pid"]) for worker in status["workers"]}
        driver.kill()
    with Driver(cluster, "--prefill", "2", "--decode", "2") as driver:
        assert "adopted decode-0, decode-1, prefill-0, prefill-1" in driver.output()
        status = driver.status()
        assert {one["worker"]: (one["host"], one["pid"]) for one in status["workers"]} == processes
        assert ask(driver, PROMPT, TOKENS) == before
        driver.stop()
    assert not list(Path(tempfile.gettempdir()).glob("diptych-keys-*"))
