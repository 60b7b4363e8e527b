"""What a role does at its end, so that the next role of the process finds vLLM's blocks free."""

from __future__ import annotations

from vllm_worker.engine import VllmEngine

# Most steps that freeing takes: each step frees what ended before it.
MAX_SETTLING_STEPS = 16


def settle_engine(engine: VllmEngine) -> None:
    """Let vLLM free what requests that have ended still hold: its ranks hear of ends in the next step.

    Nothing is done while any sequence lives: then the role ends with an error, and so does the process. Raises as
    `vllm_worker.port.EnginePort.step`.
    """
    for _ in range(MAX_SETTLING_STEPS):
        if not engine.port.has_work or any(True for _ in engine.sequences()):
            return
        engine.port.step()
