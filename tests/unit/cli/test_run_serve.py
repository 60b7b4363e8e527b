"""`diptych serve` looks at the folder for KV on disk before it starts anything, where it is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diptych.config.load import LoadedConfig
from diptych.config.options import Config
from services.cli.serve import run
from services.host.exit_codes import OK, USAGE
from tests.unit.kvcache.tiers.stored_chunks import open_store


class StartedRun:
    """Stands for a deployment that comes up."""

    def __init__(self, *_: Any) -> None:
        pass

    async def run_until_stopped(self) -> int:
        return OK


@pytest.mark.parametrize(("ray_address", "status"), [(None, USAGE), ("127.0.0.1:6379", OK)])
def test_workers_that_are_adopted_may_use_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_address: str | None, status: int
) -> None:
    monkeypatch.setattr(run, "_choose_run", lambda _: StartedRun)
    folder = tmp_path / "kv"
    config = Config(
        model="tiny",
        kv_host_bytes=64 << 20,
        kv_disk_bytes=64 << 20,
        kv_disk_folder=folder,
        ray_address=ray_address,
    )
    workers = open_store(folder)
    assert run.run_serve(LoadedConfig(config, {}), None, tmp_path / "run") == status
    workers.close()
    assert run.run_serve(LoadedConfig(config, {}), None, tmp_path / "run") == OK
