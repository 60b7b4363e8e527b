"""Runs what the scheduler planned on a CUDA device: token ids in, logits out, KV into the device's slabs.

A step goes to the device as one copy. Steps in which every sequence decodes one token replay a CUDA graph, captured
when a padded batch size first occurs; others are launched kernel by kernel. While the device computes, the host packs
the step that will most likely follow, the same sequences one token on; if it does follow, only its tokens are missing.

    host    │ pack n+1 (guess) │ wait n │ sample │ tokens into n+1 │ launch n+1 │ pack n+2 (guess) │ ...
    device  │ ........ step n ........  │                          │ ........ step n+1 ............

On the device "cpu" everything runs in Triton's interpreter, without graphs: that is how it is tested without a GPU. It
has not yet been run on one, which is why `worker.build` does not offer it: see `docs/gpu.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.batch import pack
from engine.attention.triton import Pages, Tuning, power
from engine.gpu_batch import Sizes, fill, measure, view
from engine.gpu_decoder import Decoder, Source
from engine.model.shape import Shape
from engine.seams import LayersDone
from engine.work import Bounds, Work
from kvcache.layout import CHUNK_TOKENS, KVLayout

ITEMS = (0, 64, 512)  # padded numbers of shared items; a step with more is launched without a graph


@dataclass(frozen=True, slots=True)
class Ready:
    """A step in host memory, and what it was made for."""

    works: tuple[Work, ...]
    sizes: Sizes
    ints: torch.Tensor  # [sizes.numbers] int32, page-locked where that helps
    graph: bool

    def fits(self, works: Sequence[Work]) -> bool:
        """Whether `works` are these but for their token ids, which may not have been known."""
        return len(works) == len(self.works) and all(
            len(work.tokens) == 1
            and work.start == mine.start
            and work.logits == mine.logits
            and work.slabs[: len(mine.slabs)] == mine.slabs
            for work, mine in zip(works, self.works, strict=True)
        )


class Graph:
    """One captured decode step of fixed sizes; its memory stays where it is."""

    def __init__(self, decoder: Decoder, pages: Pages, sizes: Sizes, pool: Any) -> None:
        self.ints = torch.zeros(sizes.numbers, dtype=torch.int32, device=decoder.device)
        step = view(self.ints, sizes)
        step.slots.fill_(-1)  # nothing is written while we capture
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            decoder.forward(
                step, pages
            )  # compiles kernels and makes cuBLAS choose, neither of which can be captured
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits = decoder.forward(step, pages)

    def replay(self, ints: torch.Tensor) -> torch.Tensor:
        """Run the step in host memory `ints`; the logits are overwritten by the next replay."""
        self.ints.copy_(ints, non_blocking=True)
        self.graph.replay()
        return self.logits


class Runner:
    """A loaded model bound to a pool's memory on a device. One thread at a time.

    data: [num_slabs, layers, kv_heads, 2, 64, head_dim] on the decoder's device, in its type.

    Raises:
        ValueError: `data` is not of `layout`, or not where the decoder is.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: KVLayout,
        data: torch.Tensor,
        max_model_len: int,
        tuning: Tuning | None = None,
    ) -> None:
        if (
            data.shape[1:] != layout.chunk_shape
            or data.device != decoder.device
            or data.dtype != decoder.dtype
        ):
            raise ValueError(
                f"a pool of {tuple(data.shape)} {data.dtype} on {data.device} does not fit {layout} on {decoder.device}"
            )
        self.layout, self.data = layout, data
        self.vocab_size, self.max_model_len = decoder.shape.vocab, max_model_len
        self.prepare_seconds = 0.0  # of the last run: what was done before the device had work
        self.guessed = 0  # steps that had been packed while the one before them ran
        self._decoder = decoder
        self._pages = Pages(layout, data, decoder.shape.heads, tuning)
        self._bounds = Bounds(layout, data.shape[0], max_model_len, self.vocab_size)
        self._cuda = decoder.device.type == "cuda"
        self._graphs: dict[Sizes, Graph] = {}
        self._guess: Ready | None = None

    @classmethod
    def load(
        cls, shape: Shape, source: Source, num_slabs: int, max_model_len: int, device: str, dtype: str
    ) -> Runner:
        """The model on `device` over a pool of zeros; `dtype` as in `KVLayout`. Raises ModelError as `source` does."""
        kind: torch.dtype = getattr(torch, dtype)
        with torch.no_grad():
            decoder = Decoder(shape, source, max_model_len, torch.device(device), kind)
        layout = KVLayout(shape.layers, shape.kv_heads, shape.head_dim, dtype)
        data = torch.zeros(num_slabs, *layout.chunk_shape, dtype=kind, device=decoder.device)
        return cls(decoder, layout, data, max_model_len)

    def run(self, batch: Sequence[Work], done: LayersDone | None = None) -> list[torch.Tensor]:
        """Logits per work, float32 [rows, vocab] on the CPU, rows = 1, len(tokens) or 0; the caller's to change.

        The host does not see how far the device is: `done` is told once, when all layers are through.

        Raises:
            ValueError: a work is empty, too long, or has too few slabs; nothing ran.
        """
        began_s = time.perf_counter()
        for work in batch:
            self._bounds.check(work)
        if not batch:
            return []
        ready = self._ready(batch)
        self.prepare_seconds = time.perf_counter() - began_s
        counts = [work.wanted for work in batch]
        with torch.no_grad():
            logits = self._fetch(self._launch(ready)[: sum(counts)])
        self._guess = self._ahead(batch)  # while the device computes
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        if done is not None:
            done(self.layout.layers)
        return list(torch.split(logits, counts))

    def warm(self, rows: Sequence[int] = (1,)) -> None:
        """Compile with a short prefill, capture the graphs of these batch sizes. The pool stays as it is."""
        tokens = min(CHUNK_TOKENS + 1, self.max_model_len)
        ready = self._pack([Work([0] * tokens, 0, [0] * self.layout.num_chunks(tokens), "last")])
        view(ready.ints, ready.sizes).slots.fill_(-1)
        with torch.no_grad():
            self._launch(ready)
            for sizes in [self._padded(count, items) for count in rows for items in ITEMS[:2]]:
                if self._cuda:
                    self._graph(sizes)
        if self._cuda:
            torch.cuda.synchronize()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every decode step reads."""
        return self._decoder.weight_bytes

    def replayer(self, batch: Sequence[Work]) -> Callable[[], torch.Tensor]:
        """The device's part of running `batch`, to be repeated and timed without the host's."""
        ready = self._pack(batch)
        return lambda: self._launch(ready)

    def _ready(self, batch: Sequence[Work]) -> Ready:
        """The step in host memory: as it was guessed, or packed now."""
        guess, self._guess = self._guess, None
        if guess is None or not guess.fits(batch):
            return self._pack(batch)
        self.guessed += 1
        guess.ints.numpy()[: len(batch)] = [work.tokens[0] for work in batch]  # tokens come first
        return guess

    def _pack(self, works: Sequence[Work]) -> Ready:
        batch = pack(works)
        shared, tiles = self._pages.cut(batch)
        graph = self._cuda and not batch.spans and len(shared.items) <= ITEMS[-1]
        sizes = self._padded(len(batch.tokens), len(shared.items)) if graph else measure(batch, shared, tiles)
        ints = torch.empty(sizes.numbers, dtype=torch.int32, pin_memory=self._cuda)
        fill(ints.numpy(), sizes, batch, shared, tiles)
        return Ready(tuple(works), sizes, ints, graph)

    def _padded(self, rows: int, items: int) -> Sizes:
        """The sizes of the graph that serves so many decoding rows and shared items."""
        step = power(rows) if rows <= 8 else 8 if rows <= 64 else 32
        count = -(-rows // step) * step
        padded = next(most for most in ITEMS if items <= most)
        return Sizes(count, count, count, padded, 0, count, self.layout.num_chunks(self.max_model_len))

    def _launch(self, ready: Ready) -> torch.Tensor:
        """The logits, on their way."""
        if ready.graph:
            return self._graph(ready.sizes).replay(ready.ints)
        ints = ready.ints.to(self._decoder.device, non_blocking=True)
        return self._decoder.forward(view(ints, ready.sizes), self._pages)

    def _graph(self, sizes: Sizes) -> Graph:
        if sizes not in self._graphs:
            pool = next((graph.graph.pool() for graph in self._graphs.values()), None)
            self._graphs[sizes] = Graph(self._decoder, self._pages, sizes, pool)
        return self._graphs[sizes]

    def _fetch(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits on the CPU, complete once the device is through."""
        if not self._cuda:
            return logits
        host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
        return host.copy_(logits, non_blocking=True)

    def _ahead(self, works: Sequence[Work]) -> Ready | None:
        """The step in which every one of these sequences decodes the token that this step gives it, if all do."""
        following = []
        for work in works:
            end = work.start + len(work.tokens)
            chunks = self.layout.num_chunks(end + 1)
            if work.logits != "last" or end >= self.max_model_len or chunks > len(work.slabs):
                return None
            following.append(Work([0], end, work.slabs[:chunks], "last"))
        return self._pack(following)
