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


# One codec of each family that has tables, with most and with least to do.
CODECS = ("nuq4-1%", "tq3", "int4")
# Bytes of stack that a kernel for coded pages may take: what outliers and the codes that are read ahead push out of the
# registers. It stays in the first cache, and reading ahead gains more (docs/results/engine.md, "GPU").
CODED_STACK = 256


def test_all_kernels_of_a_step_compile_for_compute_capability_90(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.engine.gpu.compile_kernels", "bfloat16", *CODECS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    kernels = [entry["kernel"] for entry in found]
    coded = {"_decode_coded", "_encode", "_expand"}
    assert set(kernels) == {"_decode", "_merge", "_prefill", "_write", "_add_norm", "_gate"} | coded
    # Shared items, rows with and without splits.
    assert kernels.count("_decode") >= 3 and kernels.count("_decode_coded") >= 3 * len(CODECS)
    for entry in found:
        most = CODED_STACK if entry["kernel"] in coded else 0
        assert entry["shared"] <= SHARED and entry["stack"] <= most, entry
