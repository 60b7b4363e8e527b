"""The connector's hooks in the order in which vLLM calls them, with stand-ins for the names of vLLM that it uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer.transfer_buffer import TransferBuffer
from vllm_worker.buffer import slab_layout
from vllm_worker.exchange import KvExchange

NUM_BLOCKS, PART = 8, 256
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class Base:
    """What the connector uses of `KVConnectorBase_V1`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_cache_config, self._kv_cache_manager = kv_cache_config, None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Nothing else reads it."""


@pytest.fixture
def connector_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class, made over stand-ins."""
    base, parallel, requests = (
        ModuleType(name) for name in (BASE, "vllm.distributed.parallel_state", "vllm.v1.request")
    )
    transfer = ModuleType("vllm.distributed.kv_transfer")
    vars(transfer)["get_kv_transfer_group"] = lambda: None
    names = {
        "KVConnectorBase_V1": Base,
        "KVConnectorMetadata": object,
        "KVConnectorWorkerMetadata": object,
        "KVConnectorRole": SimpleNamespace(SCHEDULER=0, WORKER=1),
    }
    vars(base).update(names)
    vars(parallel)["get_tensor_model_parallel_rank"] = lambda: 0
    vars(requests)["RequestStatus"] = SimpleNamespace(FINISHED_LENGTH_CAPPED=1)
    parts = BASE.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, "vllm.v1", ModuleType("vllm.v1"))
    for module in (base, parallel, requests, transfer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "vllm_worker.connector", raising=False)
    yield importlib.import_module("vllm_worker.connector").DiptychConnector
    sys.modules.pop("vllm_worker.connector", None)


class Pair:
    """The scheduler's connector and a rank's, with a buffer."""

    def __init__(self, made: Any) -> None:
        placed = SimpleNamespace(
            size=NUM_BLOCKS * PART,
            layers=["a", "b"],
            layer_stride=NUM_BLOCKS * PART // 2,
            block_stride=PART // 2,
            offset=0,
        )
        config = SimpleNamespace(kv_cache_tensors=[placed], num_blocks=NUM_BLOCKS)
        self.scheduler, self.rank = made(None, None, config), made(None, None, config)
        self.buffer = TransferBuffer(slab_layout(PART, 1), 4 * PART)
        self.exchange: KvExchange = self.scheduler.exchange
        self.exchange.attach_buffer(self.buffer, 1)
        self.cache = torch.full((NUM_BLOCKS * PART,), 9, dtype=torch.uint8)
        self.owned: dict[str, list[int]] = {}
        self.scheduler._kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: (self.owned[name],))

    def request(self, name: str, tokens: int, **params: Any) -> Any:
        params = {"diptych_key": f"{name}#1", **params}
        made = SimpleNamespace(request_id=name, num_tokens=tokens, kv_transfer_params=params, status=1)
        self.scheduler.on_new_request(made)
        return made

    def step(self, new: list[tuple[str, int, int]]) -> set[int]:
        """A step that runs (name, start, count); returns the invalid blocks."""
        output = SimpleNamespace(
            num_scheduled_tokens={name: count for name, _, count in new},
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=at) for name, at, _ in new],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        )
        self.rank.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.rank.start_load_kv(None)
        self.rank.wait_for_save()
        sent, _ = self.rank.get_finished(set())
        invalid: set[int] = self.rank.get_block_ids_with_load_errors()
        meta = self.rank.build_connector_worker_meta()
        self.scheduler.update_connector_output(
            SimpleNamespace(finished_sending=sent, kv_connector_worker_meta=meta)
        )
        return invalid

    def close(self) -> None:
        self.exchange.close()
        self.buffer.close()


@pytest.fixture
def pair(connector_class: Any) -> Iterator[Pair]:
    made = Pair(connector_class)
    yield made
    made.close()


def test_a_prompt_leaves_and_comes_back(pair: Pair) -> None:
    pair.rank.register_kv_caches({"a": pair.cache})
    assert [part.block_bytes for part in pair.scheduler.layer_parts()] == [PART // 2] * 2
    saving = pair.request("s", 70, save=True)
    assert pair.scheduler.get_num_new_matched_tokens(saving, 0) == (0, False)
    pair.owned["s"] = [2, 5]
    pair.step([("s", 0, 70)])
    views = pair.cache.view(2, NUM_BLOCKS, PART // 2)
    assert not bool(views[:, 5].any()) and bool((views[:, 2] == 9).all()), "the partly used block was zeroed"
    views[:, 5, :10] = 7
    assert pair.scheduler.request_finished(saving, [2, 5]) == (True, None)
    pair.step([])
    (saved,) = pair.exchange.take_saved()
    loading = pair.request("d", 71, load_slabs=list(saved.slabs), load_tokens=70)
    assert pair.scheduler.get_num_new_matched_tokens(loading, 0) == (70, False)
    pair.scheduler.update_state_after_alloc(loading, SimpleNamespace(get_block_ids=lambda: ([1, 3],)), 70)
    pair.owned["d"] = [1, 3]
    assert pair.step([("d", 70, 1)]) == set()
    assert torch.equal(views[:, 1], views[:, 2]) and torch.equal(views[:, 3], views[:, 5])
    assert pair.exchange.take_loaded() == ["d#1"] and not pair.exchange.take_failed_loads()


def test_a_rank_without_its_memory_fails_loads_and_saves(pair: Pair) -> None:
    pair.rank.register_kv_caches({"a": torch.zeros(3, dtype=torch.uint8)})
    loading, saving = pair.request("d", 65, load_slabs=[0], load_tokens=64), pair.request("s", 64, save=True)
    pair.owned |= {"d": [1, 2], "s": [4]}
    pair.scheduler.update_state_after_alloc(loading, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 64)
    assert pair.scheduler.request_finished(saving, [4])[0]
    assert "ends at byte" in pair.rank.copy_error, "no worker is made of it"
    assert pair.step([("d", 64, 1)]) == {1}
    assert pair.exchange.take_failed_loads() == ["d#1"]
    assert [saved.num_tokens for saved in pair.exchange.take_saved()] == [0]


def test_what_is_not_known_of_a_step_costs_no_load(pair: Pair) -> None:
    """The scheduler's output cannot be read: the loads of the step are made all the same."""
    pair.rank.register_kv_caches({"a": pair.cache})
    loading = pair.request("d", 65, load_slabs=[0], load_tokens=64)
    pair.scheduler.update_state_after_alloc(loading, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 64)
    assert pair.step([("unknown", 0, 1)]) == set()
    assert not bool(pair.cache.view(2, NUM_BLOCKS, PART // 2)[:, 1].any()), "the empty slab was loaded"
    assert pair.exchange.take_loaded() == ["d#1"]
    with pytest.raises(RuntimeError, match="in vLLM's scheduler"):
        pair.exchange.raise_error()


@pytest.mark.parametrize(
    "break_hook",
    [
        lambda scheduler: scheduler.on_new_request(None),
        lambda scheduler: scheduler.get_num_new_matched_tokens(None, 0),
        lambda scheduler: scheduler.update_state_after_alloc(None, None, 64),
        lambda scheduler: scheduler.build_connector_meta(None),
        lambda scheduler: scheduler.update_connector_output(None),
        lambda scheduler: scheduler.request_finished(None, []),
    ],
)
def test_what_fails_in_the_scheduler_lets_no_output_pass(
    pair: Pair, break_hook: Callable[[Any], object]
) -> None:
    """What was to be said of some request's KV was not said: the port raises it, and requests migrate."""
    pair.exchange.raise_error()
    break_hook(pair.scheduler)
    with pytest.raises(RuntimeError, match="in vLLM's scheduler"):
        pair.exchange.raise_error()


def test_no_hook_raises_whatever_it_gets(pair: Pair) -> None:
    assert pair.rank.copy_error
    pair.rank.register_kv_caches({"a": pair.cache})
    assert not pair.rank.copy_error
    pair.rank.register_kv_caches({})
    assert pair.rank.copy_error
    nothing = SimpleNamespace()
    pair.scheduler.on_new_request(nothing)
    assert pair.scheduler.get_num_new_matched_tokens(nothing, 0) == (0, False)
    pair.scheduler.update_state_after_alloc(nothing, None, 64)
    pair.scheduler.update_connector_output(nothing)
    assert pair.scheduler.request_finished(nothing, []) == (False, None)
    pair.rank.bind_connector_metadata(pair.scheduler.build_connector_meta(nothing))
    pair.rank.bind_connector_metadata(None)
    pair.rank.start_load_kv(None)
    assert pair.rank.get_finished(set()) == (set(), None)
    assert (
        pair.rank.get_block_ids_with_load_errors() == set()
        and pair.rank.build_connector_worker_meta() is None
    )
