"""The secrets of one deployment, as files: two CURVE key pairs, and the key that authenticates transfer tickets.

server.secret server.public   the gateway's pair; workers know the public half
worker.secret worker.public   one pair for all workers; the gateway admits no other
transfer.key                  32 random bytes, shared by all workers, unknown to the gateway's clients
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from diptych.errors import ConfigError

TRANSFER_KEY_BYTES = 32
# The most bytes of a key file that are read.
MAX_KEY_BYTES = 4096
WORKER_FILES = ("server.public", "worker.secret", "worker.public", "transfer.key")
KEY_FILES = ("server.secret", *WORKER_FILES)
# Length of a 32-byte key in Z85 encoding, in characters.
_CURVE_CHARS = 40


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The gateway's keys (Z85): its own secret key, and the only public key that it admits."""

    secret: bytes
    worker_public: bytes

    @property
    def worker_raw(self) -> bytes:
        """The workers' public key in binary (32 bytes), as the handshake contains it."""
        return z85.decode(self.worker_public)


@dataclass(frozen=True, slots=True)
class WorkerKeys:
    """A worker's keys (Z85): its own pair, and the public key of the only gateway that it connects to."""

    secret: bytes
    public: bytes
    server_public: bytes


def make_keys(folder: Path | str) -> None:
    """Write new keys into `folder` (created if missing, mode 0700; files 0600), replacing older ones.

    The gateway's secret key is written last: a folder that has it has all the others.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = Path(folder)
    with _writable_folder(folder):
        _write_private(folder / "transfer.key", os.urandom(TRANSFER_KEY_BYTES))
        for owner in ("worker", "server"):
            public, secret = zmq.curve_keypair()
            _write_private(folder / f"{owner}.public", public)
            _write_private(folder / f"{owner}.secret", secret)


def copy_worker_keys(folder: Path | str, workers: Path | str) -> None:
    """Copy the keys that a worker needs from `folder` to `workers` (created if missing, mode 0700; files 0600).

    The gateway's secret key is not copied: a worker that has it could impersonate the gateway.

    Raises:
        ConfigError: a key file is missing, unreadable or open to others, or `workers` cannot be written.
    """
    write_worker_keys(workers, read_worker_keys(folder))


def read_worker_keys(folder: Path | str) -> dict[str, bytes]:
    """What a worker needs of the keys in `folder`, by file name; the gateway's secret key is not among them.

    Raises:
        ConfigError: a key file is missing, unreadable or open to others.
    """
    return {name: _read_key_file(Path(folder) / name) for name in WORKER_FILES}


def write_worker_keys(folder: Path | str, keys: Mapping[str, bytes]) -> None:
    """Write a worker's `keys`, by file name, into `folder` (created if missing, mode 0700; files 0600).

    Raises:
        ConfigError: the folder cannot be written, or a name is not that of a worker's key file.
    """
    if not keys.keys() <= set(WORKER_FILES):
        raise ConfigError("these are no keys of a worker", ", ".join(sorted(keys)))
    with _writable_folder(Path(folder)):
        for name, key in keys.items():
            _write_private(Path(folder) / name, key)


def make_client_key(file: Path, mode: int = 0o600) -> bool:
    """Write a new secret for clients, 48 hexadecimal digits, into `file`, unless it exists; returns whether it did.

    No newline follows: a Secret of Kubernetes keeps one, and the Prometheus operator would send it with the key.

    Raises:
        ConfigError: it cannot be written.
    """
    if file.exists():
        return False
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_private(file, secrets.token_hex(24).encode(), mode)
    except OSError as error:
        raise ConfigError(
            f"cannot write the key {file}", str(error), "name a file in a folder that this user may write"
        ) from error
    return True


@contextlib.contextmanager
def _writable_folder(folder: Path) -> Iterator[None]:
    """Create `folder` or make it private; an OSError within the block becomes a ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write keys into {folder}", str(error), "name a folder that this user may write"
        ) from error


def _write_private(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically, with this mode. Several processes may do so at the same time."""
    descriptor, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise


def load_server_keys(folder: Path | str) -> ServerKeys:
    """The gateway's keys. Raises ConfigError if one is missing, unreadable, open to others or malformed."""
    return ServerKeys(_read_curve_key(folder, "server.secret"), _read_curve_key(folder, "worker.public"))


def load_worker_keys(folder: Path | str) -> WorkerKeys:
    """A worker's keys. Raises ConfigError if one is missing, unreadable, open to others or malformed."""
    return WorkerKeys(
        _read_curve_key(folder, "worker.secret"),
        _read_curve_key(folder, "worker.public"),
        _read_curve_key(folder, "server.public"),
    )


def load_transfer_key(folder: Path | str) -> bytes:
    """The 32 bytes that sign tickets. Raises ConfigError if the file is missing, open to others or malformed."""
    path = Path(folder) / "transfer.key"
    key = _read_key_file(path)
    if not _is_valid_key(path.name, key):
        raise _malformed_key(path, f"{len(key)} bytes instead of {TRANSFER_KEY_BYTES}")
    return key


def _read_curve_key(folder: Path | str, name: str) -> bytes:
    """The CURVE key in a file of `folder`. Raises ConfigError if it is missing or malformed."""
    path = Path(folder) / name
    key = _read_key_file(path)
    if not _is_valid_key(name, key):
        raise _malformed_key(path, "not 40 characters of Z85")
    return key


def _is_valid_key(name: str, content: bytes) -> bool:
    """Whether `content` is a valid key for the key file `name`."""
    if name == "transfer.key":
        return len(content) == TRANSFER_KEY_BYTES
    with contextlib.suppress(KeyError, ValueError):
        return len(content) == _CURVE_CHARS and len(z85.decode(content)) == 32
    return False


class KeyBackup:
    """Keeps the key files of a folder in memory, and writes them again when they are lost or damaged.

    Programs that clean temporary folders remove files that were not read for days, and keys are read only when
    processes start. Several processes may keep a backup of the same folder.
    """

    def __init__(self, folder: Path | str, names: Sequence[str] = KEY_FILES) -> None:
        """`names` are the key files to keep: a worker keeps `WORKER_FILES` only."""
        self._folder, self._names = Path(folder), tuple(names)
        self._kept: dict[str, bytes] = {}

    def restore_keys(self) -> None:
        """Remember the valid keys in the folder, and write remembered keys that are missing or damaged now.

        Raises:
            OSError: a key cannot be written.
            ConfigError: the folder, its parent, or a file belongs to another user, or is open to others.
        """
        for name in self._names:
            path = self._folder / name
            found = _read_key_file(path) if path.exists() else b""
            if _is_valid_key(name, found):
                self._kept[name] = found
            elif name in self._kept:
                _make_private(self._folder)
                _write_private(path, self._kept[name])


def _make_private(folder: Path) -> None:
    """Create a private folder (0700) with its missing parents; other processes may do so at the same time.

    Raises:
        OSError: a folder cannot be created.
        ConfigError: the folder belongs to another user or is open to others, or its parent belongs to another user.
    """
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=0o700)
    _check_owner(folder.parent, folder.parent.stat())
    _check_private(folder, folder.stat())


def _check_private(path: Path, found: os.stat_result, *, mounted: bool = False) -> None:
    """Raises ConfigError unless `path` belongs to this user or root, and is closed to all others.

    `mounted`: where root owns it and this process is another user, the group may read it. So Kubernetes mounts a
    secret into a pod that does not run as root: the group is that of the pod alone (`fsGroup`).
    """
    _check_owner(path, found)
    by_group = mounted and found.st_uid == 0 != os.geteuid()
    if found.st_mode & (0o037 if by_group else 0o077):
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"{path} with keys is open to others", f"its mode is {mode:04o}", f"chmod go= {path}"
        )


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Raises ConfigError unless `path` belongs to this user or root."""
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path} with keys belongs to another user",
            f"to user {found.st_uid}, and this process is user {os.geteuid()}",
            f"chown {os.geteuid()} {path}, if its content is yours; else make new keys",
        )


def _read_key_file(path: Path) -> bytes:
    """The content of a key file. Raises ConfigError if it is unreadable, or open to others."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            key = file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be read",
            error.strerror or str(error),
            "start the deployment once with `diptych serve`, or copy its key folder to this host",
        ) from error
    _check_private(path, found, mounted=True)
    return key


def _malformed_key(path: Path, why: str) -> ConfigError:
    return ConfigError(f"the key file {path} holds no key", why, "make new keys for the whole deployment")
