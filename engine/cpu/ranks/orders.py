"""What rank 0 of a worker has the other ranks do: to compute their part of a step, or to evict from their own heads.

Each order is answered before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from engine.batching.sink_slots import SinkPlan
from engine.cpu.eviction.rank_eviction import KeptOrder
from engine.cpu.ranks.tensor_parallel import FollowerRanks
from engine.protocols import EvictionReport
from engine.step_work import StepWork

Result = TypeVar("Result")


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute a step, whose missing first tokens are computed before it."""

    works: list[StepWork]
    sinks: SinkPlan


RankOrder = RunStep | KeptOrder

_DECODER: msgspec.msgpack.Decoder[RankOrder] = msgspec.msgpack.Decoder(RankOrder)


def encode_order(order: RankOrder) -> bytes:
    """Encode an order for `decode_order`."""
    return msgspec.msgpack.encode(order)


def decode_order(data: bytes) -> RankOrder:
    """The order that `encode_order` encoded. Raises msgspec.MsgspecError if `data` is not one."""
    return _DECODER.decode(data)


def carry_out(
    followers: FollowerRanks | None, order: RankOrder, part: Callable[[], Result]
) -> tuple[Result, Sequence[EvictionReport]]:
    """Carry out an order on all ranks: `part` is rank 0's. Without `followers` there are no others.

    Returns:
        What `part` returned, and the reports of the other ranks, by rank.

    Raises:
        Exception: that of `part`, or of another rank. All ranks are ready for the next order.
    """
    if followers is None:
        return part(), ()
    followers.send_order(encode_order(order))
    try:
        result = part()
    finally:
        replies = followers.wait_for_replies()
    if replies.error is not None:
        raise replies.error
    return result, replies.reports
