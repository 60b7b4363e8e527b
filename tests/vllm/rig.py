"""A `VllmEngine` with a transfer buffer, driven as a worker's loop and its roles drive it, for `tests.vllm.behaviours`.

KV is handed over to the engine itself: saved in the buffer under one attempt, loaded from the same slabs under another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from diptych.messages import Failed, Output
from diptych.request import SamplingParams, Tenancy
from engine.outputs import SequenceOutput
from engine.sequence import Sequence
from kvtransfer.transfer_buffer import TransferBuffer
from vllm_worker.engine import VllmEngine
from vllm_worker.port import EnginePort, LoadPlan, SavedKv

# Most steps of one `Rig.drive`.
MAX_STEPS = 20_000


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    """Sampling without chance."""
    return SamplingParams(**({"max_tokens": max_tokens, "seed": 1, "temperature": 0.0} | changes))  # type: ignore[arg-type]


@dataclass
class Answer:
    """What came of one sequence."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    finish: str | None = None
    failed: str | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens that its first output reports as cached."""
        return self.outputs[0].cached_tokens


class Rig:
    """An engine, its buffer, and all that they have answered. `traits` are the kinds of sampling that the port knows:
    "grammar", "seed", "penalties", "logprobs".
    """

    def __init__(self, port: EnginePort, buffer: TransferBuffer, traits: Tokens[str] = ()) -> None:
        self.port, self.buffer, self.traits = port, buffer, frozenset(traits)
        self.engine = VllmEngine(port)
        self.answers: dict[str, Answer] = {}
        self.saved: dict[str, tuple[Sequence | None, SavedKv]] = {}
        self.failed_loads: list[str] = []
        self.slabs: dict[str, tuple[int, ...]] = {}
        self.number = 0
        self.vocab = port.facts.vocab_size

    # ---- sequences

    def prompt(self, length: int, seed: int) -> list[int]:
        """Made-up tokens."""
        chance = random.Random(seed)
        return [chance.randrange(5, self.vocab) for _ in range(length)]

    def sequence(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        output: Tokens[int] = (),
        scope: bytes = b"",
        priority: int = 0,
        seconds: float = 600.0,
        hold_kv: bool = False,
    ) -> Sequence:
        """A new attempt. Without `scope` it shares no prefixes."""
        self.number += 1
        return Sequence(
            f"r{self.number}",
            1,
            list(prompt),
            sampling,
            time.monotonic() + seconds,
            output=list(output),
            hold_kv=hold_kv,
            tenancy=Tenancy(priority=priority),
            root=scope,
        )

    def add(self, seq: Sequence, defer_first: bool = False) -> Answer:
        """Queue a sequence."""
        self.engine.add(seq, time.monotonic(), defer_first)
        return self.answers.setdefault(seq.key, Answer())

    def adopt(self, seq: Sequence, saved: SavedKv) -> Answer:
        """Continue a sequence whose KV another attempt left in the buffer."""
        self.engine.adopt(seq, LoadPlan(saved.slabs, saved.num_tokens), time.monotonic())
        self.slabs[seq.key] = saved.slabs
        self.buffer.change_owner(saved.slabs, saved.key, seq.key)
        return self.answers.setdefault(seq.key, Answer())

    # ---- the loop

    def step(self) -> list[SequenceOutput]:
        """One round of a worker's loop."""
        outputs = self.engine.step(time.monotonic)
        for output in outputs:
            message = output.message
            answer = self.answers[f"{message.request}#{message.epoch}"]
            if isinstance(message, Failed):
                answer.failed = message.code
            else:
                answer.outputs.append(message)
                answer.tokens += message.tokens
                answer.finish = message.finish
        self.tend()
        return outputs

    def tend(self) -> None:
        """What roles do between steps: keep saved KV, free slabs that were loaded."""
        for seq, saved in self.engine.take_saved():
            if seq is None:
                self.buffer.give_back(saved.slabs, saved.key)
            else:
                self.saved[saved.key] = (seq, saved)
        for key, failed in self.engine.take_loaded():
            self.buffer.give_back(self.slabs.pop(key), key)
            if failed:
                self.failed_loads.append(key)

    def drive(self, most: int = MAX_STEPS) -> int:
        """Step until nothing is left to do; returns the number of steps."""
        for number in range(most):
            if not self.port.has_work and self.engine.deadline_s is None:
                self.tend()
                return number
            if not self.engine.has_work:
                time.sleep(0.001)
            self.step()
        raise AssertionError(f"not done after {most} steps: {self.port.counts}")

    def step_until(self, done: Callable[[], bool]) -> None:
        """Step until `done()`."""
        for _ in range(MAX_STEPS):
            if done():
                return
            self.step()
        raise AssertionError(f"not done after {MAX_STEPS} steps: {self.port.counts}")

    def run(self, prompt: list[int], sampling: SamplingParams, **options: object) -> Answer:
        """Answer one prompt alone."""
        answer = self.add(self.sequence(prompt, sampling, **options))  # type: ignore[arg-type]
        self.drive()
        return answer

    def hand_over(
        self, prompt: list[int], sampling: SamplingParams, defer_first: bool = False, scope: bytes = b""
    ) -> Answer:
        """Prefill a prompt, hand its KV over, and decode from it: what a client gets of both."""
        first = self.sequence(prompt, sampling, hold_kv=True, scope=scope)
        answer = self.add(first, defer_first)
        self.drive()
        assert answer.finish is None, f"prefill ended with {answer.finish}, {answer.failed}"
        _, saved = self.saved.pop(first.key)
        assert saved.num_tokens == len(prompt), "the KV of the whole prompt travels"
        second = self.sequence(prompt, sampling, output=answer.tokens, scope=scope)
        rest = self.adopt(second, saved)
        self.drive()
        return Answer(answer.tokens + rest.tokens, answer.outputs + rest.outputs, rest.finish, rest.failed)

    def check_rest(self) -> None:
        """Nothing is held: no blocks, no slabs, no sequences."""
        self.tend()
        assert not list(self.engine.sequences()), "the engine has sequences"
        assert self.port.held_blocks == 0, f"{self.port.held_blocks} blocks are held"
        assert self.buffer.used == 0, self.buffer.owners()
        assert not self.port.has_work
        self.buffer.check_books()

    def free_saved(self) -> None:
        """Drop all KV that was saved and that nobody loads."""
        for _, saved in self.saved.values():
            self.buffer.give_back(saved.slabs, saved.key)
        self.saved.clear()
