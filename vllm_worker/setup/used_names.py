"""Every name of vLLM that this package uses, checked before anything loads. Importing this module loads no vLLM.

    missing_names() ─▶ [] │ ["vllm.v1.engine.core.EngineCore.step_fn", ...]

vLLM calls most of them internal and may rename them in any release: a version whose names are all here may still
behave differently, so only those in `SUPPORTED_VERSIONS` are accepted, on which the suite has passed (docs/engines.md).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterable
from typing import Any

# Versions on which the suite of behaviours has passed, without their local part ("0.32.0+cpu" is 0.32.0).
SUPPORTED_VERSIONS = ("0.32.0",)

# Module -> names in it. "Class.name" is an attribute or a field; "name(a, b)" is called with these arguments by name.
USED_NAMES: dict[str, tuple[str, ...]] = {
    "vllm": ("SamplingParams(allowed_token_ids)", "SamplingParams._bad_words_token_ids", "__version__"),
    "vllm.sampling_params": ("StructuredOutputsParams(json, regex, choice, grammar)",),
    "vllm.engine.arg_utils": (
        "EngineArgs.add_cli_args",
        "EngineArgs.from_cli_args",
        "EngineArgs.create_model_config",
        "EngineArgs.create_engine_config",
    ),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser.parse_args", "FlexibleArgumentParser.error"),
    "vllm.exceptions": ("VLLMClientError",),
    "vllm.inputs": ("tokens_input(prompt_token_ids, cache_salt)",),
    "vllm.platforms": ("current_platform",),
    "vllm.v1.engine": (
        "EngineCoreEventType.SCHEDULED",
        "EngineCoreEventType.PREEMPTED",
        "EngineCoreOutput.new_token_ids",
        "EngineCoreOutput.new_logprobs",
        "EngineCoreOutput.new_prompt_logprobs_tensors",
        "EngineCoreOutput.finish_reason",
        "EngineCoreOutput.events",
        "EngineCoreOutput.prefill_stats",
        "EngineCoreOutputs.outputs",
        "EngineCoreOutputs.scheduler_stats",
        "FinishReason.STOP",
        "FinishReason.LENGTH",
        "FinishReason.ERROR",
        "FinishReason.ABORT",
        "FinishReason.REPETITION",
    ),
    "vllm.v1.engine.core": (
        "EngineCore(vllm_config, executor_class, log_stats, executor_fail_callback)",
        "EngineCore.step",
        "EngineCore.preprocess_add_request",
        "EngineCore.add_request",
        "EngineCore.abort_requests",
        "EngineCore.post_step",
        "EngineCore.get_supported_tasks",
        "EngineCore.collective_rpc",
        "EngineCore.reset_prefix_cache",
        "EngineCore.shutdown",
    ),
    "vllm.v1.engine.input_processor": (
        "InputProcessor.process_inputs(request_id, prompt, params, supported_tasks, arrival_time, priority)",
    ),
    "vllm.v1.executor": ("Executor.get_class",),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.has_requests",
        "Scheduler.get_request_counts",
        "Scheduler.schedule",
    ),
    "vllm.v1.core.block_pool": ("BlockPool.get_num_free_blocks",),
    "vllm.v1.metrics.stats": (
        "PrefillStats.num_local_cached_tokens",
        "PrefixCacheStats.queries",
        "PrefixCacheStats.hits",
        "SchedulerStats.iteration_details",
        "SchedulerStats.prefix_cache_stats",
        "SchedulerIterationDetails.num_ctx_tokens",
        "SchedulerIterationDetails.num_generation_tokens",
    ),
    "vllm.v1.outputs": (
        "LogprobsLists.logprob_token_ids",
        "LogprobsLists.logprobs",
        "LogprobsTensors.selected_token_ranks",
        "KVConnectorOutput.finished_sending",
        "KVConnectorOutput.kv_connector_worker_meta",
    ),
    "vllm.v1.kv_cache_interface": (
        "KVCacheConfig.num_blocks",
        "KVCacheConfig.kv_cache_groups",
        "KVCacheConfig.kv_cache_tensors",
        "KVCacheConfig.kv_cache_layout",
        "KVCacheGroupSpec.kv_cache_spec",
        "KVCacheTensor.size",
        "KVCacheTensor.layers",
        "KVCacheTensor.layer_stride",
        "KVCacheTensor.block_stride",
        "KVCacheTensor.offset",
    ),
    "vllm.config": (
        "VllmConfig.use_v2_model_runner",
        "ModelConfig.is_encoder_decoder",
        "ModelConfig.is_hybrid",
        "ModelConfig.is_attention_free",
        "ModelConfig.get_vocab_size",
        "ModelConfig.get_num_kv_heads",
        "ModelConfig.get_num_layers",
        "ModelConfig.get_head_size",
        "ModelConfig.use_mla",
    ),
    "vllm.distributed.kv_transfer": ("get_kv_transfer_group",),
    "vllm.distributed.parallel_state": ("get_tensor_model_parallel_rank",),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "KVConnectorMetadata",
        "KVConnectorRole.SCHEDULER",
        "KVConnectorWorkerMetadata.aggregate",
        "KVConnectorBase_V1(vllm_config, role, kv_cache_config)",
        "KVConnectorBase_V1.requires_kv_delivery",
        "KVConnectorBase_V1.bind_kv_cache_manager",
        "KVConnectorBase_V1.on_new_request",
        "KVConnectorBase_V1.get_num_new_matched_tokens",
        "KVConnectorBase_V1.update_state_after_alloc",
        "KVConnectorBase_V1.build_connector_meta",
        "KVConnectorBase_V1.update_connector_output",
        "KVConnectorBase_V1.request_finished",
        "KVConnectorBase_V1.register_kv_caches",
        "KVConnectorBase_V1.bind_connector_metadata",
        "KVConnectorBase_V1.start_load_kv",
        "KVConnectorBase_V1.wait_for_layer_load",
        "KVConnectorBase_V1.save_kv_layer",
        "KVConnectorBase_V1.wait_for_save",
        "KVConnectorBase_V1.get_finished",
        "KVConnectorBase_V1.get_block_ids_with_load_errors",
        "KVConnectorBase_V1.build_connector_worker_meta",
    ),
    "vllm.v1.core.kv_cache_manager": (
        "KVCacheManager.get_block_ids",
        "KVCacheManager.evict_blocks",
        "KVCacheBlocks.get_block_ids",
    ),
    "vllm.v1.core.sched.output": (
        "SchedulerOutput.num_scheduled_tokens",
        "SchedulerOutput.scheduled_new_reqs",
        "SchedulerOutput.scheduled_cached_reqs",
        "SchedulerOutput.has_sync_kv_loads",
        "NewRequestData.req_id",
        "NewRequestData.num_computed_tokens",
        "CachedRequestData.req_ids",
        "CachedRequestData.num_computed_tokens",
    ),
    "vllm.v1.request": ("RequestStatus.FINISHED_LENGTH_CAPPED",),
}


def missing_names(used: Iterable[tuple[str, tuple[str, ...]]] | None = None) -> list[str]:
    """The names of `USED_NAMES` that this interpreter's vLLM does not have, dotted; imports vLLM."""
    missing = []
    for module, names in USED_NAMES.items() if used is None else used:
        try:
            found = importlib.import_module(module)
        # vLLM's modules load libraries that fail with errors of their own.
        except Exception:
            missing.append(module)
            continue
        missing += [f"{module}.{name}" for name in names if not _has_name(found, name)]
    return missing


def installed_version() -> str:
    """The version of vLLM in this interpreter, with its local part; "" if it has none. Loads nothing."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_supported(version: str) -> bool:
    """Whether the suite has passed on this version."""
    return version.split("+", 1)[0] in SUPPORTED_VERSIONS


def _has_name(module: Any, name: str) -> bool:
    """Whether `module` has "name", "Class.name" or "name(a, b)"."""
    path, _, arguments = name.partition("(")
    found = module
    for part in path.split("."):
        if not hasattr(found, part) and part not in _field_names(found):
            return False
        found = getattr(found, part, None)
    if not arguments:
        return True
    try:
        taken = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False
    return set(arguments.rstrip(")").split(", ")) <= set(taken)


def _field_names(kind: Any) -> set[str]:
    """The fields that a class declares, in itself or in its bases; they need not be attributes of it."""
    return {field for base in getattr(kind, "__mro__", ()) for field in getattr(base, "__annotations__", {})}
