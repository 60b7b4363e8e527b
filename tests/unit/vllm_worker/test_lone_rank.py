"""A rank that is alone gets one process group for many, which can be used and ended like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed

from vllm_worker.setup.lone_rank import share_groups


@pytest.fixture
def lone_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("new_group", "destroy_process_group"):
        monkeypatch.setattr(distributed, name, getattr(distributed, name))
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    share_groups()
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_groups_of_one_rank_are_the_same_and_end_with_the_world(lone_rank: None) -> None:
    groups = [distributed.new_group([0], backend="gloo") for _ in range(3)]
    assert groups[0] is groups[1] is groups[2]
    for group in groups:
        distributed.destroy_process_group(group)
    numbers = torch.arange(3)
    distributed.all_reduce(numbers, group=groups[0])
    assert numbers.tolist() == [0, 1, 2]
    distributed.destroy_process_group()
    assert not distributed.is_initialized()


def test_groups_are_shared_by_backend(lone_rank: None) -> None:
    assert distributed.new_group([0], backend="gloo") is not distributed.new_group([0])
