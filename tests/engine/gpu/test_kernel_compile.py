"""The kernels compile for a GPU, and fit it, although none is here: Triton brings its own assembler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (it has wheels for Linux only)")

SHARED = 227 << 10  # bytes of shared memory that a program may have on compute capability 9.0


def test_all_kernels_of_a_step_compile_for_compute_capability_90(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.engine.gpu.compile_kernels", "bfloat16"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    kernels = sorted(entry["kernel"] for entry in found)
    assert set(kernels) == {"_decode", "_merge", "_prefill", "_write", "_add_norm", "_gate"}
    assert kernels.count("_decode") >= 3  # shared items, rows with and without splits
    for entry in found:
        assert entry["shared"] <= SHARED and entry["stack"] == 0, entry
