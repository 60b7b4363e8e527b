"""Settings: what a user may choose.

`Config` is the one home of every setting: its field names are the YAML keys, and flags (`--max-model-len`), environment
names (`DIPTYCH_MAX_MODEL_LEN`), help, docs/configuration.md and the schema for editors derive from it.
`diptych.config.load` merges the sources. Durations are seconds unless the name says otherwise.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from diptych.chunks import DEFAULT_KV_BUDGET_PCT
from diptych.config.answer_parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from diptych.config.fields import ENV_PREFIX, Listing
from diptych.config.values import (
    byte_size,
    duration_ms,
    duration_s,
    folder_or_none,
    http_url,
    key,
    keys,
    one_of,
    path,
    percentage,
    share,
    some_of,
    switch,
    text,
    texts,
    url_path,
    whole_number,
)
from diptych.logs.log_format import LOG_FORMATS
from diptych.specs import DEFAULT_UTILIZATION, EMULATED, ENGINES

ALL_COMMANDS, PART_COMMANDS = ("serve", "worker", "gateway"), ("worker", "gateway")
MODEL, POOLS, ENGINE, HTTP = "Model", "Pools", "Engine and KV cache", "HTTP"
REPLAN, SLO_LIMITS, SINGLE_PART, PROCESS = "Replanning", "SLOs and limits", "One part alone", "Process"
DTYPES = ("float32", "float16", "bfloat16")

WORKER_COMMANDS, GATEWAY_COMMANDS = ("serve", "worker"), ("serve", "gateway")
RARE_LIMIT, RARE_HTTP = (Listing(panel, GATEWAY_COMMANDS, rare=True) for panel in (SLO_LIMITS, HTTP))
TIER = Listing(ENGINE, WORKER_COMMANDS, shown="none", rare=True)

Count = Annotated[int, whole_number()]
PositiveCount = Annotated[int, whole_number(1)]
Processes = Annotated[int, whole_number(1, 64)]
ByteSize = Annotated[int, byte_size()]
DurationS = Annotated[float, duration_s()]
DurationMs = Annotated[float, duration_ms()]
Switch = Annotated[bool, switch()]
Host = Annotated[str, text("HOST")]
FilePath = Annotated[Path, path()]
FolderPath = Annotated[Path, path("DIR")]
FolderOrNone = Annotated[Path | Literal["none"], folder_or_none()]
Secret = Annotated[str, key()]
Secrets = Annotated[tuple[str, ...], keys()]


class Config(BaseSettings):
    """Every choice there is, with its default. Loaded by `diptych.config.load.load_config`; consequences are
    properties. `Config()` has the defaults, whatever the environment says.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        # Lists are separated by commas; they are not JSON.
        enable_decoding=False,
        # Error messages do not repeat the value, which may be a secret.
        hide_input_in_errors=True,
    )

    model: Annotated[str, text("MODEL"), Listing(MODEL, ALL_COMMANDS)] = Field(
        default="tiny", description="Hugging Face id, local folder, or 'tiny'"
    )
    served_model_name: Annotated[
        tuple[str, ...], texts("NAME"), Listing(MODEL, GATEWAY_COMMANDS, shown="MODEL")
    ] = Field(default=(), description="Model names for clients; responses carry the first")
    revision: Annotated[Annotated[str, text("REV")] | None, Listing(MODEL, ALL_COMMANDS, rare=True)] = Field(
        default=None, description="Branch, tag or commit on the hub"
    )
    dtype: Annotated[str, one_of("auto", *DTYPES), Listing(MODEL, WORKER_COMMANDS)] = Field(
        default="auto", description="Weights and KV (on CPU float32)"
    )
    device: Annotated[
        str, one_of("auto", "cpu", "cuda", hidden=EMULATED), Listing(MODEL, WORKER_COMMANDS)
    ] = Field(default="auto", description="Where to compute")
    engine: Annotated[str, one_of(*ENGINES), Listing(MODEL, ALL_COMMANDS, rare=True)] = Field(
        default="diptych", description="What computes the model"
    )
    vllm_python: Annotated[FilePath | None, Listing(MODEL, WORKER_COMMANDS, rare=True)] = Field(
        default=None, description="Python interpreter that has vLLM, for --engine vllm"
    )
    vllm_args: Annotated[
        Annotated[str, text("'--FLAG ...'")] | None, Listing(MODEL, WORKER_COMMANDS, rare=True)
    ] = Field(default=None, description="Arguments of `vllm serve`, for --engine vllm")
    max_model_len: Annotated[PositiveCount | None, Listing(MODEL, ALL_COMMANDS, shown="the model's")] = Field(
        default=None, description="Longest prompt plus answer, in tokens"
    )
    chat_template: Annotated[FilePath | None, Listing(MODEL, GATEWAY_COMMANDS, shown="the model's")] = Field(
        default=None, description="Jinja chat template"
    )
    tool_call_parser: Annotated[
        Annotated[str, one_of(*TOOL_CALL_PARSERS)] | None,
        Listing(MODEL, GATEWAY_COMMANDS, shown="the template's", rare=True),
    ] = Field(default=None, description="How the model writes calls of tools")
    reasoning_parser: Annotated[
        Annotated[str, one_of(*REASONING_PARSERS)] | None,
        Listing(MODEL, GATEWAY_COMMANDS, shown="the template's", rare=True),
    ] = Field(default=None, description="How the model writes thoughts")
    generation_config: Annotated[str, text("model|none|DIR"), Listing(MODEL, GATEWAY_COMMANDS)] = Field(
        default="model", description="Source of sampling defaults"
    )

    prefill: Annotated[Count, Listing(POOLS, GATEWAY_COMMANDS)] = Field(
        default=1, description="Prefill workers: they compute the KV of prompts"
    )
    decode: Annotated[Count, Listing(POOLS, GATEWAY_COMMANDS)] = Field(
        default=1, description="Decode workers: they generate answers"
    )
    colocated: Annotated[Count, Listing(POOLS, GATEWAY_COMMANDS)] = Field(
        default=0, description="Workers that prefill and decode, instead of two pools"
    )
    bulk: Annotated[Count, Listing(POOLS, rare=True)] = Field(
        default=0, description="Workers for batches alone, of models larger than memory"
    )
    prefill_tp: Annotated[PositiveCount, Listing(POOLS, WORKER_COMMANDS)] = Field(
        default=1, description="Ranks that split each prefill worker's heads"
    )
    prefill_pp: Annotated[PositiveCount, Listing(POOLS, WORKER_COMMANDS)] = Field(
        default=1, description="Stages that split each prefill worker's layers"
    )
    decode_tp: Annotated[PositiveCount, Listing(POOLS, WORKER_COMMANDS)] = Field(
        default=1, description="Ranks that split each decode worker's heads"
    )
    decode_pp: Annotated[PositiveCount, Listing(POOLS, WORKER_COMMANDS)] = Field(
        default=1, description="Stages that split each decode worker's layers"
    )
    transports: Annotated[tuple[str, ...], some_of("shm", "nixl"), Listing(POOLS, WORKER_COMMANDS)] = Field(
        default=("shm", "nixl"), description="How KV may move, preferred first"
    )
    pin_cores: Annotated[Switch, Listing(POOLS, rare=True)] = Field(
        default=True, description="Give each CPU worker a core of its own"
    )
    plan: Annotated[FilePath | None, Listing(POOLS)] = Field(
        default=None, description="Pools, model and SLOs from `diptych plan`"
    )

    replan: Annotated[Switch, Listing(REPLAN)] = Field(
        default=False, description="Change the pools as traffic changes"
    )
    replan_mode: Annotated[str, one_of("act", "advise"), Listing(REPLAN, rare=True)] = Field(
        default="act", description="Apply decisions, or only print them"
    )
    replan_budget: Annotated[PositiveCount | None, Listing(REPLAN, shown="those of the start", rare=True)] = (
        Field(default=None, description="Most devices held at once, draining workers included")
    )
    replan_profile: Annotated[FilePath | None, Listing(REPLAN, shown="a data sheet", rare=True)] = Field(
        default=None, description="Costs of workers, measured by `diptych profile`"
    )
    replan_journal: Annotated[FilePath | None, Listing(REPLAN, rare=True)] = Field(
        default=None, description="Append each decision with its inputs here"
    )
    replan_window_s: Annotated[DurationS, Listing(REPLAN, rare=True)] = Field(
        default=300.0, description="Length of the traffic window that a decision uses"
    )
    replan_interval_s: Annotated[DurationS, Listing(REPLAN, rare=True)] = Field(
        default=1.0, description="How often the gateway is asked for traffic"
    )

    ray_address: Annotated[
        Annotated[str, text("auto|HOST:PORT")] | None, Listing(POOLS, shown="this machine")
    ] = Field(default=None, description="Ray cluster whose nodes run the workers")
    ray_namespace: Annotated[str, text("NAME"), Listing(POOLS, rare=True)] = Field(
        default="diptych", description="Name of this deployment in the cluster"
    )
    prefill_resources: Annotated[tuple[str, ...], texts("NAME=AMOUNT"), Listing(POOLS, rare=True)] = Field(
        default=(), description="Ray resources of each prefill worker, beside its devices"
    )
    decode_resources: Annotated[tuple[str, ...], texts("NAME=AMOUNT"), Listing(POOLS, rare=True)] = Field(
        default=(), description="Ray resources of each decode worker, beside its devices"
    )

    max_num_seqs: Annotated[PositiveCount, Listing(ENGINE, WORKER_COMMANDS)] = Field(
        default=64, description="Requests running at once per worker"
    )
    max_num_batched_tokens: Annotated[PositiveCount, Listing(ENGINE, WORKER_COMMANDS)] = Field(
        default=512, description="Token budget of one step"
    )
    enable_chunked_prefill: Annotated[Switch, Listing(ENGINE, WORKER_COMMANDS)] = Field(
        default=True, description="Split long prompts over steps"
    )
    enable_prefix_caching: Annotated[Switch, Listing(ENGINE, ALL_COMMANDS)] = Field(
        default=True, description="Keep and share the KV of common prefixes"
    )
    bulk_slice_ms: Annotated[DurationMs, Listing(ENGINE, WORKER_COMMANDS, rare=True)] = Field(
        default=20.0, description="Longest unit of bulk work, for which a request may wait"
    )
    bulk_policy: Annotated[
        Annotated[str, text("NAME=VALUE,...")] | None, Listing(ENGINE, shown="the largest block", rare=True)
    ] = Field(default=None, description="What bulk workers compute together, and what lies where")
    bulk_profile: Annotated[FilePath | None, Listing(ENGINE, rare=True)] = Field(
        default=None, description="Rates of `diptych profile --bulk`, to choose the policy by"
    )
    bulk_memory_bytes: Annotated[
        ByteSize | None, Listing(ENGINE, shown="80 % of what is free", rare=True)
    ] = Field(default=None, description="Most memory of a bulk worker's block")
    bulk_disk_bytes: Annotated[ByteSize | None, Listing(ENGINE, shown="half of what is free", rare=True)] = (
        Field(default=None, description="Most disk of a bulk worker's block")
    )
    swap_space: Annotated[int, byte_size(0), Listing(ENGINE, WORKER_COMMANDS, shown="none", rare=True)] = (
        Field(default=0, description="Host memory per worker for preempted requests")
    )
    kv_cache_memory_bytes: Annotated[
        ByteSize | None, Listing(ENGINE, WORKER_COMMANDS, shown="by model and memory")
    ] = Field(default=None, description="KV pool of each worker, e.g. 2GiB")
    kv_host_bytes: Annotated[ByteSize | None, TIER] = Field(default=None, description="KV in memory per host")
    kv_disk_bytes: Annotated[ByteSize | None, TIER] = Field(default=None, description="KV on disk per host")
    kv_disk_folder: Annotated[FolderPath | None, TIER] = Field(default=None, description="Where that disk is")
    gpu_memory_utilization: Annotated[
        Annotated[float, share(with_one=True)], Listing(ENGINE, WORKER_COMMANDS, rare=True)
    ] = Field(default=DEFAULT_UTILIZATION, description="Share of a GPU that its workers take together")
    transfer_buffer_bytes: Annotated[
        ByteSize | None, Listing(ENGINE, WORKER_COMMANDS, shown="by model and memory", rare=True)
    ] = Field(default=None, description="Host memory for the KV that a GPU worker hands over")
    kv_cache_codec: Annotated[str, text("CODEC"), Listing(ENGINE, WORKER_COMMANDS)] = Field(
        default="raw", description="How KV is stored: tq4, raw:0.5,nuq4-1%, or auto"
    )
    kv_quality_budget: Annotated[
        Annotated[float, percentage()] | None, Listing(ENGINE, ALL_COMMANDS, shown="1%", rare=True)
    ] = Field(default=None, description="Growth of perplexity that auto may cost")
    kv_keep: Annotated[float, share(with_one=True), Listing(ENGINE, GATEWAY_COMMANDS, rare=True)] = Field(
        default=1.0, description="Attention that heads keep; below 1 KV is evicted"
    )
    kv_cache_calibration: Annotated[
        FilePath | None, Listing(ENGINE, WORKER_COMMANDS, shown="the model's", rare=True)
    ] = Field(default=None, description="What `diptych calibrate` wrote, for nuq codecs")
    kv_lease_s: Annotated[float, duration_s(1.0), Listing(ENGINE, ALL_COMMANDS, rare=True)] = Field(
        default=30.0, description="How long prefilled KV waits for its decode worker"
    )
    pipelined_transfer: Annotated[Switch, Listing(ENGINE, ALL_COMMANDS, rare=True)] = Field(
        default=True, description="Move KV while later layers are computed"
    )
    threads: Annotated[PositiveCount, Listing(ENGINE, WORKER_COMMANDS, rare=True)] = Field(
        default=1, description="Compute threads per worker"
    )
    prefill_yields: Annotated[
        str, one_of("auto", "always", "never"), Listing(ENGINE, WORKER_COMMANDS, rare=True)
    ] = Field(default="never", description="Threads that wake interrupt prompts; auto: on shared cores")

    host: Annotated[Host, Listing(HTTP, GATEWAY_COMMANDS)] = Field(
        default="127.0.0.1", description="Address to listen on"
    )
    port: Annotated[int, whole_number(0, 65535, "PORT"), Listing(HTTP, GATEWAY_COMMANDS)] = Field(
        default=8000, description="Port to listen on (0: a free one)"
    )
    api_key: Annotated[Secrets, Listing(HTTP, GATEWAY_COMMANDS)] = Field(
        default=(), description="Ask for this bearer key (repeatable)"
    )
    api_key_file: Annotated[FilePath | None, Listing(HTTP, GATEWAY_COMMANDS)] = Field(
        default=None, description="Keys from a file, one per line"
    )
    priority_keys: Annotated[FilePath | None, Listing(HTTP, GATEWAY_COMMANDS, shown="none", rare=True)] = (
        Field(default=None, description="More API keys, which may ask for a priority below 0")
    )
    keys: Annotated[FilePath | None, Listing(HTTP, GATEWAY_COMMANDS, shown="none", rare=True)] = Field(
        default=None, description="API keys with names and rates, watched for changes"
    )
    metrics_key: Annotated[Secret | None, Listing(HTTP, GATEWAY_COMMANDS, shown="none", rare=True)] = Field(
        default=None, description="Key for /metrics, instead of API keys"
    )
    metrics_key_file: Annotated[FilePath | None, Listing(HTTP, GATEWAY_COMMANDS, shown="none", rare=True)] = (
        Field(default=None, description="A file with the key for /metrics")
    )
    admin_key: Annotated[Secret | None, Listing(HTTP, GATEWAY_COMMANDS, shown="none", rare=True)] = Field(
        default=None, description="Key for the workers, /status and /metrics"
    )
    admin_key_file: Annotated[FilePath | None, Listing(HTTP, GATEWAY_COMMANDS, shown="none", rare=True)] = (
        Field(default=None, description="A file with the admin key")
    )
    ssl_certfile: Annotated[FilePath | None, Listing(HTTP, GATEWAY_COMMANDS, shown="none", rare=True)] = (
        Field(default=None, description="Speak HTTPS with this certificate, watched for changes")
    )
    ssl_keyfile: Annotated[FilePath | None, Listing(HTTP, GATEWAY_COMMANDS, shown="none", rare=True)] = Field(
        default=None, description="The private key of the certificate"
    )
    root_path: Annotated[
        Annotated[str, url_path()] | None, Listing(HTTP, GATEWAY_COMMANDS, shown="none", rare=True)
    ] = Field(default=None, description="What a proxy strips from paths, for documents")
    insecure: Annotated[Switch, RARE_HTTP] = Field(default=False, description="Other hosts need no key")
    gateways: Annotated[Processes, RARE_HTTP] = Field(default=1, description="Processes that take HTTP")
    max_body_bytes: Annotated[ByteSize, Listing(HTTP, GATEWAY_COMMANDS, shown="8MiB", rare=True)] = Field(
        default=8 << 20, description="Largest request body"
    )
    max_open_requests: Annotated[PositiveCount, Listing(HTTP, GATEWAY_COMMANDS, rare=True)] = Field(
        default=1024, description="Sequences in flight before 429"
    )
    max_connections: Annotated[PositiveCount, Listing(HTTP, GATEWAY_COMMANDS, rare=True)] = Field(
        default=4096, description="Connections of clients; idle ones make room"
    )
    max_queued_tokens: Annotated[PositiveCount, Listing(HTTP, GATEWAY_COMMANDS, rare=True)] = Field(
        default=1 << 20, description="Prompt tokens waiting before 429"
    )

    data_dir: Annotated[FolderOrNone | None, Listing(HTTP, GATEWAY_COMMANDS, shown="a folder of yours")] = (
        Field(default=None, description="Folder for files and batches; none: off")
    )
    max_file_bytes: Annotated[ByteSize, Listing(HTTP, GATEWAY_COMMANDS, shown="200MiB", rare=True)] = Field(
        default=200 << 20, description="Largest file that may be uploaded"
    )
    max_tenant_bytes: Annotated[
        ByteSize | None, Listing(HTTP, GATEWAY_COMMANDS, shown="as much as the disk has left", rare=True)
    ] = Field(default=None, description="Most bytes that files and batches of a key take")
    max_tenant_files: Annotated[PositiveCount, Listing(HTTP, GATEWAY_COMMANDS, rare=True)] = Field(
        default=20_000, description="Most files of a key, results included"
    )
    max_tenant_batches: Annotated[PositiveCount, Listing(HTTP, GATEWAY_COMMANDS, rare=True)] = Field(
        default=1000, description="Most open batches of a key"
    )
    max_tenant_lines: Annotated[PositiveCount, Listing(HTTP, GATEWAY_COMMANDS, rare=True)] = Field(
        default=2_000_000, description="Most lines in all open batches of a key"
    )

    slo_ttft_ms: Annotated[DurationMs | None, Listing(SLO_LIMITS, GATEWAY_COMMANDS)] = Field(
        default=None, description="SLO of the time to first token"
    )
    slo_tpot_ms: Annotated[DurationMs | None, Listing(SLO_LIMITS, GATEWAY_COMMANDS)] = Field(
        default=None, description="SLO of the time per output token"
    )
    slo_target: Annotated[
        Annotated[float, share()] | None, Listing(SLO_LIMITS, GATEWAY_COMMANDS, shown="0.9", rare=True)
    ] = Field(default=None, description="Share of requests that shall meet each SLO")
    request_timeout_s: Annotated[DurationS, RARE_LIMIT] = Field(
        default=600.0, description="Longest time from a request's arrival to its end"
    )
    max_queue_wait_s: Annotated[DurationS, RARE_LIMIT] = Field(
        default=30.0, description="Refuse (429) what would wait longer"
    )
    unknown_fields: Annotated[str, one_of("refuse", "ignore"), RARE_LIMIT] = Field(
        default="refuse", description="What becomes of fields of requests that are not known"
    )
    recovery_s: Annotated[DurationS, RARE_LIMIT] = Field(
        default=15.0, description="How long requests wait for lost workers"
    )
    local_prefill: Annotated[str, one_of("never", "fallback", "auto"), RARE_LIMIT] = Field(
        default="fallback", description="Decode workers prefill: if no other can, or if better"
    )
    decode_overdraft: Annotated[str, one_of("off", "auto"), RARE_LIMIT] = Field(
        default="off", description="Compute prompts whose decode room is about to be free"
    )
    reader_stall_s: Annotated[DurationS, RARE_LIMIT] = Field(
        default=30.0, description="Cut off clients that receive too little for this long"
    )
    drain_s: Annotated[DurationS, Listing(SLO_LIMITS, ALL_COMMANDS, rare=True)] = Field(
        default=10.0, description="Grace for requests when stopping"
    )

    role: Annotated[Annotated[str, one_of("prefill", "decode")] | None, Listing(SINGLE_PART, ("worker",))] = (
        Field(default=None, description="What this worker does")
    )
    channel: Annotated[
        Annotated[str, text("tcp://HOST:PORT")] | None,
        Listing(SINGLE_PART, ALL_COMMANDS, rare_for=("serve",)),
    ] = Field(default=None, description="The gateway's channel for workers")
    keys_dir: Annotated[FolderPath | None, Listing(SINGLE_PART, ALL_COMMANDS, rare_for=("serve",))] = Field(
        default=None, description="Channel keys, made by `diptych keys`"
    )
    name: Annotated[
        Annotated[str, text("NAME")] | None, Listing(SINGLE_PART, ("worker",), shown="ROLE-HOST")
    ] = Field(default=None, description="Name of this worker")
    advertise_host: Annotated[
        Host | None, Listing(SINGLE_PART, ("worker",), shown="none: this host only")
    ] = Field(default=None, description="This host, as other hosts' workers reach it")
    core: Annotated[Count | None, Listing(SINGLE_PART, ("worker",), shown="none")] = Field(
        default=None, description="Core to pin this worker to"
    )
    host_workers: Annotated[PositiveCount, Listing(SINGLE_PART, ("worker",))] = Field(
        default=1, description="Workers on this machine, among whom its memory is shared"
    )

    start_timeout_s: Annotated[DurationS, Listing(PROCESS, rare=True)] = Field(
        default=600.0, description="Longest start, or standstill while weights are packed"
    )
    log_level: Annotated[str, one_of("debug", "info", "warning", "error"), Listing(PROCESS, ALL_COMMANDS)] = (
        Field(default="warning", description="Detail of logs")
    )
    log_format: Annotated[str, one_of(*LOG_FORMATS), Listing(PROCESS, ALL_COMMANDS, rare=True)] = Field(
        default="text", description="Lines of logs"
    )
    request_log: Annotated[FilePath | None, Listing(PROCESS, GATEWAY_COMMANDS, rare=True)] = Field(
        default=None, description="Log the events of each request here (JSONL)"
    )
    otlp_traces_endpoint: Annotated[
        Annotated[str, http_url()] | None, Listing(PROCESS, GATEWAY_COMMANDS, rare=True)
    ] = Field(default=None, description="Send a trace of each request here (OTLP over HTTP)")
    trace_sample: Annotated[float, share(with_ends=True), Listing(PROCESS, GATEWAY_COMMANDS, rare=True)] = (
        Field(default=1.0, description="Share of requests that are traced")
    )
    step_log: Annotated[FolderPath | None, Listing(PROCESS, WORKER_COMMANDS, rare=True)] = Field(
        default=None, description="Workers log what each step cost here (JSONL)"
    )
    log_dir: Annotated[FolderPath | None, Listing(PROCESS, rare=True)] = Field(
        default=None, description="Keep the logs of all parts here"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources of a plain `Config(...)`: its arguments alone. `load_config` brings the others."""
        return (init_settings,)

    @property
    def pools(self) -> tuple[int, int]:
        """Numbers of prefill and decode workers. Colocated and bulk workers are a decode pool alone."""
        if self.bulk:
            return 0, self.bulk
        return (0, self.colocated) if self.colocated else (self.prefill, self.decode)

    @property
    def kv_budget_pct(self) -> float:
        """By how many percent perplexity may grow with a KV class that the router chooses by itself."""
        return DEFAULT_KV_BUDGET_PCT if self.kv_quality_budget is None else self.kv_quality_budget

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients may give as `model`; the first is the one that responses carry."""
        return self.served_model_name or (self.model.rstrip("/"),)

    @property
    def local_only(self) -> bool:
        """Whether `host` is reachable from this machine alone."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
