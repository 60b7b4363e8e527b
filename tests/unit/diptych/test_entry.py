"""The import path with which the command `diptych` starts, also where its working folder is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.launch.own_packages import ROOT, drop_working_folder

START = "from diptych.launch.entry import main; main()"


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which no longer exists."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    return folder


@pytest.mark.parametrize("python_path", [None, "/nowhere"])
def test_the_command_starts_in_a_folder_that_is_gone(gone: Path, python_path: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"PYTHONPATH": python_path} if python_path else {}
    # The first entry of the import path is that of `-c`; an installed command has none.
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; {START}"
    done = subprocess.run(
        [sys.executable, "-c", code, "version"], env=environ, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("diptych ")


def test_nothing_is_dropped_where_the_folder_is_gone(gone: Path) -> None:
    for python_path in ("", ":/nowhere", ".", "/nowhere"):
        paths = [str(gone), "/nowhere"]
        drop_working_folder(paths, python_path)
        assert paths == [str(gone), "/nowhere"]


def test_the_working_folder_is_dropped_only_where_pythonpath_means_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    for python_path, left in [
        (":/extra", ["/extra"]), ("/extra:.", ["/extra"]), ("./", ["/extra"]),
        ("", [here, "/extra"]), (f"{here}:/extra", [here, "/extra"]), ("/extra", [here, "/extra"]),
    ]:  # fmt: skip
        paths = [here, "/extra"]
        drop_working_folder(paths, python_path)
        assert paths == left, python_path
    monkeypatch.chdir(ROOT)
    paths = [str(ROOT)]
    drop_working_folder(paths, ".")
    assert paths == [str(ROOT)], "the checkout"
