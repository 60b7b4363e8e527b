"""How long a hand-off of 512 tokens takes between two vLLM workers, beside vLLM's own NIXL connector.

    python -m benchmarks.vllm_handoff [--json] [--rounds 1000] [--vllm-python PATH]

`handoff_ratio`   from the ticket to the request's first step at the decode worker, ours / NIXL: medians of alternating
                  rounds. Both get the ticket over a pipe. Ours pulls over shared memory, verifies every byte, goes
                  through the worker's loop, and loads within that step, which counts.
`forward_ratio`   the same to the forward of that step, `first_ratio` to the first token: what vLLM does in between
                  takes both the same time.
`slow`            how many of ours took more than a second to the first token.

Two processes each, the embedded model in float32 on the CPU; prompts are cached at the prefill workers and unknown to
the decode workers. Times in milliseconds are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import benchmarks.script_path  # noqa: F401
from benchmarks.vllm_parts.timed_steps import FirstStep, read_first_step
from diptych.messages import Offer, Release
from diptych.request import SamplingParams
from tests.support.vllm_worker_pair import REPOSITORY, LinkedPair

NUM_TOKENS, ANSWER_TOKENS, MAX_HANDOFF_S = 512, 2, 1.0
# Rounds before those that count.
WARM_ROUNDS = 5


class NixlEngine:
    """One vLLM with its own connector, in a process of its own."""

    def __init__(self, python: str, model: str, log: Path) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(find_free_port()),
            "UCX_NET_DEVICES": "lo",
        }
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.vllm_parts.nixl_engine", model],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.read()

    def send(self, **order: Any) -> None:
        """Give it an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Its next line of JSON. Raises RuntimeError if it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"vLLM has ended: {self.log.read_text()[-3000:]}")

    def finish(self, name: str) -> list[dict[str, Any]]:
        """The lines about a request, to its end."""
        lines = [self.read()]
        while lines[-1]["name"] != name or not lines[-1]["finished"]:
            lines.append(self.read())
        return lines

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def find_free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Handoff:
    """One hand-off: its first step, seconds from the ticket to the first token, and the answer."""

    first: FirstStep
    token_s: float
    answer: list[int]


def hand_over_ours(pair: LinkedPair, number: int, prompt: list[int]) -> Handoff:
    """One hand-off between two of our workers."""
    name, sampling = f"ours {number}", SamplingParams(max_tokens=ANSWER_TOKENS + 1, seed=1, temperature=0.0)
    offer: Offer = pair.offer(name, prompt, sampling)
    begun_s = time.perf_counter()
    pair.admit(name, prompt, sampling, offer.ticket, scope=name)
    pair.decode.wait_outputs(name)
    token_s = time.perf_counter() - begun_s
    pair.decode.wait_end(name)
    pair.prefill.tell(Release(name, 0))
    answer = pair.prefill.tokens(name) + pair.decode.tokens(name)
    pair.prefill.said.clear()
    pair.decode.said.clear()
    return Handoff(read_first_step(pair.decode.log, begun_s), token_s, answer)


def hand_over_nixl(engines: tuple[NixlEngine, NixlEngine], number: int, prompt: list[int]) -> Handoff:
    """As `hand_over_ours`, with vLLM's connector, whose decode worker draws the first token again."""
    name, (prefill, decode) = f"nixl {number}", engines
    prefill.send(kind="prefill", name=name, prompt=prompt, salt="known")
    first = prefill.finish(name)[-1]
    begun_s = time.perf_counter()
    decode.send(
        kind="decode",
        name=name,
        prompt=prompt,
        params=first["params"],
        max_tokens=ANSWER_TOKENS + 1,
        salt=name,
    )
    lines = [decode.read()]
    token_s = time.perf_counter() - begun_s
    if not lines[-1]["finished"]:
        lines += decode.finish(name)
    answer = lines[-1]["tokens"]
    assert answer[:1] == first["tokens"], f"{answer} after {first['tokens']}"
    return Handoff(read_first_step(decode.log, begun_s), token_s, answer)


def measure(python: str, rounds: int) -> dict[str, float]:
    """Alternate both ways for `rounds` rounds. Raises AssertionError if they answer differently."""
    ours, theirs = list[Handoff](), list[Handoff]()
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory()))
        model = owned.enter_context(linked_model(folder))
        pair = LinkedPair([python, "-m", "benchmarks.vllm_parts.timed_steps"], model, 1, folder)
        owned.callback(pair.close)
        engines = (
            NixlEngine(python, model, folder / "three.log"),
            NixlEngine(python, model, folder / "four.log"),
        )
        for engine in engines:
            owned.callback(engine.close)
        chance = Random(1)
        prompt = [chance.randrange(5, pair.prefill.ready["vocab"]) for _ in range(NUM_TOKENS)]
        for number in range(WARM_ROUNDS + rounds):
            mine, other = hand_over_ours(pair, number, prompt), hand_over_nixl(engines, number, prompt)
            assert mine.answer == other.answer, f"{mine} and {other} in round {number}"
            ours.append(mine)
            theirs.append(other)
        pair.check_rest()
    ours, theirs = ours[WARM_ROUNDS:], theirs[WARM_ROUNDS:]
    found = dict[str, float]()
    for name, seconds in (
        ("handoff", lambda one: one.first.step_s),
        ("forward", lambda one: one.first.forward_s),
        ("first", lambda one: one.token_s),
    ):
        mine_ms, other_ms = (1e3 * median(map(seconds, some)) for some in (ours, theirs))
        found |= {f"{name}_ratio": mine_ms / other_ms, f"{name}_ms": mine_ms, f"nixl_{name}_ms": other_ms}
    return found | {
        "slowest_ms": 1e3 * max(one.token_s for one in ours),
        "slow": sum(one.token_s > MAX_HANDOFF_S for one in ours),
        "rounds": rounds,
    }


@contextmanager
def linked_model(folder: Path) -> Iterator[str]:
    """The embedded model, without the file of our own that vLLM would take for weights."""
    linked = folder / "model"
    linked.mkdir()
    for path in (REPOSITORY / "models" / "tiny").iterdir():
        if path.name != "kvquant.safetensors":
            (linked / path.name).symlink_to(path)
    yield str(linked)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--vllm-python", default=os.environ.get("TEST_VLLM_PYTHON", ""))
    options = parser.parse_args()
    if not options.vllm_python:
        parser.error("--vllm-python PATH, an interpreter with vLLM, is needed (make vllm)")
    found = measure(options.vllm_python, options.rounds)
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:14s} {value:10.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
