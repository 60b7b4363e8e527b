"""Settings: what a person may choose, and what each process is told.

`Config` is the one home of every setting: its field names are the YAML keys, and flags (`--max-model-len`), environment
names (`DIPTYCH_MAX_MODEL_LEN`), help and docs/configuration.md derive from it. `diptych.load` merges the sources.

`WorkerSpec` and `GatewaySpec` are what the command line writes to the standard input of the processes it starts (JSON);
everything in them is resolved. Durations are seconds unless the name says otherwise.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from diptych import settings as kind
from diptych.settings import option

ALL = ("serve", "worker", "gateway")
MODEL, POOLS, ENGINE, HTTP = "Model", "Pools", "Engine and KV cache", "HTTP"
REPLAN = "Replanning"
LIMITS, PARTS, PROCESS = "Objectives and limits", "One part alone", "Process"
DTYPES = ("float32", "float16", "bfloat16")

WORKERS, GATEWAYS, ALONE = ("serve", "worker"), ("serve", "gateway"), ("worker", "gateway")


@dataclass(frozen=True, slots=True)
class Config:
    """Every choice there is, with its default. Loaded by `diptych.load.load`; consequences are properties."""

    model: str = option("tiny", kind.text("MODEL"), "Hugging Face id, local folder, or 'tiny'", MODEL, ALL)
    served_model_name: tuple[str, ...] = option(
        (), kind.texts("NAME"), "Names for clients; the first is echoed", MODEL, GATEWAYS, "MODEL"
    )
    revision: str | None = option(
        None, kind.text("REV"), "Branch, tag or commit on the hub", MODEL, ALL, rare=True
    )
    dtype: str = option(
        "auto", kind.one_of("auto", *DTYPES), "Weights and KV (on CPU float32)", MODEL, WORKERS
    )
    device: str = option("auto", kind.one_of("auto", "cpu", "cuda"), "Where to compute", MODEL, WORKERS)
    max_model_len: int | None = option(
        None, kind.whole(1), "Longest prompt plus answer, in tokens", MODEL, ALL, "the model's"
    )
    chat_template: Path | None = option(
        None, kind.path(), "Jinja chat template", MODEL, GATEWAYS, "the model's"
    )

    prefill: int = option(1, kind.whole(), "Workers that read prompts", POOLS, GATEWAYS)
    decode: int = option(1, kind.whole(), "Workers that write answers", POOLS, GATEWAYS)
    colocated: int = option(0, kind.whole(), "Workers that do both, instead of two pools", POOLS, GATEWAYS)
    prefill_tp: int = option(1, kind.whole(1), "Ranks that split each prefill worker's heads", POOLS, WORKERS)
    prefill_pp: int = option(
        1, kind.whole(1), "Stages that split each prefill worker's layers", POOLS, WORKERS
    )
    decode_tp: int = option(1, kind.whole(1), "Ranks that split each decode worker's heads", POOLS, WORKERS)
    decode_pp: int = option(1, kind.whole(1), "Stages that split each decode worker's layers", POOLS, WORKERS)
    transports: tuple[str, ...] = option(
        ("shm", "nixl"), kind.some_of("shm", "nixl"), "How KV may move, preferred first", POOLS, WORKERS
    )
    pin_cores: bool = option(True, kind.switch(), "A core of its own for each CPU worker", POOLS, rare=True)
    plan: Path | None = option(None, kind.path(), "Pools, model and objectives from `diptych plan`", POOLS)

    replan: bool = option(False, kind.switch(), "Change the pools as traffic changes", REPLAN)
    replan_mode: str = option(
        "act", kind.one_of("act", "advise"), "Do what is decided, or only say it", REPLAN, rare=True
    )
    replan_budget: int | None = option(
        None,
        kind.whole(1),
        "Most devices ever held, drains included",
        REPLAN,
        ("serve",),
        "those of the start",
        True,
    )
    replan_profile: Path | None = option(
        None, kind.path(), "What workers cost, by `diptych profile`", REPLAN, ("serve",), "a data sheet", True
    )
    replan_journal: Path | None = option(
        None, kind.path(), "Append each decision with its inputs here", REPLAN, rare=True
    )
    replan_window_s: float = option(
        300.0, kind.seconds(), "Traffic that is looked at together", REPLAN, rare=True
    )
    replan_interval_s: float = option(
        1.0, kind.seconds(), "How often the gateway is asked for traffic", REPLAN, rare=True
    )

    max_num_seqs: int = option(64, kind.whole(1), "Requests running at once per worker", ENGINE, WORKERS)
    max_num_batched_tokens: int = option(512, kind.whole(1), "Token budget of one step", ENGINE, WORKERS)
    enable_chunked_prefill: bool = option(
        True, kind.switch(), "Split long prompts over steps", ENGINE, WORKERS
    )
    enable_prefix_caching: bool = option(
        True, kind.switch(), "Keep and share the KV of common prefixes", ENGINE, ALL
    )
    swap_space: int = option(
        0, kind.size(0), "Host memory per worker for preempted requests", ENGINE, WORKERS, "none", rare=True
    )
    kv_cache_memory_bytes: int | None = option(
        None, kind.size(), "KV pool of each worker, e.g. 2GiB", ENGINE, WORKERS, "by model and memory"
    )
    kv_lease_s: float = option(
        10.0, kind.seconds(), "How long KV waits for its reader", ENGINE, ALL, rare=True
    )
    pipelined_transfer: bool = option(
        True, kind.switch(), "Move KV while later layers are computed", ENGINE, ALL, rare=True
    )
    threads: int = option(1, kind.whole(1), "Compute threads per worker", ENGINE, WORKERS, rare=True)

    host: str = option("127.0.0.1", kind.text("HOST"), "Address to listen on", HTTP, GATEWAYS)
    port: int = option(
        8000, kind.whole(0, 65535, "PORT"), "Port to listen on (0: a free one)", HTTP, GATEWAYS
    )
    api_key: tuple[str, ...] = option((), kind.keys(), "Ask for this bearer key (repeatable)", HTTP, GATEWAYS)
    api_key_file: Path | None = option(None, kind.path(), "Keys from a file, one per line", HTTP, GATEWAYS)
    admin_key: str | None = option(
        None, kind.key(), "Key for draining and turning workers", HTTP, GATEWAYS, "none", rare=True
    )
    insecure: bool = option(
        False, kind.switch(), "Serve other hosts without a key", HTTP, GATEWAYS, rare=True
    )
    max_body_bytes: int = option(
        8 << 20, kind.size(), "Largest request body", HTTP, GATEWAYS, "8MiB", rare=True
    )
    max_open_requests: int = option(
        1024, kind.whole(1), "Sequences in flight before 429", HTTP, GATEWAYS, rare=True
    )

    slo_ttft_ms: float | None = option(
        None, kind.milliseconds(), "Time to first token to attain", LIMITS, GATEWAYS
    )
    slo_tpot_ms: float | None = option(
        None, kind.milliseconds(), "Time per output token to attain", LIMITS, GATEWAYS
    )
    request_timeout_s: float = option(
        600.0, kind.seconds(), "Longest life of a request", LIMITS, GATEWAYS, rare=True
    )
    max_queue_wait_s: float = option(
        30.0, kind.seconds(), "Refuse (429) what would wait longer", LIMITS, GATEWAYS, rare=True
    )
    recovery_s: float = option(
        15.0, kind.seconds(), "How long requests wait for lost workers", LIMITS, GATEWAYS, rare=True
    )
    local_prefill: str = option(
        "fallback",
        kind.one_of("never", "fallback", "auto"),
        "Decode workers read prompts: if no other can, or if better",
        LIMITS,
        GATEWAYS,
        rare=True,
    )
    reader_stall_s: float = option(
        30.0, kind.seconds(), "Cut readers that take nothing", LIMITS, GATEWAYS, rare=True
    )
    drain_s: float = option(10.0, kind.seconds(), "Grace for requests when stopping", LIMITS, ALL, rare=True)

    role: str | None = option(
        None, kind.one_of("prefill", "decode"), "What this worker does", PARTS, ("worker",)
    )
    channel: str | None = option(
        None, kind.text("tcp://HOST:PORT"), "The gateway's channel for workers", PARTS, ALONE
    )
    keys_dir: Path | None = option(
        None, kind.path("DIR"), "Channel keys, made by `diptych keys`", PARTS, ALONE
    )
    name: str | None = option(None, kind.text("NAME"), "Name of this worker", PARTS, ("worker",), "ROLE-HOST")
    advertise_host: str | None = option(
        None, kind.text("HOST"), "Where other workers reach this one", PARTS, ("worker",), "this host"
    )
    core: int | None = option(None, kind.whole(), "Core to pin this worker to", PARTS, ("worker",), "none")

    start_timeout_s: float = option(
        600.0, kind.seconds(), "Give up when not ready by then", PROCESS, rare=True
    )
    log_level: str = option(
        "warning", kind.one_of("debug", "info", "warning", "error"), "Detail of logs", PROCESS, ALL
    )
    request_log: Path | None = option(
        None, kind.path(), "Write what becomes of each request here (JSONL)", PROCESS, GATEWAYS, rare=True
    )
    step_log: Path | None = option(
        None, kind.path("DIR"), "Workers write what each step cost here (JSONL)", PROCESS, WORKERS, rare=True
    )
    log_dir: Path | None = option(
        None, kind.path("DIR"), "Keep the logs of all parts here", PROCESS, rare=True
    )

    @property
    def pools(self) -> tuple[int, int]:
        """Numbers of prefill and decode workers; a colocated deployment has a decode pool only."""
        return (0, self.colocated) if self.colocated else (self.prefill, self.decode)

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model.rstrip("/"),)

    @property
    def local_only(self) -> bool:
        """Whether `host` is reachable from this machine alone."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one worker process needs to know; nothing is looked up elsewhere."""

    worker: str  # "prefill-0"
    role: str  # "prefill" | "decode"
    gateway: str  # the channel: "tcp://127.0.0.1:4567"
    keys_dir: str  # folder with this deployment's channel keys
    model: str  # a folder or a hub id
    revision: str | None = None
    dtype: str = "auto"  # "auto" | "float32" | "float16" | "bfloat16"
    device: str = "auto"  # "auto" | "cpu" | "cuda"
    max_model_len: int | None = None  # prompt and answer together; None: what the model was trained for
    kv_bytes: int = 256 << 20  # size of the KV pool
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512  # token budget of one engine step
    chunked_prefill: bool = True  # False: prompts run whole
    prefix_caching: bool = True
    swap_bytes: int = 0  # host memory that preempted requests may be parked in
    tpot_ms: float | None = None  # what prefills mixed into decode steps must leave intact (colocated)
    tp: int = 1
    pp: int = 1
    core: int | None = None  # the core to pin to
    threads: int = 1
    transports: tuple[str, ...] = ("shm", "nixl")  # in order of preference
    lease_s: float = 10.0
    digest: str = "xxh3"
    host: str = "127.0.0.1"  # where other workers reach this one
    pipelined: bool = True  # KV is announced and pulled while later layers are computed
    drain_s: float = 10.0  # how long a worker that is told to end waits for what it holds
    ended: str = ""  # how this worker's process before ended, for `Hello`; filled in by its supervisor
    step_log: str | None = None  # a folder for a file with a line for every engine step
    log_level: str = "warning"


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the gateway process needs to know."""

    host: str
    port: int
    channel: str  # where its ROUTER socket binds
    keys_dir: str
    model: str  # only tokenizer, chat template and config are read
    served_names: tuple[str, ...]  # the first is the one that answers carry
    num_prefill: int  # 0: colocated
    num_decode: int
    prefix_caching: bool = True  # of the workers: whether requests are sent where their prefix is
    revision: str | None = None
    api_keys: tuple[str, ...] = ()
    max_model_len: int | None = None
    chat_template: str | None = None  # path of a Jinja file
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    request_timeout_s: float = 600.0
    reader_stall_s: float = 30.0
    drain_s: float = 10.0  # how long open requests may go on after SIGTERM
    max_open_requests: int = 1024
    max_body_bytes: int = 8 << 20
    lease_s: float = 10.0
    beat_s: float = 0.5
    pipelined: bool = True
    max_queue_wait_s: float = 30.0  # 429 when a first token is predicted to wait longer
    recovery_s: float = 15.0  # how long requests wait for workers that were lost
    local_prefill: str = (
        "fallback"  # "never" | "fallback": decode workers read prompts when no prefill worker is left
    )
    admin_key: str | None = None
    request_log: str | None = None  # a file that gets a line for everything that happens to a request
    replan: bool = False  # traffic is kept for a replanner that asks for it with the admin key
    log_level: str = "warning"
