"""Folders of links in the user's cache folder: what vLLM's interpreter imports, and models as vLLM reads them.

A folder is made once for the same links, belongs to this user, and is the same for all processes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from diptych.errors import StartError
from diptych.launch.own_packages import PACKAGES, ROOT

# Files beside a model's weights that vLLM would take for weights.
NO_WEIGHTS = ("kvquant.safetensors",)


def link_packages(environ: Mapping[str, str]) -> Path:
    """A folder with a link to each of Diptych's packages and nothing else. Raises StartError as `link_folder`."""
    return link_folder("packages", {name: ROOT / name for name in PACKAGES}, environ)


def link_model(folder: Path, environ: Mapping[str, str]) -> Path:
    """A model's folder as vLLM can read it: itself, or links to its files without those that vLLM takes for weights.

    Raises StartError as `link_folder`.
    """
    if not any((folder / name).exists() for name in NO_WEIGHTS):
        return folder
    links = {entry.name: entry.absolute() for entry in folder.iterdir() if entry.name not in NO_WEIGHTS}
    return link_folder("model", links, environ)


def link_folder(kind: str, links: Mapping[str, Path], environ: Mapping[str, str]) -> Path:
    """A folder with these links by name and nothing else; made if it is not there.

    It is below the user's cache folder, or that for temporary files if nothing can be written there. `kind` is part of
    its name.

    Raises:
        StartError: it cannot be made.
    """
    content = "\n".join(f"{name}\t{target}" for name, target in sorted(links.items()))
    name = f"diptych-{kind}-{hashlib.sha256(f'{os.geteuid()}{content}'.encode()).hexdigest()[:16]}"
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    errors = []
    for base in (cache, tempfile.gettempdir()):
        try:
            return _make_links(Path(base, name), links)
        except OSError as error:
            errors.append(f"{base}: {error.strerror or error}")
    raise StartError(
        "a folder of links cannot be made, through which vLLM finds files of Diptych",
        "; ".join(errors),
        "set XDG_CACHE_HOME or TMPDIR to a folder that can be written to",
    )


def _make_links(folder: Path, links: Mapping[str, Path]) -> Path:
    """Make `folder` if it is not there as it should be. Raises OSError."""
    if is_linked(folder, links):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        for name, target in links.items():
            (made / name).symlink_to(target)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    except OSError:
        # Another process was faster, or what is there is not this user's.
        shutil.rmtree(made, ignore_errors=True)
        if not is_linked(folder, links):
            raise
    return folder


def is_linked(folder: Path, links: Mapping[str, Path]) -> bool:
    """Whether `folder` belongs to this user, who alone can write there, and has these links and nothing else."""
    try:
        found = folder.lstat()
        there = {entry.name: os.readlink(entry) for entry in folder.iterdir()}
    except OSError:
        return False
    closed = stat.S_ISDIR(found.st_mode) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return (
        closed and found.st_uid == os.geteuid() and there == {name: str(path) for name, path in links.items()}
    )
