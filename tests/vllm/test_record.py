"""docs/engines.md names the versions of vLLM on which the suite has passed: no other is served, installed or run."""

from __future__ import annotations

import re
from datetime import date
from typing import Any

from tests.vllm.results import REPOSITORY
from vllm_worker.setup.used_names import SUPPORTED_VERSIONS

ROW = re.compile(r"^\| ([0-9][\w.+]*) \| (\w+) \| ([\w.+]+) \| ([\d-]+) \| (.+) \|$", re.MULTILINE)
DEVICES = {"cpu", "cuda"}


def recorded(text: str) -> list[tuple[str, str, str, date]]:
    """The rows of the record: version, device, torch, day."""
    found = [
        (vllm, device, torch, date.fromisoformat(day)) for vllm, device, torch, day, _ in ROW.findall(text)
    ]
    assert all(device in DEVICES for _, device, _, _ in found)
    return found


def page() -> list[tuple[str, str, str, date]]:
    return recorded((REPOSITORY / "docs/engines.md").read_text(encoding="utf-8"))


def test_the_record_names_what_is_served_and_installed() -> None:
    assert {version for version, *_ in page()} == set(SUPPORTED_VERSIONS)
    script = (REPOSITORY / "deploy/install_vllm.sh").read_text(encoding="utf-8")
    [version] = re.findall(r"^version=(\S+)$", script, re.MULTILINE)
    [torch] = re.findall(r"^torch=(\S+)$", script, re.MULTILINE)
    assert (version, "cpu", torch) in {row[:3] for row in page()}


def test_the_record_names_what_was_run(engine_lines: dict[str, dict[str, Any]]) -> None:
    facts = engine_lines["facts"]["facts"]
    ran = facts["version"].partition("+")[0], facts["device"]
    assert ran in {row[:2] for row in page()}, f"docs/engines.md has no row for vLLM {ran}"


def test_no_run_on_a_gpu_is_claimed_without_a_row() -> None:
    """The page says openly that there is none; a row for one ends that sentence."""
    text = (REPOSITORY / "docs/engines.md").read_text(encoding="utf-8")
    assert ("**vLLM workers have never run on a GPU**" in text) == all(row[1] != "cuda" for row in page())


def test_the_record_is_read_as_it_is() -> None:
    row = "| 1.2.3 | cuda | 2.0+cu9 | 2026-01-02 | x |\n"
    assert recorded(f"| vLLM | device | torch | date | what |\n|---|---|---|---|---|\n{row}") == [
        ("1.2.3", "cuda", "2.0+cu9", date(2026, 1, 2))
    ]
