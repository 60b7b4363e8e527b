"""Without the extras the server and its clients work, and a command that lacks one says which in a few lines."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from diptych.extras import EXTRAS

ROOT = Path(__file__).parents[2]
# As if these packages were not installed.
WITHOUT = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("scipy", "matplotlib", "grafana_foundation_sdk"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
"""
CORE = (
    "services.cli.main", "services.cli.serve.commands", "services.cli.serve.launch", "services.cli.serve.standalone",
    "services.cli.plan.command", "services.cli.simulate.command", "services.cli.client.status",
    "services.bench.command", "services.gateway.__main__", "services.worker.role_lifecycle", "services.replan.driver",
)  # fmt: skip


def run_without(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python of its own that lacks the extras' packages."""
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_extras_are_those_of_pyproject() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name: {re.split("[<>=]", one)[0] for one in extras[name]} for name in EXTRAS}
    wanted = {
        "plan": {"scipy", "matplotlib"},
        "dashboards": {"grafana-foundation-sdk"},
        "otel": {"opentelemetry-proto"},
        "gpu": {"nvidia-ml-py", "triton"},
    }
    assert named == wanted
    everywhere = [name for name in EXTRAS if name != "gpu"]
    assert extras["all"] == [f"diptych[{','.join(everywhere)}]"] and "diptych[all]" in extras["test"]


def test_the_core_loads_without_extras() -> None:
    done = run_without("\n".join(f"import {module}" for module in CORE) + "\nprint('loaded')")
    assert done.stdout == "loaded\n", done.stderr


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("plan", "profile tiny --out p.json"),
        ("plan", "plan --model tiny --bulk 512:64"),
        ("plan", "plan --model tiny --plot out"),
        ("plan", "simulate --model tiny --profile p.json --placement 1B --bulk 512:64 --bulk-memory 1GiB"),
        ("plan", "bench --plot out.png"),
        ("plan", "serve --prefill 0 --decode 0 --bulk 1 --bulk-profile p.json"),
        ("dashboards", "dashboards --out out"),
    ],
)
def test_a_command_that_lacks_an_extra_names_it(extra: str, arguments: str) -> None:
    done = run_without("from services.cli.main import main\nmain()", *arguments.split())
    lines = done.stderr.strip().splitlines()
    assert done.returncode != 0 and len(lines) <= 6 and f"pip install 'diptych[{extra}]'" in done.stderr, (
        lines
    )
