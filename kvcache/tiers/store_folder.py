"""The folder of a chunk store: private to one user, used by one deployment at a time, by many processes.

    lock           held while the folder is claimed or left, and while its index is made anew
    deployment     who uses the folder; each process that does holds a shared lock on it
    owners/NAME    locked by a process while it lives: what a dead one was writing is cleared away
    partial/       chunks that are being written       chunks/  complete ones, named by their addresses

The kernel drops locks with the process that held them, so that no kill leaves anything that looks alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from diptych.errors import ConfigError

INDEX_FILE, LOCK_FILE, DEPLOYMENT_FILE = "index.sqlite3", "lock", "deployment"
CHUNKS, PARTIAL, OWNERS = "chunks", "partial", "owners"
FOLDERS = frozenset({CHUNKS, PARTIAL, OWNERS})
PARTS = FOLDERS | {LOCK_FILE, DEPLOYMENT_FILE}
# After this many seconds a folder that nobody has claimed is no longer one that is just being made.
UNCLAIMED_S = 60.0
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def check_folder(folder: Path) -> None:
    """Raises ConfigError if `folder` is there and cannot be that of a chunk store. Changes nothing."""
    try:
        state = os.lstat(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} for KV cannot be used", str(error), "name another one"
        ) from None
    if not stat.S_ISDIR(state.st_mode):
        raise ConfigError(f"{folder} is no folder", "KV is stored in a folder", "name another one")
    _check_private(folder, state)
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be read", str(error), "name another one") from None
    for name in names:
        _check_part(folder, name)


def _check_private(path: Path, state: os.stat_result) -> None:
    """Raises ConfigError if a folder or file is another user's, or others can use it."""
    if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        kind, mode = ("folder", "700") if stat.S_ISDIR(state.st_mode) else ("file", "600")
        raise ConfigError(
            f"others can read or write the {kind} {path}",
            f"it belongs to user {state.st_uid}, with mode {stat.S_IMODE(state.st_mode):o}; KV tells what prompts say",
            f"chmod {mode} {path}, as its owner, or name another one",
        )


def _check_part(folder: Path, name: str) -> None:
    """Raises ConfigError if what is in the folder under this name is no part of a store, or is somewhere else."""
    if name not in PARTS and not name.startswith(INDEX_FILE):
        raise ConfigError(
            f"the folder {folder} holds other things than KV",
            f"for example {name!r}",
            "name an empty folder, or one that is not there",
        )
    try:
        state = os.lstat(folder / name)
    except FileNotFoundError:
        # Another process of the deployment has just removed it.
        return
    is_folder = name in FOLDERS
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(state.st_mode):
        raise ConfigError(
            f"{folder / name} is no {'folder' if is_folder else 'file'}",
            "what a link leads to is not part of the store, and would be removed with it",
            f"remove {folder / name}, or name another folder",
        )
    _check_private(folder / name, state)


def check_unused(folder: Path) -> None:
    """Raises ConfigError if a deployment uses the folder."""
    if is_used(folder):
        raise _in_use_error(folder)


def is_used(folder: Path) -> bool:
    """Whether a process uses the folder, or is about to claim or leave it. Never waits."""
    try:
        fd = os.open(folder / DEPLOYMENT_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        with _hold_lock(folder, fcntl.LOCK_NB):
            return not _is_unused(fd)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def using_processes(folder: Path) -> list[int]:
    """The ids of the processes that use the folder, and of those that died in it. Raises OSError, ValueError."""
    return [int(name.partition("-")[0]) for name in os.listdir(folder / OWNERS)]


def _in_use_error(folder: Path) -> ConfigError:
    return ConfigError(
        f"another deployment uses the folder {folder}",
        "a folder for KV belongs to one deployment at a time",
        "name another folder, or stop the other deployment",
    )


@contextlib.contextmanager
def _hold_lock(folder: Path, flags: int = 0) -> Iterator[int]:
    """Hold the folder's lock alone. Raises BlockingIOError with LOCK_NB, and FileNotFoundError without the folder."""
    while True:
        fd = os.open(folder / LOCK_FILE, _OPEN, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | flags)
            if os.fstat(fd).st_nlink:
                yield fd
                return
        finally:
            os.close(fd)


class FolderClaim:
    """The use of a folder by one process of a deployment, until `release`.

    Raises:
        ConfigError: it is no folder for KV, or another deployment uses it.
        OSError: it cannot be made or written.
    """

    def __init__(self, folder: Path, deployment: str) -> None:
        check_folder(folder)
        self.folder = folder
        while True:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError), _hold_lock(folder):
                self._deployment_fd = self._enter(deployment)
                break
        self.owner = f"{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self._owner_fd = self._make_owner()
        except BaseException:
            os.close(self._deployment_fd)
            raise

    def _enter(self, deployment: str) -> int:
        """Open the file that says who uses the folder, with a shared lock on it."""
        for name in sorted(FOLDERS):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        fd = os.open(self.folder / DEPLOYMENT_FILE, _OPEN, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, deployment.encode(), 0)
        except BlockingIOError:
            if os.pread(fd, 256, 0).decode(errors="replace") != deployment:
                os.close(fd)
                raise _in_use_error(self.folder) from None
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def _make_owner(self) -> int:
        """Make and lock the file of this process; another one that found it before it was locked has removed it."""
        while True:
            fd = os.open(self.folder / OWNERS / self.owner, _OPEN, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)

    def path_of(self, address: bytes) -> Path:
        """The file of a complete chunk."""
        return self.folder / CHUNKS / address.hex()

    def partial_of(self, address: bytes) -> Path:
        """The file of a chunk that this process is writing."""
        return self.folder / PARTIAL / f"{self.owner}.{address.hex()}"

    def owners(self) -> set[str]:
        """The processes that use the folder, and those that died and were not yet forgotten."""
        return set(os.listdir(self.folder / OWNERS))

    def dead_owners(self) -> Iterator[str]:
        """The processes that died while they used the folder; each is forgotten once the caller asks for the next."""
        for name in os.listdir(self.folder / OWNERS):
            if name == self.owner:
                continue
            path = self.folder / OWNERS / name
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield name
                path.unlink(missing_ok=True)
            except BlockingIOError:
                continue
            finally:
                os.close(fd)

    def release(self, remove: bool) -> None:
        """The process does not use the folder any more; with `remove` the last one takes it away. Idempotent."""
        if self._owner_fd < 0:
            return
        with contextlib.suppress(OSError):
            (self.folder / OWNERS / self.owner).unlink()
        os.close(self._owner_fd)
        self._owner_fd = -1
        with contextlib.suppress(OSError), _hold_lock(self.folder):
            if remove and _is_unused(self._deployment_fd):
                _remove_folder(self.folder)
        os.close(self._deployment_fd)


def _is_unused(deployment_fd: int) -> bool:
    """Whether no other process uses the folder of this file; the caller holds the folder's lock."""
    try:
        fcntl.flock(deployment_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_folder(folder: Path) -> None:
    """Remove a folder whose lock the caller holds: first under its name, so that nobody claims what is just going."""
    gone = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
    os.rename(folder, gone)
    shutil.rmtree(gone)


def remove_leftovers(base: Path, prefix: str, keep: str = "") -> int:
    """Remove the folders `prefix`* of this user in `base` that no process uses, but for `keep`; returns how many."""
    removed = 0
    for folder in base.glob(f"{prefix}*"):
        if folder.name == keep:
            continue
        with contextlib.suppress(OSError):
            state = os.lstat(folder)
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
                continue
            with _hold_lock(folder, fcntl.LOCK_NB):
                if not (folder / DEPLOYMENT_FILE).exists():
                    unused = time.time() - state.st_mtime > UNCLAIMED_S
                else:
                    fd = os.open(folder / DEPLOYMENT_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        unused = _is_unused(fd)
                    finally:
                        os.close(fd)
                if unused:
                    _remove_folder(folder)
                    removed += 1
    return removed
