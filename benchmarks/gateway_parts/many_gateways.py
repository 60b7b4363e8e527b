"""Two processes that take HTTP beside one (`--gateways`): tokens per second, and what is lost when one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway_parts.paced_worker import CONTEXT_TOKENS
from benchmarks.gateway_parts.scripted import BODY, START_S, Server, scripted_gateway, scripted_workers
from benchmarks.load.deployment import StampedStream
from tests.support.gateway_process import Gateway, specification, start
from tests.support.model_folder import make_folder
from tests.support.waiting import wait_for

# More tokens than a gateway can pass on: so many streams, each with a token at each beat, read by so many processes.
# Before, while they are opened, beats are slower.
STREAMS, BEAT_S, OPENING_BEAT_S, READERS = 96, 0.002, 0.05, 2
# Processes with 2 gateways: these and the relay's, the workers', and the readers.
PROCESSES = 2 + 2 + READERS
# Of the streams under which processes are killed.
KILLED_BEAT_S, KILLED_TOKENS = 0.05, 1 << 13


def measure_throughput(rounds: int, seconds: float) -> dict[str, Any]:
    """Tokens per second with two gateways over one, in turns. One round more comes first, which does not count."""
    with scripted_gateway(OPENING_BEAT_S, 1) as one, scripted_gateway(OPENING_BEAT_S, 2) as two:
        found = [(read_tokens(one, seconds), read_tokens(two, seconds)) for _ in range(rounds + 1)][1:]
    ratios = [second[0] / first[0] for first, second in found]
    cores = len(os.sched_getaffinity(0))
    return {
        "gateways2": round(statistics.median(ratios), 2),
        "gateways2_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "gateways2_fits": int(cores >= PROCESSES),
        "cores": cores,
        "busiest_ratio": round(statistics.median(first[1] / second[1] for first, second in found), 2),
        "tokens_per_s": [
            round(statistics.median(each[0] for each in column)) for column in zip(*found, strict=True)
        ],
    }


def read_tokens(server: Server, seconds: float) -> tuple[float, float]:
    """Tokens per second of long streams, and the processor seconds of the server's busiest process per token."""
    command = [sys.executable, "-m", "benchmarks.gateway_parts.token_reader", str(server.port)]
    command += [str(STREAMS // READERS), str(seconds)]
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(READERS)
        ]
        lines = [reader.stdout for reader in readers if reader.stdout is not None]
        for line in lines:
            assert line.readline() == "open\n"
        assert server.worker is not None
        server.worker.set_beat(BEAT_S)
        before_s = server.each_cpu_s()
        for reader in readers:
            assert reader.stdin is not None
            reader.stdin.write("go\n")
            reader.stdin.flush()
        tokens = sum(int(line.readline()) for line in lines)
        server.worker.set_beat(OPENING_BEAT_S)
        used_s = [after - before for before, after in zip(before_s, server.each_cpu_s(), strict=True)]
    return tokens / seconds, max(used_s) / tokens


def measure_kills(streams: int) -> dict[str, Any]:
    """What ends when one of two gateways is killed under so many streams, and then the relay's process."""
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = str(make_folder(folder / "long", context=CONTEXT_TOKENS))
        spec = specification(folder, model=model, gateways=2)
        process = stack.enter_context(start(spec))
        stack.callback(process.kill)
        assert process.stdout is not None
        while b'"ready"' not in process.stdout.readline():
            assert process.poll() is None, "the gateway did not start"
        gateway = Gateway(spec, process)
        stack.enter_context(scripted_workers(gateway, KILLED_BEAT_S))
        return uvloop.run(kill_parts(gateway, streams))


async def kill_parts(gateway: Gateway, streams: int) -> dict[str, Any]:
    """Open the streams, kill the front with more of them, wait until it serves again, and kill the relay's process."""
    opened = [
        await StampedStream.open(gateway.spec.port, **BODY, max_tokens=KILLED_TOKENS) for _ in range(streams)
    ]
    for stream in opened:
        await stream.until(2)
    fronts = (await asyncio.to_thread(gateway.status))["gateways"]
    victim = max(fronts, key=lambda front: front["sequences"])
    os.kill(victim["pid"], signal.SIGKILL)
    killed_s = time.monotonic()

    def serves_again() -> bool:
        return any(
            one["name"] == victim["name"] and one["state"] == "ready" and one["pid"] != victim["pid"]
            for one in gateway.status()["gateways"]
        )

    await asyncio.to_thread(wait_for, serves_again, START_S)
    again_s = time.monotonic() - killed_s
    left = [stream for stream in opened if not stream.error]
    for stream in left:
        await stream.until(len(stream.stamps_s) + 1)
    gateway.process.kill()
    killed_s = time.monotonic()
    await asyncio.wait([asyncio.create_task(stream.closed.wait()) for stream in left], timeout=START_S)
    warned = [stream for stream in left if '"error"' in stream.error]
    return {
        "streams": streams,
        "served_by": sorted(front["sequences"] for front in fronts),
        "others_failed": streams - len(left) - victim["sequences"],
        "front_again_s": round(again_s, 2),
        "relay_open": len(left) - len(warned),
        "relay_end_s": round(time.monotonic() - killed_s, 2),
    }
