"""A worker's tiers are opened as its specification says, or refused with what would be right."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest

from diptych.errors import ConfigError
from diptych.specs import WorkerSpec
from kvcache.tiers.store_folder import INDEX_FILE
from kvcache.tiers.tier_checks import deployment_id
from tests.engine.tiers.tiered_engine import MIB, TieredEngine
from worker.tiers.build_tiers import build_tiers
from worker.tiers.worker_tiers import WorkerTiers

KEY = bytes(range(32))
PLAIN = WorkerSpec(
    worker="prefill-0", role="prefill", gateway="tcp://127.0.0.1:1", keys_dir="/k", model="tiny"
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("worker.tiers.build_tiers.HOST_BASE", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TieredEngine:
    made = TieredEngine("raw", tmp_path_factory.mktemp("tiers"))
    made.close()
    return made


def build(engine: TieredEngine, **settings: object) -> WorkerTiers | None:
    spec = msgspec.structs.replace(PLAIN, **settings)
    return build_tiers(spec, KEY, engine.sharded, engine.kv)


def test_a_worker_without_the_options_has_no_tiers(base: Path, engine: TieredEngine) -> None:
    assert build(engine) is None and not list(base.iterdir())


def test_workers_of_a_deployment_share_a_folder_which_goes_with_the_last(
    base: Path, engine: TieredEngine
) -> None:
    disk = {"kv_disk_bytes": 32 * MIB, "kv_disk_folder": str(base / "disk")}
    both = [build(engine, kv_host_bytes=32 * MIB, **disk) for _ in range(2)]
    assert {path.name for path in base.iterdir()} == {"disk", f"diptych-kv-{deployment_id(KEY)}"}
    for tiers in both:
        assert tiers is not None and list(tiers.stats) == ["host", "disk"]
        tiers.close()
    assert [path.name for path in base.iterdir()] == ["disk"]


def test_what_cannot_be_used_is_refused_and_nothing_is_left(base: Path, engine: TieredEngine) -> None:
    (base / "file").write_text("")
    disk = {"kv_disk_bytes": 32 * MIB, "kv_disk_folder": str(base / "file")}
    for settings, said in (
        ({"kv_host_bytes": MIB}, "has no room for one chunk"),
        ({"kv_host_bytes": 32 * MIB} | disk, "is no folder"),
        ({"kv_host_bytes": 32 * MIB, "kv_disk_bytes": MIB}, "has no room for one chunk"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            build(engine, **settings)
        assert refused.value.fix and len(refused.value.lines()) <= 6
    assert [path.name for path in base.iterdir()] == ["file"]


def test_an_index_that_another_program_has_locked_is_refused(base: Path, engine: TieredEngine) -> None:
    settings = {"kv_host_bytes": 32 * MIB, "kv_disk_bytes": 32 * MIB, "kv_disk_folder": str(base / "disk")}
    first = build(engine, **settings)
    assert first is not None
    first.close()
    other = sqlite3.connect(base / "disk" / INDEX_FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ConfigError, match="KV cannot be stored") as refused:
        build(engine, **settings)
    assert "locked" in refused.value.why and len(refused.value.lines()) <= 6
    other.close()
