"""A worker's actor on its node: a first start that fails has failed, and one that Ray restarts tries again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from diptych.channel.keys import make_keys
from diptych.specs import WorkerSpec
from services.cluster import node_worker as under_test
from services.cluster.node_worker import NodeOrder, NodeWorker, retry_delay_s
from services.host.held_memory import WORKER_OF
from services.host.supervision.supervisor import ChildStatus

LACKS = {"error": {"what": "the model does not fit", "why": "it needs 3 GiB", "fix": "another"}}
GPU = {"workers": 2, "buffer_bytes": 640, "emulated_bytes": 0}
FITS = {"model": {"path": "/m", "max_model_len": 64, "kv_bytes": 4096, "gpu": GPU}}


class Supervisor:
    """A supervisor that starts nothing."""

    def __init__(self, name: str, command: Any, spec: bytes, log: Any, environ: Any, **_: Any) -> None:
        self.name, self.environ, self.state = name, environ, "starting"
        self.spec = msgspec.json.decode(spec, type=WorkerSpec)

    def start(self) -> None:
        pass

    def status(self) -> ChildStatus:
        return ChildStatus(self.name, self.state)

    def wait_status(self, version: int, timeout_s: float) -> ChildStatus:
        return self.status()

    def stop(self, grace_s: float) -> None:
        self.state = "stopped"


class Node:
    """A node whose answers about the model are `replies`, one after the other; Ray has placed a worker there."""

    def __init__(self, folder: Path, restarted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.asked = folder, list[tuple[Any, ...]]()
        self.replies: Iterator[dict[str, Any]] = iter(())
        context = SimpleNamespace(was_current_actor_reconstructed=restarted)
        made_up = SimpleNamespace(
            get_runtime_context=lambda: context, util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
        )
        monkeypatch.setattr(under_test, "ray", made_up)
        monkeypatch.setattr(under_test, "_ray_log_folder", lambda: folder)
        monkeypatch.setattr(under_test, "_count_cpus", lambda: 8.0)
        monkeypatch.setattr(under_test, "Supervisor", Supervisor)
        monkeypatch.setattr(under_test, "ucx_listen_environment", lambda environ, address: environ)
        monkeypatch.setattr(under_test, "retry_delay_s", lambda failures: 0.01)
        monkeypatch.setattr(under_test, "describe_node", self.describe)
        make_keys(folder / "keys")

    def describe(self, *asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        return {"reply": next(self.replies)}

    def start(self, *replies: dict[str, Any]) -> NodeWorker:
        self.replies = iter(replies)
        spec = WorkerSpec(worker="decode-0", role="decode", gateway="tcp://a:1", keys_dir="", model="", tp=2)
        order = NodeOrder(
            spec=spec, module="m", namespace="n", question="{}", max_workers=5, cpus=1.0, gateway_key="",
            keys_dir=str(self.folder / "keys"), pin_cores=False, group="g", index=0, demand={"CPU": 1.0},
        )  # fmt: skip
        return NodeWorker(msgspec.json.encode(order))


def test_a_first_start_that_fails_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Node(tmp_path, False, monkeypatch).start(LACKS)
    report = worker.wait_status(0, 10.0).status
    assert report.state == "failed" and report.error is not None
    assert report.error.what == "on the node 10.0.0.1: the model does not fit"
    worker._starter.join(10.0)
    assert not worker._starter.is_alive()
    assert worker.describe_order()[1:] == ("10.0.0.1", True), "it is not adopted"


def test_a_restarted_worker_tries_until_its_node_has_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, True, monkeypatch)
    seen = list[ChildStatus]()
    monkeypatch.setattr(NodeWorker, "_wait_stopping", lambda self, _: seen.append(self._status))
    worker = node.start(LACKS, LACKS, FITS)
    worker._starter.join(10.0)
    assert [(one.state, one.restarts) for one in seen] == [("waiting", 1), ("waiting", 2)]
    assert "on the node 10.0.0.1: the model does not fit: it needs 3 GiB" in seen[0].ended
    assert seen[0].version != seen[1].version and max(one.version for one in seen) < 0
    supervisor: Any = worker._supervisor
    assert (supervisor.spec.gpu_workers, supervisor.spec.transfer_buffer_bytes) == (2, 640)
    assert supervisor.spec.kv_bytes == 4096 and supervisor.environ[WORKER_OF] == "n@10.0.0.1"
    # All workers of a node count by the same CPUs, those of the smallest.
    assert node.asked == [("{}", 5, 1.0, 8.0, "n@10.0.0.1", under_test.MODEL_TIMEOUT_S)] * 3
    assert worker.describe_order()[2] is False
    worker.stop(0.0)
    assert worker.describe_order()[2] is True


def test_a_worker_that_tries_again_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, True, monkeypatch)
    monkeypatch.setattr(under_test, "retry_delay_s", lambda failures: 3600.0)
    worker = node.start(LACKS)
    assert worker.wait_status(0, 10.0).status.state == "waiting"
    began_s = time.monotonic()
    worker.stop(0.0)
    assert time.monotonic() - began_s < 10.0


def test_tries_become_rarer() -> None:
    assert [retry_delay_s(failures) for failures in (1, 2, 3, 4, 5, 50, 100_000)] == [
        5.0,
        10.0,
        20.0,
        40.0,
        60.0,
        60.0,
        60.0,
    ]
