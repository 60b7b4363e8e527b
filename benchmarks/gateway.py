"""What the gateway itself costs: processor time per token and per request, over that of a bare server.

    python -m benchmarks.gateway [--json] [--short] [--parts PART ...] [--rounds 7] [--seconds 4] [--streams 16]

The gateway is the real process with its real sockets; its two workers are scripts, which send the next token of every
stream at each beat. Beside it runs one uvloop protocol that writes the same bytes to the same client at the same beats
(`benchmarks/gateway_parts/bare_server.py`). Both take turns. Processor time is that of all threads of the process, for
requests also that of its preparers.

    token_ratio     processor time per token of `--streams` long streams, gateway / bare server: the median over rounds
    request_ratio   the same per request of one token, of `--streams` clients that each ask again at once
    *_us            the gateway's and the bare server's microseconds (of this machine)
    *_range         of the ratios of all rounds

The part `large` runs the relay alone (`benchmarks/gateway_parts/large_fleet.py`): 1,000 streams, 10,000 waiting prompts
of 128 k tokens, as many known chunks as the workers' indexes take, up to 10^6.

    decide_ratio    processor time per request with 32 and 32 workers, over that with 2 and 2
    stall_ratio     the same of the longest event but for one in a thousand

The part `many` runs `--gateways 2` beside 1, with more tokens than either can pass on, and readers in processes of
their own:

    gateways2         tokens per second with 2 over 1: the median over rounds. Where there are fewer `cores` than
                      processes (`gateways2_fits=0`), these share them, and it says nothing about larger machines
    busiest_ratio     processor time per token of the gateway with 1, over that of the busiest process with 2: what
                      `gateways2` is where each has a core
    others_failed     of 200 streams with 2, one of which is killed: how many failed that it did not serve
    front_again_s     until it serves again
    relay_open        streams that went on, or were told of no error, when the relay's process was killed
    relay_end_s       until the last of the others had ended with an error
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import psutil
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.gateway_parts.large_fleet import FleetShape, LargeFleet
from benchmarks.gateway_parts.many_gateways import measure_kills, measure_throughput
from benchmarks.gateway_parts.paced_worker import LONG
from benchmarks.gateway_parts.scripted import BODY, START_S, Server, scripted_gateway
from benchmarks.load.command_line import figure_parser, print_figures
from benchmarks.load.deployment import StampedStream
from benchmarks.load.short_form import add_short_form

# Of the part `large`, but for the number of workers; and the requests of a round.
LARGE = FleetShape(0, streams=1000, waiting=10_000, prompt_tokens=1 << 17, known_chunks=1_000_000)
SMALLER = FleetShape(0, streams=100, waiting=1000, prompt_tokens=1 << 14, known_chunks=100_000)
DECIDED = 100


def record_answer(port: int) -> tuple[str, str, str]:
    """The head of a streamed answer of the gateway, the bytes of one event, and those of the end."""
    body = BODY | {"stream": True, "max_tokens": 8}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=START_S) as reply:
        lines = "\r\n".join(f"{name}: {value}" for name, value in reply.headers.multi_items())
        events = reply.read().decode().split("\n\n")
    head = f"HTTP/1.1 200 OK\r\n{lines}\r\n\r\n"
    return head, events[1] + "\n\n", "\n\n".join(events[-3:])


@contextlib.contextmanager
def bare_server(beat_s: float, answer: tuple[str, str, str]) -> Iterator[Server]:
    """The bare server, which writes the parts of `answer`."""
    command = [sys.executable, "-m", "benchmarks.gateway_parts.bare_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([beat_s, *answer]) + "\n")
        process.stdin.flush()
        yield Server(int(process.stdout.readline()), (psutil.Process(process.pid),))
        process.stdin.close()


async def cost_per_token(server: Server, streams: int, seconds: float) -> float:
    """Processor seconds per token of long streams."""
    opened = [await StampedStream.open(server.port, **BODY, max_tokens=LONG) for _ in range(streams)]
    try:
        for stream in opened:
            await stream.until(2)
        seen, begun_s = sum(len(stream.stamps_s) for stream in opened), server.cpu_s()
        await asyncio.sleep(seconds)
        tokens = sum(len(stream.stamps_s) for stream in opened) - seen
        return (server.cpu_s() - begun_s) / tokens
    finally:
        for stream in opened:
            await stream.leave()


async def cost_per_request(server: Server, clients: int, seconds: float) -> float:
    """Processor seconds per request of one token."""
    answered, end_s = 0, time.monotonic() + seconds

    async def ask() -> None:
        nonlocal answered
        while time.monotonic() < end_s:
            stream = await StampedStream.open(server.port, **BODY, max_tokens=1)
            try:
                await stream.done()
            finally:
                await stream.leave()
            answered += 1

    begun_s = server.cpu_s()
    await asyncio.gather(*(ask() for _ in range(clients)))
    return (server.cpu_s() - begun_s) / answered


def compare(
    name: str, measure: Callable[[Server], float], gateway: Server, bare: Server, rounds: int
) -> dict[str, Any]:
    """The figures of one kind of cost. One round more comes first, which does not count."""
    found = [(measure(gateway), measure(bare)) for _ in range(rounds + 1)][1:]
    ratios = [ours_s / bare_s for ours_s, bare_s in found]
    ours_s, bare_s = (statistics.median(column) for column in zip(*found, strict=True))
    return {
        f"{name}_ratio": round(statistics.median(ratios), 2),
        f"{name}_us": round(1e6 * ours_s, 1),
        f"bare_{name}_us": round(1e6 * bare_s, 1),
        f"{name}_range": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def measure_sockets(options: argparse.Namespace) -> dict[str, Any]:
    """The part `sockets`: the cost of tokens and requests."""
    beat_s = options.beat_ms / 1e3
    with scripted_gateway(beat_s) as gateway, bare_server(beat_s, record_answer(gateway.port)) as bare:
        return compare(
            "token",
            lambda server: uvloop.run(cost_per_token(server, options.streams, options.seconds)),
            gateway, bare, options.rounds,
        ) | compare(
            "request",
            lambda server: uvloop.run(cost_per_request(server, options.streams, options.seconds)),
            gateway, bare, options.rounds,
        )  # fmt: skip


def measure_large(options: argparse.Namespace) -> dict[str, Any]:
    """The part `large`: what a decision costs where there are many workers."""
    shape = LARGE if not options.small_fleet else SMALLER
    few, many = (LargeFleet(replace(shape, workers=workers)) for workers in (2, 32))
    for fleet in (few, many):
        fleet.fill()
    requests, stalls, found = list[float](), list[float](), list[tuple[float, float]]()
    for _ in range(options.rounds):
        for fleet in (few, many):
            fleet.measure(DECIDED)
        requests.append(many.request_s / few.request_s)
        stalls.append(many.longest_s / few.longest_s)
        found.append((few.request_s, many.request_s))
    few_s, many_s = (statistics.median(column) for column in zip(*found, strict=True))
    return {
        "decide_ratio": round(statistics.median(requests), 2),
        "decide_range": [round(min(requests), 2), round(max(requests), 2)],
        "stall_ratio": round(statistics.median(stalls), 2),
        "decide_us": [round(1e6 * few_s, 1), round(1e6 * many_s, 1)],
        "known_chunks": [len(few.relay.index), len(many.relay.index)],
        "waiting": [len(few.relay.queue), len(many.relay.queue)],
    }


def measure_many(options: argparse.Namespace) -> dict[str, Any]:
    """The part `many`: two processes that take HTTP beside one, and what is lost with one of them."""
    return measure_throughput(options.rounds, options.seconds) | measure_kills(options.killed_streams)


PARTS = {"sockets": measure_sockets, "large": measure_large, "many": measure_many}


def main() -> None:
    """Measure and print."""
    parser = figure_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a round and server")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--beat-ms", type=float, default=10.0, help="between two tokens of a stream")
    parser.add_argument(
        "--small-fleet", action="store_true", help="a tenth of the streams and prompts of `large`"
    )
    parser.add_argument("--killed-streams", type=int, default=200, help="streams of the killed gateways")
    add_short_form(parser, rounds=3, seconds=2.0, small_fleet=True)
    options = parser.parse_args()
    figures = dict[str, Any]()
    for part in options.parts:
        figures |= PARTS[part](options)
    print_figures(figures, options, "rounds", "seconds", "streams", "beat_ms")


if __name__ == "__main__":
    main()
