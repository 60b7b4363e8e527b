"""An older version of this repository beside this one: its files, and the options of `diptych serve` that it knows."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from diptych.errors import ConfigError, StartError

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"--[a-z][a-z0-9-]*")
# Lines of an error that are shown.
MAX_LINES = 3


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The files of `revision` in a temporary folder, as a worktree of git; removed at the end.

    Raises:
        ConfigError: the repository has no such revision.
        StartError: git cannot write the files.
    """
    commit = find_commit(revision)
    with tempfile.TemporaryDirectory(prefix="diptych-against-") as folder:
        tree = Path(folder, "tree")
        _run_git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            with contextlib.suppress(StartError):
                _run_git("worktree", "remove", "--force", str(tree))


def find_commit(revision: str) -> str:
    """The commit that git knows by this name. Raises ConfigError if there is none."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", "--end-of-options"]
    found = subprocess.run([*command, f"{revision}^{{commit}}"], capture_output=True, text=True)
    if found.returncode:
        raise ConfigError(
            f"there is no revision {revision!r}",
            f"git finds no such commit in {ROOT.name}; a shallow clone has only the newest",
            "name a commit, a tag or a branch that `git log` shows",
        )
    return found.stdout.strip()


def _run_git(*arguments: str) -> None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise StartError(
            "git does not write the older version", last_lines(done.stderr), "see `git worktree list`"
        )


def list_flags(checkout: Path) -> frozenset[str]:
    """The flags that `diptych serve --help-all` of a version shows. Raises StartError if it shows none."""
    command = [sys.executable, "-m", "services.cli.main", "serve", "--help-all"]
    # Wide enough that no flag is cut off.
    environ = os.environ | {"PYTHONPATH": str(checkout), "COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    shown = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True)
    flags = frozenset(FLAG.findall(shown.stdout))
    if shown.returncode or not flags:
        why = last_lines(shown.stderr)
        raise StartError(
            "`diptych serve --help-all` of the older version fails", why, "name a newer one with --rev"
        )
    return flags


def group_options(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Each flag with its values. Raises ConfigError if the words do not begin with a flag."""
    groups: list[tuple[str, ...]] = []
    for word in words:
        if word.startswith("--"):
            groups.append((word,))
        elif groups:
            groups[-1] += (word,)
        else:
            raise ConfigError(f"{word!r} is no option of `diptych serve`", "", "for example: -- --decode 2")
    return groups


def split_known(options: Sequence[tuple[str, ...]], flags: frozenset[str]) -> tuple[list[str], list[str]]:
    """The words of the options whose flags are known, and the flags that are not."""
    known = [option for option in options if option[0].partition("=")[0] in flags]
    unknown = [option[0] for option in options if option not in known]
    return [word for option in known for word in option], unknown


def last_lines(text: str) -> str:
    """The last lines of what a program has printed, for an error."""
    return "\n".join(text.strip().splitlines()[-MAX_LINES:])
