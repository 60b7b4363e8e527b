"""What it costs in goodput that somebody watches: the operators' page is open, and Prometheus scrapes every second.

    python -m benchmarks.watched [--json] [--rounds 16] [--seconds 8] [--clients 8] [--pages 1] [--colocated N]

One deployment of the embedded model, under clients that always have one request open each, for `--seconds` with and
`--seconds` without anybody who watches; the order changes from round to round. Browser and Prometheus would run on
other machines: this program sends what they send. `--pages` visitors ask `/status` once a second as the page does, and
one scraper asks `/metrics` once a second. Goodput is what the gateway counts: answers per second within both SLOs.

    watched_ratio     goodput watched over not watched: the median of the rounds
    ratios            of each round
    pages_answered    answers of `/status`, over those asked for; `scrapes_answered` those of `/metrics`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import ServedDeployment, pool_flags, serving_deployment
from benchmarks.load.rounds import Measure, measure_rounds
from benchmarks.traces import SLO_FLAGS, load

INTERVAL_S = 1.0
# What the page's own script sends (services/gateway/page/page.js).
PAGE_HEADERS = {"cache-control": "max-age=1", "pragma": "no-cache"}
SCRAPER_HEADERS = {"accept": "text/plain;version=0.0.4"}
WATCHED, PLAIN = "watched", "plain"


class Watchers:
    """Visitors of the page and a scraper, who ask every second whatever they get."""

    def __init__(self, url: str, pages: int) -> None:
        self._url, self._pages = url, pages
        self.asked, self.answered = Counter[str](), Counter[str]()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """They ask until the block ends."""
        async with httpx.AsyncClient(base_url=self._url, timeout=30, trust_env=False) as client:
            watchers = [asyncio.create_task(self._ask(client, "/metrics", SCRAPER_HEADERS))]
            for _ in range(self._pages):
                watchers.append(asyncio.create_task(self._ask(client, "/status", PAGE_HEADERS)))
            try:
                yield
            finally:
                for watcher in watchers:
                    watcher.cancel()
                await asyncio.gather(*watchers, return_exceptions=True)

    async def _ask(self, client: httpx.AsyncClient, path: str, headers: dict[str, str]) -> None:
        """Ask every `INTERVAL_S`, and go on after errors; what is due while an answer is awaited is left out."""
        begun_s = time.monotonic()
        while True:
            self.asked[path] += 1
            with contextlib.suppress(httpx.HTTPError):
                self.answered[path] += (await client.get(path, headers=headers)).status_code == 200
            passed_s = time.monotonic() - begun_s
            await asyncio.sleep(INTERVAL_S - passed_s % INTERVAL_S)

    def share_answered(self, path: str) -> float:
        """Answers over requests; the last ones are cut off when a round ends."""
        return round(self.answered[path] / max(1, self.asked[path]), 4)


async def measure(deployment: ServedDeployment, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    watchers, numbers = Watchers(deployment.url, given.pages), iter(range(2 * given.rounds + 2))
    # Two objects for the same deployment: by them a round knows which of the two it measures.
    names = {WATCHED: deployment, PLAIN: ServedDeployment(deployment.port, deployment.process)}

    def prepare_round() -> Measure[float]:
        number = next(numbers)

        async def goodput(asked: ServedDeployment) -> float:
            if asked is not deployment:
                return await load(asked, given.clients, given.seconds, 2 * number)
            async with watchers.watching():
                return await load(asked, given.clients, given.seconds, 2 * number + 1)

        return goodput

    results = await measure_rounds(names, given.rounds, prepare_round)
    ratios = [watched / plain for watched, plain in zip(results[WATCHED], results[PLAIN], strict=True)]
    return {
        "watched_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "pages_answered": watchers.share_answered("/status"),
        "scrapes_answered": watchers.share_answered("/metrics"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watched", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pages", type=int, default=1, help="pages that are open")
    parser.add_argument("--colocated", type=int, default=0, metavar="N", help="workers that do both")
    given = parser.parse_args()
    with serving_deployment(*pool_flags(given.colocated), *SLO_FLAGS) as deployment:
        deployment.wait_ready()
        report = uvloop.run(measure(deployment, given))
    print(json.dumps(report) if given.json else json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
