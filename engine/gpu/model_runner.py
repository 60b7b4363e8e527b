"""Runs a step on a CUDA device: takes token ids, returns logits, and stores KV in the device's slabs.

A step goes to the device as one copy. Steps in which every sequence decodes one token replay a CUDA graph of a padded
batch size, captured by `GpuModelRunner.warm` or when the size first occurs; other steps are launched kernel by kernel.
While the device computes, the host packs the most likely next step, in which each sequence decodes one more token; if
this guess is right, only the token ids have to be filled in. `run` returns when the device has finished, so copies that
begin between two steps race neither of them.

    host    │ pack n+1 (guess) │ wait n │ sample │ tokens into n+1 │ launch n+1 │ pack n+2 (guess) │ ...
    device  │ ........ step n ........  │                          │ ........ step n+1 ............

On the device "cpu" the kernels run in Triton's interpreter, without graphs, for tests of kernels. On the emulated
device (`engine.gpu.emulated`), also on CPU tensors, torch takes the kernels' place, and steps are padded and replayed
as on CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diptych.chunks import CHUNK_TOKENS
from engine.batching.batch import PoolSpan, pack_batch, split_results
from engine.batching.sink_slots import DEFAULT_SLOTS, SinkPlan, SinkSlots
from engine.gpu.batch import StepSizes, fill_step, measure_sizes, view_step
from engine.gpu.coded.sinks import GpuSinkRecorder
from engine.gpu.decode_graph import DecodeGraph, EmulatedGraph
from engine.gpu.decoder import GpuDecoder, WeightSource
from engine.gpu.kernels import AttentionLimits, CodedStepAttention, DeviceKernels, StepAttention
from engine.gpu.launch import LaunchTuning
from engine.model.architecture import ModelConfig
from engine.model.device_step import PADDED_ITEMS, pad_rows
from engine.protocols import OnLayersDone
from engine.step_work import RunnerBounds, StepWork
from kvcache.codecs.calibration import Calibration
from kvcache.layout import KvLayout
from kvcache.pool import slab_shape


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step in host memory, and the works that it was packed for."""

    works: tuple[StepWork, ...]
    sizes: StepSizes
    # [sizes.numbers] int32; in page-locked memory if there is a GPU.
    ints: torch.Tensor
    graph: bool
    # The places of the works' first tokens among the sinks; empty for a pool without a codec.
    sinks: tuple[int, ...] = ()
    # What is pooled; such a step uses no graph.
    pools: tuple[PoolSpan, ...] = ()

    def fits(self, works: Sequence[StepWork], sinks: Sequence[int]) -> bool:
        """Whether `works` are the packed works, apart from their token ids, which were unknown for a guess."""
        return (len(works), tuple(sinks)) == (len(self.works), self.sinks) and all(
            len(work.tokens) == 1
            and work.start == mine.start
            and work.logits == mine.logits
            and work.slabs[: len(mine.slabs)] == mine.slabs
            for work, mine in zip(works, self.works, strict=True)
        )


def load_kernels(emulated: bool = False) -> DeviceKernels:
    """The kernels of CUDA devices (without one, in Triton's interpreter), or those of the emulated device.

    Raises ImportError where Triton is needed and not installed.
    """
    # Triton is an optional dependency, which the emulated device does without.
    if emulated:
        from engine.gpu.emulated.kernels import TorchKernels

        return TorchKernels()
    from engine.gpu.triton_kernels import TritonKernels

    return TritonKernels()


class GpuModelRunner:
    """A loaded model bound to a pool's memory on a device. Only one thread at a time may use it.

    Args:
        decoder: the model on its device.
        layout: of the pool; with a codec its pages are coded (`engine.gpu.coded`).
        data: [num_slabs, layers, kv_heads, 2, 64, head_dim] on the decoder's device, in its type; with a codec
            [num_slabs, layers, pages per layer, page_bytes] uint8.
        max_model_len: most tokens of a sequence.
        tuning: how kernels are distributed; None: by the device.
        calibration: that of the pool's codec, if it has one.
        sink_slots: how many different first tokens a step may have, if the pool has a codec.

    Raises:
        ConfigError: the codec is of another calibration, or the kernels cannot handle it for heads of this size.
        ValueError: `data` does not have the shape of `layout`, or is not on the decoder's device.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        layout: KvLayout,
        data: torch.Tensor,
        max_model_len: int,
        tuning: LaunchTuning | None = None,
        *,
        calibration: Calibration | None = None,
        sink_slots: int = DEFAULT_SLOTS,
    ) -> None:
        shape, kind = slab_shape(layout)
        if (
            data.shape[1:] != shape
            or data.device != decoder.device
            or data.dtype != kind
            or getattr(torch, layout.dtype) != decoder.dtype
        ):
            raise ValueError(
                f"a pool of {tuple(data.shape)} {data.dtype} on {data.device} does not fit {layout} on {decoder.device}"
            )
        self.layout, self.data = layout, data
        self.vocab_size, self.max_model_len = decoder.config.vocab, max_model_len
        # Seconds of the last run until the device had work.
        self.prepare_seconds = 0.0
        # Number of steps that were packed while the step before them ran.
        self.guessed = 0
        self._decoder = decoder
        self._coded = self._open_coded(tuning, calibration, sink_slots) if layout.codec else None
        self._attention: StepAttention = self._coded or decoder.kernels.open_attention(
            layout, data, decoder.config, tuning
        )
        self._sink_slots = SinkSlots(sink_slots)
        self._bounds = RunnerBounds(layout, data.shape[0], max_model_len, self.vocab_size)
        self._cuda = decoder.device.type == "cuda"
        self._replays = self._cuda or decoder.kernels.emulated
        self._graphs: dict[StepSizes, DecodeGraph | EmulatedGraph] = {}
        # [rows of the largest graph, vocab]: the logits of all graphs.
        self._graph_logits = torch.empty(0, self.vocab_size, device=decoder.device)
        self._guess: PackedStep | None = None

    def _open_coded(
        self, tuning: LaunchTuning | None, calibration: Calibration | None, sink_slots: int
    ) -> CodedStepAttention:
        """The attention over coded pages. Raises ConfigError as the runner does."""
        limits = AttentionLimits(self.max_model_len, sink_slots)
        return self._decoder.kernels.open_coded_attention(
            self.layout, self.data, self._decoder.config, calibration, limits, tuning
        )

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        source: WeightSource,
        num_slabs: int,
        max_model_len: int,
        device: str,
        dtype: str,
        *,
        codec: str = "",
        calibration: Calibration | None = None,
        sink_slots: int = DEFAULT_SLOTS,
        emulated: bool = False,
    ) -> GpuModelRunner:
        """Load the model onto `device` with a new pool; `dtype` and `codec` as in `KvLayout`, the rest as the runner.

        With `emulated` the device is "cpu", and torch computes instead of Triton's interpreter.

        Raises ModelError as `source` does, and ConfigError as the runner does.
        """
        kind: torch.dtype = getattr(torch, dtype)
        with torch.no_grad():
            decoder = GpuDecoder(
                config, source, max_model_len, torch.device(device), kind, load_kernels(emulated)
            )
        layout = KvLayout(config.layers, config.kv_heads, config.head_dim, dtype, codec)
        rest, stored = slab_shape(layout)
        data = torch.zeros(num_slabs, *rest, dtype=stored, device=decoder.device)
        return cls(decoder, layout, data, max_model_len, calibration=calibration, sink_slots=sink_slots)

    def run(self, works: Sequence[StepWork], done: OnLayersDone | None = None) -> list[torch.Tensor]:
        """Compute a step. Returns logits per work, float32 [rows, vocab] on the device, rows = 1, len(tokens) or 0; or
        a sum of hidden states [1, hidden].

        The device has finished the step. The caller may keep and change the logits, which are adjacent in memory. The
        host does not see the progress of the device: `done` is called once, when all layers have finished.

        Raises:
            ValueError: a work is empty, too long, or has too few slabs, or there are more first tokens than the table
                of sinks has room for, and nothing was computed; or a key or value that was to be coded is not finite.
        """
        began_s = time.perf_counter()
        for work in works:
            self._bounds.check(work)
        if not works:
            return []
        sinks = self._plan_sinks(works)
        ready = self._prepare_step(works, sinks)
        self.prepare_seconds = time.perf_counter() - began_s
        with torch.no_grad():
            self._compute_sinks(sinks)
            logits = self._launch_step(ready)[: sum(work.wanted for work in works)]
            if ready.graph:
                # The next replay overwrites them, and a step that failed is repeated work by work.
                logits = logits.clone()
            broken = None if self._coded is None else self._fetch(self._coded.broken)
        # The next step is packed while the device computes this one.
        self._guess = self._pack_next_step(works, sinks)
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        if broken is not None and bool(broken):
            self._forget_broken()
            raise ValueError("keys and values must be finite")
        self._sink_slots.keep(sinks)
        if done is not None:
            done(self.layout.layers)
        return split_results(logits, works, self._decoder.config.hidden)

    @property
    def can_pool(self) -> bool:
        """Whether works may ask for hidden states, which come with logits and as wide."""
        return self._decoder.config.hidden <= self.vocab_size

    def rehearse(self, works: Sequence[StepWork]) -> torch.Tensor:
        """Compute a step kernel by kernel. It writes no KV, so any slabs will do. Returns logits, [wanted, vocab]."""
        ready = self._pack_step(works, SinkPlan())
        step = view_step(ready.ints, ready.sizes)
        step.slots.fill_(-1)
        with torch.no_grad():
            ints = ready.ints.to(self._decoder.device, non_blocking=True)
            return self._decoder.forward(view_step(ints, ready.sizes), self._attention)

    def warm(self, rows: Sequence[int] = (1,)) -> None:
        """Compile the kernels with a short prefill, and capture the graphs of these batch sizes. Writes no KV."""
        tokens = min(CHUNK_TOKENS + 1, self.max_model_len)
        self.rehearse([StepWork([0] * tokens, 0, [0] * self.layout.num_chunks(tokens), "last")])
        with torch.no_grad():
            # The largest first: the others fit into its memory.
            for sizes in [
                self._padded_sizes(count, items)
                for count in sorted(rows, reverse=True)
                for items in PADDED_ITEMS
            ]:
                if self._replays:
                    self._captured_graph(sizes)
        if self._cuda:
            torch.cuda.synchronize()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every decode step reads."""
        return self._decoder.weight_bytes

    def replayer(self, works: Sequence[StepWork]) -> Callable[[], torch.Tensor]:
        """A function that repeats the device's part of running `works`, for timing it without the host's part."""
        sinks = self._plan_sinks(works)
        with torch.no_grad():
            self._compute_sinks(sinks)
        self._sink_slots.keep(sinks)
        ready = self._pack_step(works, sinks)
        return lambda: self._launch_step(ready)

    def _plan_sinks(self, works: Sequence[StepWork]) -> SinkPlan:
        """The sinks that a step needs; none for a pool without a codec."""
        if not self.layout.codec:
            return SinkPlan()
        return self._sink_slots.plan([0 if work.sink_token is None else work.sink_token for work in works])

    def _compute_sinks(self, sinks: SinkPlan) -> None:
        """Compute the missing sinks, in a pass of these tokens alone."""
        if not sinks.missing:
            return
        assert self._coded is not None
        works = [StepWork([token], 0, [0], "none") for _, token in sinks.missing]
        recorder = GpuSinkRecorder(self._coded, [slot for slot, _ in sinks.missing])
        self._decoder.forward(self._attention.load(pack_batch(works)), recorder)

    def _forget_broken(self) -> None:
        """After a step with numbers that are not finite: the next one begins without."""
        assert self._coded is not None
        self._coded.broken.zero_()

    def _prepare_step(self, works: Sequence[StepWork], sinks: SinkPlan) -> PackedStep:
        """The step in host memory: the guess if it is right, with its tokens filled in, or packed now."""
        guess, self._guess = self._guess, None
        if guess is None or not guess.fits(works, sinks.slots):
            return self._pack_step(works, sinks)
        self.guessed += 1
        # The tokens come first among the integers.
        guess.ints.numpy()[: len(works)] = [work.tokens[0] for work in works]
        return guess

    def _pack_step(self, works: Sequence[StepWork], sinks: SinkPlan) -> PackedStep:
        """Pack a step into host memory, padded to the sizes of a graph if it can use one."""
        batch = pack_batch(works, sinks.slots)
        shared, tiles = self._attention.cut_batch(batch)
        graph = self._replays and not (batch.spans or batch.pools) and len(shared.items) <= PADDED_ITEMS[-1]
        sizes = (
            self._padded_sizes(len(batch.tokens), len(shared.items))
            if graph
            else measure_sizes(batch, shared, tiles)
        )
        ints = torch.empty(sizes.numbers, dtype=torch.int32, pin_memory=self._cuda)
        fill_step(ints.numpy(), sizes, batch, shared, tiles)
        return PackedStep(tuple(works), sizes, ints, graph, tuple(sinks.slots), batch.pools)

    def _padded_sizes(self, rows: int, items: int) -> StepSizes:
        """The sizes of the graph for a number of decode rows and shared items, both rounded up."""
        count = pad_rows(rows)
        padded = next(most for most in PADDED_ITEMS if items <= most)
        return StepSizes(count, count, count, padded, 0, count, self.layout.num_chunks(self.max_model_len))

    def _launch_step(self, ready: PackedStep) -> torch.Tensor:
        """Start a step on the device; returns its logits, which are complete only when the device has finished."""
        if ready.graph:
            return self._captured_graph(ready.sizes).replay(ready.ints)
        ints = ready.ints.to(self._decoder.device, non_blocking=True)
        return self._decoder.forward(view_step(ints, ready.sizes), self._attention, ready.pools)

    def _captured_graph(self, sizes: StepSizes) -> DecodeGraph | EmulatedGraph:
        """The CUDA graph for these sizes, captured at the first use. All graphs share one memory pool."""
        if sizes not in self._graphs:
            pool = next((graph.pool for graph in self._graphs.values()), None)
            if sizes.wanted > len(self._graph_logits):
                self._graph_logits = self._graph_logits.new_empty(sizes.wanted, self.vocab_size)
            kind = DecodeGraph if self._cuda else EmulatedGraph
            self._graphs[sizes] = kind(self._decoder, self._attention, sizes, self._graph_logits, pool)
        return self._graphs[sizes]

    def _fetch(self, numbers: torch.Tensor) -> torch.Tensor:
        """Start copying numbers to the CPU; the result is complete when the device has finished."""
        if not self._cuda:
            return numbers
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        return host.copy_(numbers, non_blocking=True)

    def _pack_next_step(self, works: Sequence[StepWork], sinks: SinkPlan) -> PackedStep | None:
        """Pack the step in which each of these sequences decodes one more token; None if one of them cannot."""
        following = []
        for work in works:
            end = work.start + len(work.tokens)
            chunks = self.layout.num_chunks(end + 1)
            if work.logits != "last" or end >= self.max_model_len or chunks > len(work.slabs):
                return None
            following.append(StepWork([0], end, work.slabs[:chunks], "last"))
        return self._pack_step(following, sinks)
