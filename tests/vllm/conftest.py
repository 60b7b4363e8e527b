"""Tests on vLLM itself: they need an interpreter with vLLM, and are skipped, counted, without one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.results import REPOSITORY, read_results

# Seconds that vLLM may take to load, compile and run everything, on a machine that does other things as well.
MAX_RUN_S = 1500


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter with vLLM."""
    python = os.environ.get("TEST_VLLM_PYTHON", "")
    if not python:
        pytest.skip("needs vLLM: make vllm, or TEST_VLLM_PYTHON=/path/to/python pytest tests/vllm")
    return python


@pytest.fixture(scope="session")
def embedded_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model, without the file of our own that vLLM would take for weights."""
    folder = tmp_path_factory.mktemp("model")
    for path in (REPOSITORY / "models" / "tiny").iterdir():
        if path.name != "kvquant.safetensors":
            (folder / path.name).symlink_to(path)
    return str(folder)


RunProgram = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def run_program(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> RunProgram:
    """Runs a module of the tests under vLLM's interpreter; returns the lines of JSON that it printed."""

    def run(module: str, *args: str) -> list[dict[str, Any]]:
        log = Path(tmp_path_factory.mktemp("log")) / "stderr"
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as errors:
            done = subprocess.run(
                [vllm_python, "-m", module, *args],
                cwd=REPOSITORY,
                env=env,
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=MAX_RUN_S,
                check=False,
            )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
        if not lines or done.returncode:
            lines.append({"died": f"exit status {done.returncode}\n" + log.read_text()[-3000:]})
        return lines

    return run


@pytest.fixture(scope="session")
def engine_lines(run_program: RunProgram, embedded_model: str) -> dict[str, dict[str, Any]]:
    """What the suite printed, by name; run once."""
    return read_results(run_program("tests.vllm.program", embedded_model))
