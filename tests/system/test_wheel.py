"""The wheel, installed into an environment of its own, from a folder that holds packages of Diptych's names."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import Parser
from pathlib import Path

import httpx
import pytest

from diptych.launch.own_packages import PACKAGES
from services.host.ports import claim_port
from tests.support.terminal import ROOT, Terminal, clean_environ

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None,
    reason="hatchling, which builds the wheel, is not installed",
)
RAISES = "open({marker!r}, 'a').write(__name__ + '\\n')\nraise ImportError('of the working folder')\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=clean_environ())
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone; what it requires is found in this environment's packages."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, symlinks=True, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", str(home), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--no-compile", str(wheel)], check=True, env=clean_environ())
    # A line of such a file adds a folder, but not that folder's own .pth files: the checkout is not found.
    (packages_of(home) / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def packages_of(home: Path) -> Path:
    (found,) = home.glob("lib/python*/site-packages")
    return found


def shadowed(folder: Path, names: tuple[str, ...]) -> Path:
    """Packages of these names in `folder`, which raise when they are imported; the file says which were."""
    marker = folder / "imported"
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(RAISES.format(marker=str(marker)))
    return marker


def diptych(home: Path, *words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(home / "bin" / "diptych"), *words]
    environ = clean_environ(**env)
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)


@contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    """A file of the installation with other content, or one more."""
    kept = path.read_bytes() if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    try:
        yield
    finally:
        path.unlink() if kept is None else path.write_bytes(kept)


def test_its_files_are_those_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        inside = {name: packed.read(name) for name in packed.namelist() if ".dist-info/" not in name}
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    ours = {str(path.relative_to(ROOT)): path for path in files if "__pycache__" not in path.parts}
    assert inside.keys() == ours.keys()
    assert [name for name, content in inside.items() if content != ours[name].read_bytes()] == []


def test_its_metadata_is_that_of_the_project(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [one for one in packed.namelist() if one.endswith("/METADATA")]
        found = Parser().parsestr(packed.read(name).decode())
    assert (found["Name"], found["Version"], found["Summary"]) == (
        project["name"], project["version"], project["description"],
    )  # fmt: skip
    assert found.get_all("Classifier") == project["classifiers"]
    required = [one for one in found.get_all("Requires-Dist", []) if "extra ==" not in one]
    bare = {re.split(r"[\[<>=;! ]", one)[0] for one in required}
    assert bare == {re.split(r"[\[<>=;! ]", one)[0] for one in project["dependencies"]}
    assert str(found.get_payload()).strip() == (ROOT / "README.md").read_text().strip()


def test_serves_from_a_folder_with_packages_of_these_names(installed: Path, tmp_path: Path) -> None:
    """No process imports from it: not the command line, the gateway, the workers, nor anything of Ray."""
    work, port = tmp_path / "work", claim_port("127.0.0.1", 0)
    work.mkdir()
    marker = shadowed(work, tuple(name for name in PACKAGES if name != "diptych"))
    program = str(installed / "bin" / "diptych")
    # The empty entry means the working folder to Python.
    with Terminal("serve", "--port", str(port), cwd=work, program=[program], PYTHONPATH=":/nowhere") as run:
        run.expect("ready")
        body = {"model": "tiny", "prompt": "A list is", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300, trust_env=False
        )
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        assert run.interrupt() == 0 and not run.left()
    assert not marker.exists(), marker.read_text()
    assert sorted(path.name for path in work.iterdir()) == sorted(set(PACKAGES) - {"diptych"})


def test_packages_of_pythonpath_come_after_our_own(installed: Path, tmp_path: Path) -> None:
    marker = shadowed(tmp_path, ("services", "models", "engine", "worker"))
    shown = diptych(installed, "version", cwd=tmp_path.parent, PYTHONPATH=str(tmp_path))
    assert (shown.returncode, shown.stderr, marker.exists()) == (0, "", False)


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("engine/train.py", "", "engine/train.py is not Diptych's; it belongs to theirs-2.0"),
        (
            "models/resnet/__init__.py",
            "",
            "models/resnet/__init__.py is not Diptych's; it belongs to theirs-2.0",
        ),
        (
            "worker/__init__.py",
            "import theirs\n",
            "worker/__init__.py is not what was installed; it belongs to",
        ),
    ],
)
def test_a_package_of_the_same_name_is_reported_at_start(
    installed: Path, tmp_path: Path, path: str, text: str, named: str
) -> None:
    theirs = packages_of(installed) / "theirs-2.0.dist-info"
    with changed(theirs / "RECORD", f"theirs-2.0.dist-info/RECORD,,\n{path},,\n"):
        with changed(packages_of(installed) / path, text):
            shown = diptych(installed, "serve", cwd=tmp_path)
        shutil.rmtree(packages_of(installed) / "models/resnet", ignore_errors=True)
        assert shown.returncode == 1 and "Traceback" not in shown.stderr
        assert len(shown.stderr.splitlines()) <= 6 and named in shown.stderr
        assert "fix: install Diptych into a virtual environment of its own" in shown.stderr
    shutil.rmtree(theirs)
    assert diptych(installed, "version", cwd=tmp_path).returncode == 0


def test_a_file_that_another_package_took_along_is_missed(installed: Path, tmp_path: Path) -> None:
    """Uninstalling a package of the same name removes the files that both had."""
    lost = packages_of(installed) / "router/__init__.py"
    with changed(lost, ""):
        lost.unlink()
        shown = diptych(installed, "version", cwd=tmp_path)
        lost.touch()
    assert shown.returncode == 1 and len(shown.stderr.splitlines()) <= 6
    assert "`router`" in shown.stderr and os.linesep * 2 not in shown.stderr
