"""Runs what the scheduler planned: token ids in, logits out, KV into the pool's slabs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from diptych.errors import ModelError
from engine.attention.batch import Batch, pack
from engine.attention.cpu import Pages
from engine.model.decoder import Decoder
from engine.model.weights import Weights
from engine.parallel import Crew, encode
from engine.seams import LayersDone
from engine.work import Bounds, Work
from kvcache.layout import CHUNK_TOKENS, KVLayout
from kvcache.pool import Pool

if TYPE_CHECKING:  # it takes transformers, which a rank that is told all about its model can do without
    from engine.model.files import ModelFiles


class Runner:
    """A loaded model, or one rank's part of it, bound to a pool. One thread at a time.

    `crew`: the other ranks, if there are any and this is rank 0. What is run here they run, too.
    """

    def __init__(self, decoder: Decoder, pool: Pool, max_model_len: int, crew: Crew | None = None) -> None:
        self.layout: KVLayout = pool.layout
        self.vocab_size = decoder.shape.vocab
        self.max_model_len = max_model_len
        self.prepare_seconds = 0.0  # of the last run: checking it, packing it, telling the crew
        self._decoder, self._pool, self._crew = decoder, pool, crew
        self._pages = Pages(pool.layout, pool.data, decoder.heads)
        self._bounds = Bounds(pool.layout, pool.num_slabs, max_model_len, decoder.shape.vocab)

    @classmethod
    def load(cls, model: ModelFiles, pool: Pool, max_model_len: int) -> Runner:
        """Read the weights and bind them to `pool`.

        Raises:
            ModelError: the checkpoint does not match its config, or the pool is not of this model's layout.
        """
        expected = model.layout(pool.layout.dtype)
        if pool.layout != expected or pool.layout.dtype != "float32":
            raise ModelError(
                "the KV pool does not fit the model",
                f"pool: {pool.layout}\nmodel: {model.layout('float32')}",
                "make the pool from the model's own layout, in float32 on the CPU",
            )
        with torch.no_grad(), Weights(model.weights) as weights:
            decoder = Decoder(model.shape, weights, max_model_len)
        return cls(decoder, pool, max_model_len)

    def run(self, batch: Sequence[Work], done: LayersDone | None = None) -> list[torch.Tensor]:
        """Logits per work, float32 [rows, vocab] with rows = 1, len(tokens) or 0; the caller's to change.

        `done` is told after each layer how many have all their KV in the slabs, in order. Of several ranks none knows
        how far the others are, so that it is told once, when all are through.

        Raises:
            ValueError: a work is empty, too long, or has too few slabs; nothing ran.
        """
        began_s = time.perf_counter()
        for work in batch:
            self._bounds.check(work)
        if not batch:
            return []
        counts = [work.wanted for work in batch]
        packed = pack(batch)
        if self._crew is None:
            self.prepare_seconds = time.perf_counter() - began_s
            logits = self._forward(packed, done)
        else:
            self._crew.tell(encode(batch))
            self.prepare_seconds = time.perf_counter() - began_s
            logits = self._together(packed, self._crew)
            if done is not None:
                done(self._decoder.shape.layers)
        assert logits is not None
        return list(torch.split(logits[: sum(counts)], counts))

    def part(self, batch: Sequence[Work]) -> None:
        """This rank's part of a step that rank 0 runs. Raises what went wrong here, after all ranks are through."""
        self._forward(pack(batch))

    def _together(self, packed: Batch, crew: Crew) -> torch.Tensor | None:
        """Our part, with all others' done whether it succeeds or not: the next step must find them waiting for it."""
        try:
            logits = self._forward(packed)
        finally:
            error = crew.hear()
        if error is not None:
            raise error
        return logits

    def _forward(self, packed: Batch, done: LayersDone | None = None) -> torch.Tensor | None:
        decoder = self._decoder
        with torch.no_grad():
            return decoder.wire.step(
                lambda: decoder.forward(packed, self._pages, done), len(packed.tokens), len(packed.wanted)
            )

    def warm(self) -> None:
        """Compile the kernels and touch the weights: a short prefill, a decode, and decodes that share a chunk."""
        tokens = min(CHUNK_TOKENS + 8, self.max_model_len - 2)
        owner = "warm"
        slabs = self._pool.take(self.layout.num_chunks(tokens + 2), owner)
        try:
            self.run([Work([0] * tokens, 0, slabs, "last")])
            self.run([Work([0], tokens, slabs, "last")])
            self.run([Work([0], tokens + 1, slabs, "last")] * CHUNK_TOKENS)  # equal rows write equal KV
        finally:
            self._pool.give(slabs, owner)
