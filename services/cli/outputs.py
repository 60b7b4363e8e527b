"""Whether a file can be written, found out before the work whose result it is to hold."""

from __future__ import annotations

import os
from pathlib import Path

from diptych.errors import ConfigError


def writable(path: Path, flag: str) -> None:
    """Raises ConfigError where `path`, as `flag` names it, could not be written later. Leaves nothing behind."""
    if why := unwritable(path):
        raise ConfigError(f"{flag} {path} cannot be written", why, "name another file")


def folder(path: Path, flag: str) -> None:
    """Makes the folder `path`. Raises ConfigError where that, or a file in it, is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
    else:
        why = _closed(path)
    if why:
        raise ConfigError(f"{flag} {path} cannot be written", why, "name another folder")


def unwritable(path: Path) -> str:
    """Why a file cannot be written; "" if it can."""
    parent = path.absolute().parent
    try:
        if path.is_dir():
            return "it is a folder"
        if path.is_file():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            return ""
        if path.exists():  # a device or a pipe: to open it may have effects
            return "" if os.access(path, os.W_OK) else "it takes no data"
        if not parent.is_dir():
            return f"there is no folder {path.parent}"
    except OSError as error:
        return error.strerror or str(error)
    return _closed(parent)


def _closed(parent: Path) -> str:
    """Why no file can be made in a folder; "" if it can. Tried, since permissions do not tell it all."""
    probe = parent / f".diptych-{os.getpid()}.probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except OSError as error:
        return f"{parent}: {error.strerror or error}"
    return ""
