"""Key files: made once, readable by their owner only, and told of clearly when they are not right."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from diptych.keys import load_server_keys, load_transfer_key, load_worker_keys, make_keys

FILES = ["server.public", "server.secret", "transfer.key", "worker.public", "worker.secret"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_files_are_for_their_owner_only(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in FILES} == {0o600}


def test_the_umask_does_not_matter(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_keys(tmp_path / "open")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "open" / "server.secret").stat().st_mode) == 0o600
    load_server_keys(tmp_path / "open")


def test_both_sides_fit_together(folder: Path) -> None:
    server, worker = load_server_keys(folder), load_worker_keys(folder)
    assert server.worker_public == worker.public and len(server.worker_raw) == 32
    assert len({server.secret, worker.secret, worker.public, worker.server_public}) == 4
    assert len(load_transfer_key(folder)) == 32


def test_new_keys_replace_old_ones(folder: Path) -> None:
    before = load_server_keys(folder), load_transfer_key(folder)
    make_keys(folder)
    assert before[0] != load_server_keys(folder) and before[1] != load_transfer_key(folder)


def load_all(folder: Path) -> None:
    load_server_keys(folder)
    load_worker_keys(folder)
    load_transfer_key(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fault", ["missing", "open", "short", "noise"])
def test_a_key_file_that_is_not_right_is_named(folder: Path, name: str, fault: str) -> None:
    path = folder / name
    if fault == "missing":
        path.unlink()
    elif fault == "open":
        path.chmod(0o640)
    else:
        path.write_bytes(path.read_bytes()[:-1] if fault == "short" else b"\xff" * 40)
    with pytest.raises(ConfigError) as told:
        load_all(folder)
    assert str(path) in told.value.what and told.value.fix and len(told.value.lines()) <= 6


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write keys"):
        make_keys(tmp_path / "file" / "keys")
