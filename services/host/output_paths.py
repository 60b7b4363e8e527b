"""Checks that an output file can be written before the work begins whose result it will hold."""

from __future__ import annotations

import os
from pathlib import Path

from diptych.errors import ConfigError


def require_writable(path: Path, flag: str) -> None:
    """Raises ConfigError if `path`, the value of `flag`, cannot be written. Leaves no file behind."""
    if why := unwritable_reason(path):
        raise ConfigError(f"{flag} {path} cannot be written", why, "name another file")


def make_output_folder(path: Path, flag: str) -> None:
    """Makes the folder `path`, the value of `flag`. Raises ConfigError if it or a file in it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
    else:
        why = _closed_folder_reason(path)
    if why:
        raise ConfigError(f"{flag} {path} cannot be written", why, "name another folder")


def unwritable_reason(path: Path) -> str:
    """Why a file cannot be written; "" if it can."""
    parent = path.absolute().parent
    try:
        if path.is_dir():
            return "it is a folder"
        if path.is_file():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            return ""
        # A device or a pipe is not opened, since opening it may have effects.
        if path.exists():
            return "" if os.access(path, os.W_OK) else "it cannot be written to"
        if not parent.is_dir():
            return f"there is no folder {path.parent}"
    except OSError as error:
        return error.strerror or str(error)
    return _closed_folder_reason(parent)


def _closed_folder_reason(parent: Path) -> str:
    """Why no file can be made in a folder; "" if it can.

    A file is made and removed, since permissions alone do not show it.
    """
    probe = parent / f".diptych-{os.getpid()}.probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except OSError as error:
        return f"{parent}: {error.strerror or error}"
    return ""
