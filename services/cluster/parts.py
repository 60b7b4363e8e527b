"""What a deployment consists of, as data. Does not import Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.config import GatewaySpec, WorkerSpec


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start, and where each part's log goes."""

    workers: tuple[WorkerSpec, ...]
    gateway: GatewaySpec
    logs: Path
    worker_module: str = "services.worker"
    gateway_module: str = "services.gateway"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"
