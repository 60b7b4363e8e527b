"""Workers without a model. At each beat the decode worker sends a token of every running answer, in one message."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from diptych.messages import Abort, Admit, Generate, Output, Release, Step, ToWorker
from tests.support.fake_workers import Puppet, token

# Tokens of a prompt and its answer together.
CONTEXT_TOKENS = 1 << 17
# Tokens of an answer that does not end while it is measured.
LONG = CONTEXT_TOKENS // 2


class LongPuppet(Puppet):
    """A `Puppet` whose answers may be long."""

    max_model_len, num_slabs = CONTEXT_TOKENS, CONTEXT_TOKENS


class PacedWorker(LongPuppet):
    """A worker that decodes. Its answers go on by one token every `beat_s` seconds."""

    def __init__(self, address: str, keys: Path, beat_s: float) -> None:
        self._beat_s = beat_s
        # For each answer that runs: its request and attempt, the tokens so far, and all that it will have.
        self._running: dict[str, list[int]] = {}
        self._books = threading.Lock()
        super().__init__("decode", 0, address, keys)
        self._beating = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._beating.start()

    def set_beat(self, beat_s: float) -> None:
        """From the next beat on, beats are `beat_s` seconds apart."""
        self._beat_s = beat_s

    def kill(self) -> None:
        """No heartbeat, no goodbye."""
        self._ending.set()
        self._beating.join()
        super().kill()

    def _answer(self, message: ToWorker) -> None:
        if isinstance(message, Release | Abort):
            with self._books:
                self._running.pop(message.request, None)
        super()._answer(message)

    def _write(self, order: Admit | Generate) -> None:
        self.held.add(order.request)
        with self._books:
            self._running[order.request] = [order.epoch, len(order.output), order.sampling.max_tokens]

    def _beat(self) -> None:
        """Send a step at each beat. A beat that comes late is not made up for."""
        due_s = time.monotonic()
        while not self._ending.wait(max(0.0, due_s - time.monotonic())):
            due_s = max(due_s + self._beat_s, time.monotonic())
            if outputs := self._next_outputs():
                self._link.send(Step(outputs))

    def _next_outputs(self) -> list[Output]:
        """The next token of every answer that runs."""
        outputs = list[Output]()
        with self._books:
            for request, state in list(self._running.items()):
                epoch, number, whole = state
                state[1] = number + 1
                is_last = number + 1 >= whole
                outputs.append(Output(request, epoch, [token(number)], finish="length" if is_last else None))
                if is_last:
                    del self._running[request]
                    self.held.discard(request)
        return outputs
