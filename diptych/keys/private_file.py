"""Reads files that only their owner may read: those with keys."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from diptych.errors import ConfigError

# Permission bits that a key file may not have. Its group may read it, as some orchestrators mount secrets that way.
OPEN_TO_OTHERS = 0o027


def read_private_file(file: Path, origin: str, fix: str, max_bytes: int = -1) -> str:
    """The text of a key file. `origin` says where its path came from, `fix` how to make one.

    Raises:
        ConfigError: it is missing, unreadable, no text, longer than `max_bytes` (-1: any), another user's, or open to
            others.
    """
    try:
        with file.open("rb") as opened:
            state, content = (
                os.fstat(opened.fileno()),
                opened.read(max_bytes if max_bytes < 0 else max_bytes + 1),
            )
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the key file {file} cannot be read", f"{reason} (from {origin})", fix) from None
    if 0 <= max_bytes < len(content):
        raise ConfigError(
            f"the key file {file} is too long", f"it has more than {max_bytes} bytes", "keep fewer keys in it"
        )
    if state.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"the key file {file} belongs to another user",
            f"to user {state.st_uid}, and this process is user {os.geteuid()}",
            f"chown {os.geteuid()} {file}, if its content is yours; else make a new one",
        )
    if state.st_mode & OPEN_TO_OTHERS:
        mode = stat.S_IMODE(state.st_mode)
        raise ConfigError(
            f"the key file {file} is open to other users", f"its mode is {mode:04o}", f"chmod 600 {file}"
        )
    return text
