"""A model whose KV is data that decides every token: wrong, stale, torn or foreign bytes change the answer.

A layer's row of a token is a hash of the token, the row before it and the row below it. The next token is a hash of all
rows of all layers so far, of the seed, the position and what was written before. So each byte that a transformer would
read is read, and the sampler has state that a continued answer must rebuild.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from diptych.request import Sampling
from engine.seams import LayersDone, Picked
from engine.work import Work
from kvcache.layout import CHUNK_TOKENS, KVLayout

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=2, dtype="float32")  # 16 bytes for each token and layer
VOCAB = 200
HALF = CHUNK_TOKENS * 8  # bytes of a page's keys, and of its values
FINGERPRINT = "toy"
POISON = VOCAB - 1  # never written: running it ends the process


class Crash(BaseException):
    """The process is gone: no `except Exception` may save it."""


class Memory:
    """The bytes of a pool."""

    def __init__(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs
        self.bytes = memoryview(bytearray(num_slabs * LAYOUT.chunk_bytes))

    def slab_bytes(self, slab: int) -> memoryview:
        """A window on one slab, as `kvcache.pool.Pool` has it."""
        return self.bytes[slab * LAYOUT.chunk_bytes : (slab + 1) * LAYOUT.chunk_bytes]

    def layer_bytes(self, slab: int, layer: int) -> memoryview:
        at = slab * LAYOUT.chunk_bytes + layer * LAYOUT.layer_bytes
        return self.bytes[at : at + LAYOUT.layer_bytes]


class ToyRunner:
    """`engine.seams.StepRunner`. `spend` is told the tokens of a step before each of its layers: time may pass then."""

    def __init__(self, memory: Memory, spend: Callable[[int], None] = lambda tokens: None) -> None:
        self._memory, self._spend = memory, spend

    def run(self, batch: Sequence[Work], done: LayersDone | None = None) -> list[list[bytes]]:
        """For each wanted row, the digest of all KV up to there."""
        if any(POISON in work.tokens for work in batch):
            raise Crash("a token that no process survives")
        below = [[b""] * len(work.tokens) for work in batch]
        for layer in range(LAYOUT.layers):
            self._spend(sum(len(work.tokens) for work in batch))
            below = [self._layer(work, layer, rows) for work, rows in zip(batch, below, strict=True)]
            if done is not None:
                done(layer + 1)
        return [
            [] if work.logits == "none" else [self._read(work, work.start + len(work.tokens))]
            for work in batch
        ]

    def _layer(self, work: Work, layer: int, below: list[bytes]) -> list[bytes]:
        memory, rows = self._memory.bytes, []
        before = self._row(work, layer, work.start - 1) if work.start else b""
        for position, (token, under) in enumerate(zip(work.tokens, below, strict=True), work.start):
            before = xxhash.xxh3_128_digest(before + under + token.to_bytes(4, "big") + bytes([layer]))
            at = self._at(work, layer, position)
            memory[at : at + 8], memory[at + HALF : at + HALF + 8] = before[:8], before[8:]
            rows.append(before)
        return rows

    def _row(self, work: Work, layer: int, position: int) -> bytes:
        at = self._at(work, layer, position)
        return bytes(self._memory.bytes[at : at + 8]) + bytes(self._memory.bytes[at + HALF : at + HALF + 8])

    def _at(self, work: Work, layer: int, position: int) -> int:
        slab, row = work.slabs[position // CHUNK_TOKENS], position % CHUNK_TOKENS
        return slab * LAYOUT.chunk_bytes + layer * LAYOUT.layer_bytes + row * 8

    def _read(self, work: Work, total: int) -> bytes:
        """Attention's part: every valid byte is read."""
        digest = xxhash.xxh3_64()
        for place in range(LAYOUT.num_chunks(total)):
            rows = min(CHUNK_TOKENS, total - place * CHUNK_TOKENS)
            base = work.slabs[place] * LAYOUT.chunk_bytes
            for at in range(base, base + LAYOUT.chunk_bytes, HALF):
                digest.update(self._memory.bytes[at : at + rows * 8])
        return digest.digest()


class ToyRow:
    """What sampling remembers: penalties and a grammar, both as one number that all earlier tokens went into.

    The grammar of kind "lark" is a number: the answer is complete when it divides the state.
    """

    def __init__(self, sampling: Sampling, output: Sequence[int]) -> None:
        self.seed, self.index, self.state = sampling.seed, 0, 1
        self._modulus = int(sampling.grammar.text) if sampling.grammar else 0
        for token in output:
            self.push(token)

    @property
    def done(self) -> bool:
        return bool(self._modulus) and self.state % self._modulus == 0

    def push(self, token: int) -> None:
        self.index += 1
        self.state = (self.state * 31 + token) % 1_000_003

    def pick(self, logits: bytes) -> int:
        drawn = logits + b"%d %d %d" % (self.seed, self.index, self.state)
        return xxhash.xxh3_64_intdigest(drawn) % POISON


class ToySampler:
    """`engine.seams.StepSampler`."""

    def open(self, seq: Any) -> ToyRow:
        return ToyRow(seq.sampling, seq.output)

    def sample(self, logits: list[list[bytes]], rows: list[ToyRow]) -> list[Picked | Exception]:
        return [Picked(row.pick(part[-1])) for part, row in zip(logits, rows, strict=True)]

    def score(self, logits: object, tokens: list[int], top: int) -> list[Any]:
        """Prompts are not scored here."""
        return []


def alone(prompt: Sequence[int], sampling: Sampling, max_model_len: int) -> tuple[list[int], str]:
    """The answer of one undisturbed run, and how it ends: "stop" or "length"."""
    slabs = list(range(LAYOUT.num_chunks(min(len(prompt) + sampling.max_tokens, max_model_len))))
    runner, row = ToyRunner(Memory(len(slabs))), ToyRow(sampling, ())
    tokens, start, output = list(prompt), 0, list[int]()
    while True:
        (logits,) = runner.run([Work(tokens, start, slabs, "last")])
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
