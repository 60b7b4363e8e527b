"""Workers of before understand orders that use nothing new."""

from __future__ import annotations

import msgspec
import pytest

from diptych.channel.frames import decode_from_gateway, pack_message
from diptych.eviction_spec import FASTGEN, KeepSpec
from diptych.messages import Admit, Generate, Prefill
from diptych.request import SamplingParams, Tenancy


class OldKeepSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """That of workers which evict by one rule."""

    threshold: float = 1.0
    boundary: int = 0


class OldGenerate(msgspec.Struct, array_like=True, tag="Generate"):
    """Their order."""

    request: str
    epoch: int
    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    remaining_s: float
    tenancy: Tenancy = Tenancy()
    kv_class: str = ""
    keep: OldKeepSpec = OldKeepSpec()


WHAT = "r", 1, [1, 2, 3], [7], SamplingParams(8, 1)
ORDERS: list[Prefill | Generate | Admit] = [
    Prefill(*WHAT, 9.0, kv_class="raw", cuts_kept=True),
    Generate(*WHAT, 9.0, kv_class="raw"),
    Admit(*WHAT, b"ticket", 9.0, kv_class="raw"),
]


def test_an_order_that_keeps_everything_is_read_by_older_workers() -> None:
    order = msgspec.msgpack.decode(pack_message(ORDERS[1]), type=OldGenerate)
    assert (order.kv_class, order.keep) == ("raw", OldKeepSpec())
    evicting = msgspec.structs.replace(ORDERS[1], keep=KeepSpec(0.9))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(pack_message(evicting), type=OldGenerate)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
@pytest.mark.parametrize("keep", [KeepSpec(), KeepSpec(0.9, 64), KeepSpec(0.9, 0, FASTGEN)])
def test_orders_arrive_as_they_were_sent(order: Prefill | Generate | Admit, keep: KeepSpec) -> None:
    sent = msgspec.structs.replace(order, keep=keep)
    assert decode_from_gateway(pack_message(sent)) == sent
