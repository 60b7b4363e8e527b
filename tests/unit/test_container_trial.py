"""`make containers`, as far as it can be checked without a container engine."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers import debian, image_build, run
from tests.containers.engine import BASE_IMAGE, STAND_INS
from tests.containers.project import KEY_FILES, Stream
from tests.containers.report import Report

ROOT = Path(__file__).parents[2]


def test_without_root_it_skips_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path)])
    assert run.main() == 0
    assert capsys.readouterr().out == "skipped: the trial starts a container engine, which needs root\n"
    assert not list(tmp_path.iterdir())


def test_without_debian_or_a_network_it_skips_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(debian, "SOURCES", tmp_path / "absent")
    assert "there is no" in debian.why_unavailable()
    with pytest.raises(debian.Unavailable, match="sh failed: no route to the mirror"):
        debian.run_or_skip(["sh", "-c", "echo no route to the mirror; exit 100"])
    monkeypatch.setattr(run, "why_unavailable", lambda: "")

    def fail(_: debian.Downloads) -> None:
        raise debian.Unavailable("apt-get failed: no route to the mirror")

    monkeypatch.setattr(debian.Downloads, "take_all", fail)
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path)])
    assert run.main() == 0
    assert capsys.readouterr().out == "skipped: apt-get failed: no route to the mirror\n"


def test_the_mirror_is_the_machine_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "debian.sources"
    sources.write_text(
        "Types: deb\n# http://old.example\nURIs: http://mirror.example/debian\nSuites: bookworm\n"
    )
    monkeypatch.setattr(debian, "SOURCES", sources)
    assert debian.find_mirror() == "http://mirror.example/debian"
    sources.write_text("Types: deb\n")
    with pytest.raises(debian.Unavailable, match="names no address"):
        debian.find_mirror()


def test_it_tries_what_is_deployed() -> None:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = content["services"]
    assert services["gateway"]["image"] == image_build.IMAGE
    assert {image for image, _, _ in STAND_INS} == {
        services[name]["image"] for name in ("prometheus", "alertmanager")
    }
    named = {
        value for name, value in services["gateway"]["environment"].items() if name.endswith("_KEY_FILE")
    }
    assert set(KEY_FILES.values()) == named
    recipe = (ROOT / "deploy" / "Dockerfile").read_text()
    assert set(re.findall(r"^FROM (python:\S+)", recipe, re.MULTILINE)) == {BASE_IMAGE}


def test_it_is_no_part_of_make_test() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (needed,) = re.findall(r"^test: ((?:.*\\\n)*.*(?:\n\t.*)*)", makefile, re.MULTILINE)
    assert "containers" not in needed and "tests.containers.run" in makefile
    assert not list((ROOT / "tests" / "containers").glob("test_*.py"))


def test_a_check_that_raises_fails_with_its_reason(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.md", {"engine": "1.2"})

    def fail() -> str:
        raise AssertionError("left | right\nsecond line")

    assert report.check("first", lambda: "3 s") and not report.check("second", fail)
    assert report.failed == 1 and report.file.read_text() == report.page()
    assert "| engine | 1.2 |\n" in report.page() and "| first | works | 3 s |\n" in report.page()
    assert "| second | **fails** | AssertionError: left \\| right second line |\n" in report.page()


def test_the_longest_gap_of_a_stream() -> None:
    assert Stream().max_gap_s == 0.0
    assert Stream(times_s=[1.0, 1.5, 4.0, 4.25]).max_gap_s == 2.5
