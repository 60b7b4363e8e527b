"""The product's source files, parsed."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "diptych", "kvcache", "kvtransfer", "engine", "router", "worker", "prefill_worker", "decode_worker", "planner",
    "services",
)  # fmt: skip


@cache
def trees() -> Mapping[Path, ast.Module]:
    """Every source file of the product, parsed; paths are relative to the repository."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {file.relative_to(ROOT): ast.parse(file.read_text(encoding="utf-8")) for file in files}
