"""The options of `diptych simulate`, declared once: the command line is made from these fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from diptych.config.fields import list_settings
from diptych.config.options import Config
from services.cli.option_fields import option_field

# The settings of `diptych serve` without any flags.
DEFAULTS = Config()
LOCAL_PREFILL = next(one for one in list_settings(Config) if one.name == "local_prefill")
COMPAT = "With --compat"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """How `diptych simulate` was called. `given` has the names of the fields whose flags were typed."""

    model: str = field(
        metadata={"flag": "--model", "help": "A built-in name, or a folder with a config.json"}
    )
    placement: str | None = option_field(None, "--placement", 'Such as "2P TP2 + 1D TP1", or "4C", or "2B"')
    device: str = option_field("A100-80G", "--device", "Such as H100; with --profile that one's own")
    profile: Path | None = option_field(
        None, "--profile", "What steps cost; else built in, or from data sheets"
    )
    workload: str | None = option_field(
        None, "--workload", "sharegpt, humaneval, longbench, or a trace to draw from"
    )
    kind: tuple[str, ...] = option_field(
        (),
        "--kind",
        "The SLO of a kind of the trace; NAME=WORKLOAD:SHARE:TTFT_MS:TPOT_MS: with its own workload",
        metavar="NAME=TTFT_MS:TPOT_MS",
    )
    trace: Path | None = option_field(None, "--trace", "A trace to replay, request by request")
    rate: float | None = option_field(None, "--rate", "Requests a second; a trace has its own")
    cv: float = option_field(1.0, "--cv", "Of the gaps between arrivals: 1 is Poisson", min=0.0)
    requests: int = option_field(2000, "--requests", "Of each seed", min=1)
    warmup: int = option_field(0, "--warmup", "The first of them, which do not count", min=0)
    seeds: int = option_field(3, "--seeds", "Samples of the workload", min=1)
    slo_ttft_ms: float | None = option_field(None, "--slo-ttft-ms", "SLO of the time to first token")
    slo_tpot_ms: float | None = option_field(None, "--slo-tpot-ms", "SLO of the time per further token")
    link: str | None = option_field(
        None, "--link", "KV goes over this, per instance: 25Gbps; default: measured, or the device's"
    )
    kv_cache_codec: str = option_field(
        DEFAULTS.kv_cache_codec,
        "--kv-cache-codec",
        "How KV is stored and moved, as in `diptych serve`; several with shares: raw:0.25,nuq4-1%",
        metavar="CODEC",
    )
    kv_keep: float = option_field(
        1.0,
        "--kv-keep",
        "Attention that heads keep, as in `diptych serve`; below 1 it must be in --profile",
        metavar="SHARE",
    )
    kv_mix: str | None = option_field(
        None,
        "--kv-mix",
        "Share of the requests for each class: raw=0.7,nuq4-1%=0.3; default: as the trace says, else the first",
        metavar="CLASS=SHARE,...",
    )
    max_num_seqs: int = option_field(
        DEFAULTS.max_num_seqs, "--max-num-seqs", "Requests running at once per instance", min=1
    )
    max_num_batched_tokens: int = option_field(
        DEFAULTS.max_num_batched_tokens, "--max-num-batched-tokens", "Token budget of one step", min=1
    )
    enable_chunked_prefill: bool = option_field(
        DEFAULTS.enable_chunked_prefill,
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        "Split long prompts over steps",
    )
    enable_prefix_caching: bool = option_field(
        DEFAULTS.enable_prefix_caching,
        "--enable-prefix-caching/--no-enable-prefix-caching",
        "Keep and share prefixes that the trace names",
    )
    local_prefill: str = option_field(
        DEFAULTS.local_prefill,
        "--local-prefill",
        "Whether decode instances prefill",
        metavar=LOCAL_PREFILL.kind.metavar,
    )
    tpot_budget_ms: float | None = option_field(
        None,
        "--tpot-budget-ms",
        "Of steps that prefill beside decoding; default: the lowest TPOT SLO, as in serve",
    )
    bulk: str | None = option_field(
        None,
        "--bulk",
        "A backlog of bulk work beside the requests: its lines' lengths",
        metavar="PROMPT:OUTPUT",
    )
    bulk_slice_ms: float = option_field(
        DEFAULTS.bulk_slice_ms, "--bulk-slice-ms", "Longest unit of bulk work, for which a request may wait"
    )
    bulk_memory: str | None = option_field(
        None, "--bulk-memory", "Memory of each bulk worker (a placement such as 2B)", metavar="SIZE"
    )
    bulk_disk: str | None = option_field(
        None, "--bulk-disk", "Disk of each bulk worker; default: as much as it wants", metavar="SIZE"
    )
    as_json: bool = option_field(False, "--json", "The figures as JSON")
    out: Path | None = option_field(None, "--out", "CSV of every request (of the first seed)")
    compat: str | None = option_field(None, "--compat", "simdistserve")
    backend: str = option_field("distserve", "--backend", "distserve or vllm", COMPAT)
    tp_prefill: int = option_field(1, "--tp-prefill", "Devices of a layer", COMPAT, min=1)
    pp_prefill: int = option_field(1, "--pp-prefill", "Stages", COMPAT, min=1)
    tp_decode: int = option_field(1, "--tp-decode", "Not looked at by vllm", COMPAT, min=0)
    pp_decode: int = option_field(1, "--pp-decode", "Not looked at by vllm", COMPAT, min=0)
    given: frozenset[str] = frozenset()
