"""Several ranks that run one model: which part each of them has, and how they speak to each other within a step.

Ranks of a stage hold an equal share of the heads of its layers (tensor parallelism): each computes its share of every
product, and their partial sums are added up twice per layer. Stages hold ranges of layers (pipeline parallelism): the
activations of a step go from stage to stage. Rank 0 is in the first stage and gets the logits.

    rank = stage * tp + lane          tp 2, pp 2:     0 ─┐ sum      x      2 ─┐ sum      slices of the vocabulary
                                                      1 ─┘  ───each lane──▶ 3 ─┘  ──────────────────────────────▶ 0

Every rank adds in the same order (by lane), so all ranks of a stage hold the same bits, whatever shares the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec
import torch
import torch.distributed as dist

from engine.model.shape import Shape
from engine.work import Work
from kvcache.layout import Shard

STALL_S = 120.0  # longest wait for another rank within a step
WORKS = msgspec.msgpack.Decoder(list[Work])


@dataclass(frozen=True, slots=True)
class Place:
    """One rank among `tp * pp`."""

    rank: int = 0
    tp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp

    @property
    def lane(self) -> int:
        """Its place among the ranks of its stage."""
        return self.rank % self.tp

    @property
    def first(self) -> bool:
        """It is in the stage that reads token ids."""
        return self.rank < self.tp

    @property
    def last(self) -> bool:
        """It is in the stage that writes logits."""
        return self.rank >= self.world - self.tp

    def share(self, total: int) -> slice:
        """This lane's range of `total` things, which need not divide evenly."""
        return slice(total * self.lane // self.tp, total * (self.lane + 1) // self.tp)


WHOLE = Place()


class Wire(Protocol):
    """What one rank's decoder needs of the others. All tensors are float32 and contiguous."""

    def step(self, forward: Callable[[], torch.Tensor | None], rows: int, wanted: int) -> torch.Tensor | None:
        """`forward()`, which makes each exchange of a step with `rows` activations, `wanted` of them for logits."""

    def receive(self, rows: int) -> torch.Tensor:
        """Activations from the stage before, [rows, hidden]."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all lanes' `x`, on every lane; may be `x` itself."""

    def send(self, x: torch.Tensor) -> None:
        """Activations [rows, hidden] for the next stage."""

    def collect(self, logits: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        """The last stage's `logits`, each lane's slice of the vocabulary: whole on rank 0, None elsewhere."""


class Alone:
    """The wire of a rank that is the whole worker."""

    def step(self, forward: Callable[[], torch.Tensor | None], rows: int, wanted: int) -> torch.Tensor | None:
        return forward()

    def receive(self, rows: int) -> torch.Tensor:
        raise AssertionError("there is no stage before this one")

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor) -> None:
        raise AssertionError("there is no stage behind this one")

    def collect(self, logits: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        return logits


class Group:
    """The wire of one rank of several, over torch.distributed; one per process.

    `broken` is called when an exchange fails or takes longer than `stall_s`, with what torch says. The ranks are out
    of step then and for good, so it does not return.
    """

    def __init__(
        self,
        place: Place,
        shape: Shape,
        shard: Shard,
        broken: Callable[[Exception], NoReturn],
        stall_s: float = STALL_S,
    ) -> None:
        """`shard`: the layers and heads of the rank `place` of a model of this `shape`."""
        self.place, self._stall_s = place, stall_s
        self._hidden, self._vocab, self._broken = shape.hidden, shape.vocab, broken
        self._script = (
            ["receive"] * (not place.first)
            + ["sum"] * 2 * (shard.layers[1] - shard.layers[0])
            + ["send"] * (not place.last)
            + ["collect"] * (place.last or place.rank == 0)
        )
        self._left: deque[str] = deque()

    def join(self, store: Path, backend: str = "gloo") -> None:
        """Meet the other ranks through a file in a folder that only they can read; blocks until all are there.

        gloo listens where `GLOO_SOCKET_IFNAME` says: the loopback interface, for ranks of one host.
        """
        place, limit = self.place, timedelta(seconds=self._stall_s)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=max(STALL_S, self._stall_s)),
        )
        self._all = dist.new_group(list(range(place.world)), timeout=limit, backend=backend)
        stages = [list(range(first, first + place.tp)) for first in range(0, place.world, place.tp)]
        groups = [dist.new_group(ranks, timeout=limit, backend=backend) for ranks in stages]
        self._stage = groups[place.rank // place.tp]
        dist.barrier()  # whoever returns from here needs the file no more

    def leave(self) -> None:
        """Close all connections, as far as there are any."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def step(self, forward: Callable[[], torch.Tensor | None], rows: int, wanted: int) -> torch.Tensor | None:
        self._left = deque(self._script)
        try:
            return forward()
        except Exception:
            self._drain(rows, wanted)
            raise

    def _drain(self, rows: int, wanted: int) -> None:
        """Go through what is left of a step with zeros: this rank has failed, and the others must not wait for it."""
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
                    share = self.place.share(self._vocab)
                    slim = torch.zeros(wanted, share.stop - share.start)
                    self.collect(slim if self.place.last else None, wanted)

    def receive(self, rows: int) -> torch.Tensor:
        x = torch.empty(rows, self._hidden)
        self._do("receive", lambda: dist.recv(x, self.place.rank - self.place.tp, self._all))
        return x

    def send(self, x: torch.Tensor) -> None:
        self._do("send", lambda: dist.send(x, self.place.rank + self.place.tp, self._all))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.place.tp <= 2:  # of two numbers there is one sum
            self._do("sum", lambda: self.place.tp > 1 and dist.all_reduce(x, group=self._stage))
            return x
        parts = [torch.empty_like(x) for _ in range(self.place.tp)]
        self._do("sum", lambda: dist.all_gather(parts, x, group=self._stage))
        for part in parts[1:]:
            parts[0].add_(part)
        return parts[0]

    def collect(self, logits: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        place, whole = self.place, None
        if place.rank == 0:
            whole = torch.empty(rows, self._vocab)
            self._do("collect", lambda: self._gather(logits, whole) if rows else None)
        elif place.last:
            assert logits is not None
            self._do("collect", lambda: dist.send(logits, 0, self._all) if rows else None)
        return whole

    def _gather(self, own: torch.Tensor | None, whole: torch.Tensor) -> None:
        for lane in range(self.place.tp):
            rank = self.place.world - self.place.tp + lane
            share = Place(rank, self.place.tp, self.place.pp).share(self._vocab)
            part = own
            if rank != 0:
                part = torch.empty(len(whole), share.stop - share.start)
                dist.recv(part, rank, self._all)
            assert part is not None
            whole[:, share] = part

    def _do(self, step: str, exchange: Callable[[], object]) -> None:
        planned = self._left.popleft()
        assert planned == step, f"{step} where {planned} was due"
        try:
            exchange()
        except Exception as error:
            self._broken(error)


class Crew(Protocol):
    """The other ranks, as rank 0 commands them."""

    def tell(self, step: bytes) -> None:
        """Let all of them run their part of a step, as `encode` wrote it."""

    def hear(self) -> Exception | None:
        """Wait until all of them have; what went wrong on one of them."""


def encode(works: Sequence[Work]) -> bytes:
    """A step as bytes."""
    return msgspec.msgpack.encode(works)


def decode(step: bytes) -> list[Work]:
    """What `encode` was given. Raises msgspec.MsgspecError if it is not that."""
    return WORKS.decode(step)
