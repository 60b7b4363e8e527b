"""The secrets of one deployment, as files: two CURVE key pairs and the key that authenticates transfer tickets.

server.secret server.public   the gateway's pair; workers know the public half
worker.secret worker.public   one pair for all workers; the gateway admits no other
transfer.key                  32 random bytes, shared by all workers, unknown to the gateway's clients
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from diptych.errors import ConfigError

TRANSFER_KEY_BYTES = 32
_CURVE_CHARS = 40  # of a 32-byte key in Z85


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What the gateway holds (Z85): its secret key, and the one public key that may enter."""

    secret: bytes
    worker_public: bytes

    @property
    def worker_raw(self) -> bytes:
        """The worker's public key as it travels in the handshake, 32 bytes."""
        return z85.decode(self.worker_public)


@dataclass(frozen=True, slots=True)
class WorkerKeys:
    """What a worker holds (Z85): its own pair, and the only gateway that it talks to."""

    secret: bytes
    public: bytes
    server_public: bytes


def make_keys(folder: Path | str) -> None:
    """Write new keys into `folder` (0700, made if need be; files 0600), replacing older ones.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        for owner in ("server", "worker"):
            public, secret = zmq.curve_keypair()
            _write(folder / f"{owner}.public", public)
            _write(folder / f"{owner}.secret", secret)
        _write(folder / "transfer.key", os.urandom(TRANSFER_KEY_BYTES))
    except OSError as error:
        raise ConfigError(
            f"cannot write keys into {folder}", str(error), "name a folder that this user may write"
        ) from error


def _write(path: Path, content: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    fresh.replace(path)


def load_server_keys(folder: Path | str) -> ServerKeys:
    """The gateway's keys; raises ConfigError if one is missing, unreadable, open to others or malformed."""
    return ServerKeys(_curve(folder, "server.secret"), _curve(folder, "worker.public"))


def load_worker_keys(folder: Path | str) -> WorkerKeys:
    """A worker's keys; raises ConfigError if one is missing, unreadable, open to others or malformed."""
    return WorkerKeys(
        _curve(folder, "worker.secret"), _curve(folder, "worker.public"), _curve(folder, "server.public")
    )


def load_transfer_key(folder: Path | str) -> bytes:
    """The 32 bytes behind ticket MACs; raises ConfigError if the file is missing, open to others or malformed."""
    path = Path(folder) / "transfer.key"
    key = _read(path)
    if len(key) != TRANSFER_KEY_BYTES:
        raise _malformed(path, f"{len(key)} bytes instead of {TRANSFER_KEY_BYTES}")
    return key


def _curve(folder: Path | str, name: str) -> bytes:
    path = Path(folder) / name
    key = _read(path)
    try:
        if len(key) == _CURVE_CHARS and len(z85.decode(key)) == 32:
            return key
    except (KeyError, ValueError):
        pass
    raise _malformed(path, "not 40 characters of Z85")


def _read(path: Path) -> bytes:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        key = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be read",
            error.strerror or str(error),
            "start the deployment once with `diptych serve`, or copy its key folder to this host",
        ) from error
    if mode & 0o077:
        raise ConfigError(
            f"the key file {path} is open to others", f"its mode is {mode:04o}", f"chmod 600 {path}"
        )
    return key


def _malformed(path: Path, why: str) -> ConfigError:
    return ConfigError(f"the key file {path} holds no key", why, "make new keys for the whole deployment")
