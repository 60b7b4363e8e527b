"""The memory of a worker on a device: what a plan gives to the pool, and what its refusals advise."""

from __future__ import annotations

import re
from types import MappingProxyType

import pytest

from diptych.config.values import byte_size
from diptych.errors import ConfigError, ModelError
from engine.model.architecture import ModelConfig, RopeConfig
from engine.model.device_plan import (
    CONTEXT_BYTES,
    DeviceNeeds,
    DeviceShare,
    check_device_dtype,
    device_dtype,
    plan_device_memory,
    plan_transfer_buffer,
    predict_needs,
)
from engine.model.memory_plan import MemoryPlan
from kvcache.layout import KvLayout

GIB = 1 << 30
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336,
    vocab=128256, context=131072, eps=1e-5, tied=False, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
    windows=(0,) * 32, rope=RopeConfig("default", 500_000.0),
)  # fmt: skip
LAYOUT = KvLayout(LLAMA_8B.layers, LLAMA_8B.kv_heads, LLAMA_8B.head_dim, "bfloat16")
H200 = DeviceShare(141 * GIB)


def plan(share: DeviceShare, length: int | None = 8192, kv_bytes: int | None = None) -> MemoryPlan:
    context = length or LLAMA_8B.context
    needs = predict_needs(LLAMA_8B, LAYOUT, context, step_tokens=4096, step_rows=256)
    return plan_device_memory(
        "some/model", LLAMA_8B, LAYOUT, share, needs, max_model_len=length, kv_bytes=kv_bytes
    )


def refusal(share: DeviceShare, length: int | None = 8192, kv_bytes: int | None = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        plan(share, length, kv_bytes)
    assert len(caught.value.lines()) <= 6 and "some/model does not fit on the device" in caught.value.what
    return caught.value


def advised(error: ModelError, flag: str) -> str:
    found = re.search(rf"{flag} (\S+?)(,| |$)", error.fix)
    assert found, error.fix
    return found[1]


def test_the_pool_is_what_is_left_of_the_share() -> None:
    found = plan(H200)
    whole = found.fixed_bytes + found.step_bytes + found.kv_bytes + CONTEXT_BYTES
    assert 0 <= int(141 * GIB * 0.9) - whole < LAYOUT.chunk_bytes
    assert 14.9 * GIB < found.weight_bytes < 15.1 * GIB, "8.03 billion numbers of 2 bytes"
    two = plan(DeviceShare(141 * GIB, workers=2))
    assert abs(two.kv_bytes - (found.kv_bytes - int(141 * GIB * 0.9) / 2)) < 2 * LAYOUT.chunk_bytes
    assert plan(H200, kv_bytes=4 * GIB).kv_bytes == 4 * GIB
    assert plan(DeviceShare(141 * GIB, utilization=0.5)).kv_bytes < found.kv_bytes - 56 * GIB


def test_first_tokens_and_angles_of_coded_pages_are_counted() -> None:
    coded = KvLayout(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, "bfloat16", "tq4")
    needs = predict_needs(LLAMA_8B, coded, 8192, step_tokens=4096, step_rows=256)
    found = plan_device_memory(
        "some/model", LLAMA_8B, coded, H200, needs, max_model_len=8192, kv_bytes=None, max_requests=3
    )
    assert found.sink_slots >= 256 and found.sink_bytes and found.angle_bytes
    assert found.num_slabs == 3 * coded.num_chunks(8192)


def test_the_advice_of_a_refused_context_works() -> None:
    share = DeviceShare(24 * GIB)
    error = refusal(share, 131_072 if LLAMA_8B.context >= 131_072 else LLAMA_8B.context)
    longest = int(advised(error, "--max-model-len"))
    assert plan(share, longest).num_slabs >= longest // 64
    assert "KV pool" in error.why and "24.00 GiB" in error.why and f"fits is {longest}" in error.why


def test_the_advice_of_a_refused_pool_works() -> None:
    large = refusal(H200, kv_bytes=130 * GIB)
    size = byte_size().parse(advised(large, "--kv-cache-memory-bytes"))
    assert plan(H200, kv_bytes=size).kv_bytes > 100 * GIB
    small = refusal(H200, kv_bytes=64 << 20)
    size = byte_size().parse(advised(small, "--kv-cache-memory-bytes"))
    assert plan(H200, kv_bytes=size).num_slabs >= 128
    assert plan(H200, int(advised(small, "--max-model-len")), 64 << 20).kv_bytes <= 64 << 20


def test_a_model_that_does_not_fit_at_all_is_refused() -> None:
    error = refusal(DeviceShare(24 * GIB, workers=2))
    assert "use a smaller model" in error.fix and "fewer workers per GPU" in error.fix
    assert "/ 2 workers" in error.why


def test_measured_needs_take_the_place_of_predicted_ones() -> None:
    needs = DeviceNeeds(GIB, 2 * GIB, 0, MappingProxyType({}))
    share = DeviceShare(10 * GIB, 1.0, 1, 3 * GIB)
    found = plan_device_memory("m", LLAMA_8B, LAYOUT, share, needs, max_model_len=64, kv_bytes=None)
    assert found.max_kv_bytes == 4 * GIB


def test_a_buffer_holds_a_request_and_fits_in_the_host() -> None:
    one = LAYOUT.num_chunks(2048) * LAYOUT.chunk_bytes

    def buffer(asked: int | None, host: int, length: int = 2048) -> int:
        return plan_transfer_buffer("m", LAYOUT, length, asked=asked, host_bytes=host)

    assert buffer(None, 64 * GIB) == 4 * one
    assert buffer(None, 3 * one) == one, "a quarter of the host would be too small"
    assert buffer(one + 5, 64 * GIB) == one
    for asked, host, words in (
        (one - 1, 64 * GIB, "too small for one request of m"),
        (65 * GIB, 64 * GIB, "does not fit in host memory"),
        (None, one - 1, "does not fit in host memory"),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            buffer(asked, host)
        assert len(caught.value.lines()) <= 6
        if "--transfer-buffer-bytes" in caught.value.fix:
            size = byte_size().parse(advised(caught.value, "--transfer-buffer-bytes"))
            assert buffer(size, host) <= host
        else:
            assert buffer(asked, host, int(advised(caught.value, "--max-model-len"))) <= host


def test_automatic_means_bfloat16() -> None:
    assert device_dtype("auto") == "bfloat16" and device_dtype("float32") == "float32"
    with pytest.raises(ConfigError, match="int8 is not available on a GPU"):
        device_dtype("int8")


def test_a_type_that_the_gpu_lacks_is_refused() -> None:
    check_device_dtype("float16", "Tesla T4", (7, 5))
    check_device_dtype("bfloat16", "A100", (8, 0))
    with pytest.raises(ConfigError, match="Tesla T4 does not compute in bfloat16") as caught:
        check_device_dtype("bfloat16", "Tesla T4", (7, 5))
    assert "--dtype float16" in caught.value.fix and "7.5" in caught.value.why
