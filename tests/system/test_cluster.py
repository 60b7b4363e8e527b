"""`diptych serve --ray-address`: a deployment on three Ray nodes, which are network namespaces of this machine.

All tests share the cluster: its head has no CPUs, two nodes have four each. Where the machine has no namespaces they
are skipped, and say why.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from planner.costs.model import find_model
from planner.placement.plan_file import (
    VERSION,
    PlanFile,
    PlanPool,
    PlanSlo,
    PlanTraffic,
    load_plan,
    save_plan,
)
from tests.support import network_namespaces
from tests.support.cluster_driver import Driver, ask, run_serve
from tests.support.deployment import wait_for
from tests.support.ray_nodes import RayCluster, RayNode, running_cluster
from tests.system.batches.batch_lines import COMPLETION, finished, input_file, results, start
from tests.system.bulk_lines import completion_lines
from tests.system.plan_files import PREDICTED
from tests.system.replan_load import COST, HUMANEVAL, SHORT, Load, decisions, steered

pytestmark = pytest.mark.timeout(900)
TOKENS = 24
PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    if why := network_namespaces.why_unavailable():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="dpt", dir="/tmp"))
    try:
        with running_cluster(folder, cpus=(0,)) as cluster:
            (folder / "away").mkdir()
            cluster.add_node(4)
            path = os.pathsep.join(filter(None, (str(folder / "away"), os.environ.get("PYTHONPATH"))))
            cluster.add_node(4, environ={"PYTHONPATH": path})
            cluster.wait_started()
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
    with ThreadPoolExecutor(2) as threads:
        absent = threads.submit(refused, cluster, address=f"{head}:6401")
        wrong = threads.submit(refused, cluster, RAY_AUTH_TOKEN="f" * 32)
        missing = threads.submit(refused, cluster, RAY_AUTH_TOKEN="", HOME=str(cluster.folder))
        assert "no Ray head answers" in absent.result()
        assert "refuses this token" in wrong.result() and "RAY_AUTH_TOKEN_PATH" in wrong.result()
        assert "needs a token" in missing.result()


def test_what_cannot_be_placed_is_refused_with_what_each_node_has(cluster: RayCluster) -> None:
    said = refused(cluster, "--decode-tp", "8")
    assert "no room for decode-0" in said and "asked: CPU 8 for decode-0" in said
    for node in cluster.nodes:
        assert node.house.address in said


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
    # Only this node's Python looks here.
    strange = cluster.folder / "away" / "diptych-9.9.9.dist-info"
    strange.mkdir()
    (strange / "METADATA").write_text("Metadata-Version: 2.1\nName: diptych\nVersion: 9.9.9\n")
    try:
        assert f"{away.house.address}: diptych 9.9.9, here" in refused(cluster)
    finally:
        shutil.rmtree(strange)


def pools_by_node(status: dict[str, Any]) -> dict[str, list[str]]:
    """The names of the workers of each node, by its address."""
    found: dict[str, list[str]] = {}
    for worker in status["workers"]:
        found.setdefault(worker["host"], []).append(worker["worker"])
    return {address: sorted(names) for address, names in found.items()}


def worker_processes(cluster: RayCluster) -> list[psutil.Process]:
    """The processes of workers on all nodes."""
    found = [psutil.Process(node.init_pid).children(recursive=True) for node in cluster.nodes]
    return [one for processes in found for one in processes if one.cmdline()[-1:] == ["services.worker"]]


def key_folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("diptych-keys-*"))


def transports(status: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(link["source"], link["target"]): link["transport"] for link in status["links"]}


def lose_node(node: RayNode, driver: Driver, expected: str) -> None:
    """Kill a node while it is asked: no answer is lost, and its workers come back on the other node."""
    over, wrong = threading.Event(), list[str]()

    def keep_asking() -> None:
        while not over.is_set():
            try:
                if (answer := ask(driver, PROMPT, TOKENS)) != expected:
                    wrong.append(answer)
            except (OSError, AssertionError, http.client.HTTPException) as error:
                wrong.append(repr(error))

    asking = [threading.Thread(target=keep_asking) for _ in range(4)]
    for thread in asking:
        thread.start()
    try:
        node.kill()
        address = node.house.address

        def all_back() -> bool:
            places = pools_by_node(driver.status())
            return address not in places and sum(map(len, places.values())) == 4

        wait_for(all_back, explain=driver.output)
    finally:
        over.set()
        for thread in asking:
            thread.join()
    assert wrong == []
    node.start()
    wait_for(node.is_started, explain=node.output)


@pytest.mark.slow
def test_a_lost_node_costs_no_answer(cluster: RayCluster) -> None:
    with Driver(cluster, "--prefill", "2", "--decode", "2", "--recovery-s", "120") as driver:
        lose_node(cluster.nodes[2], driver, ask(driver, PROMPT, TOKENS))
        driver.stop()


def test_a_deployment_on_two_nodes_outlives_its_driver(cluster: RayCluster) -> None:
    """Each node has a worker of each pool; the next driver adopts them all; no worker has the gateway's secret."""
    first, second = (node.house.address for node in cluster.nodes[1:3])
    # A node that was killed leaves its own behind, for a minute.
    older = set(key_folders())
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
        for folder in key_folders():
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
    assert set(key_folders()) <= older


def test_bulk_workers_on_two_nodes_serve_batches(cluster: RayCluster, tmp_path: Path) -> None:
    """Each node prepares the weights for itself; each line is answered, and equal prompts equally."""
    caps = ("--bulk-memory-bytes", "24MiB", "--bulk-disk-bytes", "1GiB", "--max-model-len", "512")
    pools = ("--bulk", "2", "--prefill", "0", "--decode", "0", "--data-dir", str(tmp_path / "batches"))
    with Driver(cluster, *pools, *caps) as driver:
        nodes = {node.house.address for node in cluster.nodes[1:3]}
        assert pools_by_node(driver.status()).keys() == nodes
        lines = completion_lines(24, temperature=0, stop=None)
        with openai.OpenAI(base_url=f"http://{driver.host}:{driver.port}/v1", api_key="none") as client:
            ended = finished(client, start(client, input_file(lines.items(), COMPLETION), COMPLETION).id)
            found = results(client, ended.output_file_id)
        assert found.keys() == lines.keys()
        by_prompt: dict[str, set[str]] = {}
        for name, row in found.items():
            texts = by_prompt.setdefault(lines[name]["prompt"], set())
            texts.add(row["response"]["body"]["choices"][0]["text"])
        assert all(len(texts) == 1 for texts in by_prompt.values())
        driver.stop()


def plan_of_a_pair(folder: Path) -> str:
    """A plan that counts on shared memory between a prefill and a decode worker."""
    path = folder / "plan.json"
    save_plan(
        path,
        PlanFile(
            version=VERSION,
            model="tiny",
            layers=find_model("embedded").layers,
            devices_per_node=2,
            pools=(PlanPool(role="prefill"), PlanPool(role="decode")),
            affinity="low",
            cross=1,
            slos={"": PlanSlo(ttft_s=5.0, tpot_s=0.5)},
            traffic=PlanTraffic(name="made up"),
            predicted=PREDICTED,
        ),
    )
    return str(path)


@pytest.mark.slow
def test_a_planned_pair_is_on_one_node_and_a_replanner_adds_and_takes_workers(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """The replanner's budget is the cluster, and it grows on another node. A second deployment shares the cluster.

    No request of either fails.
    """
    options, journal = steered(tmp_path, COST)
    slos = options.index("--slo-ttft-ms")
    with Driver(cluster, "--plan", plan_of_a_pair(tmp_path), *options[:slos]) as driver:
        assert "replan: the budget is the cluster's 8 devices" in driver.output()
        assert list(pools_by_node(driver.status()).values()) == [["decode-0", "prefill-0"]]
        with Driver(cluster, namespace="other", port=8001) as other:
            assert ask(other, PROMPT, TOKENS) == ask(driver, PROMPT, TOKENS)
            other.stop()
        load = Load(f"http://{driver.host}:{driver.port}")
        with load.flowing():
            wait_for(lambda: decisions(journal))
            load.shape = HUMANEVAL
            wait_for(lambda: len(driver.status()["workers"]) == 3, explain=lambda: decisions(journal))
            places = pools_by_node(driver.status())
            assert sorted(places.values()) == [["decode-0", "prefill-0"], ["decode-1"]]
            load.shape = SHORT
            wait_for(lambda: "replan: stop of decode-" in driver.output(), explain=driver.output)
            assert len(driver.status()["workers"]) == 2
        assert load.wrong == [] and len(load.answers) > 20
        driver.stop()


def test_a_plan_for_more_nodes_than_there_are_is_refused(cluster: RayCluster, tmp_path: Path) -> None:
    """Each of its pairs needs a whole node, and one has no room."""
    path = Path(plan_of_a_pair(tmp_path))
    plan = load_plan(path).model_copy(
        update={
            "devices_per_node": 4,
            "pools": (PlanPool(role="prefill", count=3, tp=2), PlanPool(role="decode", count=3, tp=2)),
        }
    )
    save_plan(path, plan)
    said = refused(cluster, "--plan", str(path))
    assert "no room for decode-2 and prefill-2" in said and "on one node; CPU 12 in all" in said


@pytest.mark.slow
def test_a_second_ctrl_c_ends_workers_though_rays_head_is_dead(cluster: RayCluster) -> None:
    """Requests that drain are cut off. The next start, when the head is back, ends what was left with Ray."""
    with Driver(cluster, "--prefill", "1", "--decode", "1", "--drain-s", "600") as driver:
        workers = worker_processes(cluster)
        assert len(workers) == 2
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(ask, driver, PROMPT, 1900) for _ in range(8)]
            wait_for(lambda: driver.status()["pools"]["decode"]["running"], explain=driver.output)
            head = cluster.kill_head()
            before = driver.output()
            assert driver.interrupt_twice() == 130
            assert all(isinstance(one.exception(), OSError | http.client.HTTPException) for one in asked)
        said = driver.output().removeprefix(before)
        assert len(said.splitlines()) <= 6 and "Traceback" not in said, said
        assert not psutil.wait_procs(workers, timeout=60)[1]
    cluster.restart_head(head)
    with Driver(cluster, "--prefill", "1", "--decode", "1") as driver:
        assert "adopted" not in driver.output() and ask(driver, PROMPT, TOKENS)
        driver.stop()
