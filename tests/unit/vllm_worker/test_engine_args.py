"""The command line for vLLM's parser: ours comes last, and what contradicts it is refused with a fix."""

from __future__ import annotations

import json

import pytest

from diptych.errors import ConfigError
from vllm_worker.setup.engine_args import (
    EngineOptions,
    build_arguments,
    check_vllm_args,
    chunks_prompts,
    flag_name,
    kv_arguments,
)


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--block-size", "block-size"),
        ("--block_size=16", "block-size"),
        ("--no-async-scheduling", "async-scheduling"),
        ("--kv-transfer-config.kv_role", "kv-transfer-config"),
        ("--compilation-config.custom_ops+", "compilation-config"),
        ("-tp=2", "tensor-parallel-size"),
        ("-dp", "data-parallel-size"),
        ("16", ""),
        ("-1", ""),
    ],
)
def test_flags_are_recognised_in_every_spelling(argument: str, name: str) -> None:
    assert flag_name(argument) == name


@pytest.mark.parametrize(
    "argument",
    [
        "--model",
        "--max_model_len=5",
        "-tp",
        "--block-size=32",
        "--kv-transfer-config.kv_connector",
        "--async-scheduling",
        "--enable-expert-parallel",
        "--data-parallel-size=2",
        "-pp",
        "--speculative-config",
        "--no-enable-prefix-caching",
        "--config",
        "--help=all",
        "-h",
    ],
)
def test_what_contradicts_ours_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_vllm_args(["--enforce-eager", argument, "2"])
    assert flag_name(argument) in refused.value.what
    assert refused.value.why and refused.value.fix and len(refused.value.lines()) <= 6


def test_the_users_flags_come_first() -> None:
    options = EngineOptions("folder", dtype="float32", kv_bytes=1 << 20, vllm_args=("--quantization", "awq"))
    args = build_arguments(options, is_cpu=False)
    assert args[:4] == ["--quantization", "awq", "--model", "folder"]
    pairs = dict(zip(args, args[1:], strict=False))
    assert pairs["--block-size"] == "64" and pairs["--scheduling-policy"] == "priority"
    assert pairs["--kv-cache-memory-bytes"] == str(1 << 20)
    assert pairs["--distributed-executor-backend"] == "uni"
    config = json.loads(pairs["--kv-transfer-config"])
    assert config["kv_connector_module_path"] == "vllm_worker.connector"
    assert config["kv_load_failure_policy"] == "fail"


def test_an_engine_without_hand_off_has_no_connector() -> None:
    assert "--kv-transfer-config" not in build_arguments(EngineOptions("folder", connector=None), True)


def test_prompts_are_whole_on_cpus_unless_asked() -> None:
    plain, asked = EngineOptions("m"), EngineOptions("m", vllm_args=("--enable-chunked-prefill",))
    assert not chunks_prompts(plain, is_cpu=True) and chunks_prompts(plain, is_cpu=False)
    assert chunks_prompts(asked, is_cpu=True)
    refused = EngineOptions("m", vllm_args=("--no-enable-chunked-prefill",))
    assert not chunks_prompts(refused, is_cpu=False)
    assert "--no-enable-chunked-prefill" in build_arguments(plain, is_cpu=True)
    assert "--max-num-batched-tokens" not in build_arguments(plain, is_cpu=True)
    assert "--max-num-batched-tokens" in build_arguments(asked, is_cpu=True)


def test_only_arguments_that_may_change_kv_tell_workers_apart() -> None:
    args = ["--enforce-eager", "--hf-token", "secret", "--quantization", "fp8", "--hf-token=secret"]
    assert kv_arguments([*args, "--hf-overrides", "{}"]) == "--quantization fp8 --hf-overrides {}"


def test_several_ranks_are_processes() -> None:
    args = build_arguments(EngineOptions("m", tp=2), is_cpu=True)
    assert args[args.index("--distributed-executor-backend") + 1] == "mp"
