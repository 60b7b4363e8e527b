"""Preparers work on what clients send: nothing in their memory opens the service."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.gateway_process import serving, until


def memory(pid: int) -> Iterator[bytes]:
    """What a process can write to, region by region."""
    with (
        open(f"/proc/{pid}/maps", encoding="ascii", errors="replace") as maps,
        open(f"/proc/{pid}/mem", "rb", buffering=0) as content,
    ):
        for line in maps:
            bounds, access, *_ = line.split()
            if access.startswith("rw"):
                start, end = (int(bound, 16) for bound in bounds.split("-"))
                content.seek(start)
                yield content.read(end - start)


def test_preparers_never_had_a_key(tmp_path: Path) -> None:
    api, admin, figures, operator = (secrets.token_hex(20) for _ in range(4))
    keys: dict[str, Any] = {
        "api_keys": (api,),
        "priority_keys": (api,),
        "admin_key": admin,
        "metrics_keys": (figures,),
        "status_keys": (operator,),
    }
    with serving(tmp_path, **keys) as gateway:
        process = psutil.Process(gateway.process.pid)
        until(lambda: len(process.children(recursive=True)) >= 3)  # the fork server and some preparers
        looked_for = [key.encode() for key in (api, admin, figures, operator)]
        try:
            known = {key for region in memory(process.pid) for key in looked_for if key in region}
        except PermissionError:
            pytest.skip("this machine does not let a process look into another one")
        assert known == set(looked_for), "the gateway needs them"
        for child in process.children(recursive=True):
            assert not any(key in region for region in memory(child.pid) for key in looked_for), child
        for key, status in ((api, 200), (admin, 401), ("none", 401)):
            answer = gateway.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status
