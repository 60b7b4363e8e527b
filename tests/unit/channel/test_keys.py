"""Key files: made once, readable by their owner only, and refused clearly when they are not right."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diptych.channel import keys as key_files
from diptych.channel.keys import (
    KeyBackup,
    copy_worker_keys,
    load_server_keys,
    load_transfer_key,
    load_worker_keys,
    make_client_key,
    make_keys,
)
from diptych.config.load import collect_api_keys, load_config, with_operator_keys
from diptych.errors import ConfigError

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


def test_workers_get_a_copy_without_the_gateway_s_secret(folder: Path, tmp_path: Path) -> None:
    workers = tmp_path / "workers"
    for _ in range(2):  # also when it is there
        copy_worker_keys(folder, workers)
        assert sorted(path.name for path in workers.iterdir()) == [
            name for name in FILES if name != "server.secret"
        ]
    assert load_worker_keys(workers) == load_worker_keys(folder)
    assert load_transfer_key(workers) == load_transfer_key(folder)
    assert stat.S_IMODE((workers / "worker.secret").stat().st_mode) == 0o600
    (folder / "transfer.key").unlink()
    with pytest.raises(ConfigError, match="transfer.key cannot be read"):
        copy_worker_keys(folder, workers)


def test_a_client_s_key_is_the_whole_file_and_is_read_with_a_newline_too(tmp_path: Path) -> None:
    """`kubectl create secret --from-file` takes the bytes as they are, and a PodMonitor sends them so."""
    file = tmp_path / "clients" / "key"
    assert make_client_key(file)
    key = file.read_bytes()
    assert re.fullmatch(rb"[0-9a-f]{48}", key)
    assert not make_client_key(file) and file.read_bytes() == key, "one that is there is kept"
    given = load_config("serve", {"api_key_file": str(file), "metrics_key_file": str(file)}, {})
    for content in (key, key + b"\n"):
        file.write_bytes(content)
        assert collect_api_keys(given).every == (key.decode(),)
        assert with_operator_keys(given).config.metrics_key == key.decode()


def test_new_keys_replace_old_ones(folder: Path) -> None:
    before = load_server_keys(folder), load_transfer_key(folder)
    make_keys(folder)
    assert before[0] != load_server_keys(folder) and before[1] != load_transfer_key(folder)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `path` belong to another user than this process's."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)


def test_a_key_that_root_has_mounted_for_a_group_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts a secret into a pod that runs as another user; never one that all may read."""
    real = os.fstat

    def of_root(descriptor: int) -> os.stat_result:
        found = list(real(descriptor))
        found[stat.ST_UID] = 0
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", of_root)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    path = folder / "transfer.key"
    path.chmod(0o440)
    assert len(load_transfer_key(folder)) == 32
    for mode in (0o444, 0o460):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="open to others"):
            load_transfer_key(folder)


def load_all(folder: Path) -> None:
    load_server_keys(folder)
    load_worker_keys(folder)
    load_transfer_key(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fault", ["missing", "open", "short", "noise", "foreign"])
def test_a_key_file_that_is_not_right_is_named(
    folder: Path, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / name
    if fault == "missing":
        path.unlink()
    elif fault == "open":
        path.chmod(0o640)
    elif fault == "foreign":
        give_away(path, monkeypatch)
    else:
        path.write_bytes(path.read_bytes()[:-1] if fault == "short" else b"\xff" * 40)
    with pytest.raises(ConfigError) as caught:
        load_all(folder)
    assert str(path) in caught.value.what and caught.value.fix and len(caught.value.lines()) <= 6


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write keys"):
        make_keys(tmp_path / "file" / "keys")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_keys_that_a_cleaner_has_removed_are_written_again(folder: Path) -> None:
    before, backup = contents(folder), KeyBackup(folder)
    backup.restore_keys()
    (folder / "transfer.key").unlink()
    backup.restore_keys()
    assert contents(folder) == before
    shutil.rmtree(folder)
    backup.restore_keys()
    assert contents(folder) == before and stat.S_IMODE(folder.stat().st_mode) == 0o700
    make_keys(folder)  # new ones are not undone
    newer = contents(folder)
    backup.restore_keys()
    assert contents(folder) == newer != before


def test_keys_are_not_written_where_another_user_has_made_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = KeyBackup(folder)
    backup.restore_keys()
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    give_away(folder, monkeypatch)
    with pytest.raises(ConfigError, match="belongs to another user"):
        backup.restore_keys()
    assert list(folder.iterdir()) == []


def test_keys_that_were_never_there_are_nobody_s(tmp_path: Path) -> None:
    KeyBackup(tmp_path / "none").restore_keys()
    assert not (tmp_path / "none").exists()


def test_processes_that_write_the_same_keys_again_do_not_collide(folder: Path) -> None:
    before, backups = contents(folder), [KeyBackup(folder) for _ in range(8)]
    for backup in backups:
        backup.restore_keys()
    with ThreadPoolExecutor(len(backups)) as threads:
        for _ in range(50):
            shutil.rmtree(folder)
            list(threads.map(KeyBackup.restore_keys, backups))
            assert contents(folder) == before


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_does_not_replace_the_key_that_is_remembered(folder: Path, name: str) -> None:
    before, backup = contents(folder), KeyBackup(folder)
    backup.restore_keys()
    os.truncate(folder / name, 0)
    backup.restore_keys()
    assert contents(folder) == before


def test_a_damaged_file_is_not_remembered(folder: Path) -> None:
    os.truncate(folder / "transfer.key", 5)
    backup = KeyBackup(folder)
    backup.restore_keys()
    (folder / "transfer.key").unlink()
    backup.restore_keys()
    assert not (folder / "transfer.key").exists()


def test_lost_folders_are_made_again_for_their_owner_only(tmp_path: Path) -> None:
    private = tmp_path / "private"
    make_keys(private / "keys")
    backup = KeyBackup(private / "keys")
    backup.restore_keys()
    shutil.rmtree(private)
    backup.restore_keys()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (private, private / "keys")] == [0o700, 0o700]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_keys_are_not_written_into_another_user_s_folder(tmp_path: Path) -> None:
    private = tmp_path / "private"
    make_keys(private / "keys")
    backup = KeyBackup(private / "keys")
    backup.restore_keys()
    shutil.rmtree(private)
    private.mkdir(mode=0o755)
    os.chown(private, 12345, -1)
    with pytest.raises(ConfigError, match="private with keys belongs to another user"):
        backup.restore_keys()
    assert not list(private.rglob("*.*"))


def test_keys_that_were_half_made_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written first: `diptych keys` takes the gateway's secret key as a sign that all are there."""
    write, folder = key_files._write_private, tmp_path / "keys"
    for count in range(len(FILES)):
        left = iter(range(count))

        def some(path: Path, content: bytes, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise OSError("no room")
            write(path, content)

        monkeypatch.setattr(key_files, "_write_private", some)
        with pytest.raises(ConfigError, match="cannot write keys"):
            make_keys(folder)
        assert not (folder / "server.secret").exists()
