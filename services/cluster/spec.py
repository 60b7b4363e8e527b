"""Describes what a deployment consists of, as data. Does not import Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.specs import GatewaySpec, WorkerSpec

# The `ChildStatus.ended` of a worker whose actor died.
SUPERVISOR_DIED = "its supervisor died"


@dataclass(frozen=True, slots=True)
class Bundle:
    """The devices that a worker needs on one node; bundles of the same group are on the same node.

    `resources` are the Ray resources that it takes; without any, one CPU for each device.
    """

    worker: str
    devices: int = 1
    resources: tuple[tuple[str, float], ...] = ()

    @property
    def demand(self) -> dict[str, float]:
        """The Ray resources that it takes, by name."""
        return dict(self.resources) or {"CPU": float(self.devices)}


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """How a deployment runs in a Ray cluster that others started.

    `namespace` is the deployment's name in the cluster. Each node looks for the model by `question`, a
    `services.host.model_probe.ProbeRequest` in JSON, for at most `max_workers` workers (0: bulk workers,
    which find out themselves what fits). `node_keys_dir` is a folder with the workers' keys on every node; empty if
    they are sent, sealed.
    """

    namespace: str
    question: str
    max_workers: int
    node_keys_dir: str = ""
    pin_cores: bool = True


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """The processes to start, which of them must share a node, and where their logs go.

    Each worker is in one of `node_groups`. At most `device_budget` devices may be held at any time.
    """

    workers: tuple[WorkerSpec, ...]
    gateway: GatewaySpec
    logs: Path
    node_groups: tuple[tuple[Bundle, ...], ...]
    device_budget: int
    worker_module: str = "services.worker"
    gateway_module: str = "services.gateway"

    def log_path(self, name: str) -> Path:
        """The log file of the process `name`."""
        return self.logs / f"{name}.log"
