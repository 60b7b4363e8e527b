"""The units of deploy/systemd: what systemd says of them, and what our command line does with their settings."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import typer

from diptych.config.load import LoadedConfig
from services.cli.serve.settings_flags import bind_settings

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
PROGRAM = "/opt/diptych/bin/diptych"


def values(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_has_nothing_to_say(tmp_path: Path) -> None:
    """Checked with a program that is there, since the installed one need not be, and as a user that is."""
    program = tmp_path / "diptych"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    checked = []
    for unit in UNITS:
        copy = tmp_path / unit.name
        copy.write_text(unit.read_text().replace(PROGRAM, str(program)))
        checked.append(str(copy))
    done = subprocess.run(["systemd-analyze", "verify", *checked], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wrong = tmp_path / "wrong.service"
    wrong.write_text(Path(checked[0]).read_text() + "Misspelt=yes\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(wrong)], capture_output=True, text=True, timeout=60
    )
    assert "Misspelt" in done.stderr, "verify looks at nothing here"


def loaded(unit: Path, credentials: Path, **files: str) -> LoadedConfig:
    """The settings with which the unit's command would start; `files` are those of its files of settings."""
    environ = {"DIPTYCH_CHANNEL": "tcp://127.0.0.1:5700"}
    for line in values(unit, "Environment"):
        text = line.replace("%S", "/var/lib").replace("%C", "/var/cache").replace("%d", str(credentials))
        environ |= dict(word.split("=", 1) for word in shlex.split(text))
    assert "PYTHONSAFEPATH" in environ
    assert environ["HF_HOME"].startswith("/var/lib/diptych/")
    assert environ["NUMBA_CACHE_DIR"].startswith("/var/cache/diptych/")
    (line,) = values(unit, "ExecStart")
    program, command, *words = shlex.split(line.replace("%i", "decode"))
    assert program == PROGRAM
    found: list[LoadedConfig] = []

    def take(given: LoadedConfig) -> int:
        found.append(given)
        return 0

    app = typer.Typer(add_completion=False)
    app.command()(bind_settings(command, take, "role" if command == "worker" else "model"))
    with mock.patch.dict(os.environ, environ | files, clear=True):
        app(words, standalone_mode=False)
    return found[0]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_our_command_line_takes_what_a_unit_gives(unit: Path, tmp_path: Path) -> None:
    config = loaded(unit, tmp_path).config
    (said,) = re.findall(r"drain_s, (\d+) s", unit.read_text())
    assert config.drain_s == int(said), "what the unit says is what it does"
    assert int(values(unit, "TimeoutStopSec")[0]) > config.drain_s + 2
    assert values(unit, "KillMode") == ["mixed"]
    if "worker" not in unit.name:
        (credential,) = values(unit, "LoadCredential")
        assert config.api_key_file == tmp_path / credential.partition(":")[0]
