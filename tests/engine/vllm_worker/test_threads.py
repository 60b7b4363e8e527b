"""Both roles as a worker makes them, with their threads and shared memory, over toy ports; each loop has a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from diptych.messages import (
    Abort,
    Admit,
    Drain,
    Failed,
    Hello,
    Linked,
    Offer,
    Peer,
    Prefill,
    Pulled,
    Release,
    Step,
    ToGateway,
    ToWorker,
)
from diptych.specs import WorkerSpec
from kvtransfer.transports.links import OfferedTransports
from tests.engine.vllm_worker.vllm_bench import MAX_MODEL_LEN, alone, greedy, make_prompt
from tests.engine.workers.worker_bench import KEY
from tests.support.toy_port import ToyPort
from vllm_worker import roles
from vllm_worker.buffer import open_buffer
from vllm_worker.engine import VllmEngine
from vllm_worker.roles import VllmRoles
from worker.loop import LatestStats, WorkerLoop

M = TypeVar("M", Offer, Pulled, Linked)
MAX_WAIT_S = 60.0


class QueueLink:
    """A `worker.loop.GatewayLink` in this process."""

    def __init__(self) -> None:
        self.gateway_lost = self.is_congested = False
        self.inbox: queue.SimpleQueue[ToWorker | None] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[ToGateway] = queue.SimpleQueue()

    def send(self, message: ToGateway) -> None:
        self.outbox.put(message)

    def poll_messages(self, timeout_s: float) -> list[ToWorker]:
        try:
            first = self.inbox.get(timeout=timeout_s) if timeout_s > 0 else self.inbox.get_nowait()
        except queue.Empty:
            return []
        return [first] if first is not None else []

    def wake_poll(self) -> None:
        self.inbox.put(None)


class ThreadedWorker:
    """A worker over a toy port, whose loop runs in a thread until it is drained."""

    def __init__(self, name: str, role: str) -> None:
        self.link, port = QueueLink(), ToyPort(max_model_len=MAX_MODEL_LEN, num_blocks=60)
        self.buffer = open_buffer(port.facts, 40 * port.facts.slab_bytes)
        port.attach_buffer(self.buffer)
        engine = VllmEngine(port)
        spec = WorkerSpec(worker=name, role=role, gateway="", keys_dir="", model="", transports=("shm",))
        maker = VllmRoles(spec, engine, self.buffer, KEY, "model")
        self.sources: OfferedTransports | None = None
        if role == "prefill":
            self.sources = OfferedTransports(
                ["shm"], [(self.buffer.pool.shards[0], self.buffer.memory)], name
            )
            made, self.close_role = maker.make_prefill(self.link, make_hello(name), self.sources)
        else:
            made, self.close_role = maker.make_decode(self.link)
        self.books, self.said = maker.books, list[ToGateway]()
        self.loop = WorkerLoop(self.link, engine, made, maker.books, LatestStats(), fingerprint="model")
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_until_drained()
            self.loop.check_settled()
        except BaseException as error:
            self.error = error

    def tell(self, *messages: ToWorker) -> None:
        for message in messages:
            self.link.inbox.put(message)

    def wait_for(self, found: Callable[[], object]) -> None:
        """Take what the worker says until `found` returns something true."""
        while not found():
            self.said.append(self.link.outbox.get(timeout=MAX_WAIT_S))

    def wait_first(self, kind: type[M], request: str) -> M:
        """The first message of a kind about a request (or a worker)."""

        def find() -> M | None:
            found = (one for one in self.said if isinstance(one, kind))
            return next(
                (one for one in found if request in (getattr(one, "request", ""), getattr(one, "peer", ""))),
                None,
            )

        self.wait_for(find)
        first = find()
        assert first is not None
        return first

    def tokens(self, request: str) -> list[int]:
        steps = [message for message in self.said if isinstance(message, Step)]
        outputs = [output for step in steps for output in step.outputs if output.request == request]
        return [token for output in outputs for token in output.tokens]

    def ended(self, request: str) -> bool:
        steps = [message for message in self.said if isinstance(message, Step)]
        outputs = [output for step in steps for output in step.outputs if output.request == request]
        failed = any(isinstance(one, Failed) and one.request == request for one in self.said)
        return failed or any(output.finish for output in outputs)

    def close(self) -> None:
        """Drain; nothing is left."""
        self.tell(Drain())
        self.thread.join(MAX_WAIT_S)
        self.close_role()
        if self.sources is not None:
            self.sources.close()
        assert self.error is None and not self.thread.is_alive(), self.error
        assert self.books.used == 0, self.books.owners()
        self.buffer.close()


def make_hello(name: str) -> Hello:
    return Hello(
        worker=name,
        role="prefill",
        incarnation="life",
        fingerprint="model",
        identity={},
        host="",
        pid=0,
        num_slabs=0,
        chunk_bytes=0,
        max_model_len=MAX_MODEL_LEN,
        endpoints={},
    )


@pytest.fixture(params=[0, roles.SMALL_PULL_BYTES], ids=["other thread", "own thread"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ThreadedWorker, ThreadedWorker]]:
    """A decode worker that pulls in the thread that is for it, or while it is idle in that of its loop."""
    monkeypatch.setattr(roles, "SMALL_PULL_BYTES", request.param)
    prefill, decode = ThreadedWorker("p", "prefill"), ThreadedWorker("d", "decode")
    assert prefill.sources is not None
    decode.tell(Peer("p", "life", prefill.sources.endpoints()))
    assert decode.wait_first(Linked, "p").transport == "shm"
    yield prefill, decode
    prefill.close()
    decode.close()


@pytest.mark.parametrize("defer", [False, True])
def test_requests_side_by_side_get_the_answers_of_one_engine(
    pair: tuple[ThreadedWorker, ThreadedWorker], defer: bool
) -> None:
    prefill, decode = pair
    prompts = {f"r{size}": make_prompt(size) for size in (1, 64, 65, 130, 300, 500, 130 + 64)}
    for name, prompt in prompts.items():
        prefill.tell(Prefill(name, 0, prompt, [], greedy(), 60.0, defer_first=defer))
    for name, prompt in prompts.items():
        offer = prefill.wait_first(Offer, name)
        decode.tell(Admit(name, 0, prompt, prefill.tokens(name), greedy(), offer.ticket, 60.0))
        decode.wait_first(Pulled, name)
        prefill.tell(Release(name, 0))
    for name, prompt in prompts.items():
        decode.wait_for(lambda name=name: decode.ended(name))  # type: ignore[misc]
        assert prefill.tokens(name) + decode.tokens(name) == alone(prompt)


def test_aborts_at_any_moment_leave_nothing(pair: tuple[ThreadedWorker, ThreadedWorker]) -> None:
    prefill, decode = pair
    for number in range(40):
        name, prompt = f"r{number}", make_prompt(100 + number, number)
        prefill.tell(Prefill(name, 0, prompt, [], greedy(), 60.0))
        if number % 4 == 0:
            prefill.tell(Abort(name, 0))
            continue
        offer = prefill.wait_first(Offer, name)
        decode.tell(Admit(name, 0, prompt, prefill.tokens(name), greedy(), offer.ticket, 60.0))
        if number % 4 == 2:
            decode.wait_first(Pulled, name)
        decode.tell(Abort(name, 0))
        prefill.tell(Abort(name, 0))
