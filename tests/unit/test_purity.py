"""Decisions are pure: importing them loads neither the engine's libraries nor an event loop."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

HEAVY = ("torch", "ray", "numpy")
# The lightest first: they are imported in this order, in one process until one is in `FRESH`.
PURE = {
    # vLLM's interpreter may lack anything, and vLLM has to be opened before numba is imported.
    "vllm_worker.preflight": (*HEAVY, "numba", "zmq", "msgspec"),
    "diptych.eviction_spec": HEAVY,
    "diptych.specs": (*HEAVY, "asyncio", "pydantic", "pydantic_settings"),
    "router.requests.relay": (*HEAVY, "asyncio", "zmq"),
    "router.routing.policy": (*HEAVY, "asyncio", "zmq"),
    "router.requests.admission": (*HEAVY, "asyncio", "zmq"),
    "router.workers.fleet": (*HEAVY, "asyncio", "zmq"),
    "kvcache.allocator": (*HEAVY, "asyncio", "zmq"),
    "services.gateway.keys.key_rates": (*HEAVY, "asyncio", "zmq", "yaml"),
    "services.worker.vllm_process": (*HEAVY, "numba", "llvmlite", "pydantic"),
    "engine.scheduling.scheduler": HEAVY,
    "kvcache.codecs.storage": (*HEAVY, "safetensors"),
    "kvtransfer.handoff": HEAVY,
    "planner.replan.replanner": (*HEAVY, "pydantic"),
    "planner.replan.evaluate": (*HEAVY, "pydantic"),
    "planner.sim.exact.simulate": (*HEAVY, "pydantic"),
    "engine.offload.engine": HEAVY,
    "services.cli.main": (*HEAVY, "httpx", "scipy", "pydantic", "pydantic_settings"),
    "services.cli.serve.run": (*HEAVY, "httpx", "scipy"),
    "engine.model.checkpoint": (*HEAVY, "transformers", "huggingface_hub", "httpx", "numba"),
    "services.host.model_probe": (*HEAVY, "transformers", "huggingface_hub", "httpx", "numba"),
    "kvcache.eviction.kept_rows": ("torch", "ray", "numba", "scipy"),
    "kvcache.codecs.registry": ("torch", "ray", "numba"),
    "engine.calibration.fitting": ("torch", "ray", "numba", "scipy"),
    # What runs there without vLLM needs packages that vLLM has.
    "services.worker.vllm_parts": (
        "torch",
        "ray",
        "transformers",
        "tokenizers",
        "llguidance",
        "safetensors",
        "httpx",
        "fastapi",
        "pydantic",
        "huggingface_hub",
        "cryptography",
        "nixl",
    ),
    "services.worker.model_worker": (
        "ray",
        "scipy.linalg",
        "transformers",
        "huggingface_hub",
        "httpx",
        "matplotlib",
    ),
    "services.worker.__main__": ("pydantic_settings", "diptych.config"),
    "services.gateway.__main__": (
        "pydantic_settings",
        "diptych.config",
        "torch",
        "ray",
        "scipy",
        "numba",
        "httpx",
    ),
}
FRESH = ("services.worker.vllm_parts", "services.gateway.__main__")

# Prints what is there after each module, one line each, with nothing unloaded in between.
ONE_BY_ONE = """
import importlib, sys
for line in sys.argv[1:]:
    module, *unwanted = line.split()
    importlib.import_module(module)
    print(*(name for name in unwanted if name in sys.modules))
"""


def loaded(*modules: tuple[str, tuple[str, ...]]) -> list[list[str]]:
    """Which of the unwanted names are there after importing each of `modules`, in turn, in a process of their own."""
    lines = [" ".join((module, *unwanted)) for module, unwanted in modules]
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE, *lines], capture_output=True, text=True, check=True, timeout=150
    )
    return [line.split() for line in done.stdout.split("\n")[: len(lines)]]


@pytest.fixture(scope="module")
def seen() -> dict[str, list[str]]:
    """What is there after all modules, imported in turn: if one does not find what it must not load, it has not."""
    starts = [0, *map(list(PURE).index, FRESH), len(PURE)]
    parts = (list(PURE.items())[start:end] for start, end in pairwise(starts))
    return dict(zip(PURE, (found for part in parts for found in loaded(*part)), strict=True))


@pytest.mark.parametrize("module", PURE)
def test_importing_decisions_loads_nothing_heavy(module: str, seen: dict[str, list[str]]) -> None:
    if seen[module]:  # by this module, or by one before it
        assert loaded((module, PURE[module])) == [[]]


def test_the_check_can_fail() -> None:
    assert loaded(("json", ("torch",)), ("asyncio", ("asyncio", "torch"))) == [[], ["asyncio"]]
