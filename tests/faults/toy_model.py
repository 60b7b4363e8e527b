"""A language model for the proving ground: no weights, no torch, and no wrong byte goes unseen.

KV of a token is made of the state before it, the token and its position, spread over all layers, heads and elements;
the state is read back from the KV of the token before. KV with a codec keeps less of it, and every reader gets what
was kept. Logits are a hash of all KV *as it lies in the slabs*: of every byte of every token before. So one byte that
is wrong, stale, foreign or in another place changes the answer.

Tokens are bytes (id = 1 + byte, 0 ends an answer) and only printable ASCII is ever written, so the text of an answer
tells its tokens exactly.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from llguidance import LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import GrammarError
from diptych.messages import Logprob
from diptych.request import Pooling, SamplingParams
from engine.protocols import SampledToken
from engine.sampling import grammar
from engine.sequence import Sequence as Live
from engine.step_work import RunnerBounds, StepWork
from kvcache.layout import KvLayout

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]

LAYOUT = KvLayout(layers=4, kv_heads=2, head_dim=8, dtype="float32")
CODED = "tq-k8v4.s0"
VOCAB = 257
END_TOKEN, END_TEXT = 0, "<|end|>"
# A chat is the text of its messages.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CONTEXT = 2048
WRITABLE_TOKENS = np.array([1 + byte for byte in range(32, 127)], np.int64)  # printable ASCII
LOGIT_HEIGHT = 6.0  # logits are within 0 and this
END_HANDICAP = 3.5  # answers are to be of some length

_MASK = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Bits of a state that a codec loses.
_LOST = 0xFFFF


def toy_layout(codec: str) -> KvLayout:
    """The layout of KV with a codec; "" is none."""
    return dataclasses.replace(LAYOUT, codec=codec)


def mix_bits(z: int) -> int:
    """splitmix64's finaliser."""
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def spell_answer(tokens: Sequence[int]) -> str:
    """The text of an answer, its end token left out."""
    return bytes(token - 1 for token in tokens if token != END_TOKEN).decode("latin-1")


class ToyPool:
    """A pool's bytes, as 64-bit words `[slabs, layers, kv_heads, 2, 64, words]`."""

    def __init__(self, memory: memoryview | bytearray, layout: KvLayout = LAYOUT) -> None:
        self.layout = layout
        # Words of one token, in one page's keys or values.
        words = layout.page_bytes // (2 * CHUNK_TOKENS) // 8
        shape = (layout.layers, layout.kv_heads, 2, CHUNK_TOKENS, words)
        self.words: Words = np.frombuffer(memory, np.uint64).reshape(-1, *shape)
        count = layout.layers * layout.kv_heads * 2 * words
        spread = np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN & ~1) + np.uint64(1)
        # Odd factors; the first one is 1.
        self._spread = spread.reshape(layout.layers, layout.kv_heads, 2, words)

    def code(self, state: int) -> int:
        """What every reader gets of a state: all of it, or what a codec keeps."""
        return state & ~_LOST if self.layout.codec else state

    @property
    def num_slabs(self) -> int:
        return len(self.words)

    def state(self, slabs: Sequence[int], position: int) -> int:
        """The state after the token at `position`, as its KV has it."""
        slab, place = slabs[position // CHUNK_TOKENS], position % CHUNK_TOKENS
        return int(self.words[slab, 0, 0, 0, place, 0])

    def write(self, slabs: Sequence[int], start: int, states: Words, layer: int) -> None:
        """KV of one layer for the tokens from `start` on; `states` are those after each of them."""
        done = 0
        while done < len(states):
            place = (start + done) % CHUNK_TOKENS
            count = min(CHUNK_TOKENS - place, len(states) - done)
            part = states[done : done + count]
            page = (
                self._spread[layer][:, :, None, :] * part[None, None, :, None]
            )  # [kv_heads, 2, count, words]
            self.words[slabs[(start + done) // CHUNK_TOKENS], layer, :, :, place : place + count] = page
            done += count

    def read(self, slabs: Sequence[int], num_tokens: int) -> int:
        """A hash of all KV of the first `num_tokens` tokens."""
        whole, rest = divmod(num_tokens, CHUNK_TOKENS)
        digest = xxhash.xxh3_64(seed=num_tokens)
        for slab in slabs[:whole]:
            digest.update(self.words[slab].data)
        if rest:
            digest.update(np.ascontiguousarray(self.words[slabs[whole], :, :, :, :rest]).data)
        return digest.intdigest()


def make_logits(digest: int) -> Floats:
    """Over the vocabulary, from the hash of all that was read."""
    z = np.uint64(digest) + np.arange(VOCAB, dtype=np.uint64) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    heights = (z >> np.uint64(11)).astype(np.float64) * (LOGIT_HEIGHT / (1 << 53))
    row = np.full(VOCAB, -np.inf)
    row[WRITABLE_TOKENS] = heights[WRITABLE_TOKENS]
    row[END_TOKEN] = heights[END_TOKEN] - END_HANDICAP
    return row


class ToyRunner:
    """Implements `engine.protocols.StepRunner`. A step takes `step_s`, and `token_s` per token, in even parts
    per layer.
    """

    def __init__(self, memory: ToyPool, step_s: float = 0.0, token_s: float = 0.0) -> None:
        self.memory, self.step_s, self.token_s = memory, step_s, token_s
        self._bounds = RunnerBounds(memory.layout, memory.num_slabs, CONTEXT, VOCAB)

    def run(self, batch: list[StepWork], done: Callable[[int], None] | None = None) -> list[Floats]:
        """Rows of logits for each work, [wanted, vocab]; `done` is called with how many layers lie in the slabs."""
        for work in batch:
            self._bounds.check(work)
        pause_s = (
            self.step_s + self.token_s * sum(len(work.tokens) for work in batch)
        ) / self.memory.layout.layers
        states = [self._states(work) for work in batch]
        for layer in range(self.memory.layout.layers):
            if pause_s:
                time.sleep(pause_s)
            for work, after in zip(batch, states, strict=True):
                self.memory.write(work.slabs, work.start, after, layer)
            if done is not None:
                done(layer + 1)
        return [self._rows(work) for work in batch]

    def _states(self, work: StepWork) -> Words:
        state = self.memory.state(work.slabs, work.start - 1) if work.start else 1
        after = np.empty(len(work.tokens), np.uint64)
        for place, token in enumerate(work.tokens):
            state = mix_bits((state + _GOLDEN * (token + 1) + work.start + place) & _MASK) | 1
            after[place] = state = self.memory.code(state)
        return after

    def _rows(self, work: StepWork) -> Floats:
        end = work.start + len(work.tokens)
        first = {"all": work.start + 1, "last": end, "none": end + 1}[work.logits]
        rows = [make_logits(self.memory.read(work.slabs, count)) for count in range(first, end + 1)]
        return np.array(rows) if rows else np.empty((0, VOCAB))


class ToyRow:
    """What sampling remembers of one sequence: how often it wrote what, and where it is in its grammar."""

    cost_s = 0.0

    def __init__(
        self,
        prompt: list[int],
        output: list[int],
        asked: SamplingParams,
        match: grammar.GrammarMatcher | None,
    ):
        self.asked, self.index, self.match = asked, len(output), match
        self.counts = Counter(output)
        self.seen = set(prompt) | set(output)

    @property
    def done(self) -> bool:
        return self.match is not None and self.match.done

    def push(self, token: int) -> None:
        self.index += 1
        self.counts[token] += 1
        self.seen.add(token)
        if self.match is not None:
            self.match.push(token)

    def shape(self, row: Floats) -> Floats:
        """The row with bias, penalties and grammar applied, and without what may not be chosen."""
        row, asked = row.copy(), self.asked
        for token, bias in asked.logit_bias.items():
            row[token] += bias
        for token in self.seen if asked.repetition_penalty != 1.0 else ():
            row[token] *= 1 / asked.repetition_penalty if row[token] > 0 else asked.repetition_penalty
        for token, count in self.counts.items():
            row[token] -= asked.frequency_penalty * count + asked.presence_penalty
        if self.match is not None:
            row[~self.match.token_mask(VOCAB)] = -np.inf
            free = np.flatnonzero(self.match.token_mask(VOCAB))
            if not np.isfinite(row).any():  # the grammar wants what this model never writes
                row[free] = 0.0
        if END_TOKEN not in asked.stop_token_ids:
            row[END_TOKEN] = -np.inf  # it has no text, and would be missing in what tells the tokens
        if self.index < asked.min_tokens:
            row[list(asked.stop_token_ids)] = -np.inf
        return row


class ToySampler:
    """Implements `engine.protocols.StepSampler`: Gumbel-max, with noise hashed from (seed, index, token)."""

    def __init__(self, tokenizer: LLTokenizer | None = None) -> None:
        self.tokenizer = tokenizer

    def expect(self, seq: Live) -> None:
        """Nothing here takes long."""

    def notify(self, wake: Callable[[], None]) -> None:
        """Nobody waits."""

    def open(self, seq: Live) -> ToyRow:
        return self.row(seq.prompt, seq.output, seq.sampling)

    def row(self, prompt: list[int], output: list[int], asked: SamplingParams) -> ToyRow:
        """The state of sampling after `output`. Raises GrammarError."""
        match = None
        if asked.grammar is not None:
            if self.tokenizer is None:
                raise GrammarError("this toy was made without a tokenizer")
            match = grammar.compile_grammar(asked.grammar, self.tokenizer)
            match.replay(output)
        return ToyRow(prompt, output, asked, match)

    def sample(self, logits: list[Floats], rows: list[ToyRow]) -> list[SampledToken | Exception]:
        return [self.pick(part[-1], row) for part, row in zip(logits, rows, strict=True)]

    def pick(self, raw: Floats, row: ToyRow) -> SampledToken:
        """One token, with its log-probability if that is asked for."""
        shaped, asked = row.shape(raw), row.asked
        if asked.temperature > 0:
            shaped = shaped / asked.temperature + _gumbel_noise(asked.seed, row.index)
        token = int(shaped.argmax())
        return SampledToken(
            token, None if asked.logprobs is None else _score_token(raw, token, asked.logprobs)
        )

    def score(self, logits: Floats, tokens: list[int], top: int) -> list[Logprob]:
        return [_score_token(row, token, top) for row, token in zip(logits, tokens, strict=True)]

    def pool(self, row: Floats, pooling: Pooling, num_tokens: int) -> bytes:
        raise AssertionError("the toy does not pool")


def _gumbel_noise(seed: int, index: int) -> Floats:
    start = mix_bits((mix_bits(seed & _MASK) + _GOLDEN * (index + 1)) & _MASK)
    z = np.uint64(start) + np.arange(VOCAB, dtype=np.uint64) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    uniform = ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    gumbel: Floats = -np.log(-np.log(uniform))
    return gumbel


def _score_token(row: Floats, token: int, top: int) -> Logprob:
    peak = row.max()
    total = peak + math.log(float(np.exp(row - peak).sum()))
    scores = np.maximum(row - total, -9999.0)
    best = np.argsort(-scores, kind="stable")[:top]
    return Logprob(token, float(scores[token]), [(int(one), float(scores[one])) for one in best])


class ToyOracle:
    """What the model answers when nothing ever happens: private memory, one sequence, one token at a time."""

    def __init__(
        self, tokenizer: LLTokenizer | None = None, context: int = CONTEXT, layout: KvLayout = LAYOUT
    ) -> None:
        num_slabs = -(-context // CHUNK_TOKENS)
        self.context = context
        self._slabs = list(range(num_slabs))
        self._memory = ToyPool(bytearray(num_slabs * layout.chunk_bytes), layout)
        self._runner, self._sampler = ToyRunner(self._memory), ToySampler(tokenizer)

    def answer(self, prompt: list[int], asked: SamplingParams) -> tuple[list[int], str]:
        """The tokens of an undisturbed answer, a finishing end token included, and why it ends: "stop", "length"."""
        row = self._sampler.row(prompt, [], asked)
        output: list[int] = []
        known, start = list(prompt), 0
        while len(output) < asked.max_tokens and len(known) < self.context:
            (rows,) = self._runner.run([StepWork(known[start:], start, self._slabs, "last", prompt[0])])
            start = len(known)
            token = self._sampler.pick(rows[-1], row).token
            output.append(token)
            known.append(token)
            if token in asked.stop_token_ids:
                return output, "stop"
            row.push(token)
            if row.done:
                return output, "stop"
        return output, "length"


def tokenizer() -> Tokenizer:
    """Bytes to ids and back."""
    symbols = {symbol: 1 + byte for byte, symbol in enumerate(_alphabet())}
    made = Tokenizer(models.BPE(vocab={END_TEXT: END_TOKEN, **symbols}, merges=[]))
    made.add_special_tokens([END_TEXT])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def grammar_tokenizer() -> LLTokenizer:
    """The tokenizer as structured output needs it."""
    return grammar.build_tokenizer(tokenizer(), [END_TOKEN])


def make_folder(folder: Path, context: int = CONTEXT) -> Path:
    """What a gateway reads of a model: tokenizer and configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_TEXT,
            "chat_template": CHAT_TEMPLATE,
        },
        "config.json": {"vocab_size": VOCAB, "eos_token_id": END_TOKEN, "max_position_embeddings": context},
        "generation_config.json": {"eos_token_id": END_TOKEN},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def _alphabet() -> list[str]:
    """The symbol of each byte in byte-level BPE (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [symbols[byte] for byte in range(256)]
