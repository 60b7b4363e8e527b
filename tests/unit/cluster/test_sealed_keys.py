"""Keys that travel sealed: only the process that they are for can open them, and only for its own worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from diptych.channel.keys import (
    load_transfer_key,
    load_worker_keys,
    make_keys,
    read_worker_keys,
    write_worker_keys,
)
from diptych.errors import ConfigError
from services.cluster.sealed_keys import open_keys, seal_keys

CONTEXT = "diptych/prefill-0"


@pytest.fixture
def private() -> X25519PrivateKey:
    return X25519PrivateKey.generate()


def test_keys_arrive_and_the_gateways_secret_does_not(private: X25519PrivateKey, tmp_path: Path) -> None:
    make_keys(tmp_path / "here")
    sealed = seal_keys(read_worker_keys(tmp_path / "here"), private.public_key().public_bytes_raw(), CONTEXT)
    there = tmp_path / "there"
    write_worker_keys(there, open_keys(sealed, private, CONTEXT))
    assert load_worker_keys(there) == load_worker_keys(tmp_path / "here")
    assert load_transfer_key(there) == load_transfer_key(tmp_path / "here")
    for file in (tmp_path / "here").iterdir():
        assert file.read_bytes() not in sealed
        assert (there / file.name).exists() == (file.name != "server.secret")
    assert (there.stat().st_mode & 0o777, (there / "worker.secret").stat().st_mode & 0o777) == (0o700, 0o600)


def test_nobody_else_opens_them(private: X25519PrivateKey) -> None:
    public = private.public_key().public_bytes_raw()
    sealed = seal_keys({"transfer.key": b"k" * 32}, public, CONTEXT)
    assert open_keys(sealed, private, CONTEXT) == {"transfer.key": b"k" * 32}
    for changed, key, context in (
        (sealed, X25519PrivateKey.generate(), CONTEXT),
        (sealed, private, "diptych/prefill-1"),
        (sealed[:-1] + bytes([sealed[-1] ^ 1]), private, CONTEXT),
        (bytes([sealed[0] ^ 1]) + sealed[1:], private, CONTEXT),
        (sealed[:31], private, CONTEXT),
        (b"", private, CONTEXT),
    ):
        with pytest.raises(ConfigError, match="cannot be opened"):
            open_keys(changed, key, context)
    assert seal_keys({"transfer.key": b"k" * 32}, public, CONTEXT) != sealed


def test_a_worker_takes_no_other_files(private: X25519PrivateKey, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no keys of a worker"):
        write_worker_keys(tmp_path, {"../.bashrc": b""})
    with pytest.raises(ConfigError, match="cannot be sealed"):
        seal_keys({}, b"short", CONTEXT)
