"""Copies that happen late catch callers that do not wait for them."""

from __future__ import annotations

import pytest
import torch

from kvcache.device.pool import DevicePool
from kvcache.layout import KvLayout
from kvcache.slab_ledger import SlabLedger
from tests.support.late_copies import POISON, LateCopies, Lateness, seeded_lateness

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=16, dtype="float32")
SIZE = LAYOUT.chunk_bytes


class Sides:
    """A pool of 3 slabs that contain their number, and 3 host slabs of zeros with an owner of their own."""

    def __init__(self, lateness: Lateness = lambda: None) -> None:
        self.pool, self.ledger = DevicePool(LAYOUT, 3, torch.device("cpu")), SlabLedger(3)
        self.pool.take_slabs(3, "seq")
        self.ledger.take_slabs(3, "seq")
        self.device, self.host = self.pool.slab_bytes, torch.zeros(3, SIZE, dtype=torch.uint8)
        self.device[:] = torch.arange(3, dtype=torch.uint8)[:, None]
        memory = self.host.view(-1).numpy().data
        self.copies = LateCopies(self.pool, memory, lateness, self.ledger)


def swap_slabs(sides: Sides, leave_out: str) -> None:
    """Move slab 0 to the host and slab 1's former content back, as a caller does; one wait is left out."""

    def wait(name: str) -> None:
        if name != leave_out:
            sides.copies.release()

    out = sides.copies.to_host([(0, 2)])
    wait("offer")
    sides.pool.give_back([0], "seq")
    sides.pool.take_slabs(1, "other")
    sides.device[0] = 9
    digest = int(sides.host[2].sum())
    back = sides.copies.to_device([(1, 1)])
    wait("upload")
    assert digest == 0, "the host's slab was read before its content had arrived"
    assert bool((sides.device[1] == 0).all()), "the device's slab was read before its content had arrived"
    sides.ledger.give_back([1, 2], "seq")
    sides.copies.check_faults()
    assert out.is_done() and back.is_done()


@pytest.mark.parametrize("wait", ["", "offer", "upload"])
def test_each_wait_that_is_left_out_is_caught(wait: str) -> None:
    sides = Sides()
    if not wait:
        swap_slabs(sides, wait)
        return
    with pytest.raises(AssertionError):
        swap_slabs(sides, wait)


def test_a_batch_ends_at_release_and_never_by_itself() -> None:
    sides = Sides()
    batch = sides.copies.to_host([(2, 0), (1, 1)])
    assert not any(batch.is_done() for _ in range(100)) and sides.copies.in_flight == 1
    assert bool((sides.host[:2] == POISON).all())
    sides.copies.release()
    assert batch.is_done() and sides.copies.in_flight == 0
    assert sides.host[:, 0].tolist() == [2, 1, 0]
    sides.copies.check_faults()


def test_a_schedule_ends_batches_when_they_are_asked_often_enough() -> None:
    def count_polls(seed: int) -> list[int]:
        sides = Sides(seeded_lateness(seed, 5))
        counts = []
        for _ in range(20):
            batch, polls = sides.copies.to_host([(1, 1)]), 1
            while not batch.is_done():
                assert sides.host[1, 0] == POISON
                polls += 1
            assert sides.host[1, 0] == 1 and batch.is_done()
            counts.append(polls)
        sides.copies.check_faults()
        return counts

    assert count_polls(1) == count_polls(1) != count_polls(2)
    assert set(count_polls(1)) == set(range(1, 7))


def test_faults_name_the_slab_and_what_happened_to_it() -> None:
    sides = Sides()
    sides.copies.to_host([(0, 0), (1, 1)])
    sides.device[0], sides.host[1] = 7, 7
    sides.copies.to_host([(0, 1)])
    sides.copies.to_device([(0, 2)])
    sides.pool.give_back([1], "seq")
    sides.ledger.give_back([0, 2], "seq")
    assert sides.copies.faults == [
        "to_host: target 1 is used by another copy",
        "to_device: source 0 is used by another copy",
        "seq gave back device slab 1 during a copy",
        "seq gave back host slab 0 during a copy",
    ]
    sides.copies.faults.clear()
    sides.copies.release()
    assert sides.copies.faults[:1] == ["to_host: source 0 was changed during the copy"]
    # The late content arrives, as on a device.
    assert sides.host[0, 0] == 7
