"""The options of `diptych simulate`, declared once: the command line is made from these fields."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from diptych.config.fields import list_settings, option_field
from diptych.config.options import Config
from services.cli.plan.options import (
    CODEC_HELP,
    CV_HELP,
    KEEP_HELP,
    KIND_HELP,
    MIX_HELP,
    TPOT_HELP,
    TTFT_HELP,
)

# The settings of `diptych serve` without any flags.
DEFAULTS = Config()
LOCAL_PREFILL = next(setting for setting in list_settings(Config) if setting.name == "local_prefill")
DECODE_OVERDRAFT = next(setting for setting in list_settings(Config) if setting.name == "decode_overdraft")
COMPAT = "With --compat"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """How `diptych simulate` was called. `given` has the names of the fields whose flags were typed."""

    model: str = option_field(MISSING, "A built-in name, or a folder with a config.json")
    placement: str | None = option_field(None, 'Instances, such as "2P TP2 + 1D TP1", or "4C", or "2B"')
    device: str = option_field("A100-80G", "Type of device, such as H100; with --profile that one's own")
    profile: Path | None = option_field(
        None, "Costs, as `diptych profile` measured them; default: built in, or from data sheets"
    )
    workload: str | None = option_field(None, "sharegpt, humaneval, longbench, or a trace to draw from")
    kind: tuple[str, ...] = option_field((), KIND_HELP, metavar="NAME=TTFT_MS:TPOT_MS")
    trace: Path | None = option_field(None, "A trace to replay, request by request")
    rate: float | None = option_field(None, "Requests per second; a trace has its own")
    cv: float = option_field(1.0, CV_HELP, min=0.0)
    requests: int = option_field(2000, "Requests of each seed", min=1)
    warmup: int = option_field(0, "How many of the first requests do not count", min=0)
    seeds: int = option_field(3, "Number of samples of the workload", min=1)
    slo_ttft_ms: float | None = option_field(None, TTFT_HELP)
    slo_tpot_ms: float | None = option_field(None, TPOT_HELP)
    link: str | None = option_field(
        None, "Link that KV moves over, for each instance: 25Gbps; default: measured, or the device's"
    )
    kv_cache_codec: str = option_field(DEFAULTS.kv_cache_codec, CODEC_HELP, metavar="CODEC")
    kv_keep: float = option_field(1.0, KEEP_HELP, metavar="SHARE")
    kv_mix: str | None = option_field(None, MIX_HELP, metavar="CLASS=SHARE,...")
    kv_host_bytes: str | None = option_field(
        None, "Prefixes that left a pool, in memory: bytes of each cell", metavar="SIZE"
    )
    kv_disk_bytes: str | None = option_field(None, "The same on a disk below that memory", metavar="SIZE")
    kv_host_rate: str | None = option_field(
        None, "How fast each worker reads that memory: 8GB/s; default: a worker's first guess"
    )
    kv_disk_rate: str | None = option_field(None, "The same of the disk")
    max_num_seqs: int = option_field(DEFAULTS.max_num_seqs, "Most running requests of an instance", min=1)
    max_num_batched_tokens: int = option_field(
        DEFAULTS.max_num_batched_tokens, "Most tokens of one step", min=1
    )
    enable_chunked_prefill: bool = option_field(
        DEFAULTS.enable_chunked_prefill, "Split long prompts over steps"
    )
    enable_prefix_caching: bool = option_field(
        DEFAULTS.enable_prefix_caching, "Keep and share prefixes that the trace names"
    )
    local_prefill: str = option_field(
        DEFAULTS.local_prefill, "When decode instances prefill", metavar=LOCAL_PREFILL.kind.metavar
    )
    decode_overdraft: str = option_field(
        DEFAULTS.decode_overdraft,
        "Compute prompts whose decode room is about to be free",
        metavar=DECODE_OVERDRAFT.kind.metavar,
    )
    tpot_budget_ms: float | None = option_field(
        None,
        "Longest step that prefills beside decoding; default: the lowest TPOT SLO, as in `diptych serve`",
    )
    bulk: str | None = option_field(
        None, "Add a backlog of bulk work beside the requests, of this length", metavar="PROMPT:OUTPUT"
    )
    bulk_slice_ms: float = option_field(
        DEFAULTS.bulk_slice_ms, "Longest unit of bulk work, for which a request may wait"
    )
    bulk_memory: str | None = option_field(
        None, "Memory of each bulk worker (of a placement such as 2B)", metavar="SIZE"
    )
    bulk_disk: str | None = option_field(
        None, "Disk of each bulk worker; default: as much as it wants", metavar="SIZE"
    )
    as_json: bool = option_field(False, "Print the figures as JSON", flag="--json")
    out: Path | None = option_field(None, "Write every request (of the first seed) here, as CSV")
    compat: str | None = option_field(None, "Use the paper's own simulator: simdistserve")
    backend: str = option_field("distserve", "distserve or vllm", COMPAT)
    tp_prefill: int = option_field(1, "Devices that share a layer", COMPAT, min=1)
    pp_prefill: int = option_field(1, "Stages of layers", COMPAT, min=1)
    tp_decode: int = option_field(1, "As --tp-prefill; the back-end vllm does not use it", COMPAT, min=0)
    pp_decode: int = option_field(1, "As --pp-prefill; the back-end vllm does not use it", COMPAT, min=0)
    given: frozenset[str] = frozenset()
