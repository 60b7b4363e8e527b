"""Runs the real `diptych bench` against a deployment, and reads what it reports."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

from services.host.supervision.process_guard import tied_command

# Lengths as in ShareGPT, short enough for the embedded model.
CHAT = ("--workload", "sharegpt", "--shrink", "8")
# Long prompts: what another fleet is for.
DOCUMENTS = ("--workload", "longbench", "--shrink", "4")


async def run_bench(url: str, *arguments: str) -> dict[str, Any]:
    """One run of `diptych bench` with all its requests counted: the figures of its only rate, as `--json` has them.

    Raises:
        RuntimeError: it failed.
    """
    own = [sys.executable, "-m", "services.cli.main", "bench", "--url", url, "--json", "--warmup", "0"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    process = await asyncio.create_subprocess_exec(
        *tied_command([*own, *arguments]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    )
    try:
        said, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"diptych bench failed: {errors.decode(errors='replace').strip()[-600:]}")
    (figures,) = json.loads(said)["points"]
    assert isinstance(figures, dict)
    return figures


async def answers_per_s(url: str, clients: int, num_requests: int) -> float:
    """Answers per second of so many clients that always have a request open."""
    load = ("--rate", "10000", "--max-concurrency", str(clients), "--num-requests", str(num_requests))
    figures = await run_bench(url, *CHAT, *load, "--slo-ttft-ms", "60000")
    return float(figures["answered"]) / float(figures["seconds"])
