"""Runs the same requests in the resident engine and in block engines, for tests that compare them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch

from diptych.chunks import RAW_CLASS
from diptych.messages import Failed, Output
from diptych.request import SamplingParams
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.offload.loading import BlockFiles, load_block
from engine.cpu.offload.runner import CpuOffloadRunner
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.offload.block_admission import BlockAdmission
from engine.offload.engine import OffloadEngine
from engine.offload.policy import BlockPolicy
from engine.outputs import SequenceOutput
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool

MODEL_LEN = 512
LENGTHS = (1, 63, 64, 65, 130, 17, 40, 5, 100, 3)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 0.0, "max_tokens": 3},
    {"temperature": 0.0, "prompt_logprobs": 0, "max_tokens": 0},
)
# Tokens, their log-probabilities, those of the prompt, and the finish.
Answer = tuple[list[int], list[float], list[float], str | None]


def ask(number: int, length: int, **fields: Any) -> Sequence:
    """A request with a random prompt of so many tokens."""
    draw = torch.Generator().manual_seed(number)
    prompt = torch.randint(3, 259, (length,), generator=draw).tolist()
    asked: dict[str, Any] = {"max_tokens": 9, "seed": number, "logprobs": 0} | fields
    return Sequence(f"r{number}", 1, prompt, SamplingParams(**asked), math.inf)


def some_requests() -> list[Sequence]:
    """Requests of all kinds, short and long."""
    return [ask(i, length, **KINDS[i % len(KINDS)]) for i, length in enumerate(LENGTHS)]


def gather(outputs: Many[SequenceOutput]) -> dict[str, Answer]:
    """The answer of each request."""
    found: dict[str, Answer] = {}
    for one in outputs:
        message = one.message
        assert isinstance(message, Output), message
        tokens, scores, prompt, _ = found.get(message.request, ([], [], [], None))
        scores = scores + [score.logprob for score in message.logprobs or ()]
        prompt = prompt + [score.logprob for score in message.prompt_logprobs or () if score is not None]
        found[message.request] = (tokens + message.tokens, scores, prompt, message.finish)
    return found


def run_resident(model: Checkpoint, requests: Many[Sequence], codec: str = "") -> dict[str, Answer]:
    """The answers of the resident engine."""
    pool = KvPool(model.layout(codec=resolve_kv_codec(model, codec or RAW_CLASS)[0]), 60)
    runner = CpuModelRunner.load(model, pool, MODEL_LEN)
    limits = EngineLimits(60, MODEL_LEN, max_num_seqs=12, max_num_batched_tokens=96)
    engine = Engine(runner, Scheduler(limits), KvAllocator(pool), Sampler(runner.vocab_size))
    ticks = itertools.count()
    for seq in requests:
        engine.add(seq, 0.0)
    outputs = []
    while len(engine.scheduler):
        outputs += engine.step(lambda: float(next(ticks)))
    return gather(outputs)


class BlockRun:
    """A block engine over a model, with its files below `folder`."""

    def __init__(self, model: Checkpoint, policy: BlockPolicy, folder: Path, **caps: Any) -> None:
        folder.mkdir(exist_ok=True)
        files = BlockFiles(folder, folder, **caps)
        self.runner: CpuOffloadRunner = load_block(model, policy, files, MODEL_LEN)
        vocab = self.runner.vocab_size
        self.schedule = BlockAdmission(policy, MODEL_LEN)
        # One unit per call, since time passes by itself.
        self.engine = OffloadEngine(self.runner, self.schedule, Sampler(vocab), vocab, 0.5)
        self._ticks = itertools.count()
        self.outputs: list[SequenceOutput] = []

    def clock(self) -> float:
        """A clock that advances by a second with every look."""
        return float(next(self._ticks))

    def step(self) -> None:
        """One unit."""
        self.outputs += self.engine.step(self.clock)

    def run(self, requests: Many[Sequence]) -> dict[str, Answer]:
        """Add requests, and run until all have ended."""
        for seq in requests:
            self.engine.add(seq, 0.0)
        return self.settle()

    def settle(self) -> dict[str, Answer]:
        """Run until all requests have ended; the block is empty then."""
        while self.engine.has_work:
            self.step()
        assert not len(self.schedule)
        assert all(len(set(batch.free)) == len(batch.free) for batch in self.schedule.batches)
        return gather(self.outputs)

    def failures(self) -> list[Failed]:
        """The failures so far."""
        return [one.message for one in self.outputs if isinstance(one.message, Failed)]
