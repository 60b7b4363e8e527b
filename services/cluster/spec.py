"""Describes what a deployment consists of, as data. Does not import Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.specs import GatewaySpec, WorkerSpec

# The `ChildStatus.ended` of a worker whose actor died.
SUPERVISOR_DIED = "its supervisor died"


@dataclass(frozen=True, slots=True)
class Bundle:
    """The devices that a worker needs on one node; bundles of the same group are on the same node."""

    worker: str
    devices: int = 1


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
