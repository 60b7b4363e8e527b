"""Where the paper's data lies, for tests that compare with it; they skip where it is absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("DIPTYCH_SHARED", Path(__file__).resolve().parents[4] / "shared"))


def distserve(name: str) -> Path:
    """A file of the paper's artefact, or a skip with the reason."""
    file = SHARED / "data" / "distserve" / name
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    return file
