"""vLLM's side of the hand-off: a `KVConnectorBase_V1` that copies whole blocks to and from our transfer buffer.

vLLM makes one object in its scheduler, in the worker's process, and one in each rank. The scheduler's tells
`vllm_worker.exchange.KvExchange` what happens to requests, and sends each step's plan; the ranks' perform it
(`vllm_worker.rank_copies.RankCopies`). Nothing here decides, and no method raises: vLLM would end with blocks held.
What fails in the scheduler is kept, and the port raises it before any output of that step: its KV may be wrong.

Saves are made in `bind_connector_metadata`, before the forward of the step after the one that computed the KV; after
it they would wait behind other prompts. Loads are made in `start_load_kv`, of the step that first runs the request, and
before its forward: `get_num_new_matched_tokens` says that they are synchronous.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from vllm_worker.blocks import find_regions, layer_parts
from vllm_worker.exchange import CopyPlan, KvExchange, ScheduledTokens, StepResults
from vllm_worker.port import LayerPart, LoadPlan
from vllm_worker.rank_copies import FailedCopies, RankCopies

log = logging.getLogger(__name__)


def _never_raise(default: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a hook return `default()` instead of raising. The error is logged, and kept by the exchange."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def guarded(connector: DiptychConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(connector, *args, **kwargs)
            except Exception as error:
                log.exception("%s failed in the connector", method.__name__)
                connector.exchange.keep_error(error)
                return default()

        return guarded

    return wrap


def find_copy_error(worker: Any) -> str:
    """Runs in a rank, which is not used: why its connector cannot copy blocks; empty: it can."""
    return str(get_kv_transfer_group().copy_error)


@dataclass
class PlanMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan on its way to the ranks."""

    plan: CopyPlan


@dataclass
class ResultMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A rank's results on their way to the scheduler."""

    results: StepResults

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The results of both: what failed on one rank has failed."""
        assert isinstance(other, ResultMetadata)
        return ResultMetadata(StepResults(self.results.failed | other.results.failed))


class DiptychConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The connector that `kv_connector_module_path="vllm_worker.connector"` names. See the module's text.

    A request's `kv_transfer_params` are `diptych_key`, `save`, `load_slabs` and `load_tokens`
    (`vllm_worker.port.PortRequest`).
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # The scheduler's part, and the rank's, which can copy when vLLM has allocated its KV.
        self.exchange = KvExchange()
        self._copies = FailedCopies()
        # Why this rank cannot copy.
        self.copy_error = "vLLM has not shown its KV"

    def layer_parts(self) -> tuple[LayerPart, ...]:
        """The parts of one rank in a slab. Raises ValueError if vLLM's KV is not made of whole blocks."""
        config = self._kv_cache_config
        return layer_parts(find_regions(config.kv_cache_tensors, config.num_blocks))

    # ---- in the scheduler

    @_never_raise(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """Note what a request saves or loads; those that are not ours do neither."""
        params = request.kv_transfer_params or {}
        if (key := params.get("diptych_key")) is None:
            return
        slabs = tuple(params.get("load_slabs") or ())
        load = LoadPlan(slabs, int(params["load_tokens"])) if slabs else None
        self.exchange.expect(request.request_id, key, request.num_tokens, bool(params.get("save")), load)

    @_never_raise(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens' KV the buffer has beyond those that vLLM has cached; they are loaded before the forward."""
        return self.exchange.missing_tokens(request.request_id, num_computed_tokens), False

    @_never_raise(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has got its blocks: its load begins with the next plan."""
        self.exchange.begin_load(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    @_never_raise(lambda: PlanMetadata(CopyPlan()))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The plan of the step that is about to run."""
        return PlanMetadata(self.exchange.plan_step(self._read_scheduled(scheduler_output)))

    @_never_raise(list)
    def _read_scheduled(self, output: Any) -> list[ScheduledTokens]:
        """The requests of a step. Without them nothing is zeroed, but the step's loads must be made all the same."""
        known, counts = self._kv_cache_manager, output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        starts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        starts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return [
            ScheduledTokens(request, start, counts[request], known.get_block_ids(request)[0])
            for request, start in starts
        ]

    @_never_raise(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """A step has ended on all ranks."""
        meta = connector_output.kv_connector_worker_meta
        results = meta.results if isinstance(meta, ResultMetadata) else None
        self.exchange.end_step(connector_output.finished_sending or (), results)

    @_never_raise(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Whether a finished request's blocks are held until its KV was saved."""
        complete = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        return self.exchange.finish(request.request_id, block_ids, complete), None

    # ---- in each rank

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where the rank's KV is. If that fails, `copy_error` says why, and no worker is made of this rank."""
        try:
            config = self._kv_cache_config
            regions = find_regions(config.kv_cache_tensors, config.num_blocks)
            cache = next(iter(kv_caches.values()))
            self._copies = RankCopies(cache, regions, config.num_blocks, get_tensor_model_parallel_rank())
            self.copy_error = ""
        except Exception as error:
            log.exception("the rank's KV was not found")
            self.copy_error = f"{type(error).__name__}: {error}"

    @_never_raise(lambda: None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Make the step's saves."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, PlanMetadata):
            self._copies.begin_step(connector_metadata.plan)

    @_never_raise(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Make the step's loads."""
        self._copies.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved when their request has finished."""

    def wait_for_save(self) -> None:
        """Nothing: saves are complete."""

    @_never_raise(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose blocks were saved in this step, or shall not be."""
        return self._copies.take_ended(), None

    @_never_raise(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be loaded in this step; they are zero."""
        return self._copies.take_invalid()

    @_never_raise(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The copies that failed in this step."""
        results = self._copies.take_results()
        return ResultMetadata(results) if results is not None else None
