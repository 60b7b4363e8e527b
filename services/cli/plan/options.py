"""The options of `diptych plan`, declared once: the command line is made from these fields."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from diptych.chunks import RAW_CLASS
from diptych.config.fields import option_field

DEFAULT_WORKLOAD = "sharegpt"
HARDWARE, TRAFFIC, SEARCH, ANSWER = "Hardware", "Traffic and SLOs", "Search", "Answer"
BULK = "Bulk work"
# Help of options that `diptych simulate` has too.
CODEC_HELP = "How KV is stored and moved, as in `diptych serve`; several with shares: raw:0.25,nuq4-1%"
KEEP_HELP = "Attention that heads keep, as in `diptych serve`; below 1 it must be in --profile"
MIX_HELP = (
    "Share of the requests for each class: raw=0.7,nuq4-1%=0.3; default: as the trace says, else the first"
)
KIND_HELP = "SLO of a kind of the trace; NAME=WORKLOAD:SHARE:TTFT_MS:TPOT_MS: of a kind with its own workload"
CV_HELP = "Coefficient of variation of the gaps between arrivals; 1 is Poisson"
TTFT_HELP, TPOT_HELP = "SLO of the time to first token", "SLO of the time per further token"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How `diptych plan` was called. `workload` is None if none was named, which means `DEFAULT_WORKLOAD`."""

    model: str = option_field(MISSING, "A built-in name, or a folder with a config.json")
    device: str | None = option_field(None, "Type of device, such as H100; default: the profile's", HARDWARE)
    gpus: int | None = option_field(None, "Number of devices, on nodes of --gpus-per-node", HARDWARE, min=1)
    nodes: int | None = option_field(None, "Number of nodes, instead of --gpus", HARDWARE, min=1)
    gpus_per_node: int | None = option_field(
        None, "Devices of a node; default: as the device comes", HARDWARE, min=1
    )
    also: tuple[str, ...] = option_field(
        (), "More nodes, with another type of device: H200:1x8", HARDWARE, metavar="DEVICE:NODESxGPUS"
    )
    link: str | None = option_field(None, "Link between nodes, for each instance: 25Gbps", HARDWARE)
    kv_cache_codec: str = option_field(RAW_CLASS, CODEC_HELP, HARDWARE, metavar="CODEC")
    kv_keep: float = option_field(1.0, KEEP_HELP, HARDWARE, metavar="SHARE")
    kv_mix: str | None = option_field(None, MIX_HELP, TRAFFIC, metavar="CLASS=SHARE,...")
    profile: Path | None = option_field(
        None, "Costs, as `diptych profile` measured them; default: built in", HARDWARE
    )
    profiled_only: bool = option_field(False, "Use no tensor parallelism that was not measured", HARDWARE)
    workload: str | None = option_field(
        None, f"sharegpt, humaneval, longbench, or a trace's file; default: {DEFAULT_WORKLOAD}", TRAFFIC
    )
    kind: tuple[str, ...] = option_field((), KIND_HELP, TRAFFIC, metavar="NAME=TTFT_MS:TPOT_MS")
    fit: bool = option_field(
        False, "Draw from lognormals fitted to the trace, for a trace too short to have long prompts", TRAFFIC
    )
    rate: float | None = option_field(
        None, "Requests per second to serve at the lowest cost; default: the highest goodput", TRAFFIC
    )
    cv: float = option_field(1.0, CV_HELP, TRAFFIC, min=0.0)
    slo_ttft_ms: float | None = option_field(None, TTFT_HELP, TRAFFIC)
    slo_tpot_ms: float | None = option_field(None, TPOT_HELP, TRAFFIC)
    attainment: float = option_field(0.9, "Share of requests that must meet both SLOs", TRAFFIC)
    affinity: str = option_field(
        "auto", "Where KV moves: anywhere (high), within nodes (low), or what is better (auto)", SEARCH
    )
    family: tuple[str, ...] = option_field((), "colocated, disaggregated or hybrid; default: all", SEARCH)
    chunk_tokens: int = option_field(
        2048,
        "Tokens of a slice, where colocated instances split prompts; 0: whole prompts first",
        SEARCH,
        min=0,
    )
    verify: bool = option_field(
        True, "Check the best candidates with the product's scheduler and router, in virtual time", SEARCH
    )
    seeds: int = option_field(2, "Number of samples, which count together", SEARCH, min=1)
    horizon: int = option_field(
        600, "Least requests of a run; the last runs have three times as many", SEARCH, min=20
    )
    span_s: float = option_field(
        60.0, "Least seconds of traffic of a run; 0: as short as --horizon", SEARCH, min=0.0
    )
    explain: bool = option_field(False, "Say why this deployment was chosen", ANSWER)
    what_if: tuple[str, ...] = option_field(
        (),
        "Plan again with one change: ttft=0.3, tpot, gpus=-2, nodes, link=25Gbps, rate=x2, cv, attainment, device",
        ANSWER,
        metavar="NAME=VALUE",
    )
    plot: Path | None = option_field(None, "Write plots here, as PNG and JSON", ANSWER, metavar="FOLDER")
    as_json: bool = option_field(False, "Print all of it as JSON", ANSWER, flag="--json")
    out: Path | None = option_field(None, "Write the plan here, for `diptych serve --plan`", ANSWER)
    bulk: str | None = option_field(
        None,
        "Plan bulk work instead, on a CPU and a disk: tokens of a prompt and of an answer, such as 512:64",
        BULK,
        metavar="PROMPT:OUTPUT",
    )
    bulk_memory: str = option_field("8GiB", "Memory for bulk work", BULK, metavar="SIZE")
    bulk_disk: str = option_field("100GiB", "Disk for bulk work", BULK, metavar="SIZE")
    bulk_disk_rate: str = option_field("1GB/s", "How fast the disk reads and writes", BULK, metavar="RATE")
    bulk_int4: bool = option_field(False, "Allow 4 bits for weights and KV, which changes answers", BULK)
    # The names of the fields whose flags were given.
    given: frozenset[str] = frozenset()
