"""Workers without a model: they speak the real channel and answer as the protocol wants, with tokens from a list.

A prompt's first token decides: `MUTE` is never answered by the decode worker, `HALF` gets `HALF_TOKENS` tokens of its
answer unless it comes with some of them already, those of `FAILING` fail, anything else gets `TOKENS`, by position. Who
is asked to change pools does so at once.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

from diptych.channel.keys import load_worker_keys
from diptych.channel.link import ChannelLink
from diptych.messages import (
    Abort,
    Admit,
    Failed,
    Generate,
    Hello,
    Linked,
    Offer,
    Output,
    Peer,
    Prefill,
    Pulled,
    Release,
    Step,
    SwitchRole,
    ToWorker,
    WorkerStats,
)

MUTE, HALF = 7, 8
# A prompt that begins with one of these fails with this code, for a reason that is for the log only.
FAILING = {
    20: "internal_error",
    21: "transfer_failed",
    22: "out_of_memory",
    23: "overloaded",
    24: "invalid_grammar",
    25: "no_token_left",
}
CAUSE = "the worker's own words"
HALF_TOKENS = 5
TOKENS = list(range(40, 56))
BYTES = 4096
_lives = itertools.count()


class Puppet:
    """One worker. `held` are the requests whose KV it has; `deaf` makes it ignore everything but its heart."""

    max_model_len, num_slabs = 256, 64

    def __init__(
        self, role: str, number: int, address: str, keys: Path, fingerprint: str = "same", ended: str = ""
    ) -> None:
        self.name, self.role = f"{role}-{number}", role
        self._address, self._keys, self._fingerprint, self._ended = address, keys, fingerprint, ended
        self.deaf = self.draining = False
        self.stuck_s = 0.0
        self.held: set[str] = set()
        self.seen: list[ToWorker] = []
        self._ending = threading.Event()
        self._link = self._open()
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def _open(self) -> ChannelLink:
        """Introduce itself in a new life."""
        self._incarnation = f"life-{next(_lives)}"
        identity = {"model": self._fingerprint, "dtype": "float32"}
        endpoints = {"shm": b"somewhere"} if self.role == "prefill" else {}
        hello = Hello(
            self.name,
            self.role,
            self._incarnation,
            self._fingerprint,
            identity,
            "127.0.0.1",
            1,
            self.num_slabs,
            BYTES,
            self.max_model_len,
            endpoints,
            ended=self._ended,
        )
        link = ChannelLink(self._address, load_worker_keys(self._keys), hello, self._stats, beat_s=0.1)
        link.open()
        return link

    def kill(self) -> None:
        """No heartbeat, no goodbye."""
        self._ending.set()
        self._thread.join()
        self._link.close()

    def _stats(self) -> WorkerStats:
        held = len(self.held)
        return WorkerStats(
            slabs_total=self.num_slabs,
            slabs_used=held,
            leases=held,
            running=held,
            draining=self.draining,
            stuck_s=self.stuck_s,
        )

    def _work(self) -> None:
        while not self._ending.is_set():
            for message in self._link.poll_messages(0.05):
                self.seen.append(message)
                if not self.deaf:
                    self._answer(message)

    def _answer(self, message: ToWorker) -> None:
        if isinstance(message, Peer):
            self._link.send(Linked(message.worker, message.incarnation, "shm", 9.0, 12.0))
        elif isinstance(message, Prefill):
            self._prefill(message)
        elif isinstance(message, Admit):
            self._admit(message)
        elif isinstance(message, Generate):
            self._write(message)
        elif isinstance(message, SwitchRole):
            self._link.close()
            self.role = message.role
            self._link = self._open()
        elif isinstance(message, Release | Abort):
            self.held.discard(message.request)

    def _prefill(self, order: Prefill) -> None:
        request, epoch = order.request, order.epoch
        if code := FAILING.get(order.prompt[0]):
            return self._link.send(Failed(request, epoch, code, CAUSE))
        number = len(order.output)
        last = "length" if order.sampling.max_tokens <= number + 1 else None
        seconds = {"queue": 0.0001, "prefill": 0.0002}
        self._link.send(Step([Output(request, epoch, [token(number)], finish=last, seconds=seconds)]))
        if last is None:
            self.held.add(request)
            self._link.send(Offer(request, epoch, b"ticket", len(order.prompt), BYTES))

    def _admit(self, order: Admit) -> None:
        seconds = {"reserve": 0.0001, "transfer": 0.0002, "verify": 0.0001, "hidden": 0.003, "exposed": 0.001}
        self._link.send(Pulled(order.request, order.epoch, "shm", BYTES, seconds))
        self._write(order)

    def _write(self, order: Admit | Generate) -> None:
        """The rest of the answer, or as much as this one gets."""
        request, epoch, whole = order.request, order.epoch, order.sampling.max_tokens
        self.held.add(request)
        if order.prompt[0] == MUTE:
            return
        half = order.prompt[0] == HALF and len(order.output) < HALF_TOKENS
        for number in range(len(order.output), HALF_TOKENS if half else whole):
            last = "length" if number == whole - 1 else None
            self._link.send(Step([Output(request, epoch, [token(number)], finish=last)]))
        if not half:
            self.held.discard(request)


def token(number: int) -> int:
    """The answer's token at this position."""
    return TOKENS[number % len(TOKENS)]
