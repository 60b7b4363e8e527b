"""Part `roles`: workers change their roles under load, and what workers cost at rest."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

from benchmarks.gpu_parts.check_part import PartContext
from benchmarks.load.answer_checks import AskedRequest, ask_reference, compare_answers, make_requests
from benchmarks.load.channel_deployment import DEVICE_BOOKS, ChannelAnswer, ChannelDeployment, wait_answers
from benchmarks.vllm_parts.tokens import ALONE, KINDS, REST_S, TWO_PAIRS, vllm_flags

NUM_ASKED, STREAMS, NEW_TOKENS = 48, 8, 40
# Changes one after the other; together they bring every worker back to its role.
CHANGES = (
    ("prefill-1", "decode"), ("prefill-1", "prefill"), ("decode-1", "prefill"), ("prefill-0", "decode"),
    ("decode-1", "decode"), ("prefill-0", "prefill"),
)  # fmt: skip
ROUNDS, PAUSE_S = 4, 2.0
# For how long the CPU time of workers is taken, and how long they rest before.
WATCH_S, SETTLE_S = 10.0, 2.0


class SteadyLoad:
    """So many requests at a time, until it is ended."""

    def __init__(
        self, deployment: ChannelDeployment, asked: Sequence[AskedRequest], chance: random.Random
    ) -> None:
        self.answers: list[tuple[int, ChannelAnswer]] = []
        self._deployment, self._asked, self._chance = deployment, asked, chance
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(STREAMS)]

    def _ask(self) -> None:
        """One stream: a request when the last one has ended."""
        while not self._ended.is_set():
            number = self._chance.randrange(len(self._asked))
            one = self._asked[number]
            answer = self._deployment.submit(one.prompt, one.sampling)
            self.answers.append((number, answer))
            wait_answers([answer])

    @contextmanager
    def running(self) -> Iterator[None]:
        """It runs until the block ends; then the last requests are waited for."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in self._threads:
                thread.join()


def measure_roles(context: PartContext) -> None:
    """Changes of roles, both ways, under 8 streams; then the CPU time of idle workers."""
    asked = make_requests(NUM_ASKED // 2, NUM_ASKED // 2, seed=3, max_tokens=NEW_TOKENS, kinds=KINDS)
    with ChannelDeployment(*ALONE, *vllm_flags()) as deployment:
        reference = ask_reference(deployment, asked)
    with ChannelDeployment(*TWO_PAIRS, *vllm_flags()) as deployment:
        pids = {worker: deployment.pid(worker) for worker in deployment.workers}
        steady, changes = SteadyLoad(deployment, asked, random.Random(0)), 0
        with steady.running():
            for _ in range(max(1, round(ROUNDS * context.share))):
                for worker, role in CHANGES:
                    time.sleep(PAUSE_S)
                    deployment.switch_role(worker, role)
                    changes += 1
        held = deployment.wait_rest(REST_S, DEVICE_BOOKS)
        found = compare_answers(
            [reference[at] for at, _ in steady.answers], [one for _, one in steady.answers]
        )
        context.record({
            "role_changes": changes, "role_answers": found.answers, "role_failed": found.failed,
            "role_unexplained": found.unexplained, "role_held": len(held), "role_examples": found.examples,
            "reloads": sum(deployment.pid(worker) != pid for worker, pid in pids.items()),
        })  # fmt: skip
        time.sleep(SETTLE_S)
        context.record({"idle_percent": watch_cpu(list(pids.values()))})


def watch_cpu(pids: Sequence[int]) -> float:
    """The CPU time of the busiest process in percent of a core."""
    watched = [psutil.Process(pid) for pid in pids]

    def seconds() -> list[float]:
        return [one.cpu_times().user + one.cpu_times().system for one in watched]

    before = seconds()
    time.sleep(WATCH_S)
    return round(max(after - then for after, then in zip(seconds(), before, strict=True)) / WATCH_S * 100, 2)
