"""The channel of a deployment in a Ray cluster: that of the last start where it can be. Nothing is started."""

from __future__ import annotations

import asyncio
import platform
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.config.load import LoadedConfig
from diptych.config.options import Config
from diptych.errors import StartError
from services.cli.serve.cluster import cluster_launch
from services.cli.serve.cluster.cluster_launch import CHANNEL_FILE, ClusterRun
from services.cluster.capacity import NodeCapacity
from services.cluster.joined_deployment import ClusterDeployment
from services.cluster.node_probe import NodeReport
from services.cluster.spec import Bundle
from services.host import model_probe
from services.host.model_probe import ProbedModel, ProbeRequest, probe_request
from services.host.versions import installed_version

OWN = "127.0.0.1"


def made_run(folder: Path, said: list[str], **settings: Any) -> ClusterRun:
    view: Any = SimpleNamespace(print_line=said.append)
    loaded = LoadedConfig(Config(**settings), {name: f"the file's {name}" for name in settings})
    run = ClusterRun(loaded, None, folder, folder, view)
    run._joined, run._state = cast(Any, SimpleNamespace(own_address=OWN)), folder / "state"
    return run


def test_the_channel_of_the_last_start_is_taken_again(tmp_path: Path) -> None:
    said = list[str]()
    first = made_run(tmp_path, said)._claim_channel()
    kept = tmp_path / "state" / CHANNEL_FILE
    assert first.startswith(f"tcp://{OWN}:") and kept.read_text() == first
    assert made_run(tmp_path, said)._claim_channel() == first and said == []


@pytest.mark.parametrize("content", ["tcp://192.0.2.1:5700", "nonsense", "tcp://127.0.0.1:99999", "\xff"])
def test_a_channel_that_cannot_be_had_again_is_replaced(tmp_path: Path, content: str) -> None:
    said = list[str]()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / CHANNEL_FILE).write_text(content, encoding="latin-1")
    assert made_run(tmp_path, said)._claim_channel().startswith(f"tcp://{OWN}:") and said == []


def test_a_port_that_was_taken_meanwhile_is_replaced(tmp_path: Path) -> None:
    said = list[str]()
    first = made_run(tmp_path, said)._claim_channel()
    with socket.create_server((OWN, int(first.rpartition(":")[2]))):
        second = made_run(tmp_path, said)._claim_channel()
        assert second != first and (tmp_path / "state" / CHANNEL_FILE).read_text() == second
        (line,) = said
        assert "is in use" in line and "started anew" in line
        with pytest.raises(StartError) as caught:
            made_run(tmp_path, said, channel=first)._claim_channel()
        assert "the file's channel" in caught.value.why and "--channel tcp://" in caught.value.fix


def test_a_channel_keeps_its_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "services.cli.serve.cluster.cluster_launch.claim_port", lambda host, port, *_, **__: port or 7
    )
    assert made_run(tmp_path, [], channel="tcp://[fd00::1]:9000")._claim_channel() == "tcp://[fd00::1]:9000"
    run = made_run(tmp_path, [])
    run._joined = cast(Any, SimpleNamespace(own_address="fd00::1"))
    assert run._claim_channel() == run._claim_channel() == "tcp://[fd00::1]:7"


class SilentCluster:
    """A cluster whose head does not answer before `stop`."""

    def __init__(self, address: str, namespace: str) -> None:
        self.address, self.asked, self.left = address, threading.Event(), threading.Event()

    def start(self) -> None:
        self.asked.set()
        self.left.wait()

    def stop(self) -> None:
        self.left.set()


def test_ctrl_c_ends_a_start_whose_cluster_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_launch, "JoinedCluster", SilentCluster)
    run = made_run(tmp_path, [], ray_address="10.0.0.1:6379")
    run._view = cast(Any, SimpleNamespace(print_line=lambda line: None, begin_phase=lambda name: None))

    async def story() -> None:
        finding = run._unless_stopped(run._find_and_start(0, cast(Any, None)))
        starting = asyncio.create_task(finding)
        while run._joined is None:
            await asyncio.sleep(0.001)
        while not cast(Any, run._joined).asked.is_set():
            await asyncio.sleep(0.001)
        run._stop.stop_asked.set()
        assert await starting is None
        run._stop_ray()

    run._joined = None
    thread = threading.Thread(target=lambda: asyncio.run(story()), daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive(), "the event loop is blocked"


@pytest.mark.parametrize("known", [True, False])
def test_keys_are_kept_while_workers_of_an_earlier_start_may_be_left(tmp_path: Path, known: bool) -> None:
    """They were not found yet when this one was stopped, or failed; the next start needs keys and channel for them."""
    run = made_run(tmp_path, [])
    run._claim_channel()
    ended = list[bool]()
    deployment = ClusterDeployment.__new__(ClusterDeployment)
    deployment.has_taken_over = known
    deployment.end_at_once = lambda: ended.append(True)  # type: ignore[method-assign]
    run._deployment, run._joined = deployment, cast(Any, SimpleNamespace(stop=lambda: None))
    run._stop_ray()
    assert ended == [True] and (tmp_path / "state" / CHANNEL_FILE).exists() is not known


def test_the_replanner_reckons_with_the_memory_of_the_nodes(tmp_path: Path) -> None:
    versions = {
        "diptych": installed_version("diptych"),
        "python": platform.python_version(),
        "ray": installed_version("ray"),
    }
    nodes = [NodeCapacity(f"n{number}", f"10.0.0.{number}", {"CPU": 4.0}, {"CPU": 4.0}) for number in (1, 2)]
    asked = list[str]()

    def probe(nodes: list[NodeCapacity], question: str, *_: Any) -> list[NodeReport]:
        asked.append(question)
        sizes = (8192, 4096) if question else (0, 0)
        return [
            NodeReport(node.address, versions, 0, "31536000", kv_bytes=size)
            for node, size in zip(nodes, sizes, strict=True)
        ]

    run = made_run(tmp_path, [], replan=True)
    run._joined = cast(Any, SimpleNamespace(probe_nodes=probe))
    run._bundle_groups = ((Bundle("prefill-0"),), (Bundle("decode-0"),))
    # The driver itself looks for no weights, and plans no memory.
    found = run._check_nodes(nodes, ProbedModel("/m", "a model", True, 2048, 0))
    assert found.kv_bytes == 4096 and found.max_model_len == 2048
    assert asked[0] == "" and asked[1] == run._question


def test_only_the_nodes_fetch_the_weights_of_bulk_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver plans without them, but for a calibration, which it compares with them."""
    asked = list[ProbeRequest]()

    async def note_question(question: ProbeRequest) -> ProbedModel:
        asked.append(question)
        return ProbedModel("/m", "a model", True, 2048, 0)

    monkeypatch.setattr(model_probe, "_probe_in_process", note_question)
    for policy in (None, "kv_codec=int4", "kv_codec=nuq4"):
        run = made_run(tmp_path, [], model="owner/name", bulk=2, bulk_policy=policy)
        asyncio.run(run._find_model())
        assert probe_request(run._config, 0).weights
    assert [question.weights for question in asked] == [False, False, True]
