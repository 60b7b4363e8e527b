"""The units of deploy/systemd: what systemd says of them, and what our command line does with their settings."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import typer

from diptych.channel.keys import load_server_keys, load_transfer_key, load_worker_keys
from diptych.config.load import LoadedConfig
from diptych.errors import ConfigError
from services.cli.main import main
from services.cli.serve.cluster.cluster_settings import check_cluster_settings
from services.cli.serve.settings_flags import bind_settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
WHOLE = FOLDER / "diptych.service"
PARTS = [unit for unit in UNITS if unit != WHOLE]
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
    environ: dict[str, str] = {}
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


@pytest.mark.parametrize("unit", PARTS, ids=lambda unit: unit.stem)
def test_a_part_finds_the_channel_and_its_share_of_the_memory(unit: Path, tmp_path: Path) -> None:
    config = loaded(unit, tmp_path).config
    assert config.channel == "tcp://127.0.0.1:5700"
    assert "worker" not in unit.name or config.host_workers == 2
    given = {"DIPTYCH_CHANNEL": "tcp://10.0.0.1:5700", "DIPTYCH_HOST_WORKERS": "3"}
    config = loaded(unit, tmp_path, **given).config
    assert (config.channel, config.host_workers) == ("tcp://10.0.0.1:5700", 3)


def test_what_serve_refuses_is_in_a_file_that_only_the_parts_read(tmp_path: Path) -> None:
    shared, apart = "-/etc/diptych/diptych.env", "-/etc/diptych/parts.env"
    assert values(WHOLE, "EnvironmentFile") == [shared]
    assert [values(unit, "EnvironmentFile") for unit in PARTS] == [[shared, apart]] * len(PARTS)
    check_cluster_settings(loaded(WHOLE, tmp_path))
    with pytest.raises(ConfigError, match="has no effect"):
        check_cluster_settings(loaded(WHOLE, tmp_path, DIPTYCH_CHANNEL="tcp://127.0.0.1:5700"))


def test_the_documents_make_the_keys_that_the_units_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of docs/deploying.md makes them, and gives them to the units' user."""
    text = (ROOT / "docs" / "deploying.md").read_text()
    (make,) = re.findall(rf"^{PROGRAM} (keys .*)$", text, re.MULTILINE)
    (give,) = re.findall(r"^chown -R diptych: (.*)$", text, re.MULTILINE)
    assert text.index(make) < text.index(give) < text.index("enable --now diptych-gateway")
    place = str(tmp_path)
    monkeypatch.setattr(sys, "argv", ["diptych", *shlex.split(make.replace("/etc/diptych", place))])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    for unit in PARTS:
        assert values(unit, "User") == ["diptych"]
        folder = str(loaded(unit, tmp_path).config.keys_dir)
        assert folder in give.split()
        inside = folder.replace("/etc/diptych", place)
        if "worker" in unit.name:
            load_worker_keys(inside)
            load_transfer_key(inside)
            assert not (Path(inside) / "server.secret").exists()
        else:
            load_server_keys(inside)
