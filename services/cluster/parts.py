"""What a deployment consists of, as data. Does not import Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.config import GatewaySpec, WorkerSpec


@dataclass(frozen=True, slots=True)
class Bundle:
    """Devices of one node that a worker needs; bundles of one group are on the same node."""

    worker: str
    devices: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start, what must be placed together, and where each part's log goes.

    Each worker is in one of `groups`. `budget` devices are the most that may ever be held.
    """

    workers: tuple[WorkerSpec, ...]
    gateway: GatewaySpec
    logs: Path
    groups: tuple[tuple[Bundle, ...], ...]
    budget: int
    worker_module: str = "services.worker"
    gateway_module: str = "services.gateway"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"
