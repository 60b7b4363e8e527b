"""A deployment on three Ray nodes, which are network namespaces of this machine: exact answers, whatever is lost.

    python -m benchmarks.cluster [--json] [--short] [--answers 400] [--streams 50] [--seeds 20] [--head-down-s 60]

Needs root, and the commands `ip`, `bridge`, `tc`, `unshare` and `nsenter`. Ray's head has no CPUs and runs `diptych
serve`; two nodes have CPUs for all workers each, so that one is a spare for the other. The embedded model serves, with
two prefill and two decode workers. What answers should be was asked before of a deployment on this machine alone.

    cluster_exact        1 if all greedy answers are equal to those of one machine
    transports           which transport each pair of workers has; `within_shm` and `between_nixl`: all pairs have it
    moved_bytes          KV that was handed over, by transport
    second_deployment    1 if a deployment in another namespace of the same cluster answers the same
    refused_s            seconds until a worker that no node has room for is refused, in `refused_lines` lines
    head_failed          requests that failed or differed while Ray's head was dead, of `head_requests`
    node_failed          the same while a node was killed, or cut off and healed, of `node_requests`, over all seeds
    back_s               seconds from a node's loss until all four workers were there again (median)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from typing import Any

import httpx

import benchmarks.script_path  # noqa: F401
from benchmarks.load.short_form import add_short_form
from tests.support import network_namespaces, waiting
from tests.support.cluster_driver import Driver, run_serve
from tests.support.deployment import serve_parts
from tests.support.ray_nodes import RayCluster, RayNode, running_cluster

PATIENCE_S = 300.0
# A node that is cut off for 10 s is given up by Ray meanwhile.
HEALTH_TIMEOUT_S = 2.0
# Seconds after a cut within which Ray ends a node that it has given up.
SETTLE_S = 15.0
TOKENS = 24
NUM_PROMPTS = 40
POOLS = ("--prefill", "2", "--decode", "2")
WORDS = (
    "def",
    "class",
    "return",
    "import",
    "self",
    "value",
    "index",
    "for",
    "in",
    "list",
    "dict",
    "open",
    "line",
)


def make_prompts(count: int, seed: int) -> list[str]:
    """Prompts of different lengths."""
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS, k=dice.randint(4, 120))) + "\n" for _ in range(count)]


def request_body(prompt: str, stream: bool) -> dict[str, Any]:
    """A greedy request."""
    return {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": stream}


async def ask_whole(http: httpx.AsyncClient, prompt: str) -> str:
    """The answer in one piece. Raises httpx.HTTPError if there is none."""
    answer = await http.post("/v1/completions", json=request_body(prompt, stream=False))
    return str(answer.raise_for_status().json()["choices"][0]["text"])


async def ask_stream(http: httpx.AsyncClient, prompt: str) -> str:
    """The streamed answer. Raises httpx.HTTPError, or RuntimeError if the stream ends with an error or early."""
    parts, done = [], False
    async with http.stream("POST", "/v1/completions", json=request_body(prompt, stream=True)) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"])[:200])
                parts += [choice["text"] for choice in event["choices"]]
    if not done:
        raise RuntimeError("the stream ended early")
    return "".join(parts)


async def ask_all(url: str, prompts: list[str], at_once: int = 8) -> list[str]:
    """The answers to all prompts."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:

        async def one(prompt: str) -> str:
            async with gate:
                return await ask_whole(http, prompt)

        return list(await asyncio.gather(*map(one, prompts)))


class StreamLoad:
    """Streams that ask one after the other, and how their answers were."""

    def __init__(self, url: str, expected: dict[str, str], streams: int, seed: int) -> None:
        self._url, self._expected, self._streams = url, expected, streams
        self._dice = random.Random(seed)
        self.count = 0
        self.failures = Counter[str]()

    async def run_beside(self, fault: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Keep all streams busy until `fault()` has returned, then let the last answers come."""
        over = asyncio.Event()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=PATIENCE_S, trust_env=False, limits=limits
        ) as http:
            asking = [asyncio.create_task(self._ask_until(http, over)) for _ in range(self._streams)]
            try:
                await fault()
            finally:
                over.set()
                await asyncio.gather(*asking)

    async def _ask_until(self, http: httpx.AsyncClient, over: asyncio.Event) -> None:
        prompts = list(self._expected)
        while not over.is_set():
            prompt = self._dice.choice(prompts)
            self.count += 1
            try:
                text = await ask_stream(http, prompt)
            except (httpx.HTTPError, RuntimeError) as error:
                self.failures[f"{type(error).__name__}: {error}"[:160]] += 1
            else:
                self.failures["differs"] += text != self._expected[prompt]

    @property
    def num_failed(self) -> int:
        """How many answers failed or differed."""
        return sum(self.failures.values())


def all_linked(driver: Driver) -> bool:
    """Whether all four workers are there and linked."""
    state = driver.status()
    return len(state["workers"]) == 4 and len(state["links"]) == 4 and not state["reasons"]


async def until_linked(driver: Driver) -> float:
    """Seconds until all four workers are there and linked."""
    return await asyncio.to_thread(
        waiting.wait_for, lambda: all_linked(driver), PATIENCE_S, 0.5, driver.output
    )


def measure_exact(driver: Driver, url: str, prompts: list[str], expected: dict[str, str]) -> dict[str, Any]:
    """Whether all answers are those of one machine, and how KV has moved."""
    answers = asyncio.run(ask_all(url, prompts))
    equal = sum(answer == expected[prompt] for prompt, answer in zip(prompts, answers, strict=True))
    status = driver.status()
    host = {worker["worker"]: worker["host"] for worker in status["workers"]}
    moved: Counter[str] = Counter()
    within: set[str] = set()
    between: set[str] = set()
    for link in status["links"]:
        moved[link["transport"]] += link["moved_bytes"]
        same = host[link["source"]] == host[link["target"]]
        (within if same else between).add(link["transport"])
    return {
        "cluster_exact": int(equal == len(prompts)),
        "answers_equal": equal,
        "answers": len(prompts),
        "within_shm": int(within == {"shm"}),
        "between_nixl": int(between == {"nixl"}),
        "moved_bytes": dict(moved),
    }


def measure_refusal(cluster: RayCluster) -> dict[str, Any]:
    """How soon a worker that no node has room for is refused."""
    began_s = time.monotonic()
    ended = run_serve(cluster, cluster.address, "--ray-namespace", "large", "--decode-tp", "32")
    return {
        "refused_s": round(time.monotonic() - began_s, 2),
        "refused_lines": len(ended.stderr.strip().splitlines()) if ended.returncode else 0,
    }


def measure_second(cluster: RayCluster, prompts: list[str], expected: dict[str, str]) -> dict[str, Any]:
    """Whether another deployment answers the same, beside the first one."""
    with Driver(cluster, "--prefill", "1", "--decode", "1", namespace="second", port=8001) as driver:
        answers = asyncio.run(ask_all(f"http://{driver.host}:{driver.port}", prompts))
        driver.stop()
    return {"second_deployment": int(answers == [expected[prompt] for prompt in prompts])}


def measure_head(cluster: RayCluster, driver: Driver, load: StreamLoad, down_s: float) -> dict[str, Any]:
    """Kill Ray's head under load, and start it again."""

    async def kill_and_restart() -> None:
        command = cluster.kill_head()
        await asyncio.sleep(down_s)
        cluster.restart_head(command)
        await asyncio.to_thread(
            waiting.wait_for, lambda: "head is back" in driver.output(), PATIENCE_S, 0.5, driver.output
        )
        await until_linked(driver)

    asyncio.run(load.run_beside(kill_and_restart))
    return {
        "head_failed": load.num_failed,
        "head_requests": load.count,
        "head_down_s": down_s,
        "head_failures": dict(+load.failures),
    }


async def restore_node(cluster: RayCluster, driver: Driver, node: RayNode) -> None:
    """Start the node again unless it serves: a node that Ray has given up ends itself, sooner or later."""
    if node.find_process("raylet") is not None:
        await asyncio.sleep(SETTLE_S)
        await until_linked(driver)
        if any(worker["host"] == node.house.address for worker in driver.status()["workers"]):
            return
    node.kill()
    node.start()
    await asyncio.to_thread(cluster.wait_started)


def measure_nodes(
    cluster: RayCluster, driver: Driver, loads: list[StreamLoad], cut_s: float
) -> dict[str, Any]:
    """Lose a node with its workers in each round: killed and cut off in turn, the two nodes in turn."""
    back: list[float] = []
    kinds: Counter[str] = Counter()
    for number, load in enumerate(loads):
        node = cluster.nodes[1 + number // 2 % 2]
        killed = number % 2 == 0

        async def lose(node: RayNode = node, killed: bool = killed) -> None:
            await asyncio.sleep(1.0)
            began_s = time.monotonic()
            if killed:
                node.kill()
            else:
                cut = node.house.cut()
                await asyncio.sleep(cut_s)
                cut.heal()
                cut.verify()
            await asyncio.sleep(2.0)
            await until_linked(driver)
            back.append(time.monotonic() - began_s)
            await restore_node(cluster, driver, node)

        asyncio.run(load.run_beside(lose))
        kinds["killed" if killed else "cut off"] += 1
        print(f"round {number}: {load.count} requests, {load.num_failed} failed {dict(+load.failures)}",
              file=sys.stderr)  # fmt: skip
    failures: Counter[str] = sum((load.failures for load in loads), Counter())
    return {
        "node_failed": sum(load.num_failed for load in loads),
        "node_requests": sum(load.count for load in loads),
        "node_rounds": dict(kinds),
        "node_failures": dict(+failures),
        "back_s": round(median(back), 1) if back else None,
    }


def run_checks(cluster: RayCluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    every = make_prompts(max(arguments.answers, NUM_PROMPTS), 1)
    with serve_parts() as alone:
        texts = asyncio.run(ask_all(alone.url, every))
    expected = dict(zip(every, texts, strict=True))
    prompts, streamed = (
        every[: arguments.answers],
        {prompt: expected[prompt] for prompt in every[:NUM_PROMPTS]},
    )
    options = ("--max-queue-wait-s", "300", "--recovery-s", "120")
    with Driver(cluster, *POOLS, *options) as driver:
        url = f"http://{driver.host}:{driver.port}"
        found = measure_exact(driver, url, prompts, expected)
        found |= measure_refusal(cluster) | measure_second(cluster, prompts[:20], expected)
        if arguments.head_down_s > 0:
            load = StreamLoad(url, streamed, arguments.streams, 0)
            found |= measure_head(cluster, driver, load, arguments.head_down_s)
        if arguments.seeds:
            loads = [StreamLoad(url, streamed, arguments.streams, seed) for seed in range(arguments.seeds)]
            found |= measure_nodes(cluster, driver, loads, arguments.cut_s)
        driver.stop()
    return found


def main() -> None:
    """Read the command line, run the checks, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--answers", type=int, default=400, help="greedy answers that are compared")
    parser.add_argument("--streams", type=int, default=50, help="streams at a time while something is lost")
    parser.add_argument("--seeds", type=int, default=20, help="rounds in which a node is lost (0: none)")
    parser.add_argument(
        "--head-down-s", type=float, default=60.0, help="seconds without Ray's head (0: skip)"
    )
    parser.add_argument("--cut-s", type=float, default=10.0, help="seconds for which a node is cut off")
    add_short_form(parser, answers=60, streams=20, seeds=2, head_down_s=15.0, cut_s=8.0)
    arguments = parser.parse_args()
    if why := network_namespaces.why_unavailable():
        parser.exit(1, f"error: {why}\n")
    folder = Path(tempfile.mkdtemp(prefix="dpt", dir="/tmp"))
    try:
        with running_cluster(folder, cpus=(0, 8, 8), health_timeout_s=HEALTH_TIMEOUT_S) as cluster:
            found = run_checks(cluster, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<20} {value}")


if __name__ == "__main__":
    main()
