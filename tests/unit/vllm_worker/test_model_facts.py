"""What must hold in vLLM's configuration, however it was asked for. The configurations here are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diptych.errors import ConfigError, ModelError
from vllm_worker.setup.model_facts import check_blocks, check_model, check_options


def make_config(**changes: Any) -> Any:
    """A configuration of one rank that prefills prompts whole; `changes` are fields of any of its parts."""
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False, "world_size": 1,
        },
        "scheduler_config": {"async_scheduling": False, "enable_chunked_prefill": False},
        "cache_config": {"block_size": 64},
    }  # fmt: skip
    whole: dict[str, Any] = {"speculative_config": None, "lora_config": None}
    for name, value in changes.items():
        place = next((part for part in parts.values() if name in part), whole)
        place[name] = value
    return SimpleNamespace(**whole, **{name: SimpleNamespace(**part) for name, part in parts.items()})


def test_what_is_supported_is_accepted() -> None:
    check_options(make_config(), ranks=1, is_chunked=False)
    check_options(make_config(world_size=2, enable_chunked_prefill=True), ranks=2, is_chunked=True)
    check_blocks(make_config())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"enable_expert_parallel": True}, "expert"),
        ({"world_size": 2}, "2 ranks instead of 1"),
        ({"speculative_config": object()}, "speculative"),
        ({"lora_config": object()}, "LoRA"),
        ({"async_scheduling": True}, "asynchronous"),
        ({"enable_chunked_prefill": True}, "prefill"),
    ],
)
def test_what_came_by_another_spelling_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        check_options(make_config(**changes), ranks=1, is_chunked=False)
    assert len(refused.value.lines()) <= 6


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ModelError, match="blocks of 16 tokens"):
        check_blocks(make_config(block_size=16))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runner_type": "pooling"}, "no text"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"is_hybrid": True}, "beside layers with KV"),
        ({"is_attention_free": True}, "instead of KV"),
    ],
)
def test_models_without_kv_of_one_kind_are_refused(changes: dict[str, Any], words: str) -> None:
    kinds = {
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "is_hybrid": False,
        "is_attention_free": False,
    }
    check_model(SimpleNamespace(**kinds))
    with pytest.raises(ModelError, match=words):
        check_model(SimpleNamespace(**kinds | changes))
