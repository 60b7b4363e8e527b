"""Shares of the KV pool that are too small for a request: whatever the error advises works."""

from __future__ import annotations

import re
from functools import partial
from math import ceil
from pathlib import Path

import pytest

from diptych.errors import ModelError
from engine.model.checkpoint import Checkpoint
from engine.model.memory_plan import USABLE_SHARE, plan_memory
from engine.model.pool_split import split_pool
from kvcache.class_shares import parse_class_shares

TINY = Path(__file__).parents[3] / "models" / "tiny"
MODEL = Checkpoint.resolve(str(TINY))


def divide(codecs: str, kv_bytes: int | None, max_model_len: int, pool_room: int) -> tuple[int, ...]:
    """The slabs of each class on a machine with room for a pool of `pool_room` bytes."""
    shares = parse_class_shares(codecs)
    layouts = [
        MODEL.layout(codec="" if one.codec_id.name == "raw" else f"{one.codec_id.name}.s0") for one in shares
    ]
    largest = max(layouts, key=lambda layout: layout.chunk_bytes)
    plan_of = partial(plan_memory, "tiny", MODEL.config, largest, max_model_len=max_model_len, coded=True)
    beside = plan_of(kv_bytes=None, available=1 << 40).fixed_bytes
    plan = plan_of(kv_bytes=kv_bytes, available=ceil((beside + pool_room) / USABLE_SHARE))
    return split_pool("tiny", plan, layouts, [one.share for one in shares], asked=kv_bytes is not None)


def read_advice(
    fix: str, codecs: str, kv_bytes: int | None, length: int
) -> list[tuple[str, int | None, int]]:
    """What each part of the advice sets instead: codecs, size of the pool, and length."""
    ways = []
    for way in fix.split(", or "):
        found = dict(re.findall(r"--(kv-cache-codec|kv-cache-memory-bytes|max-model-len) (\S+)", way))
        size = found.get("kv-cache-memory-bytes")
        ways.append(
            (
                found.get("kv-cache-codec", codecs),
                kv_bytes if size is None else int(size),
                int(found.get("max-model-len", length)),
            )
        )
    return ways


@pytest.mark.parametrize("codecs", ["raw:0.05,tq4", "raw:0.5,tq4:0.01", "tq4:0.9,raw", "raw:0.3,tq4:0.3,tq3"])
@pytest.mark.parametrize("kv_bytes", [None, 1, 1.2, 2, 5, 40], ids=str)
@pytest.mark.parametrize("room", [1, 3, 60])
@pytest.mark.parametrize("length", [64, 1000, 2048])
def test_whatever_is_advised_works(codecs: str, kv_bytes: float | None, room: int, length: int) -> None:
    """Sizes of the pool and of memory are in raw requests of full length."""
    one = MODEL.layout().num_chunks(length) * MODEL.layout().chunk_bytes
    pool, most = None if kv_bytes is None else int(kv_bytes * one), room * one
    if pool is not None and pool > most:
        return  # the pool itself does not fit
    try:
        divide(codecs, pool, length, most)
    except ModelError as error:
        assert len(error.lines()) <= 6
        if error.fix == "name fewer classes, or use a machine with more memory":
            assert room == 1
            return
        ways = read_advice(error.fix, codecs, pool, length)
        assert (codecs, pool, length) not in ways
        for way in ways:
            assert all(divide(*way, most))


def test_a_share_that_cannot_be_raised_is_not_advised() -> None:
    """The pool holds one raw request, so no share of it does."""
    one = MODEL.layout().num_chunks(2048) * MODEL.layout().chunk_bytes
    with pytest.raises(ModelError) as caught:
        divide("raw:0.5,tq4", one, 2048, 3 * one)
    assert caught.value.fix.startswith(f"use --kv-cache-memory-bytes {2 * one}, or use --max-model-len 1024")
    with pytest.raises(ModelError) as caught:
        divide("raw:0.5,tq4", one, 2048, one)
    assert caught.value.fix == "use --max-model-len 1024 or less"


def test_shares_that_work_are_close_to_those_that_were_asked_for() -> None:
    one = MODEL.layout().num_chunks(2048) * MODEL.layout().chunk_bytes
    with pytest.raises(ModelError) as caught:
        divide("raw:0.2,tq4", 4 * one, 2048, 4 * one)
    ((codecs, _, _), *_) = read_advice(caught.value.fix, "", 0, 0)
    shares = {str(one.codec_id): one.share for one in parse_class_shares(codecs)}
    assert 0.25 <= shares["raw"] < 0.4 and shares["tq4.s0"] > 0.6
