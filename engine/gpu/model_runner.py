"""Runs a step on a CUDA device: takes token ids, returns logits, and stores KV in the device's slabs.

A step goes to the device as one copy. Steps in which every sequence decodes one token replay a CUDA graph, captured
when a padded batch size first occurs; other steps are launched kernel by kernel. While the device computes, the host
packs the most likely next step, in which each sequence decodes one more token; if this guess is right, only the token
ids have to be filled in.

    host    │ pack n+1 (guess) │ wait n │ sample │ tokens into n+1 │ launch n+1 │ pack n+2 (guess) │ ...
    device  │ ........ step n ........  │                          │ ........ step n+1 ............

On the device "cpu" everything runs in Triton's interpreter, without graphs, for tests without a GPU. This runner has
not yet been used on a GPU in a deployment, which is why `worker.build` does not offer it: see `docs/gpu.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError
from engine.attention.batch import pack_batch
from engine.gpu.attention import GpuAttention, LaunchTuning, next_power_of_two
from engine.gpu.batch import StepSizes, fill_step, measure_sizes, view_step
from engine.gpu.decoder import GpuDecoder, WeightSource
from engine.model.architecture import ModelConfig
from engine.protocols import OnLayersDone
from engine.step_work import RunnerBounds, StepWork
from kvcache.layout import KvLayout

# Numbers to which the number of shared items is padded. A step with more items is launched without a graph.
PADDED_ITEMS = (0, 64, 512)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step in host memory, and the works that it was packed for."""

    works: tuple[StepWork, ...]
    sizes: StepSizes
    # [sizes.numbers] int32; in page-locked memory if there is a GPU.
    ints: torch.Tensor
    graph: bool

    def fits(self, works: Sequence[StepWork]) -> bool:
        """Whether `works` are the packed works, apart from their token ids, which were unknown for a guess."""
        return len(works) == len(self.works) and all(
            len(work.tokens) == 1
            and work.start == mine.start
            and work.logits == mine.logits
            and work.slabs[: len(mine.slabs)] == mine.slabs
            for work, mine in zip(works, self.works, strict=True)
        )


class DecodeGraph:
    """One captured CUDA graph of a decode step of fixed sizes. Its input and output keep their addresses."""

    def __init__(self, decoder: GpuDecoder, pages: GpuAttention, sizes: StepSizes, pool: Any) -> None:
        self.ints = torch.zeros(sizes.numbers, dtype=torch.int32, device=decoder.device)
        step = view_step(self.ints, sizes)
        # Padding slots, so that capturing the graph writes no KV.
        step.slots.fill_(-1)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            # Compiles the kernels and lets cuBLAS choose its algorithms, which cannot be captured.
            decoder.forward(step, pages)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits = decoder.forward(step, pages)

    def replay(self, ints: torch.Tensor) -> torch.Tensor:
        """Run the step in host memory `ints`; returns the logits, which the next replay overwrites."""
        self.ints.copy_(ints, non_blocking=True)
        self.graph.replay()
        return self.logits


class GpuModelRunner:
    """A loaded model bound to a pool's memory on a device. Only one thread at a time may use it.

    data: [num_slabs, layers, kv_heads, 2, 64, head_dim] on the decoder's device, in its type.

    Raises:
        ConfigError: KV is to be coded, which the kernels for GPUs cannot do.
        ValueError: `data` does not have the shape of `layout`, or is not on the decoder's device.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        layout: KvLayout,
        data: torch.Tensor,
        max_model_len: int,
        tuning: LaunchTuning | None = None,
    ) -> None:
        if layout.codec:
            raise ConfigError(
                f"the KV codec {layout.codec} is not available on a GPU",
                "the kernels for GPUs read and write KV as it was computed",
                "leave out --kv-cache-codec, or use --device cpu",
            )
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
        # Seconds of the last run until the device had work.
        self.prepare_seconds = 0.0
        # Number of steps that were packed while the step before them ran.
        self.guessed = 0
        self._decoder = decoder
        self._pages = GpuAttention(layout, data, decoder.shape.heads, tuning)
        self._bounds = RunnerBounds(layout, data.shape[0], max_model_len, self.vocab_size)
        self._cuda = decoder.device.type == "cuda"
        self._graphs: dict[StepSizes, DecodeGraph] = {}
        self._guess: PackedStep | None = None

    @classmethod
    def load(
        cls,
        shape: ModelConfig,
        source: WeightSource,
        num_slabs: int,
        max_model_len: int,
        device: str,
        dtype: str,
    ) -> GpuModelRunner:
        """Load the model onto `device` with a new pool; `dtype` as in `KvLayout`.

        Raises ModelError as `source` does.
        """
        kind: torch.dtype = getattr(torch, dtype)
        with torch.no_grad():
            decoder = GpuDecoder(shape, source, max_model_len, torch.device(device), kind)
        layout = KvLayout(shape.layers, shape.kv_heads, shape.head_dim, dtype)
        data = torch.zeros(num_slabs, *layout.chunk_shape, dtype=kind, device=decoder.device)
        return cls(decoder, layout, data, max_model_len)

    def run(self, batch: Sequence[StepWork], done: OnLayersDone | None = None) -> list[torch.Tensor]:
        """Compute a step. Returns logits per work, float32 [rows, vocab] on the CPU, rows = 1, len(tokens) or 0.

        The caller may change the logits. The host does not see the progress of the device: `done` is called once, when
        all layers have finished.

        Raises:
            ValueError: a work is empty, too long, or has too few slabs; nothing was computed.
        """
        began_s = time.perf_counter()
        for work in batch:
            self._bounds.check(work)
        if not batch:
            return []
        ready = self._prepare_step(batch)
        self.prepare_seconds = time.perf_counter() - began_s
        counts = [work.wanted for work in batch]
        with torch.no_grad():
            logits = self._fetch_logits(self._launch_step(ready)[: sum(counts)])
        # The next step is packed while the device computes this one.
        self._guess = self._pack_next_step(batch)
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        if done is not None:
            done(self.layout.layers)
        return list(torch.split(logits, counts))

    def warm(self, rows: Sequence[int] = (1,)) -> None:
        """Compile the kernels with a short prefill, and capture the graphs of these batch sizes. Writes no KV."""
        tokens = min(CHUNK_TOKENS + 1, self.max_model_len)
        ready = self._pack_step([StepWork([0] * tokens, 0, [0] * self.layout.num_chunks(tokens), "last")])
        view_step(ready.ints, ready.sizes).slots.fill_(-1)
        with torch.no_grad():
            self._launch_step(ready)
            for sizes in [self._padded_sizes(count, items) for count in rows for items in PADDED_ITEMS[:2]]:
                if self._cuda:
                    self._captured_graph(sizes)
        if self._cuda:
            torch.cuda.synchronize()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every decode step reads."""
        return self._decoder.weight_bytes

    def replayer(self, batch: Sequence[StepWork]) -> Callable[[], torch.Tensor]:
        """A function that repeats the device's part of running `batch`, for timing it without the host's part."""
        ready = self._pack_step(batch)
        return lambda: self._launch_step(ready)

    def _prepare_step(self, batch: Sequence[StepWork]) -> PackedStep:
        """The step in host memory: the guess if it is right, with its tokens filled in, or packed now."""
        guess, self._guess = self._guess, None
        if guess is None or not guess.fits(batch):
            return self._pack_step(batch)
        self.guessed += 1
        # The tokens come first among the integers.
        guess.ints.numpy()[: len(batch)] = [work.tokens[0] for work in batch]
        return guess

    def _pack_step(self, works: Sequence[StepWork]) -> PackedStep:
        """Pack a step into host memory, padded to the sizes of a graph if it can use one."""
        batch = pack_batch(works)
        shared, tiles = self._pages.cut_batch(batch)
        graph = self._cuda and not batch.spans and len(shared.items) <= PADDED_ITEMS[-1]
        sizes = (
            self._padded_sizes(len(batch.tokens), len(shared.items))
            if graph
            else measure_sizes(batch, shared, tiles)
        )
        ints = torch.empty(sizes.numbers, dtype=torch.int32, pin_memory=self._cuda)
        fill_step(ints.numpy(), sizes, batch, shared, tiles)
        return PackedStep(tuple(works), sizes, ints, graph)

    def _padded_sizes(self, rows: int, items: int) -> StepSizes:
        """The sizes of the graph for a number of decode rows and shared items, both rounded up."""
        step = next_power_of_two(rows) if rows <= 8 else 8 if rows <= 64 else 32
        count = -(-rows // step) * step
        padded = next(most for most in PADDED_ITEMS if items <= most)
        return StepSizes(count, count, count, padded, 0, count, self.layout.num_chunks(self.max_model_len))

    def _launch_step(self, ready: PackedStep) -> torch.Tensor:
        """Start a step on the device; returns its logits, which are complete only when the device has finished."""
        if ready.graph:
            return self._captured_graph(ready.sizes).replay(ready.ints)
        ints = ready.ints.to(self._decoder.device, non_blocking=True)
        return self._decoder.forward(view_step(ints, ready.sizes), self._pages)

    def _captured_graph(self, sizes: StepSizes) -> DecodeGraph:
        """The CUDA graph for these sizes, captured at the first use. All graphs share one memory pool."""
        if sizes not in self._graphs:
            pool = next((graph.graph.pool() for graph in self._graphs.values()), None)
            self._graphs[sizes] = DecodeGraph(self._decoder, self._pages, sizes, pool)
        return self._graphs[sizes]

    def _fetch_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Start copying the logits to the CPU; the result is complete when the device has finished."""
        if not self._cuda:
            return logits
        host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
        return host.copy_(logits, non_blocking=True)

    def _pack_next_step(self, works: Sequence[StepWork]) -> PackedStep | None:
        """Pack the step in which each of these sequences decodes one more token; None if one of them cannot."""
        following = []
        for work in works:
            end = work.start + len(work.tokens)
            chunks = self.layout.num_chunks(end + 1)
            if work.logits != "last" or end >= self.max_model_len or chunks > len(work.slabs):
                return None
            following.append(StepWork([0], end, work.slabs[:chunks], "last"))
        return self._pack_step(following)
