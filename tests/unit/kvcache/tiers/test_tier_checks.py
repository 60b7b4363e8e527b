"""Tiers that cannot be are refused before a deployment starts, each with what would be right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from kvcache.tiers.tier_checks import (
    TierRequest,
    check_chunk_fits,
    check_disk,
    check_host_memory,
    check_tiers,
    filesystem_type,
)
from tests.unit.kvcache.tiers.stored_chunks import open_store

GIB = 1 << 30
MOUNTS = """21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 21 0:40 / /mnt/far rw,relatime - nfs4 server:/export rw
31 30 0:41 / /mnt/far/near\\040here rw - tmpfs tmpfs rw
"""


def refusal(error: pytest.ExceptionInfo[ConfigError]) -> str:
    lines = error.value.lines()
    assert error.value.fix and len(lines) <= 6
    return " ".join(lines)


def test_a_bound_smaller_than_a_chunk_is_refused_with_one_that_is_not() -> None:
    with pytest.raises(ConfigError, match="--kv-host-bytes 1000000 has no room for one chunk") as refused:
        check_chunk_fits("--kv-host-bytes", 1_000_000, 393_216)
    assert "use --kv-host-bytes 2MiB or more" in refusal(refused)
    check_chunk_fits("--kv-host-bytes", 2 << 20, 393_216)


def test_more_than_there_is_of_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than the memory that is free") as refused:
        check_host_memory(3 * GIB, GIB, base=tmp_path)
    assert "512MiB or less" in refusal(refused)
    with pytest.raises(ConfigError, match="larger than what is free in") as refused:
        check_host_memory(1 << 60, 1 << 61, base=tmp_path)
    assert "--shm-size" in refusal(refused)
    with pytest.raises(ConfigError, match="no shared memory") as refused:
        check_host_memory(GIB, 2 * GIB, base=tmp_path / "absent")
    refusal(refused)


def test_folders_on_disk_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_disk(1 << 20, tmp_path / "new" / "folder")
    with pytest.raises(ConfigError, match="larger than what is free in") as refused:
        check_disk(1 << 60, tmp_path / "new")
    refusal(refused)
    monkeypatch.setattr("kvcache.tiers.tier_checks.filesystem_type", lambda _: "nfs4")
    with pytest.raises(ConfigError, match="network file system") as refused:
        check_disk(1 << 20, tmp_path / "new")
    refusal(refused)
    monkeypatch.undo()
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="others can read") as refused:
        check_disk(1 << 20, tmp_path / "open")
    assert "chmod 700" in refusal(refused)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="nothing can be written") as refused:
        check_disk(1 << 20, tmp_path / "new")
    refusal(refused)


def test_what_is_stored_there_already_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(tmp_path / "kv").close()
    (tmp_path / "kv" / "chunks" / "ab").write_bytes(bytes(5 << 20))
    monkeypatch.setattr(
        "kvcache.tiers.tier_checks.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20})()
    )
    check_disk(6 << 20, tmp_path / "kv")
    with pytest.raises(ConfigError):
        check_disk((6 << 20) + 1, tmp_path / "kv")


def test_the_file_system_of_a_path_is_found(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    found = {
        name: filesystem_type(Path(name), mounts)
        for name in ("/home", "/mnt/far", "/mnt/far/x", "/mnt/farther", "/mnt/far/near here/x")
    }
    assert list(found.values()) == ["ext4", "nfs4", "nfs4", "ext4", "tmpfs"]
    assert filesystem_type(Path("/proc")) == "proc" and filesystem_type(Path("/"), tmp_path / "absent") == ""


def test_a_request_for_tiers_is_checked_as_a_whole(tmp_path: Path) -> None:
    assert TierRequest.of(None, None, None) is None
    request = TierRequest.of(2 << 20, 3 << 20, tmp_path / "kv")
    assert request == TierRequest(2 << 20, 3 << 20, str(tmp_path / "kv"))
    check_tiers(request, 393_216, GIB)
    (tmp_path / "kv").write_text("")
    with pytest.raises(ConfigError, match="no folder"):
        check_tiers(request, 393_216, GIB)
