"""Decisions are pure: importing them loads neither the engine's libraries nor an event loop."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "numpy")
PURE = {
    "router.relay": (*HEAVY, "asyncio", "zmq"),
    "router.policy": (*HEAVY, "asyncio", "zmq"),
    "router.admission": (*HEAVY, "asyncio", "zmq"),
    "router.fleet": (*HEAVY, "asyncio", "zmq"),
    "engine.scheduler": HEAVY,
    "kvcache.holdings": (*HEAVY, "asyncio", "zmq"),
    "kvtransfer.handoff": HEAVY,
    "planner.replan": HEAVY,
    "planner.elastic": HEAVY,
    "planner.simulator": HEAVY,  # when it exists
}


def loaded(module: str, unwanted: tuple[str, ...]) -> list[str]:
    """Which of `unwanted` are there after importing `module` in a process of its own."""
    code = f"import sys, {module}; print(*(name for name in {unwanted!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=150
    )
    return done.stdout.split()


@pytest.mark.parametrize("module", PURE)
def test_importing_decisions_loads_nothing_heavy(module: str) -> None:
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    assert loaded(module, PURE[module]) == []


def test_the_check_can_fail() -> None:
    assert loaded("asyncio", ("asyncio", "torch")) == ["asyncio"]
