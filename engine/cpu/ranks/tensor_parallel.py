"""Tensor and pipeline parallelism on the CPU: which shard of the model each rank has, and how ranks exchange data.

The ranks of a stage hold equal shares of the heads of its layers (tensor parallelism): each rank ("lane") computes its
share of every product, and their partial sums are added up twice per layer. The stages hold ranges of layers (pipeline
parallelism): the activations of a step pass from stage to stage. Rank 0 is in the first stage and gets the logits.

    rank = stage * tp + lane          tp 2, pp 2:     0 ─┐ sum      x      2 ─┐ sum      slices of the vocabulary
                                                      1 ─┘  ───each lane──▶ 3 ─┘  ──────────────────────────────▶ 0

Every rank adds in the same order (by lane), so all ranks of a stage have the same bits, whatever else is in the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from engine.model.architecture import ModelConfig
from engine.protocols import EvictionReport
from kvcache.layout import Shard

# Seconds to wait for another rank within a step.
EXCHANGE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The place of one rank among `tp * pp` ranks."""

    rank: int = 0
    tp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp

    @property
    def lane(self) -> int:
        """The rank's index among the ranks of its stage."""
        return self.rank % self.tp

    @property
    def first(self) -> bool:
        """Whether the rank is in the first stage, which takes token ids."""
        return self.rank < self.tp

    @property
    def last(self) -> bool:
        """Whether the rank is in the last stage, which computes logits."""
        return self.rank >= self.world - self.tp

    def share(self, total: int) -> slice:
        """This lane's range of `total` items, which need not divide evenly."""
        return slice(total * self.lane // self.tp, total * (self.lane + 1) // self.tp)


WHOLE_MODEL = RankPlacement()


class Communicator(Protocol):
    """The exchanges with other ranks that a rank's decoder needs. All tensors are float32 and contiguous."""

    def step(self, forward: Callable[[], torch.Tensor | None], rows: int, wanted: int) -> torch.Tensor | None:
        """Run `forward()` for a step with `rows` rows of activations, `wanted` of which need logits."""

    def receive(self, rows: int) -> torch.Tensor:
        """Receive the activations of the previous stage, [rows, hidden]."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all lanes' `x`, on every lane; may be `x` itself."""

    def send(self, x: torch.Tensor) -> None:
        """Send activations [rows, hidden] to the next stage."""

    def collect(self, logits: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        """Gather the last stage's `logits`, one slice of the vocabulary per lane: complete on rank 0, None
        elsewhere.
        """


class SingleRank:
    """The communicator of a single rank, which has the whole model."""

    def step(self, forward: Callable[[], torch.Tensor | None], rows: int, wanted: int) -> torch.Tensor | None:
        """Call `forward` and return its logits; a single rank has no others to wait for."""
        return forward()

    def receive(self, rows: int) -> torch.Tensor:
        """Never called: a single rank is its own first stage."""
        raise AssertionError("there is no stage before this one")

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` unchanged: there are no partial sums of other ranks."""
        return x

    def send(self, x: torch.Tensor) -> None:
        """Never called: a single rank is its own last stage."""
        raise AssertionError("there is no stage after this one")

    def collect(self, logits: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        """Returns the logits unchanged: they already cover the whole vocabulary."""
        return logits


class RankGroup:
    """The communicator of one rank of several, over torch.distributed; one per process.

    `broken` is called with the error when an exchange fails or takes longer than `stall_s` seconds. The ranks are then
    out of step for ever, so it must not return.
    """

    def __init__(
        self,
        placement: RankPlacement,
        config: ModelConfig,
        shard: Shard,
        broken: Callable[[Exception], NoReturn],
        stall_s: float = EXCHANGE_TIMEOUT_S,
    ) -> None:
        """`shard` are the layers and heads of the rank `placement` of a model with this `config`."""
        self.placement, self._stall_s = placement, stall_s
        self._hidden, self._vocab, self._broken = config.hidden, config.vocab, broken
        self._script = (
            ["receive"] * (not placement.first)
            + ["sum"] * 2 * (shard.layers[1] - shard.layers[0])
            + ["send"] * (not placement.last)
            + ["collect"] * (placement.last or placement.rank == 0)
        )
        self._left: deque[str] = deque()

    def join(self, store: Path, backend: str = "gloo") -> None:
        """Connect to the other ranks through the file `store`, in a private folder; blocks until all ranks have joined.

        gloo listens on the interface in `GLOO_SOCKET_IFNAME`: the loopback interface, for ranks of one host.
        """
        placement, limit = self.placement, timedelta(seconds=self._stall_s)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=placement.rank,
            world_size=placement.world,
            timeout=timedelta(seconds=max(EXCHANGE_TIMEOUT_S, self._stall_s)),
        )
        self._all = dist.new_group(list(range(placement.world)), timeout=limit, backend=backend)
        stages = [
            list(range(first, first + placement.tp)) for first in range(0, placement.world, placement.tp)
        ]
        groups = [dist.new_group(ranks, timeout=limit, backend=backend) for ranks in stages]
        self._stage = groups[placement.rank // placement.tp]
        # When all ranks have joined, the file is no longer needed.
        dist.barrier()

    def leave(self) -> None:
        """Close all connections, if there are any."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def step(self, forward: Callable[[], torch.Tensor | None], rows: int, wanted: int) -> torch.Tensor | None:
        """Run this rank's shard of one step by calling `forward`.

        If `forward` fails, the remaining exchanges of the step are still made, so that the other ranks do not hang.

        Args:
            forward: Computes this rank's shard; returns logits on the last stage.
            rows: Tokens in the step.
            wanted: Rows that need logits.

        Raises:
            Exception: whatever `forward` raised.
        """
        self._left = deque(self._script)
        try:
            return forward()
        except Exception:
            self._drain_step(rows, wanted)
            raise

    def _drain_step(self, rows: int, wanted: int) -> None:
        """Make the remaining exchanges of a failed step with zeros, so that other ranks do not wait."""
        x = torch.zeros(rows, self._hidden)
        while self._left:
            match self._left[0]:
                case "receive":
                    self.receive(rows)
                case "sum":
                    self.sum(x)
                case "send":
                    self.send(x)
                case _:
                    share = self.placement.share(self._vocab)
                    slim = torch.zeros(wanted, share.stop - share.start)
                    self.collect(slim if self.placement.last else None, wanted)

    def receive(self, rows: int) -> torch.Tensor:
        """Receive the activations [rows, hidden] of the previous stage."""
        x = torch.empty(rows, self._hidden)
        self._exchange("receive", lambda: dist.recv(x, self.placement.rank - self.placement.tp, self._all))
        return x

    def send(self, x: torch.Tensor) -> None:
        """Send the activations `x` [rows, hidden] to the next stage."""
        self._exchange("send", lambda: dist.send(x, self.placement.rank + self.placement.tp, self._all))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up the partial sums `x` of this stage's ranks, in the order of lanes, so that all get the same bits."""
        if self.placement.tp <= 2:
            # The sum of two numbers does not depend on their order.
            self._exchange("sum", lambda: self.placement.tp > 1 and dist.all_reduce(x, group=self._stage))
            return x
        parts = [torch.empty_like(x) for _ in range(self.placement.tp)]
        self._exchange("sum", lambda: dist.all_gather(parts, x, group=self._stage))
        for part in parts[1:]:
            parts[0].add_(part)
        return parts[0]

    def collect(self, logits: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        """Gather the last stage's slices of the vocabulary at rank 0.

        Args:
            logits: This rank's slice [rows, share of the vocabulary]; None on ranks before the last stage.
            rows: Rows that need logits.

        Returns:
            The complete logits [rows, vocab] on rank 0, None elsewhere.
        """
        placement, whole = self.placement, None
        if placement.rank == 0:
            whole = torch.empty(rows, self._vocab)
            self._exchange("collect", lambda: self._gather_logits(logits, whole) if rows else None)
        elif placement.last:
            assert logits is not None
            self._exchange("collect", lambda: dist.send(logits, 0, self._all) if rows else None)
        return whole

    def _gather_logits(self, own: torch.Tensor | None, whole: torch.Tensor) -> None:
        """Receive the slices of all lanes of the last stage into `whole`; `own` is rank 0's slice, if any."""
        for lane in range(self.placement.tp):
            rank = self.placement.world - self.placement.tp + lane
            share = RankPlacement(rank, self.placement.tp, self.placement.pp).share(self._vocab)
            part = own
            if rank != 0:
                part = torch.empty(len(whole), share.stop - share.start)
                dist.recv(part, rank, self._all)
            assert part is not None
            whole[:, share] = part

    def _exchange(self, step: str, exchange: Callable[[], object]) -> None:
        """Run one exchange, which must be the next one of the step; on an error end the worker."""
        planned = self._left.popleft()
        assert planned == step, f"{step} where {planned} was due"
        try:
            exchange()
        except Exception as error:
            self._broken(error)


@dataclass(frozen=True, slots=True)
class RankReplies:
    """The answers of the other ranks to an order: the error of one of them, if any failed, else the reports that the
    order asks for, by rank.
    """

    error: Exception | None = None
    reports: Sequence[EvictionReport] = ()


class FollowerRanks(Protocol):
    """The other ranks, as rank 0 commands them (`worker.ranks.RankProcesses`)."""

    def send_order(self, order: bytes) -> None:
        """Send an order, encoded by `engine.cpu.ranks.orders.encode_order`, to all other ranks, which begin with it."""

    def wait_for_replies(self) -> RankReplies:
        """Wait until all of them have answered."""
