"""Reads what `tests.vllm.program` printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def read_results(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The lines by the name of their behaviour, or by their only key."""
    return {line.get("name") or next(iter(line)): line for line in lines}


def check_result(results: dict[str, dict[str, Any]], name: str) -> None:
    """Raises AssertionError with the child's traceback if a behaviour has failed or was not run."""
    if name not in results:
        died = results.get("died", {"died": "a behaviour before it has failed"})["died"]
        raise AssertionError(f"{name} was not run: {died}")
    if error := results[name]["error"]:
        raise AssertionError(error)
