"""Doors at which a toy worker holds requests in a chosen phase, until the runner of a scenario says go.

The first tokens of a prompt say who it is: `[1 + 128 + phase, nonce, nonce, nonce, …]`; phase 0 is held nowhere. When a
marked request comes to its phase, the worker tells the runner over a Unix socket and does not go on with it (others do
go on) until the runner has let it go. What was let go stays so, in later processes, too: the runner greets each with
the list. If the runner is gone, all doors are open.

    worker ── {"worker", "pid"} · {"at": phase, "nonce": n, "epoch": e} · {"rest": bool} ──▶ runner
    worker ◀── {"gone": [nonce, …]} (first line) · {"go": nonce} ── runner
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

PHASES = (
    "free",  # held nowhere
    "waiting",  # in the gateway's queue: no worker ever sees it there
    "queued",  # at the prefill worker, nothing read
    "reading",  # part of the prompt is read
    "staged",  # part of the prompt is read, and announced to be pulled ahead
    "read",  # its first token is said, its KV not offered yet
    "offered",  # under lease; the decode worker waits for room
    "pulling",  # KV is on the way
    "pulled",  # it is at the decode worker, not one token written there
    "decoding",  # some tokens into the answer
    "last",  # one token before the end of the answer
)
HELD_PHASES = PHASES[1:]
FIRST_MARK = 1 + 128  # token ids of the marks: bytes that no answer has
NONCE_BASE = 250
NONCE_TOKENS = 3


def mark_prompt(phase: str, nonce: int) -> list[int]:
    """The tokens that a prompt begins with."""
    digits = [1 + nonce // NONCE_BASE**place % NONCE_BASE for place in range(NONCE_TOKENS)]
    return [FIRST_MARK + PHASES.index(phase), *digits]


def read_mark(prompt: Sequence[int]) -> tuple[str, int]:
    """Phase and nonce of a prompt; ("free", -1) if it has no mark."""
    if len(prompt) <= NONCE_TOKENS or not FIRST_MARK <= prompt[0] < FIRST_MARK + len(PHASES):
        return "free", -1
    nonce = sum((token - 1) * NONCE_BASE**place for place, token in enumerate(prompt[1 : 1 + NONCE_TOKENS]))
    return PHASES[prompt[0] - FIRST_MARK], nonce


class PhaseGates:
    """The worker's end. `wake` is called when something was let go."""

    def __init__(self, path: str | None, worker: str) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._gone: set[int] = set()
        self._reported: set[tuple[str, int, int]] = set()
        self._open = threading.Condition()
        self._all = path is None
        self._rest: bool | None = None
        self._socket: socket.socket | None = None
        if path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(path)
            self._say({"worker": worker, "pid": os.getpid()})
            lines = self._socket.makefile("r", encoding="utf-8")
            self._gone = set(json.loads(lines.readline())["gone"])
            threading.Thread(target=self._hear, args=(lines,), name="doors", daemon=True).start()

    def shut(self, prompt: Sequence[int], epoch: int, *phases: str) -> bool:
        """Is this request, which is now in one of `phases`, to be held there? The runner is informed the first time."""
        phase, nonce = read_mark(prompt)
        if phase not in phases or self._all or nonce in self._gone:
            return False
        if (phase, nonce, epoch) not in self._reported:
            self._reported.add((phase, nonce, epoch))
            self._say({"at": phase, "nonce": nonce, "epoch": epoch})
        return True

    def wait(self, prompt: Sequence[int], epoch: int, phase: str, stop: Callable[[], bool]) -> None:
        """Hold the calling thread while the door is shut, unless `stop` says to give up."""
        while self.shut(prompt, epoch, phase) and not stop():
            with self._open:
                self._open.wait(0.02)

    def rest(self, resting: bool) -> None:
        """Tell whether this worker holds anything; said when it changes."""
        if resting != self._rest:
            self._rest = resting
            self._say({"rest": resting})

    def _say(self, line: dict[str, Any]) -> None:
        if self._socket is not None and not self._all:
            try:
                self._socket.sendall(json.dumps(line).encode() + b"\n")
            except OSError:
                self._release()

    def _hear(self, lines: Any) -> None:
        try:
            for line in lines:
                with self._open:
                    self._gone.add(json.loads(line)["go"])
                    self._open.notify_all()
                self.wake()
        except OSError:
            pass
        self._release()

    def _release(self) -> None:
        """The runner is gone: nobody is held any more."""
        with self._open:
            self._all = True
            self._open.notify_all()
        self.wake()
