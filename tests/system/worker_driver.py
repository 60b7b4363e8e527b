"""Real worker processes driven by hand: a gateway's end of the channel, without HTTP and without a relay.

The tests play the relay, so that they can also do what a relay never would.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from diptych.channel.hub import ChannelHub
from diptych.channel.keys import load_server_keys, make_keys
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.messages import (
    Abort,
    Admit,
    Failed,
    Generate,
    Heartbeat,
    Hello,
    Linked,
    Offer,
    Opened,
    OpenTransport,
    Output,
    Peer,
    Prefill,
    Pulled,
    Release,
    Step,
    ToGateway,
    ToWorker,
    WorkerStats,
)
from diptych.request import SamplingParams
from diptych.specs import WorkerSpec
from tests.support.warm_process import WarmProcess

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0  # far beyond what anything takes, compiling all kernels included
SILENCE_S = 2 * PATIENCE_S  # a test process that stands still for a while loses no worker
T = TypeVar("T")
Ending = Output | Failed
Word = Output | Offer | Pulled | Failed  # what is said about one request


def at_rest(stats: WorkerStats) -> bool:
    """Nothing is used, leased, staged, running or waiting."""
    return not any((stats.slabs_used, stats.leases, stats.staging_bytes, stats.running, stats.waiting))


@dataclasses.dataclass
class Member:
    """One worker as the driver knows it."""

    process: subprocess.Popen[bytes]
    spec: WorkerSpec
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    hello: Hello | None = None
    stats: WorkerStats = dataclasses.field(default_factory=WorkerStats)
    beats: int = 0
    # Sessions that ended while the worker's life went on, although no test asked for it.
    broken: int = 0
    reader: threading.Thread = dataclasses.field(default_factory=threading.Thread)

    def __repr__(self) -> str:
        role = self.hello.role if self.hello else "not met"
        books = {
            name: n for name, n in msgspec.structs.asdict(self.stats).items() if isinstance(n, int) and n
        }
        errors = [line for line in self.lines if "error" in line]
        return f"{self.spec.worker}: {role}, exit status {self.process.poll()}, {self.beats} beats, {books} {errors}"

    def note_hello(self, hello: Hello) -> None:
        """Keep what the worker says of itself; the same life over another link has lost its requests."""
        before, self.hello = self.hello, hello
        if before is not None and before.incarnation == hello.incarnation and before.link != hello.link:
            self.broken += 1


class Driver:
    """A hub and the workers that it started. Everything is called from the test's thread."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.keys, self.model = folder / "keys", model
        make_keys(self.keys)
        self.members: dict[str, Member] = {}
        self.words: dict[str, list[tuple[str, Word]]] = {}
        self.links: dict[tuple[str, str], Linked] = {}
        self.opened: dict[str, Opened] = {}
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="driver")
        self._thread.start()
        self.address = "tcp://127.0.0.1:*"
        self.open()

    # ---- the gateway's end

    def open(self, name: str = "gateway") -> None:
        """Bind (again, on the same port, under another name: a gateway that was restarted)."""
        self.run(self._open(name))

    async def _open(self, name: str) -> None:
        self.hub = ChannelHub(
            self.address, load_server_keys(self.keys), name, beat_s=0.05, lease_s=10.0, silence_s=SILENCE_S
        )
        self.hub.open()
        self.address = self.hub.address
        self._pump = asyncio.create_task(self._hear())

    def lose(self) -> None:
        """The gateway's end vanishes; the workers stay."""
        self.run(self._lose())

    async def _lose(self) -> None:
        self._pump.cancel()
        self.hub.close()
        for member in self.members.values():
            member.hello = None

    async def _hear(self) -> None:
        while True:
            worker, message = await self.hub.receive_message()
            if isinstance(message, Hello):
                self.hub.accept_session(worker, message.link)
            self._note(worker, message)
            self._news.set()

    def _note(self, worker: str, message: ToGateway) -> None:
        member = self.members.get(worker)
        match message:
            case Hello() if member:
                member.note_hello(message)
            case Heartbeat(stats=stats) if member:
                member.stats = stats
                member.beats += 1
            case Opened():
                self.opened[worker] = message
            case Linked(peer=peer):
                self.links[worker, peer] = message
            case Step(outputs=outputs):
                for output in outputs:
                    self.words.setdefault(output.request, []).append((worker, output))
            case Offer() | Pulled() | Failed():
                self.words.setdefault(message.request, []).append((worker, message))

    def run(self, task: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result(2 * PATIENCE_S)

    def wait(self, what: Callable[[], T | None]) -> T:
        """Until `what()` is true; it is asked again after every message.

        Raises:
            AssertionError: it was not in time, or a session broke, with whose requests the test waits in vain.
        """
        return self.run(self._wait(what))

    async def _wait(self, what: Callable[[], T | None]) -> T:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (answer := what()):
                    broken = [name for name, member in self.members.items() if member.broken]
                    assert not broken, self.describe_workers(f"a session of {', '.join(broken)} broke")
                    self._news.clear()
                    await self._news.wait()
                return answer
        except TimeoutError:
            raise AssertionError(self.describe_workers(f"nothing came of it in {PATIENCE_S:g} s")) from None

    def describe_workers(self, what: str) -> str:
        """`what`, and how the workers are: one line each."""
        lines = [repr(member) for member in self.members.values()]
        return "\n".join([what, *lines, f"refused frames: {dict(self.hub.refused)}"])

    def send(self, worker: str, message: ToWorker) -> None:
        async def say() -> bool:
            return self.hub.send(worker, message)

        assert self.run(say()), f"{worker} is not there"

    # ---- workers

    def spec(self, worker: str, **changes: Any) -> WorkerSpec:
        return WorkerSpec(
            **{
                "worker": worker,
                "role": worker.split("-")[0],
                "gateway": self.address,
                "keys_dir": str(self.keys),
                "model": str(self.model),
                "kv_bytes": 64 << 20,
                "lease_s": PATIENCE_S,
                **changes,
            }
        )

    def start(self, worker: str, **changes: Any) -> Member:
        """Start a worker process; `changes` are fields of its specification."""
        spec = self.spec(worker, **changes)
        process = WarmProcess(
            [sys.executable, "-m", "services.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.close()
        member = self.members[worker] = Member(process, spec)
        member.reader = threading.Thread(target=self._read, args=(member,), daemon=True)
        member.reader.start()
        return member

    def _read(self, member: Member) -> None:
        assert member.process.stdout is not None
        with member.process.stdout as lines:
            for line in lines:
                member.lines.append(json.loads(line))

    def up(self, *workers: str) -> list[Hello]:
        """Wait until they have introduced themselves."""
        return [self.wait(lambda name=name: self.members[name].hello) for name in workers]  # type: ignore[misc]

    def peer(self, decode: str, prefill: str) -> Linked:
        """Let a decode worker link to a prefill worker; returns what it says about that."""
        (hello,) = self.up(prefill)
        self.links.pop((decode, prefill), None)
        self.send(decode, Peer(prefill, hello.incarnation, hello.endpoints))
        linked = self.wait(lambda: self.links.get((decode, prefill)))
        if not linked.wants:
            return linked
        self.opened.pop(prefill, None)
        self.send(prefill, OpenTransport(linked.wants))
        opened = self.wait(lambda: self.opened.get(prefill))
        assert not opened.error, opened.error
        endpoints = hello.endpoints | {opened.transport: opened.endpoint}
        self.members[prefill].hello = msgspec.structs.replace(hello, endpoints=endpoints)
        return self.peer(decode, prefill)

    def kill(self, worker: str) -> None:
        process = self.members[worker].process
        process.kill()
        process.wait()

    def rest(self, *workers: str) -> None:
        """Wait until they say that they hold nothing, in a beat that was sent after this call."""
        for name in workers or tuple(self.members):
            member = self.members[name]
            then = member.beats + 1  # the beat that is under way may be older
            self.wait(lambda m=member, t=then: m.beats > t and at_rest(m.stats))  # type: ignore[misc]

    def close(self) -> None:
        for member in self.members.values():
            if member.process.poll() is None:
                member.process.kill()
            member.process.wait()
        self.run(self._lose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- requests

    def word(self, request: str, index: int = 0) -> tuple[str, Word]:
        """The `index`-th thing said about a request, and by whom."""

        def said() -> tuple[str, Word] | None:
            words = self.words.get(request, [])
            return words[index] if len(words) > index else None

        return self.wait(said)

    def until(self, request: str, kind: type[T]) -> T:
        """The first `kind` of word about a request; fails at once if the attempt failed instead."""

        def said() -> T | None:
            for worker, word in self.words.get(request, []):
                if isinstance(word, kind):
                    return word
                assert not isinstance(word, Failed), (worker, word)
            return None

        return self.wait(said)

    def over(self, request: str) -> Ending:
        """The last word about a request: an output that finishes, or a failure."""

        def said() -> list[Ending]:
            words = [word for _, word in self.words.get(request, [])]
            return [
                word
                for word in words
                if isinstance(word, Failed) or (isinstance(word, Output) and word.finish)
            ]

        return self.wait(said)[0]

    def tokens(self, request: str) -> list[int]:
        words = [word for _, word in self.words.get(request, []) if isinstance(word, Output)]
        return [token for word in words for token in word.tokens]

    def prefill(
        self,
        worker: str,
        request: str,
        prompt: list[int],
        sampling: SamplingParams,
        epoch: int = 0,
        **more: Any,
    ) -> None:
        remaining_s = more.get("remaining_s", PATIENCE_S)
        output, keep, kv = more.get("output", []), more.get("keep", KEEP_ALL), more.get("kv_class", "")
        self.send(
            worker, Prefill(request, epoch, prompt, output, sampling, remaining_s, kv_class=kv, keep=keep)
        )

    def admit(
        self,
        worker: str,
        request: str,
        prompt: list[int],
        sampling: SamplingParams,
        ticket: bytes,
        epoch: int = 0,
        keep: KeepSpec = KEEP_ALL,
        kv_class: str = "",
    ) -> None:
        tokens = self.tokens(request)
        self.send(
            worker,
            Admit(request, epoch, prompt, tokens, sampling, ticket, PATIENCE_S, kv_class=kv_class, keep=keep),
        )

    def abort(self, request: str, *workers: str, epoch: int = 0) -> None:
        for worker in workers:
            self.send(worker, Abort(request, epoch))

    def alone(
        self,
        worker: str,
        request: str,
        prompt: list[int],
        sampling: SamplingParams,
        keep: KeepSpec = KEEP_ALL,
        kv_class: str = "",
    ) -> list[int]:
        """The answer of one decode worker that reads the prompt itself: an undisturbed single-engine run."""
        self.send(
            worker, Generate(request, 0, prompt, [], sampling, PATIENCE_S, kv_class=kv_class, keep=keep)
        )
        ending = self.over(request)
        assert isinstance(ending, Output), ending
        return self.tokens(request)

    def handed(
        self, prefill: str, decode: str, request: str, prompt: list[int], sampling: SamplingParams
    ) -> list[int]:
        """The answer by two workers: one reads the prompt, the other writes."""
        self.prefill(prefill, request, prompt, sampling)
        offer = self.until(request, Offer)
        self.admit(decode, request, prompt, sampling, offer.ticket)
        self.until(request, Pulled)
        self.send(prefill, Release(request, 0))
        ending = self.over(request)
        assert isinstance(ending, Output), ending
        return self.tokens(request)
