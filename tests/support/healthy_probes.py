"""Probes of a gateway without workers that is always alive and ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.openai.schemas.response_schema import Readiness


class HealthyProbes:
    """Implements `services.gateway.api_routes.HealthProbes`."""

    def is_alive(self) -> bool:
        return True

    async def check_readiness(self, known: bool = True) -> Readiness:
        return Readiness(ready=True, reasons=[])

    def status_report(self) -> Mapping[str, Any]:
        return {}
