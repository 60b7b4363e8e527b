"""The accounting of saves and loads: who gets slabs when, what is zeroed, and what aborts leave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diptych.errors import ConfigError
from kvtransfer.transfer_buffer import TransferBuffer
from tests.support.toy_port import ToyPort
from vllm_worker.buffer import open_buffer, slab_layout
from vllm_worker.exchange import KvExchange, ScheduledTokens, StepResults
from vllm_worker.port import LoadPlan

NUM_SLABS = 5


@pytest.fixture
def exchange() -> Iterator[KvExchange]:
    made, buffer = KvExchange(), TransferBuffer(slab_layout(256, 1), NUM_SLABS * 256)
    made.attach_buffer(buffer, 1)
    yield made
    made.close()
    buffer.close()


def finish(exchange: KvExchange, name: str, chunks: int) -> bool:
    exchange.expect(name, f"{name}#1", chunks * 64, save=True)
    return exchange.finish(name, list(range(chunks)), complete=True)


def planned(exchange: KvExchange) -> list[str]:
    return [copies.request for copies in exchange.plan_step().saves]


def test_saves_take_slabs_in_the_order_in_which_requests_finished(exchange: KvExchange) -> None:
    """A large one is not overtaken by a small one that would fit."""
    assert exchange.buffer is not None
    assert all(finish(exchange, name, chunks) for name, chunks in (("a", 3), ("b", 3), ("c", 1)))
    assert planned(exchange) == ["a"] and exchange.num_waiting == 2
    exchange.end_step(["a"], None)
    assert planned(exchange) == [] and not exchange.can_progress
    (saved,) = exchange.take_saved()
    exchange.buffer.give_back(saved.slabs, saved.key)
    assert planned(exchange) == ["b", "c"]
    exchange.end_step(["b", "c"], None)
    assert [one.key for one in exchange.take_saved()] == ["b#1", "c#1"] and exchange.buffer.used == 4


def test_an_aborted_save_that_waits_lets_its_blocks_go(exchange: KvExchange) -> None:
    assert exchange.buffer is not None
    for name, chunks in (("a", 5), ("b", 2), ("c", 2)):
        finish(exchange, name, chunks)
    assert planned(exchange) == ["a"]
    exchange.end_step(["a"], None)
    exchange.abort_saves(["b#1", "unknown#1"])
    assert exchange.can_progress
    plan = exchange.plan_step()
    assert plan.dropped == ("b",) and plan.saves == ()
    exchange.end_step(["b"], None)
    assert [one.key for one in exchange.take_saved()] == ["a#1"] and exchange.num_waiting == 1


def test_what_is_not_wanted_or_never_fits_is_not_held(exchange: KvExchange) -> None:
    exchange.expect("a", "a#1", 64, save=True)
    assert not exchange.finish("a", [1], complete=False)
    exchange.expect("b", "b#1", 64, save=False)
    assert not exchange.finish("b", [1], complete=True)
    assert not exchange.finish("nobody", [1], complete=True)
    assert exchange.take_saved() == []
    assert not finish(exchange, "big", NUM_SLABS + 1)
    exchange.expect("short", "short#1", 65, save=True)
    assert not exchange.finish("short", [1], complete=True), "its KV is not all there"
    assert [(one.key, one.slabs, one.num_tokens) for one in exchange.take_saved()] == [
        ("big#1", (), 0),
        ("short#1", (), 0),
    ]
    assert not exchange.can_progress


def test_without_a_buffer_nothing_is_saved_or_loaded() -> None:
    exchange = KvExchange()
    assert not finish(exchange, "a", 1)
    exchange.expect("d", "d#1", 65, save=False, load=LoadPlan((0,), 64))
    assert exchange.missing_tokens("d", 0) == 0
    exchange.begin_load("d", [1], 0)
    assert exchange.take_loaded() == ["d#1"]


@pytest.mark.parametrize(
    ("tokens", "covered", "cached", "missing"),
    [
        (129, 128, 0, 128),
        (129, 128, 64, 64),
        (129, 128, 128, 0),
        (128, 128, 0, 127),  # the last token is computed again
        (1, 1, 0, 0),
        (65, 65, 64, 0),
        (66, 65, 64, 1),
    ],
)
def test_what_is_loaded_is_what_vllm_lacks_but_never_the_last_token(
    exchange: KvExchange, tokens: int, covered: int, cached: int, missing: int
) -> None:
    slabs = tuple(range(-(-covered // 64)))
    exchange.expect("d", "d#1", tokens, save=False, load=LoadPlan(slabs, covered))
    assert exchange.missing_tokens("d", cached) == exchange.missing_tokens("d", cached) == missing
    blocks = [10, 11, 12]
    exchange.begin_load("d", blocks, missing)
    plan = exchange.plan_step()
    first, end = cached // 64, -(-(cached + missing) // 64)
    if missing:
        (copies,) = plan.loads
        assert (copies.blocks, copies.slabs) == (tuple(blocks[first:end]), slabs[first:end])
    else:
        assert plan.loads == ()
    exchange.end_step([], None)
    assert exchange.take_loaded() == ["d#1"]
    assert exchange.missing_tokens("d", 0) == 0, "a request that is preempted computes its KV again"
    exchange.begin_load("d", blocks, 0)
    exchange.finish("d", blocks, complete=True)
    assert exchange.take_loaded() == []


def test_a_request_that_ends_before_it_loads_frees_its_slabs(exchange: KvExchange) -> None:
    exchange.expect("d", "d#1", 65, save=False, load=LoadPlan((0,), 64))
    assert exchange.missing_tokens("d", 0) == 64
    assert not exchange.finish("d", [], complete=False)
    assert exchange.take_loaded() == ["d#1"] and exchange.take_failed_loads() == []


def test_a_failed_load_is_named(exchange: KvExchange) -> None:
    for name in ("d", "e"):
        exchange.expect(name, f"{name}#1", 65, save=False, load=LoadPlan((0,), 64))
        exchange.begin_load(name, [1], 64)
    number = exchange.plan_step().loads[1].number
    exchange.end_step([], StepResults(frozenset([number])))
    assert exchange.take_loaded() == ["d#1", "e#1"] and exchange.take_failed_loads() == ["e#1"]


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(
    ("tokens", "start", "count", "zeroed"),
    [
        (100, 0, 100, (8,)),
        (100, 0, 64, ()),
        (100, 64, 36, (8,)),
        (100, 64, 10, (8,)),
        (100, 74, 26, ()),  # its first part was written by the step before
        (128, 0, 128, ()),
        (30, 0, 30, (7,)),
        (30, 10, 20, ()),
    ],
)
def test_the_block_that_stays_partly_empty_is_zeroed_once_before_it_is_written(
    exchange: KvExchange, save: bool, tokens: int, start: int, count: int, zeroed: tuple[int, ...]
) -> None:
    exchange.expect("a", "a#1", tokens, save=save)
    plan = exchange.plan_step([ScheduledTokens("a", start, count, [7, 8])])
    assert plan.zeroed == (zeroed if save else ())


def test_a_buffer_for_less_than_one_request_is_refused_with_the_fix() -> None:
    facts = ToyPort(max_model_len=1000).facts
    with pytest.raises(ConfigError) as refused:
        open_buffer(facts, 16 * facts.slab_bytes - 1)
    assert f"--transfer-buffer-bytes {16 * facts.slab_bytes}" in str(refused.value.fix)
    buffer = open_buffer(facts, 16 * facts.slab_bytes)
    assert buffer.num_slabs == 16 and buffer.layout.chunk_bytes == facts.slab_bytes
    buffer.close()


def test_a_block_of_odd_size_is_refused() -> None:
    with pytest.raises(ConfigError):
        slab_layout(300, 1)
