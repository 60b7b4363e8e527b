"""The command line that vLLM's own parser reads: the user's `--vllm-args`, then what a worker of ours needs.

Imports neither vLLM nor torch. What a worker sets comes last, so nothing of the user's can change it by another
spelling; flags that contradict it are refused before that, each with what to do instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError

CONNECTOR_CLASS = "DiptychConnector"
CONNECTOR_MODULE = "vllm_worker.connector"
# Flags that options of `diptych serve` stand for, by vLLM's name.
_OURS = {
    "model": "name the model itself: diptych serve MODEL",
    "revision": "use --revision",
    "dtype": "use --dtype",
    "seed": "leave it out: requests bring their seeds",
    "max-model-len": "use --max-model-len",
    "gpu-memory-utilization": "use --gpu-memory-utilization",
    "device-memory-utilization": "use --gpu-memory-utilization",
    "kv-cache-memory-bytes": "use --kv-cache-memory-bytes",
    "max-num-seqs": "use --max-num-seqs",
    "max-num-batched-tokens": "use --max-num-batched-tokens",
    "tensor-parallel-size": "use --prefill-tp and --decode-tp",
    "enable-prefix-caching": "use --enable-prefix-caching or --no-enable-prefix-caching",
    "served-model-name": "use --served-model-name of diptych serve",
}
# Flags that a worker has set for good, and why.
_FIXED = {
    "block-size": f"a block is a chunk of {CHUNK_TOKENS} tokens",
    "scheduling-policy": "requests have priorities",
    "kv-transfer-config": "KV is handed over by Diptych's own connector",
    "ec-transfer-config": "KV is handed over by Diptych's own connector",
    "kv-offloading-size": "KV is handed over by Diptych's own connector",
    "kv-offloading-backend": "KV is handed over by Diptych's own connector",
    "structured-outputs-config": "grammars are llguidance's, as on Diptych's own workers",
    "logprobs-mode": "log-probabilities are those of the model, before any change",
    "generation-config": "the gateway resolves all defaults",
    "override-generation-config": "the gateway resolves all defaults",
    "async-scheduling": "a step's tokens are sent before the next step begins",
    "distributed-executor-backend": "ranks are processes of the worker",
    "runner": "workers generate text",
    "convert": "workers generate text",
    "skip-tokenizer-init": "grammars need the tokenizer",
    "scheduler-cls": "the connector needs vLLM's own scheduler",
    "worker-cls": "the connector needs vLLM's own workers",
    "config": "each flag is checked, and a file's would not be",
    "help": "it is no setting",
    "disable-log-stats": "the worker's statistics come from vLLM's",
    "enable-logging-iteration-details": "the worker's statistics come from vLLM's",
}
# What cannot be handed over.
_MISSING = {
    "data-parallel-size": "data parallelism",
    "data-parallel-size-local": "data parallelism",
    "data-parallel-rank": "data parallelism",
    "data-parallel-start-rank": "data parallelism",
    "data-parallel-address": "data parallelism",
    "data-parallel-backend": "data parallelism",
    "data-parallel-hybrid-lb": "data parallelism",
    "data-parallel-external-lb": "data parallelism",
    "enable-expert-parallel": "expert parallelism",
    "enable-elastic-ep": "expert parallelism",
    "enable-eplb": "expert parallelism",
    "pipeline-parallel-size": "pipeline parallelism",
    "decode-context-parallel-size": "context parallelism",
    "prefill-context-parallel-size": "context parallelism",
    "nnodes": "a worker on several machines",
    "speculative-config": "speculative decoding",
    "spec-method": "speculative decoding",
    "spec-model": "speculative decoding",
    "spec-tokens": "speculative decoding",
    "enable-lora": "LoRA adapters",
    "diffusion-config": "diffusion models",
    "pooler-config": "pooling models",
}
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-n": "nnodes",
    "-sc": "speculative-config",
    "-dc": "diffusion-config",
    "-h": "help",
}
# Flags that change neither KV nor tokens, or that nobody else may see.
_PRIVATE = {"enforce-eager", "download-dir", "hf-token", "log-level", "log-config-file", "logging-config"}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a worker asks of vLLM. Bytes and tokens; None: vLLM decides.

    With `kv_bytes` None, vLLM takes the share `gpu_memory_utilization` of the device's memory. `connector` is the
    configuration that the connector reads; None: the engine hands no KV over. `chunked_prefill` counts on devices: on
    CPUs prompts are prefilled whole, unless `vllm_args` says otherwise.
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    kv_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    tp: int = 1
    prefix_caching: bool = True
    chunked_prefill: bool = True
    vllm_args: tuple[str, ...] = ()
    connector: dict[str, Any] | None = field(default_factory=dict)


def flag_name(argument: str) -> str:
    """vLLM's name of the flag that `argument` sets, without dashes, negation, keys and value; "" if it is no flag."""
    if not argument.startswith("-") or argument[1:2].isdigit():
        return ""
    head = argument.split("=", 1)[0]
    if not head.startswith("--"):
        return _SHORT.get(head, head.lstrip("-"))
    name = head[2:].split(".", 1)[0].rstrip("+").replace("_", "-")
    return name.removeprefix("no-")


def check_vllm_args(args: Sequence[str]) -> None:
    """Check that the user's `--vllm-args` contradict nothing that a worker sets.

    Raises:
        ConfigError: a flag has an option of ours, is fixed, or asks for what cannot be handed over.
    """
    for argument in args:
        name = flag_name(argument)
        shown = f"--vllm-args: --{name} cannot be given"
        if name in _OURS:
            raise ConfigError(shown, "diptych serve has its own option for it", _OURS[name])
        if name in _FIXED:
            raise ConfigError(shown, _FIXED[name], "leave it out")
        if name in _MISSING:
            why = f"workers of vLLM do not support {_MISSING[name]}"
            raise ConfigError(shown, why, "leave it out; docs/engines.md has what is supported")


def kv_arguments(args: Sequence[str]) -> str:
    """Those of the user's `--vllm-args` that may change KV: workers where they differ exchange none."""
    kept, skips = list[str](), False
    for argument in args:
        if name := flag_name(argument):
            skips = name in _PRIVATE
        if not skips:
            kept.append(argument)
    return " ".join(kept)


def chunks_prompts(options: EngineOptions, is_cpu: bool) -> bool:
    """Whether long prompts are prefilled in parts."""
    for argument in reversed(options.vllm_args):
        if flag_name(argument) == "enable-chunked-prefill":
            return not argument.startswith("--no")
    return options.chunked_prefill and not is_cpu


def build_arguments(options: EngineOptions, is_cpu: bool) -> list[str]:
    """The arguments for vLLM's parser; `is_cpu`: it is vLLM's build for CPUs.

    `--max-num-batched-tokens` is not among them while prompts are prefilled whole: it has to be at least the model's
    length, which is known later (`vllm_worker.vllm_port`).

    Raises:
        ConfigError: as `check_vllm_args`.
    """
    check_vllm_args(options.vllm_args)
    args = [*options.vllm_args, "--model", options.model, "--dtype", options.dtype]
    for flag, value in (
        ("--revision", options.revision),
        ("--max-model-len", options.max_model_len),
        ("--kv-cache-memory-bytes", options.kv_bytes),
        ("--gpu-memory-utilization", options.gpu_memory_utilization),
    ):
        args += [] if value is None else [flag, str(value)]
    whole = not chunks_prompts(options, is_cpu)
    args += ["--no-enable-chunked-prefill"] if whole else ["--enable-chunked-prefill"]
    args += [] if whole else ["--max-num-batched-tokens", str(options.max_num_batched_tokens)]
    args += ["--max-num-seqs", str(options.max_num_seqs)]
    args += ["--tensor-parallel-size", str(options.tp)]
    args += ["--distributed-executor-backend", "uni" if options.tp == 1 else "mp"]
    args += ["--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"]
    args += ["--block-size", str(CHUNK_TOKENS), "--scheduling-policy", "priority", "--no-async-scheduling"]
    args += ["--generation-config", "vllm", "--enable-logging-iteration-details"]
    args += ["--structured-outputs-config", json.dumps({"backend": "guidance"})]
    if options.connector is not None:
        args += ["--kv-transfer-config", json.dumps(connector_config(options.connector))]
    return args


def connector_config(extra: dict[str, Any]) -> dict[str, Any]:
    """vLLM's configuration of our connector, with what only the connector reads.

    A load that fails ends its request, which another attempt can serve: were it computed again, blocks with wrong KV
    would stay under the names of prefixes meanwhile.
    """
    return {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }
