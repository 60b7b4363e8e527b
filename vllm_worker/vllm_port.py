"""vLLM's synchronous engine, in this process, as an `EnginePort`.

    PortRequest ─▶ InputProcessor (vLLM's own checks) ─▶ EngineCore.add_request │ PortRefused
    step ─▶ EngineCore.step_fn ─▶ PortOutput of each request that progressed

vLLM's front end (detokenizer, stop strings, HTTP) is left out: token ids go in and come out. mypy cannot see vLLM, so
its objects are `Any` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from diptych.errors import DeviceLost, raise_if_lost
from diptych.messages import Logprob
from vllm_worker.port import (
    ComputedPart,
    PortCounts,
    PortFacts,
    PortOutput,
    PortRefused,
    PortRequest,
    SavedKv,
)
from vllm_worker.sampling import build_sampling

if TYPE_CHECKING:
    from kvtransfer.transfer_buffer import TransferBuffer
    from vllm_worker.exchange import KvExchange

# The least log-probability that a token is reported with, as on our own workers.
LOWEST_LOGPROB = -9999.0


@dataclass(slots=True)
class _NamedRequest:
    """A request in vLLM: its name there, and what the port still has to know of it."""

    name: str
    request: PortRequest
    silent: bool = True
    started_s: float | None = None


class VllmPort:
    """An `EnginePort` over vLLM's `EngineCore`. `lost` has an entry once a rank of it has ended.

    vLLM's names of requests end in a number, so that an attempt whose blocks are still being copied is never confused
    with another one.
    """

    def __init__(self, core: Any, inputs: Any, facts: PortFacts, lost: list[str]) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.engine import EngineCoreEventType, FinishReason

        self.facts = facts
        self._core, self._inputs, self._lost = core, inputs, lost
        self._scheduler = core.scheduler
        # The connector's part in the scheduler (`vllm_worker.exchange.KvExchange`); None: no KV is handed over.
        self.exchange: KvExchange | None = getattr(core.scheduler.connector, "exchange", None)
        self._cache = core.scheduler.kv_cache_manager
        self._pool = self._cache.block_pool
        self._tasks = core.get_supported_tasks()
        self._make_sampling, self._make_grammar = SamplingParams, StructuredOutputsParams
        self._make_tokens: Callable[..., Any] = tokens_input
        self._client_errors: tuple[type[Exception], ...] = (VLLMClientError, ValueError)
        self._scheduled, self._preempted = EngineCoreEventType.SCHEDULED, EngineCoreEventType.PREEMPTED
        self._finishes = {
            FinishReason.STOP: "stop",
            FinishReason.REPETITION: "stop",
            FinishReason.LENGTH: "length",
            FinishReason.ERROR: "error",
            FinishReason.ABORT: "error",
        }
        self._end_id: int | None = inputs.renderer.get_eos_token_id()
        self._entries: dict[str, _NamedRequest] = {}
        self._keys: dict[str, str] = {}
        self._numbers = count()
        self._counts = PortCounts()
        # Whether the last step had nothing to compute.
        self._idle = False
        # vLLM's `SchedulerOutput` of the last step.
        self._scheduled_output: Any = None
        core.scheduler.schedule = self._note_schedule(core.scheduler.schedule)
        self._closed = False

    def attach_buffer(self, buffer: TransferBuffer) -> None:
        """See `EnginePort.attach_buffer`."""
        assert self.exchange is not None, "the engine was opened without a connector"
        self.exchange.attach_buffer(buffer, self.facts.ranks)

    def add(self, request: PortRequest) -> None:
        """See `EnginePort.add`. Raises PortRefused."""
        if request.key in self._entries:
            raise PortRefused("internal_error", f"{request.key} is here already")
        values = build_sampling(request, self.facts, self._end_id)
        name = f"{request.key}~{next(self._numbers)}"
        try:
            if (grammar := values.get("structured_outputs")) is not None:
                values["structured_outputs"] = self._make_grammar(**grammar)
            params = self._make_sampling(**values)
            # vLLM makes tokens of its own field, which has texts.
            params._bad_words_token_ids = [list(word) for word in request.sampling.bad_words] or None
            made = self._inputs.process_inputs(
                request_id=name,
                prompt=self._make_tokens(
                    prompt_token_ids=[*request.prompt, *request.output], cache_salt=request.salt or None
                ),
                params=params,
                supported_tasks=self._tasks,
                arrival_time=request.arrived_s,
                priority=request.priority,
            )
            ready, wave = self._core.preprocess_add_request(made)
        except Exception as error:
            raise_if_lost(error)
            raise self._refusal(request, error) from error
        self._core.add_request(ready, wave)
        self._entries[request.key], self._keys[name] = _NamedRequest(name, request), request.key
        self._idle = False

    def _refusal(self, request: PortRequest, error: Exception) -> PortRefused:
        """Why vLLM's own checks refuse a request."""
        code = "unsupported_parameter" if isinstance(error, self._client_errors) else "internal_error"
        if request.sampling.grammar is not None:
            code = "invalid_grammar"
        return PortRefused(code, "vLLM refuses the request", " ".join(str(error).split())[:300])

    def abort(self, keys: list[str]) -> None:
        """See `EnginePort.abort`."""
        if self.exchange is not None:
            self.exchange.abort_saves(keys)
        names = [self._forget(key).name for key in keys if key in self._entries]
        if names:
            self._core.abort_requests(names)
            # Its ranks hear of it in the next step.
            self._idle = False

    def step(self) -> list[PortOutput]:
        """See `EnginePort.step`. Raises DeviceLost if a rank has ended."""
        if self._lost:
            raise DeviceLost(self._lost[0])
        outputs, executed = self._core.step_fn()
        if self.exchange is not None:
            self.exchange.raise_error()
        self._core.post_step(executed)
        self._idle = not executed
        batches = list((outputs or {}).values())
        events = [event for batch in batches for output in batch.outputs for event in output.events or ()]
        self._count(batches, sum(event.type == self._preempted for event in events))
        made = [self._output_of(output) for batch in batches for output in batch.outputs]
        return [output for output in made if output is not None]

    @property
    def has_work(self) -> bool:
        """See `EnginePort.has_work`. A step is due when a rank has ended: it raises."""
        return bool(self._lost) or bool(self._scheduler.has_requests())

    @property
    def is_waiting_only(self) -> bool:
        """See `EnginePort.is_waiting_only`. Grammars that are being compiled are waited for, too."""
        return self._idle and not self._lost and (self.exchange is None or not self.exchange.can_progress)

    def saved(self) -> list[SavedKv]:
        """See `EnginePort.saved`."""
        return [] if self.exchange is None else self.exchange.take_saved()

    def loaded(self) -> list[str]:
        """See `EnginePort.loaded`."""
        return [] if self.exchange is None else self.exchange.take_loaded()

    def failed_loads(self) -> list[str]:
        """See `EnginePort.failed_loads`."""
        failed = [] if self.exchange is None else self.exchange.take_failed_loads()
        if failed:
            # vLLM ends all requests that share these blocks, but what they computed after them keeps its name.
            self._cache.evict_blocks(set(range(self._pool.num_gpu_blocks)))
        return failed

    @property
    def held_blocks(self) -> int:
        """See `EnginePort.held_blocks`."""
        return self.facts.num_blocks - int(self._pool.get_num_free_blocks())

    @property
    def counts(self) -> PortCounts:
        """See `EnginePort.counts`."""
        running, waiting = self._scheduler.get_request_counts()
        held = self.held_blocks
        grown = self._counts
        return PortCounts(
            running=running,
            waiting=waiting,
            used_blocks=held,
            cached_blocks=min(len(self._pool.cached_block_hash_to_block), self.facts.num_blocks - held),
            step_tokens=grown.step_tokens,
            prefill_tokens=grown.prefill_tokens,
            prefix_queries=grown.prefix_queries,
            prefix_hits=grown.prefix_hits,
            preemptions=grown.preemptions,
        )

    def computed(self) -> list[ComputedPart]:
        """See `EnginePort.computed`."""
        output = self._scheduled_output
        if output is None:
            return []
        cached, counts = output.scheduled_cached_reqs, output.num_scheduled_tokens
        starts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        starts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return [ComputedPart(name.rpartition("~")[0], start, counts[name]) for name, start in starts]

    def _note_schedule(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM's `Scheduler.schedule`, whose result is kept for `computed`: `EngineCore.step` does not return it."""

        def noted(*args: Any, **options: Any) -> Any:
            self._scheduled_output = schedule(*args, **options)
            return self._scheduled_output

        return noted

    def clear_prefixes(self) -> None:
        """See `EnginePort.clear_prefixes`."""
        self._core.reset_prefix_cache()

    def close(self) -> None:
        """See `EnginePort.close`."""
        if not self._closed:
            self._closed = True
            self._core.shutdown()
            if self.exchange is not None:
                self.exchange.close()

    def _forget(self, key: str) -> _NamedRequest:
        entry = self._entries.pop(key)
        del self._keys[entry.name]
        return entry

    def _count(self, batches: list[Any], preempted: int) -> None:
        """Add what the last step reports to the counts."""
        stats = next((batch.scheduler_stats for batch in batches if batch.scheduler_stats), None)
        details = None if stats is None else stats.iteration_details
        old, prefixes = self._counts, None if stats is None else stats.prefix_cache_stats
        self._counts = PortCounts(
            step_tokens=0 if details is None else details.num_ctx_tokens + details.num_generation_tokens,
            prefill_tokens=0 if details is None else details.num_ctx_tokens,
            prefix_queries=old.prefix_queries + (0 if prefixes is None else prefixes.queries),
            prefix_hits=old.prefix_hits + (0 if prefixes is None else prefixes.hits),
            preemptions=old.preemptions + preempted,
        )

    def _output_of(self, output: Any) -> PortOutput | None:
        """What vLLM's output says of a request; None if it was aborted meanwhile."""
        key = self._keys.get(output.request_id)
        if key is None:
            return None
        entry, request = self._entries[key], self._entries[key].request
        for event in output.events or ():
            if event.type == self._scheduled and entry.started_s is None:
                entry.started_s = float(event.timestamp)
        finish = None if output.finish_reason is None else self._finishes[output.finish_reason]
        if finish == "length" and request.save:
            finish = "saved"
        tokens, logprobs = list(output.new_token_ids), read_logprobs(output.new_logprobs)
        if request.defer_first or request.sampling.max_tokens == 0:
            tokens, logprobs = [], None
        prefill, first = output.prefill_stats, entry.silent
        entry.silent = False
        if finish is not None:
            self._forget(key)
        return PortOutput(
            key=key,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=read_prompt_logprobs(output.new_prompt_logprobs_tensors, request.prompt),
            finish=finish,
            cached_tokens=0 if prefill is None else int(prefill.num_local_cached_tokens),
            started_s=entry.started_s if first else None,
            error="vLLM has ended the request with an error" if finish == "error" else "",
        )


def read_logprobs(lists: Any) -> list[Logprob] | None:
    """vLLM's `LogprobsLists` of one request: a row per token, that token first, then the most likely ones."""
    if lists is None:
        return None
    rows = zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True)
    return [_logprob(ids, values) for ids, values in rows]


def read_prompt_logprobs(tensors: Any, prompt: list[int]) -> list[Logprob | None] | None:
    """vLLM's prompt log-probabilities, with None for the first token of `prompt`, which has none."""
    if tensors is None:
        return None
    ids, logprobs = tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist()
    rows = zip(ids, logprobs, tensors.selected_token_ranks.tolist(), strict=True)
    scored = [_logprob(*row) for row in rows]
    return [None, *scored][: len(prompt)]


def _logprob(ids: list[int], values: list[float], rank: int = 0) -> Logprob:
    # Not a number is less than nothing.
    floored = [value if value > LOWEST_LOGPROB else LOWEST_LOGPROB for value in values]
    return Logprob(ids[0], floored[0], list(zip(ids[1:], floored[1:], strict=True)), rank)
