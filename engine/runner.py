"""Runs what the scheduler planned: token ids in, logits out, KV into the pool's slabs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.errors import ModelError
from engine.attention.batch import pack
from engine.attention.cpu import Pages
from engine.model.decoder import Decoder
from engine.model.files import ModelFiles
from engine.model.weights import Weights
from engine.work import Work
from kvcache.layout import CHUNK_TOKENS, KVLayout
from kvcache.pool import Pool


class Runner:
    """A loaded model bound to a pool. One thread at a time."""

    def __init__(self, decoder: Decoder, pool: Pool, max_model_len: int) -> None:
        self.layout: KVLayout = pool.layout
        self.vocab_size = decoder.shape.vocab
        self.max_model_len = max_model_len
        self._decoder, self._pool = decoder, pool
        self._pages = Pages(pool.layout, pool.data, decoder.shape.heads)

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

    def run(self, batch: Sequence[Work]) -> list[torch.Tensor]:
        """Logits per work, float32 [rows, vocab] with rows = 1, len(tokens) or 0; the caller's to change.

        Raises:
            ValueError: a work is empty, too long, or has too few slabs; nothing ran.
        """
        for work in batch:
            self._check(work)
        if not batch:
            return []
        counts = [{"last": 1, "all": len(work.tokens), "none": 0}[work.logits] for work in batch]
        with torch.no_grad():
            logits = self._decoder.forward(pack(batch), self._pages)
            return list(torch.split(logits[: sum(counts)], counts))

    def warm(self) -> None:
        """Compile the kernels and touch the weights with one short prefill and two decodes, in slabs taken for it."""
        tokens = min(CHUNK_TOKENS + 8, self.max_model_len - 2)
        owner = "warm"
        slabs = self._pool.take(self.layout.num_chunks(tokens + 2), owner)
        try:
            self.run([Work([0] * tokens, 0, slabs, "last")])
            self.run([Work([0], tokens, slabs, "last")])
            self.run([Work([0], tokens + 1, slabs, "last")])
        finally:
            self._pool.give(slabs, owner)

    def _check(self, work: Work) -> None:
        end = work.start + len(work.tokens)
        if not work.tokens or work.start < 0 or end > self.max_model_len:
            raise ValueError(f"positions {work.start}..{end - 1} are not within 0..{self.max_model_len - 1}")
        if self.layout.num_chunks(end) > len(work.slabs):
            raise ValueError(f"{end} tokens do not fit into {len(work.slabs)} slabs")
        if work.logits not in ("last", "all", "none"):
            raise ValueError(f"logits are 'last', 'all' or 'none', not {work.logits!r}")
        if min(work.slabs) < 0 or max(work.slabs) >= self._pool.num_slabs:
            raise ValueError(f"slabs {work.slabs} are not all in a pool of {self._pool.num_slabs}")
        if min(work.tokens) < 0 or max(work.tokens) >= self.vocab_size:
            raise ValueError(f"token ids are not all within 0..{self.vocab_size - 1}")
