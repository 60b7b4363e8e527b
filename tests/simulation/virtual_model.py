"""A model whose KV is data that decides every token: wrong, stale, torn or foreign bytes change the answer.

A layer's row of a token is a hash of the token, the row before it and the row below it. The next token is a hash of all
rows of all layers so far, of the seed, the position and what was written before. So each byte that a transformer would
read is read, and the sampler has state that a continued answer must rebuild.

A class with a codec is lossy: a row is coded when it is written, and every reader gets the decoded code, the token's
own row included. Only a sequence's first token is read exactly, from its id. So a code is a function of the tokens
before it, and answers can be compared to the token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from diptych.request import GRAMMAR, PENALTIES, SEED, TRAITS, Pooling, SamplingParams
from engine.protocols import OnLayersDone, SampledToken
from engine.sequence import num_chunks
from engine.step_work import StepWork
from kvcache.layout import KvLayout

LAYERS = 2
VOCAB = 200
# A class with a codec, whose pages are smaller than raw ones.
CODED = "nuq4.g2@aaaaaaaaaaaaaaaa"
FINGERPRINT = "toy"
POISON = VOCAB - 1  # never written: running it ends the process


class ProcessCrash(BaseException):
    """The process is gone: no `except Exception` may save it."""


def toy_layout(kv_class: str = RAW_CLASS) -> KvLayout:
    """How KV of one class lies in memory: raw, 16 bytes for each token and layer."""
    codec = "" if kv_class == RAW_CLASS else kv_class
    return KvLayout(layers=LAYERS, kv_heads=1, head_dim=2, dtype="float32", codec=codec)


LAYOUT = toy_layout()


class VirtualMemory:
    """The bytes of a pool, all of one class; its slabs are numbered from `first`."""

    def __init__(
        self, num_slabs: int, kv_class: str = RAW_CLASS, first: int = 0, memory: memoryview | None = None
    ) -> None:
        self.num_slabs, self.layout, self.first = num_slabs, toy_layout(kv_class), first
        self.bytes = memoryview(bytearray(num_slabs * self.layout.chunk_bytes)) if memory is None else memory

    def __contains__(self, slab: int) -> bool:
        return 0 <= slab - self.first < self.num_slabs

    def slab_bytes(self, slab: int) -> memoryview:
        """A window on one slab, as `kvcache.pool.KvPool` has it."""
        size, place = self.layout.chunk_bytes, slab - self.first
        return self.bytes[place * size : (place + 1) * size]

    def layer_bytes(self, slab: int, layer: int) -> memoryview:
        size = self.layout.layer_bytes
        return self.slab_bytes(slab)[layer * size : (layer + 1) * size]


class VirtualRunner:
    """`engine.protocols.StepRunner`. `spend` is called with the tokens of a step before each of its layers: time may
    pass then.
    """

    can_pool = True

    def __init__(self, memory: VirtualMemory, spend: Callable[[int], None] = lambda tokens: None) -> None:
        """KV differs from class to class, so an answer that changes its class is seen."""
        self._memory, self._spend = memory, spend
        self._coded = bool(memory.layout.codec)
        self._salt = memory.layout.codec.encode()
        # Bytes of a slab, of the keys (and of the values) of one layer of it, and of a row of them.
        self._slab, self._half = memory.layout.chunk_bytes, memory.layout.page_bytes // 2
        self._row_bytes = self._half // CHUNK_TOKENS

    def run(self, batch: Sequence[StepWork], done: OnLayersDone | None = None) -> list[list[bytes]]:
        """For each wanted row, the digest of all KV up to there."""
        return run_step(batch, [self] * len(batch), self._spend, done)

    def compute_layer(self, work: StepWork, layer: int, below: list[bytes]) -> list[bytes]:
        rows = []
        before = self._load_row(work, layer, work.start - 1) if work.start else b""
        for position, (token, under) in enumerate(zip(work.tokens, below, strict=True), work.start):
            exact = self._exact_row(layer, before, under, token)
            self._store_row(work, layer, position, exact)
            before = self.attended_row(work, layer, position, exact)
            rows.append(before)
        return rows

    def _exact_row(self, layer: int, before: bytes, under: bytes, token: int) -> bytes:
        text = before + under + token.to_bytes(4, "big") + bytes([layer]) + self._salt
        return xxhash.xxh3_128_digest(text)

    def attended_row(self, work: StepWork, layer: int, position: int, exact: bytes) -> bytes:
        """What later tokens of the same step read of a row: what everybody reads of it later."""
        if position == 0 and self._coded:
            return exact
        return self._decode_row(exact[: self._row_bytes], exact[8 : 8 + self._row_bytes])

    def sink_row(self, work: StepWork, layer: int) -> bytes | None:
        """The exact row of the sequence's first token, from its id alone; None: pages without a codec have it."""
        if not self._coded:
            return None
        assert work.sink_token is not None, "a pool with a codec needs the sequence's first token"
        row = b""
        for under in range(layer + 1):
            row = self._exact_row(under, b"", row, work.sink_token)
        return row

    def _store_row(self, work: StepWork, layer: int, position: int, exact: bytes) -> None:
        """A coded row has room for some of the bytes alone."""
        memory, size, at = self._memory.bytes, self._row_bytes, self._place(work, layer, position)
        memory[at : at + size] = exact[:size]
        memory[at + self._half : at + self._half + size] = exact[8 : 8 + size]

    def _load_row(self, work: StepWork, layer: int, position: int) -> bytes:
        """Decode a row, or read the first token's."""
        if position == 0 and (sink := self.sink_row(work, layer)) is not None:
            return sink
        memory, size, at = self._memory.bytes, self._row_bytes, self._place(work, layer, position)
        return self._decode_row(
            bytes(memory[at : at + size]), bytes(memory[at + self._half : at + self._half + size])
        )

    def _decode_row(self, keys: bytes, values: bytes) -> bytes:
        return keys.ljust(8, b"\0") + values.ljust(8, b"\0")

    def _place(self, work: StepWork, layer: int, position: int) -> int:
        slab, row = work.slabs[position // CHUNK_TOKENS] - self._memory.first, position % CHUNK_TOKENS
        return slab * self._slab + layer * 2 * self._half + row * self._row_bytes

    def read_rows(self, work: StepWork) -> bytes:
        """Attention's part: every valid byte is read, but of the first token what is exact."""
        total = work.start + len(work.tokens)
        digest, memory, size = xxhash.xxh3_64(), self._memory.bytes, self._row_bytes
        skipped = 0
        if self._coded:
            skipped = size
            digest.update(self.sink_row(work, LAYERS - 1) or b"")
        for first in range(0, total, CHUNK_TOKENS):
            rows = min(CHUNK_TOKENS, total - first)
            base = self._place(work, 0, first)
            for start in range(base, base + self._slab, self._half):
                digest.update(memory[start + skipped : start + rows * size])
            skipped = 0
        return digest.digest()


def run_step(
    batch: Sequence[StepWork],
    runners: Sequence[VirtualRunner],
    spend: Callable[[int], None],
    done: OnLayersDone | None,
) -> list[list[bytes]]:
    """A step, each work by the runner of its pool: layer by layer, all works in each."""
    if any(POISON in work.tokens for work in batch):
        raise ProcessCrash("a token that no process survives")
    below = [[b""] * len(work.tokens) for work in batch]
    for layer in range(LAYERS):
        spend(sum(len(work.tokens) for work in batch))
        below = [
            runner.compute_layer(work, layer, rows)
            for runner, work, rows in zip(runners, batch, below, strict=True)
        ]
        if done is not None:
            done(layer + 1)
    return [
        [] if work.logits == "none" else [runner.read_rows(work)]
        for runner, work in zip(runners, batch, strict=True)
    ]


class VirtualClassRunner:
    """`engine.protocols.StepRunner` over the pools of several classes, with a `VirtualRunner` for each."""

    can_pool = True

    def __init__(
        self,
        memories: Sequence[VirtualMemory],
        spend: Callable[[int], None],
        runners: type[VirtualRunner] = VirtualRunner,
    ) -> None:
        self._memories, self._spend = list(memories), spend
        self._runners = [runners(memory) for memory in memories]

    def run(self, batch: Sequence[StepWork], done: OnLayersDone | None = None) -> list[list[bytes]]:
        """As `VirtualRunner.run`."""
        return run_step(batch, [self._runner_of(work) for work in batch], self._spend, done)

    def _runner_of(self, work: StepWork) -> VirtualRunner:
        number = next(i for i, memory in enumerate(self._memories) if work.slabs[0] in memory)
        assert all(slab in self._memories[number] for slab in work.slabs), "slabs of two classes"
        return self._runners[number]


class VirtualSamplerRow:
    """What sampling remembers: penalties and a grammar, both as one number that all earlier tokens went into.

    The grammar of kind "lark" is a number: the answer is complete when it divides the state. Without a temperature
    there is no noise, without penalties and a grammar the state does not matter.
    """

    cost_s = 0.0

    def __init__(self, sampling: SamplingParams, output: Sequence[int]) -> None:
        self.seed, self.index, self.state = sampling.seed, 0, 1
        self._modulus = int(sampling.grammar.text) if sampling.grammar else 0
        self._noisy = sampling.temperature > 0
        self._stateful = bool(self._modulus or sampling.frequency_penalty)
        for token in output:
            self.push(token)

    @property
    def done(self) -> bool:
        return bool(self._modulus) and self.state % self._modulus == 0

    def push(self, token: int) -> None:
        self.index += 1
        self.state = (self.state * 31 + token) % 1_000_003

    def pick(self, logits: bytes) -> int:
        drawn = logits
        if self._noisy:
            drawn += b"%d %d " % (self.seed, self.index)
        if self._stateful:
            drawn += b"%d" % self.state
        return xxhash.xxh3_64_intdigest(drawn) % POISON


class VirtualSampler:
    """`engine.protocols.StepSampler`. Without one of the `traits` it takes an answer's tokens for a part of the prompt,
    as far as that matters.
    """

    def __init__(self, traits: Sequence[str] = TRAITS) -> None:
        self._traits = frozenset(traits)

    def expect(self, seq: Any) -> None:
        """Nothing here takes long."""

    def notify(self, wake: Callable[[], None]) -> None:
        """Nobody waits."""

    def open(self, seq: Any) -> VirtualSamplerRow:
        row = VirtualSamplerRow(seq.sampling, seq.output)
        if SEED not in self._traits:
            row.index = 0
        if not {GRAMMAR, PENALTIES} <= self._traits:
            row.state = 1
        return row

    def sample(
        self, logits: list[list[bytes]], rows: list[VirtualSamplerRow]
    ) -> list[SampledToken | Exception]:
        return [SampledToken(row.pick(part[-1])) for part, row in zip(logits, rows, strict=True)]

    def score(self, logits: object, tokens: list[int], top: int) -> list[Any]:
        """Prompts are not scored here."""
        return []

    def pool(self, row: list[bytes], pooling: Pooling, num_tokens: int) -> bytes:
        """The digest of all rows of KV that the last token read."""
        return row[-1]


def undisturbed_answer(
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_model_len: int,
    kv_class: str = RAW_CLASS,
    runners: type[VirtualRunner] = VirtualRunner,
) -> tuple[list[int], str]:
    """The answer of one undisturbed run, or the bytes that are pooled, with KV of one class, its prompt prefilled at
    once, and how it ends: "stop" or "length".
    """
    slabs = list(range(num_chunks(min(len(prompt) + sampling.max_tokens, max_model_len))))
    runner = runners(VirtualMemory(len(slabs), kv_class))
    if sampling.pooling is not None:
        (logits,) = runner.run([StepWork(list(prompt), 0, slabs, "last", prompt[0])])
        return list(logits[-1]), "stop"
    row = VirtualSamplerRow(sampling, ())
    tokens, start, output = list(prompt), 0, list[int]()
    while True:
        (logits,) = runner.run([StepWork(tokens, start, slabs, "last", prompt[0])])
        start += len(tokens)
        tokens = [row.pick(logits[-1])]
        output += tokens
        if tokens[0] in sampling.stop_token_ids:
            return output, "stop"
        row.push(tokens[0])
        if row.done:
            return output, "stop"
        if len(output) >= sampling.max_tokens or len(prompt) + len(output) >= max_model_len:
            return output, "length"
