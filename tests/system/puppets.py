"""Workers without a model: they speak the real channel and answer as the protocol wants, with tokens from a list.

A prompt's first token decides: `MUTE` is never answered by the decode worker, anything else gets `TOKENS`.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

from diptych.channel import Link
from diptych.keys import load_worker_keys
from diptych.messages import (
    Abort,
    Admit,
    Hello,
    Linked,
    Offer,
    Output,
    Peer,
    Prefill,
    Pulled,
    Release,
    Stats,
    Step,
    ToWorker,
)

MUTE = 7
TOKENS = list(range(40, 56))
BYTES = 4096
_lives = itertools.count()


class Puppet:
    """One worker. `held` are the requests whose KV it has; `deaf` makes it ignore everything but its heart."""

    def __init__(self, role: str, number: int, address: str, keys: Path, fingerprint: str = "same") -> None:
        self.name = f"{role}-{number}"
        self.deaf = False
        self.held: set[str] = set()
        self.seen: list[ToWorker] = []
        self._incarnation = f"life-{next(_lives)}"
        identity = {"model": fingerprint, "dtype": "float32"}
        endpoints = {"shm": b"somewhere"} if role == "prefill" else {}
        hello = Hello(
            self.name,
            role,
            self._incarnation,
            fingerprint,
            identity,
            "127.0.0.1",
            1,
            64,
            BYTES,
            256,
            endpoints,
        )
        self._link = Link(address, load_worker_keys(keys), hello, self._stats, beat_s=0.1)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name=self.name)
        self._link.open()
        self._thread.start()

    def kill(self) -> None:
        """No heartbeat, no goodbye."""
        self._ending.set()
        self._thread.join()
        self._link.close()

    def _stats(self) -> Stats:
        return Stats(slabs_total=64, slabs_used=len(self.held), leases=len(self.held), running=len(self.held))

    def _work(self) -> None:
        while not self._ending.is_set():
            for message in self._link.poll(0.05):
                self.seen.append(message)
                if not self.deaf:
                    self._answer(message)

    def _answer(self, message: ToWorker) -> None:
        if isinstance(message, Peer):
            self._link.send(Linked(message.worker, message.incarnation, "shm", 9.0, 12.0))
        elif isinstance(message, Prefill):
            self._prefill(message)
        elif isinstance(message, Admit):
            self._decode(message)
        elif isinstance(message, Release | Abort):
            self.held.discard(message.request)

    def _prefill(self, order: Prefill) -> None:
        request, epoch = order.request, order.epoch
        last = "length" if order.sampling.max_tokens <= 1 else None
        seconds = {"queue": 0.0001, "prefill": 0.0002}
        self._link.send(Step([Output(request, epoch, TOKENS[:1], finish=last, seconds=seconds)]))
        if last is None:
            self.held.add(request)
            self._link.send(Offer(request, epoch, b"ticket", len(order.prompt), BYTES))

    def _decode(self, order: Admit) -> None:
        request, epoch = order.request, order.epoch
        self.held.add(request)
        seconds = {"reserve": 0.0001, "transfer": 0.0002, "verify": 0.0001}
        self._link.send(Pulled(request, epoch, "shm", BYTES, seconds))
        if order.prompt[0] == MUTE:
            return
        for i in range(1, order.sampling.max_tokens):
            last = "length" if i == order.sampling.max_tokens - 1 else None
            self._link.send(Step([Output(request, epoch, [TOKENS[i % len(TOKENS)]], finish=last)]))
        self.held.discard(request)
