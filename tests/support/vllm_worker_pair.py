"""A prefill and a decode worker on vLLM, or on a toy, in processes of their own; the test is their gateway."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from diptych.channel.frames import decode_from_worker, pack_message
from diptych.messages import (
    Admit,
    Failed,
    Generate,
    Linked,
    Offer,
    Output,
    Peer,
    Prefill,
    Pulled,
    Release,
    Step,
    SwitchRole,
    ToGateway,
    ToWorker,
)
from diptych.request import SamplingParams, Tenancy
from kvtransfer.shared_memory import SharedMemoryAddress, attach_memory

REPOSITORY = Path(__file__).parents[2]
# Seconds that a worker may take to load vLLM, and to answer.
MAX_START_S, MAX_ANSWER_S = 900.0, 120.0
REST_POLL_S = 0.05
# References are computed under a scope of their own, so that they warm no cache.
REFERENCE = "reference"

# Lengths of prompts, in tokens.
LENGTHS = (
    *(1, 2, 5, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 300),
    *(500, 512, 513, 777, 1000, 1024, 1400, 1500),
)
TOKENS = 16
GREEDY = SamplingParams(max_tokens=TOKENS, seed=1, temperature=0.0)


def make_prompts(chance: random.Random, vocab: int) -> dict[str, list[int]]:
    """Prompts of each length, and some that share beginnings."""
    shared = [chance.randrange(5, vocab) for _ in range(640)]
    alone = {f"p{size}": [chance.randrange(5, vocab) for _ in range(size)] for size in LENGTHS}
    sharing = {
        f"s{size}": shared[:size] + [chance.randrange(5, vocab) for _ in range(40)]
        for size in (64, 100, 320, 640)
    }
    return alone | sharing


def name_prompts(prompts: dict[str, list[int]], tag: str) -> dict[str, list[int]]:
    """The prompts under other names."""
    return {f"{tag} {name}": prompt for name, prompt in prompts.items()}


def vllm_command(python: str) -> list[str]:
    """Starts a worker on vLLM under an interpreter that has it."""
    return [python, "-m", "tests.support.vllm_worker_process"]


def toy_command() -> list[str]:
    """Starts a worker on a toy."""
    return [sys.executable, "-m", "tests.support.toy_worker_process"]


M = TypeVar("M", Offer, Pulled)


class LinkedWorker:
    """One worker's process, and all that it has said."""

    def __init__(
        self, command: Sequence[str], name: str, role: str, model: str, ranks: int, log: Path
    ) -> None:
        near, far = socket.socketpair()
        self.log = log
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        arguments = [str(far.fileno()), name, role, model, str(ranks)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *arguments],
                cwd=REPOSITORY,
                env=env,
                pass_fds=[far.fileno()],
                stdout=output,
                stderr=output,
            )
        far.close()
        self._connection = Connection(near.detach())
        self.name, self.said = name, list[ToGateway]()
        self._lines: list[dict[str, Any]] = []
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Returns when it serves."""
        self.ready = self._next_line(MAX_START_S)
        address = msgspec.msgpack.decode(bytes.fromhex(self.ready["memory"]), type=SharedMemoryAddress)
        self.memory = attach_memory(address, writable=True)

    def tell(self, *messages: ToWorker) -> None:
        for message in messages:
            self._connection.send_bytes(pack_message(message))

    def wait_for(self, found: Callable[[], Any], limit_s: float = MAX_ANSWER_S) -> Any:
        """Read what the worker says until `found` returns something true, which is returned."""
        while not (answer := found()):
            self._read(limit_s)
        return answer

    def _read(self, limit_s: float) -> None:
        try:
            arrived = self._connection.poll(limit_s)
            payload = self._connection.recv_bytes() if arrived else b""
        except (EOFError, OSError):
            payload = b""
        if not payload:
            raise AssertionError(f"{self.name} says nothing:\n{self.log.read_text()[-4000:]}")
        if payload.startswith(b"{"):
            self._lines.append(json.loads(payload))
        else:
            self.said.append(decode_from_worker(payload))

    def _next_line(self, limit_s: float = MAX_ANSWER_S) -> dict[str, Any]:
        self.wait_for(lambda: self._lines, limit_s)
        return self._lines.pop(0)

    def report(self) -> dict[str, Any]:
        """Books and statistics of now."""
        self._connection.send_bytes(b"report")
        return self._next_line()

    def wait_rest(self) -> dict[str, Any]:
        """The report of a worker that holds nothing any more. Raises AssertionError if it does not come to that."""
        end_s = time.monotonic() + MAX_ANSWER_S
        while (report := self.report())["busy"] or report["used"]:
            assert time.monotonic() < end_s, f"{self.name} does not come to rest: {report}"
            time.sleep(REST_POLL_S)
        return report

    def switch(self, role: str) -> None:
        """Drain, and serve in another role."""
        self.tell(SwitchRole(role))
        self.ready = self._next_line()
        assert self.ready["role"] == role

    def tokens(self, request: str) -> list[int]:
        return [token for output in self.outputs(request) for token in output.tokens]

    def outputs(self, request: str) -> list[Output]:
        steps = [message for message in self.said if isinstance(message, Step)]
        return [output for step in steps for output in step.outputs if output.request == request]

    def ended(self, request: str) -> str:
        """How the request has ended here: a finish reason or a failure code; empty: it has not."""
        failed = (one for one in self.said if isinstance(one, Failed) and one.request == request)
        return next((one.code for one in failed), "") or next(
            (output.finish for output in self.outputs(request) if output.finish), ""
        )

    def first(self, kind: type[Any], request: str) -> Any:
        """The first message of a kind about a request, or None."""
        return next((one for one in self.said if isinstance(one, kind) and one.request == request), None)

    def wait_first(self, kind: type[M], request: str) -> M:
        """The first message of a kind about a request, when it has come."""
        self.wait_for(lambda: self.first(kind, request))
        found: M = self.first(kind, request)
        return found

    def wait_outputs(self, request: str) -> None:
        """Returns when the request has its first output."""
        self.wait_for(lambda: self.outputs(request))

    def wait_end(self, request: str) -> str:
        """How the request ends, when it has: a finish reason or a failure code."""
        self.wait_for(lambda: self.ended(request))
        return self.ended(request)

    def close(self) -> None:
        self._connection.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class LinkedPair:
    """Two workers that are linked. Requests are greedy, unless a test asks for something else."""

    def __init__(self, command: Sequence[str], model: str, ranks: int, folder: Path) -> None:
        self.prefill = LinkedWorker(command, "one", "prefill", model, ranks, folder / "one.log")
        self.decode = LinkedWorker(command, "two", "decode", model, ranks, folder / "two.log")
        try:
            self.prefill.wait_ready()
            self.decode.wait_ready()
            self.link()
        except BaseException:
            self.close()
            raise

    def link(self) -> None:
        """Link the decode worker to the prefill worker."""
        ready, said = self.prefill.ready, len(self.decode.said)
        endpoints = {name: bytes.fromhex(value) for name, value in ready["endpoints"].items()}
        self.decode.tell(Peer(self.prefill.name, ready["incarnation"], endpoints))
        linked = self.decode.wait_for(
            lambda: next((one for one in self.decode.said[said:] if isinstance(one, Linked)), None)
        )
        assert linked.transport == "shm", linked

    def exchange_roles(self) -> None:
        """Each takes the role of the other, without loading anything."""
        self.prefill.switch("decode")
        self.decode.switch("prefill")
        self.prefill, self.decode = self.decode, self.prefill
        self.link()

    def offer(
        self, name: str, prompt: list[int], sampling: SamplingParams, defer: bool = False, scope: str = ""
    ) -> Offer:
        """Let the prefill worker compute a prompt."""
        self.prefill.tell(
            Prefill(name, 0, prompt, [], sampling, 600.0, Tenancy(scope=scope), defer_first=defer)
        )
        return self.prefill.wait_first(Offer, name)

    def admit(
        self, name: str, prompt: list[int], sampling: SamplingParams, ticket: bytes, scope: str = ""
    ) -> None:
        first = self.prefill.tokens(name)
        self.decode.tell(Admit(name, 0, prompt, first, sampling, ticket, 600.0, Tenancy(scope=scope)))

    def answers(
        self, prompts: dict[str, list[int]], sampling: SamplingParams, defer: bool = False, scope: str = ""
    ) -> dict[str, list[int]]:
        """Hand all prompts over, side by side; returns the answers."""
        for name, prompt in prompts.items():
            self.prefill.tell(
                Prefill(name, 0, prompt, [], sampling, 600.0, Tenancy(scope=scope), defer_first=defer)
            )
        for name, prompt in prompts.items():
            offer = self.prefill.wait_first(Offer, name)
            self.admit(name, prompt, sampling, offer.ticket, scope)
            self.decode.wait_first(Pulled, name)
            self.prefill.tell(Release(name, 0))
        for name in prompts:
            self.decode.wait_end(name)
        return {name: self.prefill.tokens(name) + self.decode.tokens(name) for name in prompts}

    def references(self, prompts: dict[str, list[int]], sampling: SamplingParams) -> dict[str, list[int]]:
        """What the decode worker answers alone."""
        scope = Tenancy(scope=REFERENCE)
        for name, prompt in prompts.items():
            self.decode.tell(Generate(f"{REFERENCE} {name}", 0, prompt, [], sampling, 600.0, scope))
        for name in prompts:
            self.decode.wait_end(f"{REFERENCE} {name}")
        return {name: self.decode.tokens(f"{REFERENCE} {name}") for name in prompts}

    def check_rest(self) -> None:
        """Nothing is held at either worker."""
        for worker in (self.prefill, self.decode):
            report = worker.wait_rest()
            assert report["held_blocks"] == 0 and not report["owners"].keys() - {"vLLM", "copies"}, report

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
