"""The specifications with which the gateway and the worker processes are started.

The command line writes a `WorkerSpec` or `GatewaySpec` as JSON to the standard input of each process that it starts.
All values in them are resolved. Durations are in seconds unless the name says otherwise.
"""

from __future__ import annotations

import msgspec

from diptych.chunks import DEFAULT_KV_BUDGET_PCT
from diptych.messages import SILENCE_S
from diptych.slo import DEFAULT_ATTAINMENT, Slo, read_slo

# A device for tests: all that a GPU worker does, on the tensors of the CPU.
EMULATED = "emulated"
# The devices whose memory is not the host's.
GPU_DEVICES = ("cuda", EMULATED)
# What computes the model in a worker: Diptych's own engine, or vLLM (docs/engines.md).
VLLM = "vllm"
ENGINES = ("diptych", VLLM)
# The share of a GPU's memory that its workers take together; vLLM's default too.
DEFAULT_UTILIZATION = 0.9


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one worker process; it reads no other configuration."""

    worker: str  # "prefill-0"
    # Either "prefill" or "decode".
    role: str
    gateway: str  # the channel: "tcp://127.0.0.1:4567"
    # Folder with this deployment's channel keys.
    keys_dir: str
    # A folder or a Hugging Face hub id.
    model: str
    revision: str | None = None
    dtype: str = "auto"  # "auto" | "float32" | "float16" | "bfloat16"
    device: str = "auto"  # "auto" | "cpu", or one of `GPU_DEVICES`
    # One of `ENGINES`. Of vLLM: the interpreter that has it, and arguments as `vllm serve` takes them.
    engine: str = "diptych"
    vllm_python: str = ""
    vllm_args: tuple[str, ...] = ()
    # Most tokens of prompt and answer together; None means the model's own limit.
    max_model_len: int | None = None
    # Size of the KV pool in bytes.
    kv_bytes: int = 256 << 20
    # Whether the user has set `kv_bytes`. If not, a worker on a GPU takes what is left of its share of the memory.
    kv_bytes_asked: bool = False
    # Of a worker on a GPU: the share of its memory that all workers there may take, and how many they are.
    gpu_memory_utilization: float = DEFAULT_UTILIZATION
    gpu_workers: int = 1
    # Of an emulated device: the memory that it pretends to have.
    emulated_bytes: int = 0
    # Of a worker on a GPU, or with vLLM: the host memory through which KV is handed over.
    transfer_buffer_bytes: int = 0
    max_num_seqs: int = 64
    # Most tokens of one engine step, over all requests.
    max_num_batched_tokens: int = 512
    # Whether long prompts are prefilled in parts, beside other requests. False: prompts are prefilled whole.
    chunked_prefill: bool = True
    prefix_caching: bool = True
    # How KV is coded, as the user named it (`kvcache.codecs.codec_id`).
    kv_cache_codec: str = "raw"
    # Path of the file with the codec's constants; empty means the file in the model's folder, if there is one.
    kv_cache_calibration: str = ""
    # Bytes of host memory to which the KV of preempted requests may be swapped.
    swap_bytes: int = 0
    # Most bytes of KV that left the pools, in memory and on disk: of all workers of a host together. 0: none.
    kv_host_bytes: int = 0
    kv_disk_bytes: int = 0
    kv_disk_folder: str = ""
    # The threshold of eviction of requests that give none: below 1 memory for evictions is set aside.
    kv_keep: float = 1.0
    # Milliseconds that a step may take if sequences decode and prompts are prefilled in it (colocated workers only).
    tpot_ms: float | None = None
    # Milliseconds for which bulk work may run at a time, while online requests wait.
    bulk_slice_ms: float = 20.0
    # SLO of the milliseconds per token of online answers, beside which bulk work may run. None: it never does.
    bulk_tpot_ms: float | None = None
    # Whether this worker only does bulk work, in blocks (`engine.offload`), and takes no other requests.
    bulk_only: bool = False
    # Of such a worker: what is computed together, and what lies where (`engine.offload.policy.parse_policy`); empty:
    # what fits.
    bulk_policy: str = ""
    # Whether `bulk_policy` was predicted to fit, and not asked for: what is too large by a little is made smaller.
    bulk_planned: bool = False
    # Most bytes of memory and disk that blocks may take; None: what is there now.
    bulk_memory_bytes: int | None = None
    bulk_disk_bytes: int | None = None
    tp: int = 1
    pp: int = 1
    # Lanes and stages of the workers of both pools: KV that was evicted moves between them.
    pool_splits: tuple[tuple[int, int], ...] = ()
    # Number of the core that the worker is pinned to; None means not pinned.
    core: int | None = None
    threads: int = 1
    # The time slice of the thread that computes prompts while the role is prefill (`services.worker.prefill_priority`).
    prefill_slice_ms: float = 0.0
    # Transports in order of preference.
    transports: tuple[str, ...] = ("shm", "nixl")
    lease_s: float = 30.0
    digest: str = "xxh3"
    # Address at which other workers reach this one.
    host: str = "127.0.0.1"
    # Whether KV is announced and pulled while later layers are still computed.
    pipelined: bool = True
    # Seconds that a draining worker waits for its requests.
    drain_s: float = 10.0
    # How the worker's previous process ended, for `Hello`. The supervisor sets it.
    ended: str = ""
    # Folder for a file with one line per engine step; None means no such file.
    step_log: str | None = None
    log_level: str = "warning"
    # One of `diptych.logs.log_format.LOG_FORMATS`.
    log_format: str = "text"
    # Where this worker's log lies on its node, for /status; empty if nobody has to look for it.
    log_file: str = ""

    @property
    def tpot_s(self) -> float | None:
        """`tpot_ms` in seconds."""
        return None if self.tpot_ms is None else self.tpot_ms / 1e3

    @property
    def bulk_tpot_s(self) -> float | None:
        """`bulk_tpot_ms` in seconds."""
        return None if self.bulk_tpot_ms is None else self.bulk_tpot_ms / 1e3


class BulkPlan(msgspec.Struct, frozen=True):
    """Where the policy of bulk workers comes from, and what it is predicted to bring."""

    # "profile": the programme's choice for measured rates; "setting": asked for; "fit": the largest block that fits.
    source: str
    # The policy, as `engine.offload.policy.parse_policy` reads it; empty with "fit", which each worker finds itself.
    policy: str = ""
    # The profile whose rates predicted the policy; empty: there is none. With "fit", no block is predicted to fit.
    profile: str = ""
    # New tokens per second of one worker, what a decode step of its block waits for, and the bytes that it needs.
    tokens_per_s: float | None = None
    waits_for: str | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None


class StorageShares(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that files and batches of one API key may take."""

    # None: as much as the disk has left.
    max_bytes: int | None = None
    max_files: int = 20_000
    # Open batches, and the lines of all of them.
    max_batches: int = 1000
    max_lines: int = 2_000_000


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the gateway process."""

    host: str
    port: int
    # Address that the gateway's ROUTER socket binds.
    channel: str
    keys_dir: str
    # A folder or a hub id. The gateway reads only tokenizer, chat template and config.
    model: str
    # Names that clients may use; answers contain the first one.
    served_names: tuple[str, ...]
    num_prefill: int  # 0: colocated
    num_decode: int
    # Whether there are only workers for bulk work: no request over HTTP is answered.
    bulk_only: bool = False
    # The policy of these workers, and what it is predicted to bring.
    bulk_plan: BulkPlan | None = None
    # Whether workers cache prefixes, so that routing prefers workers that have a prompt's prefix.
    prefix_caching: bool = True
    revision: str | None = None
    api_keys: tuple[str, ...] = ()
    max_model_len: int | None = None
    # Path of a Jinja file that replaces the model's chat template.
    chat_template: str | None = None
    # Formats of calls and thoughts in answers (`diptych.config.answer_parsers`); None: as the chat template tells.
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    # What becomes of fields of requests that are not known: "refuse" or "ignore".
    unknown_fields: str = "refuse"
    # Source of the sampling defaults: "model", "none", or a folder.
    generation_config: str = "model"
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    # Share of requests that shall meet each SLO.
    slo_target: float = DEFAULT_ATTAINMENT
    request_timeout_s: float = 600.0
    reader_stall_s: float = 30.0
    # Seconds that open requests may continue after SIGTERM.
    drain_s: float = 10.0
    max_open_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    max_body_bytes: int = 8 << 20
    # Most connections at a time. There are fewer if the process may not open that many files.
    max_connections: int = 4096
    # Processes that take HTTP; 1: the gateway does.
    gateways: int = 1
    lease_s: float = 30.0
    beat_s: float = 0.5
    # A worker or gateway that is silent for this many seconds counts as lost.
    silence_s: float = SILENCE_S
    pipelined: bool = True
    # A request is answered with 429 if its first token is predicted to take longer than this many seconds.
    max_queue_wait_s: float = 30.0
    # Seconds that requests wait for workers that were lost.
    recovery_s: float = 15.0
    # When decode workers prefill: "never", or as a "fallback" while no prefill worker can.
    local_prefill: str = "fallback"
    # Whether prompts begin before their decode room is free, if it is predicted to be: "off" or "auto".
    decode_overdraft: str = "off"
    # By how many percent perplexity may grow with a KV class that the router chooses by itself.
    kv_quality_budget: float = DEFAULT_KV_BUDGET_PCT
    # The threshold of eviction (`diptych.eviction_spec.KeepSpec`) of requests that give none.
    kv_keep: float = 1.0
    # Those of the `api_keys` whose requests may ask for a priority below 0.
    priority_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    # If there are any, only these keys may read /metrics.
    metrics_keys: tuple[str, ...] = ()
    # If there are any, only these keys may read /status.
    status_keys: tuple[str, ...] = ()
    # File that gets one line per event of a request; None means no such file.
    request_log: str | None = None
    # Folder for files and batches; None turns their routes off.
    data_dir: str | None = None
    # Whether to serve without files and batches if that folder cannot be used.
    data_dir_optional: bool = False
    # Largest file that may be uploaded.
    max_file_bytes: int = 200 << 20
    # What files and batches of one API key may take.
    shares: StorageShares = StorageShares()
    # URL to which traces are sent as OTLP over HTTP; None means that nothing is traced.
    otlp_traces_endpoint: str | None = None
    # The file of API keys with names and rates, which the gateway watches; None: there is none.
    keys_file: str | None = None
    # The server's certificate and its key, which the gateway watches; None: it speaks plain HTTP.
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    # What a proxy strips from the paths of requests; empty: nothing.
    root_path: str = ""
    # Share of the requests that are traced, of those whose client has not decided it.
    trace_sample: float = 1.0
    # Whether to keep records of the traffic for a replanner, which reads them with the admin key.
    replan: bool = False
    # Where the number of workers comes from, in words, for /status; empty if it was not planned.
    plan_note: str = ""
    log_level: str = "warning"
    log_format: str = "text"

    @property
    def slo(self) -> Slo:
        """The SLO of all requests. JSON has no infinity, so the fields are None where there is no limit."""
        return read_slo(self.slo_ttft_ms, self.slo_tpot_ms, self.slo_target)

    @property
    def only_pools(self) -> bool:
        """Whether there are only prefill workers, so that prompts are pooled and nothing is generated."""
        return self.num_decode == 0

    @property
    def status_key(self) -> str | None:
        """A key that may read /status; None if no key is needed."""
        return next(iter((*self.status_keys, *self.api_keys)), None)
