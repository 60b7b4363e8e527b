"""The options of `diptych plan`, declared once: the command line is made from these fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from diptych.chunks import RAW_CLASS
from services.cli.option_fields import option_field

DEFAULT_WORKLOAD = "sharegpt"
HARDWARE, TRAFFIC, SEARCH, ANSWER = "Hardware", "Traffic and SLOs", "Search", "Answer"
BULK = "Bulk work"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How `diptych plan` was called. `workload` is None if none was named, which means `DEFAULT_WORKLOAD`."""

    model: str = field(
        metadata={"flag": "--model", "help": "A built-in name, or a folder with a config.json"}
    )
    device: str | None = option_field(None, "--device", "Such as H100; default: the profile's", HARDWARE)
    gpus: int | None = option_field(
        None, "--gpus", "Devices in all, on nodes of --gpus-per-node", HARDWARE, min=1
    )
    nodes: int | None = option_field(None, "--nodes", "Instead of --gpus", HARDWARE, min=1)
    gpus_per_node: int | None = option_field(
        None, "--gpus-per-node", "Default: as the device comes", HARDWARE, min=1
    )
    also: tuple[str, ...] = option_field(
        (), "--also", "More, of another kind: H200:1x8", HARDWARE, metavar="DEVICE:NODESxGPUS"
    )
    link: str | None = option_field(None, "--link", "Between nodes, per instance: 25Gbps", HARDWARE)
    kv_cache_codec: str = option_field(
        RAW_CLASS,
        "--kv-cache-codec",
        "How KV is stored and moved, as in `diptych serve`; several with shares: raw:0.25,nuq4-1%",
        HARDWARE,
        metavar="CODEC",
    )
    kv_keep: float = option_field(
        1.0,
        "--kv-keep",
        "Attention that heads keep, as in `diptych serve`; below 1 it must be in --profile",
        HARDWARE,
        metavar="SHARE",
    )
    kv_mix: str | None = option_field(
        None,
        "--kv-mix",
        "Share of the requests for each class: raw=0.7,nuq4-1%=0.3; default: as the trace says, else the first",
        TRAFFIC,
        metavar="CLASS=SHARE,...",
    )
    profile: Path | None = option_field(
        None, "--profile", "Of `diptych profile`; default: built in", HARDWARE
    )
    profiled_only: bool = option_field(
        False, "--profiled-only", "No tensor parallelism that was not measured", HARDWARE
    )
    workload: str | None = option_field(
        None,
        "--workload",
        f"sharegpt, humaneval, longbench, or a trace's file; default: {DEFAULT_WORKLOAD}",
        TRAFFIC,
    )
    kind: tuple[str, ...] = option_field(
        (),
        "--kind",
        "The SLO of a kind of --workload's trace; NAME=WORKLOAD:SHARE:TTFT_MS:TPOT_MS: with its own workload",
        TRAFFIC,
        metavar="NAME=TTFT_MS:TPOT_MS",
    )
    fit: bool = option_field(
        False,
        "--fit",
        "Draw from lognormals fitted to the trace, for a trace too short to have long prompts",
        TRAFFIC,
    )
    rate: float | None = option_field(
        None, "--rate", "Requests/s to carry as cheaply as may be; without: the highest goodput", TRAFFIC
    )
    cv: float = option_field(1.0, "--cv", "Burstiness of arrivals; 1 is Poisson", TRAFFIC, min=0.0)
    slo_ttft_ms: float | None = option_field(None, "--slo-ttft-ms", "SLO of the time to first token", TRAFFIC)
    slo_tpot_ms: float | None = option_field(
        None, "--slo-tpot-ms", "SLO of the time per further token", TRAFFIC
    )
    attainment: float = option_field(0.9, "--attainment", "Share of requests that must meet both", TRAFFIC)
    affinity: str = option_field(
        "auto",
        "--affinity",
        "KV moves anywhere (high), within nodes (low), or what is better (auto)",
        SEARCH,
    )
    family: tuple[str, ...] = option_field(
        (), "--family", "colocated, disaggregated or hybrid; default: all", SEARCH
    )
    chunk_tokens: int = option_field(
        2048,
        "--chunk-tokens",
        "Colocated instances cut prompts into slices of so many tokens; 0: whole prompts first",
        SEARCH,
        min=0,
    )
    verify: bool = option_field(
        True,
        "--verify/--no-verify",
        "Let the product's scheduler and router have the last word, in virtual time",
        SEARCH,
    )
    seeds: int = option_field(2, "--seeds", "Samples that count together", SEARCH, min=1)
    horizon: int = option_field(
        600,
        "--horizon",
        "Requests of a run at least; the last runs have three times as many",
        SEARCH,
        min=20,
    )
    span_s: float = option_field(
        60.0, "--span-s", "Seconds of traffic of a run at least; 0: as short as --horizon", SEARCH, min=0.0
    )
    explain: bool = option_field(False, "--explain", "Why this one", ANSWER)
    what_if: tuple[str, ...] = option_field(
        (),
        "--what-if",
        "Plan again with one change: ttft=0.3, tpot, gpus=-2, nodes, link=25Gbps, rate=x2, cv, attainment, device",
        ANSWER,
        metavar="NAME=VALUE",
    )
    plot: Path | None = option_field(None, "--plot", "Plots, as PNG and JSON", ANSWER, metavar="FOLDER")
    as_json: bool = option_field(False, "--json", "All of it as JSON", ANSWER)
    out: Path | None = option_field(
        None, "--out", "Where the plan goes that `diptych serve --plan` reads", ANSWER
    )
    bulk: str | None = option_field(
        None,
        "--bulk",
        "Plan bulk work instead, on a CPU and a disk: tokens of a prompt and of an answer, such as 512:64",
        BULK,
        metavar="PROMPT:OUTPUT",
    )
    bulk_memory: str = option_field("8GiB", "--bulk-memory", "Memory for it", BULK, metavar="SIZE")
    bulk_disk: str = option_field("100GiB", "--bulk-disk", "Disk for it", BULK, metavar="SIZE")
    bulk_disk_rate: str = option_field(
        "1GB/s", "--bulk-disk-rate", "What the disk reads and writes", BULK, metavar="RATE"
    )
    bulk_int4: bool = option_field(
        False, "--bulk-int4", "Allow 4 bits for weights and KV, which changes answers", BULK
    )
    # The names of the fields whose flags were given.
    given: frozenset[str] = frozenset()
