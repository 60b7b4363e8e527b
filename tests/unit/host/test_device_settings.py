"""Settings of workers on GPUs: their defaults, and what is refused before anything is looked for."""

from __future__ import annotations

import pytest

from diptych.config.load import LoadedConfig, load_config
from diptych.errors import ConfigError
from services.host.device_settings import apply_device


def settle(**given: str) -> LoadedConfig:
    return apply_device(load_config("serve", given, {}))


def test_steps_are_larger_on_a_gpu_unless_the_user_says_otherwise() -> None:
    cpu, cuda, emulated = (settle(device=name).config for name in ("cpu", "cuda", "emulated"))
    assert (cpu.max_num_batched_tokens, cpu.max_num_seqs, cpu.threads) == (512, 64, 1)
    assert (cuda.max_num_batched_tokens, cuda.max_num_seqs, cuda.threads) == (4096, 256, 2)
    assert (emulated.max_num_batched_tokens, emulated.max_num_seqs, emulated.threads) == (4096, 256, 1)
    assert settle(device="emulated", swap_space="1GiB").config.swap_space == 1 << 30
    own = settle(device="cuda", max_num_batched_tokens="128", threads="1").config
    assert (own.max_num_batched_tokens, own.max_num_seqs, own.threads) == (128, 128, 1)
    assert settle(device="cuda", max_num_seqs="8").config.max_num_seqs == 8


@pytest.mark.parametrize("device", ["cuda", "emulated"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bulk": "1", "prefill": "0", "decode": "0"}, "bulk workers compute on the CPU"),
        ({"prefill_tp": "2"}, "--prefill-tp 2 splits a worker"),
        ({"decode_tp": "2"}, "--decode-tp 2 splits a worker"),
        ({"prefill_pp": "3"}, "--prefill-pp 3 splits a worker"),
        ({"decode_pp": "3"}, "--decode-pp 3 splits a worker"),
        ({"kv_keep": "0.9"}, "--kv-keep 0.9 evicts KV"),
        ({"kv_cache_codec": "raw:0.5,tq4"}, "several KV classes"),
        ({"kv_cache_codec": "auto"}, "several KV classes"),
        ({"kv_cache_codec": "auto,tq4"}, "several KV classes"),
    ],
)
def test_what_gpus_do_not_do_is_refused(device: str, given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        settle(device=device, **given)
    assert caught.value.fix and len(caught.value.lines()) <= 6


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpu_memory_utilization": "0.5"}, "--gpu-memory-utilization has no effect"),
        ({"transfer_buffer_bytes": "1GiB", "device": "cpu"}, "--transfer-buffer-bytes has no effect"),
    ],
)
def test_settings_of_gpus_mean_nothing_on_the_cpu(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        settle(**given)
    assert "add --device cuda" in caught.value.fix


def test_prompts_on_a_gpu_yield_to_nobody() -> None:
    with pytest.raises(ConfigError, match="--prefill-yields has no effect") as caught:
        settle(device="emulated", prefill_yields="never")
    assert caught.value.fix and len(caught.value.lines()) <= 6


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"threads": "2"}, "several threads or ranks"),
        ({"prefill_tp": "2"}, "several threads or ranks"),
        ({"prefill_pp": "2"}, "several threads or ranks"),
        ({"colocated": "2"}, "no worker has prompts alone"),
        ({"bulk": "1", "prefill": "0", "decode": "0"}, "no worker has prompts alone"),
    ],
)
def test_always_is_refused_where_nothing_can_yield(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match="--prefill-yields has no effect") as caught:
        settle(prefill_yields="always", **given)
    assert words in caught.value.why and len(caught.value.lines()) <= 6
    for setting in ("auto", "never"):
        settle(prefill_yields=setting, **given)
