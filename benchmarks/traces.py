"""What tracing every request costs in goodput.

    python -m benchmarks.traces [--json] [--rounds 8] [--seconds 10] [--clients 8] [--colocated N]

Two deployments of the embedded model, one of which sends a trace of every request to a collector of this program, which
drops them. Each round loads one and then the other with clients that always have one request open each, for
`--seconds`; the order changes from round to round. Goodput is what the gateway counts: answers per second within both
SLOs. The collector takes processor time of the same machine, which counts against tracing.

    traces_ratio      goodput with traces over without: the median of the rounds
    ratios            of each round
    traces_sent       traces that the collector took, over the requests of the traced deployment
    traces_lost       traces that were dropped or failed
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import ServedDeployment, StampedStream, pool_flags, serving_deployment
from benchmarks.load.rounds import measure_rounds

PROMPT_WORDS, ANSWER_TOKENS = 40, 24
# Generous: on a busy machine too, what is lost is speed, and goodput follows the rate of answers.
SLO_FLAGS = ("--slo-ttft-ms", "5000", "--slo-tpot-ms", "1000")
TRACED, PLAIN = "traced", "plain"
GOODPUT, ANSWERED = "diptych:goodput_requests_total", "vllm:request_success_total"
TRACES = "diptych:traces_total"


class Discard(BaseHTTPRequestHandler):
    """Takes what is sent to it, and drops it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is printed."""


@contextlib.contextmanager
def collecting() -> Iterator[str]:
    """The URL of a collector in this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Discard)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="collector")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def load(deployment: ServedDeployment, clients: int, seconds: float, number: int) -> float:
    """Answers per second within both SLOs, of clients that always have a request open; `number` is the round's."""
    before, began_s = await asyncio.to_thread(deployment.metric, GOODPUT), time.monotonic()

    async def client(index: int) -> None:
        asked = 0
        while time.monotonic() - began_s < seconds:
            prompt = f"{number} {index} {asked} " + "def read(self): " * (PROMPT_WORDS // 2)
            asked += 1
            stream = await StampedStream.open(
                deployment.port, model="tiny", prompt=prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True
            )
            try:
                await stream.done()
            finally:
                await stream.leave()

    await asyncio.gather(*(client(index) for index in range(clients)))
    ended_s = time.monotonic()
    return (await asyncio.to_thread(deployment.metric, GOODPUT) - before) / (ended_s - began_s)


async def measure(deployments: dict[str, ServedDeployment], given: argparse.Namespace) -> dict[str, Any]:
    """All rounds, and what became of the traces."""
    numbers = iter(range(given.rounds + 1))

    def prepare_round() -> Any:
        number = next(numbers)
        return lambda deployment: load(deployment, given.clients, given.seconds, number)

    results = await measure_rounds(deployments, given.rounds, prepare_round)
    ratios = [traced / plain for traced, plain in zip(results[TRACED], results[PLAIN], strict=True)]
    await asyncio.sleep(2.0)  # the last traces are gathered for a moment before they are sent
    traced = deployments[TRACED]
    ended, answered = traced.metric(TRACES), traced.metric(ANSWERED)
    sent = traced.metric(f'{TRACES}{{outcome="sent"}}')
    return {
        "traces_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "traces_sent": round(sent / answered, 4),
        "traces_lost": ended - sent,
        "requests": answered,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--colocated", type=int, default=0, metavar="N", help="workers that do both")
    given = parser.parse_args()
    flags = (*pool_flags(given.colocated), *SLO_FLAGS)
    with (
        collecting() as url,
        serving_deployment(*flags) as plain,
        serving_deployment(*flags, "--otlp-traces-endpoint", url) as traced,
    ):
        for deployment in (plain, traced):
            deployment.wait_ready()
        report = uvloop.run(measure({TRACED: traced, PLAIN: plain}, given))
    print(json.dumps(report) if given.json else json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
