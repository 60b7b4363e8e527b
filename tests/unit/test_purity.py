"""Decisions are pure: importing them loads neither the engine's libraries nor an event loop."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "numpy")
PURE = {
    "diptych.specs": (*HEAVY, "asyncio", "pydantic", "pydantic_settings"),
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
    "services.gateway.keys.key_rates": (*HEAVY, "asyncio", "zmq", "yaml"),
    "router.requests.relay": (*HEAVY, "asyncio", "zmq"),
    "router.routing.policy": (*HEAVY, "asyncio", "zmq"),
    "router.requests.admission": (*HEAVY, "asyncio", "zmq"),
    "router.routing.fleet": (*HEAVY, "asyncio", "zmq"),
    "engine.scheduling.scheduler": HEAVY,
    "engine.offload.engine": HEAVY,
    "kvcache.allocator": (*HEAVY, "asyncio", "zmq"),
    "diptych.eviction_spec": HEAVY,
    "kvcache.eviction.kept_rows": ("torch", "ray", "numba", "scipy"),
    "kvcache.codecs.storage": (*HEAVY, "safetensors"),
    "kvcache.codecs.registry": ("torch", "ray", "numba"),
    "kvcache.codecs.fitting": ("torch", "ray", "numba", "scipy"),
    "kvtransfer.handoff": HEAVY,
    "planner.replan.replanner": (*HEAVY, "pydantic"),
    "planner.replan.evaluate": (*HEAVY, "pydantic"),
    "planner.sim.exact.simulate": (*HEAVY, "pydantic"),
    "engine.model.checkpoint": (*HEAVY, "transformers", "huggingface_hub", "httpx", "numba"),
    "services.worker.model_worker": (
        "ray",
        "scipy.linalg",
        "transformers",
        "huggingface_hub",
        "httpx",
        "matplotlib",
    ),
    # vLLM's interpreter may lack anything, and vLLM has to be opened before numba is imported.
    "vllm_worker.preflight": (*HEAVY, "numba", "zmq", "msgspec"),
    "services.worker.vllm_process": (*HEAVY, "numba", "llvmlite", "pydantic"),
    # What runs there without vLLM needs packages that vLLM has.
    "services.worker.vllm_parts": (
        *("torch", "ray", "transformers", "tokenizers", "llguidance", "safetensors", "httpx", "fastapi"),
        *("pydantic", "huggingface_hub", "cryptography", "nixl"),
    ),
    "services.cli.main": (*HEAVY, "httpx", "scipy", "pydantic", "pydantic_settings"),
    "services.cli.serve.run": (*HEAVY, "httpx", "scipy"),
    "services.host.model_probe": (*HEAVY, "transformers", "huggingface_hub", "httpx", "numba"),
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
    assert loaded(module, PURE[module]) == []


def test_the_check_can_fail() -> None:
    assert loaded("asyncio", ("asyncio", "torch")) == ["asyncio"]
