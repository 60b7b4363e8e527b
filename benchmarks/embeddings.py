"""What a flood of embeddings does to streams that are being decoded.

    python -m benchmarks.embeddings [--json] [--short] [--rounds 9] [--seconds 4] [--streams 4] [--clients 4]

One deployment of the embedded model, 1 prefill and 1 decode worker with one compute thread each. Its folder says that
it pools the last token, so it has embeddings as well as answers. Four streams decode. In turn, windows of some seconds
have no other load, then embeddings of 256 tokens from four clients as fast as they are answered, then prompts of the
same length that are prefilled and answered with one token, which is the same work for the prefill worker.

    itl_ratio       the 99th percentile of the gaps between events, with embeddings / without, median over rounds
    prompt_ratio    the same with prompts instead
    calm_ratio      the same of two windows without load: what the machine does by itself
    per_s           embeddings per second in such a window, median
    held            slabs that workers hold at rest

Figures in milliseconds are this machine's, and only ratios are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.interference import gaps_within, percentile
from benchmarks.load.command_line import figure_parser, print_figures
from benchmarks.load.deployment import ANSWER_S, ServedDeployment, StampedStream, serving_deployment
from benchmarks.load.short_form import add_short_form

MODEL, PROMPT_TOKENS, ANSWER_TOKENS, WARM_EVENTS = "tiny", 256, 1900, 24
FOLDER = Path(__file__).parents[1] / "models" / MODEL
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
Load = Callable[[httpx.AsyncClient, list[int]], Awaitable[httpx.Response]]


def make_pooling_model(folder: Path) -> Path:
    """The embedded model in a folder that says that it pools the last token."""
    copy = folder / MODEL
    shutil.copytree(FOLDER, copy)
    (copy / "modules.json").write_text(json.dumps(MODULES), encoding="utf-8")
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}', encoding="utf-8")
    return copy


def embed(http: httpx.AsyncClient, prompt: list[int]) -> Awaitable[httpx.Response]:
    """Ask for an embedding."""
    return http.post("/v1/embeddings", json={"model": MODEL, "input": [prompt]})


def complete(http: httpx.AsyncClient, prompt: list[int]) -> Awaitable[httpx.Response]:
    """Ask for one token."""
    return http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})


class StreamsUnderLoad:
    """Windows of one deployment, with prompts of their own."""

    def __init__(self, deployment: ServedDeployment, options: argparse.Namespace) -> None:
        self._deployment, self._options, self._number = deployment, options, 0
        self.answered: list[int] = []

    async def window(self, load: Load | None) -> float:
        """The 99th percentile of the gaps of all streams, in seconds, while `load` runs. Raises httpx.HTTPError."""
        fixed: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        streams: list[StampedStream] = []
        try:
            for _ in range(self._options.streams):
                prompt = self._take_prompt(32)
                streams.append(await StampedStream.open(self._deployment.port, prompt=prompt, **fixed))
            for stream in streams:
                await stream.until(WARM_EVENTS)
            begun_s = time.monotonic()
            if load is None:
                await asyncio.sleep(self._options.seconds)
            else:
                self.answered.append(await self._flood(load, begun_s + self._options.seconds))
            end_s = time.monotonic()
        finally:
            for stream in streams:
                await stream.leave()
        return percentile([gap for one in streams for gap in gaps_within(one.stamps_s, begun_s, end_s)], 99)

    async def _flood(self, load: Load, end_s: float) -> int:
        """Load from all clients until `end_s`; the number of answers."""
        answered = 0

        async def ask(http: httpx.AsyncClient) -> None:
            nonlocal answered
            while time.monotonic() < end_s:
                (await load(http, self._take_prompt(PROMPT_TOKENS))).raise_for_status()
                answered += 1

        url = self._deployment.url
        async with (
            httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(self._options.clients):
                tasks.create_task(ask(http))
        return answered

    def _take_prompt(self, num_tokens: int) -> list[int]:
        """Token ids that no prompt before had."""
        self._number += 1
        return [400 + self._number % 997, 400 + self._number // 997, *range(500, 498 + num_tokens)]


async def measure(deployment: ServedDeployment, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; in each the four windows come in another order."""
    loads: dict[str, Load | None] = {"none": None, "again": None, "embeddings": embed, "prompts": complete}
    times_s: dict[str, list[float]] = {name: [] for name in loads}
    streams, embedded = StreamsUnderLoad(deployment, options), []
    for number in range(-1, options.rounds):
        names = list(loads)
        for name in names[number % 4 :] + names[: number % 4]:
            seconds = await streams.window(loads[name])
            if name == "embeddings" and number >= 0:
                embedded.append(streams.answered[-1] / options.seconds)
            if number >= 0:  # the first round warms up
                times_s[name].append(seconds)

    def ratio(name: str) -> float:
        pairs = zip(times_s[name], times_s["none"], strict=True)
        return round(median(loaded / calm for loaded, calm in pairs), 3)

    return {
        "itl_ratio": ratio("embeddings"), "prompt_ratio": ratio("prompts"), "calm_ratio": ratio("again"),
        "per_s": round(median(embedded), 1),
        "p99_ms": {name: round(median(values) * 1e3, 2) for name, values in times_s.items()},
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = figure_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a window")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4, help="that ask for embeddings")
    add_short_form(parser, rounds=3, seconds=3.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = make_pooling_model(Path(scratch))
        with serving_deployment(
            "--model", str(model), "--served-model-name", MODEL, "--prefill", "1", "--decode", "1"
        ) as deployment:
            deployment.wait_ready()
            report = uvloop.run(measure(deployment, options))
            deployment.rest()
            report["held"] = deployment.metric("diptych:kv_slabs_used")
    print_figures(report, options, "rounds", "seconds")
    sys.exit(bool(report["held"]))


if __name__ == "__main__":
    main()
